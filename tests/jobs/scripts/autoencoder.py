"""A variational autoencoder of digits: a step of its own, trackers with other names."""

import keras
import tensorflow as tf
from keras import layers, ops
from sklearn.datasets import load_digits

import tf_dgc

strategy = tf_dgc.DenseStrategy()
keras.utils.set_random_seed(1)
digits = (load_digits().data[:600] / 16).astype("float32")


class Sampling(layers.Layer):
    """Draws a code around its mean."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.seed_generator = keras.random.SeedGenerator(1337)

    def call(self, inputs):
        """Return a code of each row."""
        mean, log_variance = inputs
        noise = keras.random.normal(ops.shape(mean), seed=self.seed_generator)
        return mean + ops.exp(0.5 * log_variance) * noise


class Autoencoder(keras.Model):
    """Encodes, draws and decodes."""

    def __init__(self, encoder, decoder, **arguments):
        super().__init__(**arguments)
        self.encoder, self.decoder = encoder, decoder
        self.total_tracker = keras.metrics.Mean(name="total_loss")
        self.picture_tracker = keras.metrics.Mean(name="picture_loss")
        self.code_tracker = keras.metrics.Mean(name="code_loss")

    @property
    def metrics(self):
        """What is reset at each epoch."""
        return [self.total_tracker, self.picture_tracker, self.code_tracker]

    def train_step(self, data):
        """Take a step on a batch of pictures without targets."""
        data = data[0] if isinstance(data, tuple) else data
        with tf.GradientTape() as tape:
            mean, log_variance, code = self.encoder(data)
            pixels = keras.losses.binary_crossentropy(data, self.decoder(code))
            picture = ops.mean(pixels) * 64.0
            spread = 1 + log_variance - ops.square(mean) - ops.exp(log_variance)
            code = ops.mean(ops.sum(-0.5 * spread, axis=1))
            total = picture + code
        gradients = tape.gradient(total, self.trainable_weights)
        weights = self.trainable_weights
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        self.total_tracker.update_state(total)
        self.picture_tracker.update_state(picture)
        self.code_tracker.update_state(code)
        return {
            "loss": self.total_tracker.result(),
            "picture": self.picture_tracker.result(),
            "code": self.code_tracker.result(),
        }


with strategy.scope():
    pictures = keras.Input((64,))
    hidden = layers.Dense(32, activation="relu")(pictures)
    mean = layers.Dense(2, name="mean")(hidden)
    log_variance = layers.Dense(2, name="log_variance")(hidden)
    code = Sampling()([mean, log_variance])
    encoder = keras.Model(pictures, [mean, log_variance, code], name="encoder")
    codes = keras.Input((2,))
    hidden = layers.Dense(32, activation="relu")(codes)
    painted = layers.Dense(64, activation="sigmoid")(hidden)
    decoder = keras.Model(codes, painted, name="decoder")
    model = Autoencoder(encoder, decoder)
    model.compile(keras.optimizers.Adam(0.01))
stopping = keras.callbacks.EarlyStopping("loss", patience=2)
logger = keras.callbacks.CSVLogger("log.csv")
history = model.fit(
    digits, epochs=6, batch_size=64, verbose=0, callbacks=[stopping, logger]
)
painted = decoder.predict(encoder.predict(digits[:10], verbose=0)[0], verbose=0)
figures = {"history": history.history, "painted": painted.shape}
