"""Transfer learning: a network's layers frozen under another head, then fine-tuned."""

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_digits

import tf_dgc

strategy = tf_dgc.DenseStrategy()
keras.utils.set_random_seed(3)
data = load_digits()
images = (data.images[..., None] / 16).astype("float32")[:600]
labels = data.target[:600]
low = labels < 5

with strategy.scope():
    base = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(8, 3, activation="relu"),
            layers.BatchNormalization(synchronized=True),
            layers.GlobalAveragePooling2D(),
        ],
        name="base",
    )
    first = keras.Sequential([base, layers.Dense(5, activation="softmax")])
    first.compile(
        keras.optimizers.Adam(0.01, epsilon=1e-3), "sparse_categorical_crossentropy"
    )
count = int(low.sum()) // 60 * 60  # batches that all workers share equally
first.fit(
    images[low][:count], labels[low][:count], batch_size=30, epochs=2, shuffle=False,
    verbose=0,
)  # fmt: skip
base.save_weights("base.weights.h5")

with strategy.scope():
    base.trainable = False
    inputs = keras.Input((8, 8, 1))
    features = base(inputs, training=False)
    outputs = layers.Dense(5)(features)
    model = keras.Model(inputs, outputs)
    model.compile(
        keras.optimizers.Adam(0.01, epsilon=1e-3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
rest = images[~low], labels[~low] - 5
frozen = model.fit(*rest, batch_size=32, epochs=3, shuffle=False, verbose=0)
before = base.get_weights()

with strategy.scope():
    base.trainable = True
    model.compile(
        keras.optimizers.Adam(1e-3, epsilon=1e-3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
tuned = model.fit(*rest, batch_size=32, epochs=2, shuffle=False, verbose=0)
moved = np.abs(base.get_weights()[0] - before[0]).max()
figures = {
    "frozen": frozen.history,
    "tuned": tuned.history,
    "moved": float(moved),
    "evaluated": model.evaluate(*rest, batch_size=50, verbose=0),
    "weights": [w.tolist() for w in model.get_weights()],
}
