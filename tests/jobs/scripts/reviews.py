"""Text classification: words are counted, classified, and asked for as strings."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tf_dgc

strategy = tf_dgc.DenseStrategy()
keras.utils.set_random_seed(4)
random = np.random.default_rng(4)
good, bad = ["fine", "lovely", "great", "warm"], ["dull", "poor", "cold", "bad"]
both = ["the", "film", "was", "and", "so", "it"]
labels = random.integers(0, 2, 400)
texts = [
    " ".join(
        [*random.choice(both, 4), *random.choice(good if label else bad, 2)]
    ).capitalize()
    + "!"
    for label in labels
]
raw = tf.data.Dataset.from_tensor_slices((texts, labels)).batch(30)

vectorize = layers.TextVectorization(max_tokens=30, output_sequence_length=6)
vectorize.adapt(raw.map(lambda text, label: text))


def vectorized(text, label):
    """Turn strings into the numbers of their words."""
    return vectorize(tf.expand_dims(text, -1)), label


train = raw.take(10).map(vectorized).cache().prefetch(2)
test = raw.skip(10).map(vectorized).cache().prefetch(2)
with strategy.scope():
    model = keras.Sequential(
        [
            keras.Input((None,), dtype="int64"),
            layers.Embedding(30, 8, mask_zero=True),
            layers.GlobalAveragePooling1D(),
            layers.Dense(8, activation="relu"),
            layers.Dense(1, activation="sigmoid"),
        ]
    )
    model.compile(
        keras.optimizers.SGD(1.0, momentum=0.9),
        "binary_crossentropy",
        metrics=["accuracy"],
    )
history = model.fit(train, validation_data=test, epochs=3, verbose=0)
loss, accuracy = model.evaluate(test, verbose=0)

with strategy.scope():
    inputs = keras.Input((1,), dtype="string")
    whole = keras.Model(inputs, model(vectorize(inputs)))
    whole.compile("adam", "binary_crossentropy", metrics=["accuracy"])
examples = tf.constant([["The film was great!"], ["It was so poor."], ["Cold, dull."]])
figures = {
    "history": history.history,
    "loss": loss,
    "accuracy": accuracy,
    "words": vectorize.get_vocabulary(),
    "predicted": whole.predict(examples, verbose=0).tolist(),
    "weights": [w.tolist() for w in model.get_weights()],
}
