"""TensorFlow's training loop of one's own: distributed data, steps, metrics."""

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

import tf_dgc

strategy = tf_dgc.DenseStrategy()
keras.utils.set_random_seed(7)
data = load_digits()
images, labels = data.images[..., None].astype("float32") / 16, data.target
GLOBAL_BATCH = 64
train = tf.data.Dataset.from_tensor_slices((images[:410], labels[:410]))
train = train.shuffle(410, seed=1).batch(GLOBAL_BATCH)
test = tf.data.Dataset.from_tensor_slices((images[410:600], labels[410:600]))
test = test.batch(GLOBAL_BATCH)
train_dist = strategy.experimental_distribute_dataset(train)
test_dist = strategy.experimental_distribute_dataset(test)

with strategy.scope():
    loss_object = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction="none"
    )
    test_loss = keras.metrics.Mean(name="test_loss")
    train_accuracy = keras.metrics.SparseCategoricalAccuracy(name="train_accuracy")
    test_accuracy = keras.metrics.SparseCategoricalAccuracy(name="test_accuracy")
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(8, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(10, kernel_regularizer="l2"),
        ]
    )
    optimizer = keras.optimizers.Adam(0.01, epsilon=1e-3)
    checkpoint = tf.train.Checkpoint(optimizer=optimizer, model=model)


def compute_loss(labels, predictions, model_losses):
    """Return this worker's part of the mean of a batch."""
    loss = tf.nn.compute_average_loss(
        loss_object(labels, predictions), global_batch_size=GLOBAL_BATCH
    )
    return loss + tf.nn.scale_regularization_loss(tf.add_n(model_losses))


def train_step(inputs):
    """Take a step on a worker's share."""
    images, labels = inputs
    with tf.GradientTape() as tape:
        predictions = model(images, training=True)
        loss = compute_loss(labels, predictions, model.losses)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    train_accuracy.update_state(labels, predictions)
    return loss


def test_step(inputs):
    """Evaluate a worker's share."""
    images, labels = inputs
    predictions = model(images, training=False)
    test_loss.update_state(loss_object(labels, predictions))
    test_accuracy.update_state(labels, predictions)


@tf.function
def distributed_train_step(inputs):
    """Return the loss of a batch of all workers."""
    losses = strategy.run(train_step, args=(inputs,))
    return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)


@tf.function
def distributed_test_step(inputs):
    """Evaluate a batch of all workers."""
    return strategy.run(test_step, args=(inputs,))


epochs = []
for _ in range(3):
    total, batches = 0.0, 0
    for batch in train_dist:
        total += float(distributed_train_step(batch))
        batches += 1
    for batch in test_dist:
        distributed_test_step(batch)
    results = [test_loss, train_accuracy, test_accuracy]
    epochs.append([total / batches, *(float(metric.result()) for metric in results)])
    for metric in results:
        metric.reset_state()
figures = {"epochs": epochs, "weights": [w.tolist() for w in model.get_weights()]}
