"""A generative adversarial network: two optimizers, and pictures after each epoch."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops
from sklearn.datasets import load_digits

import tf_dgc

strategy = tf_dgc.DenseStrategy()
keras.utils.set_random_seed(2)
pictures = (load_digits().images[:512, ..., None] / 8 - 1).astype("float32")
LATENT = 8


class Adversaries(keras.Model):
    """A generator, and a discriminator that tells its pictures from true ones."""

    def __init__(self, discriminator, generator):
        super().__init__()
        self.discriminator, self.generator = discriminator, generator
        self.seed_generator = keras.random.SeedGenerator(1337)
        self.built = True

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        """Take an optimizer for each."""
        super().compile()
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer
        self.loss_fn = loss_fn
        self.d_metric = keras.metrics.Mean(name="d_loss")
        self.g_metric = keras.metrics.Mean(name="g_loss")

    @property
    def metrics(self):
        """What is reset at each epoch."""
        return [self.d_metric, self.g_metric]

    def train_step(self, real):
        """Train the one, then the other."""
        rows = ops.shape(real)[0]
        latent = keras.random.normal((rows, LATENT), seed=self.seed_generator)
        both = ops.concatenate([self.generator(latent), real], axis=0)
        labels = ops.concatenate([ops.ones((rows, 1)), ops.zeros((rows, 1))], axis=0)
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.discriminator(both))
        weights = self.discriminator.trainable_weights
        gradients = tape.gradient(d_loss, weights)
        self.d_optimizer.apply_gradients(zip(gradients, weights, strict=True))
        latent = keras.random.normal((rows, LATENT), seed=self.seed_generator)
        with tf.GradientTape() as tape:
            judged = self.discriminator(self.generator(latent))
            g_loss = self.loss_fn(ops.zeros((rows, 1)), judged)
        weights = self.generator.trainable_weights
        gradients = tape.gradient(g_loss, weights)
        self.g_optimizer.apply_gradients(zip(gradients, weights, strict=True))
        self.d_metric.update_state(d_loss)
        self.g_metric.update_state(g_loss)
        return {"d_loss": self.d_metric.result(), "g_loss": self.g_metric.result()}


class Painter(keras.callbacks.Callback):
    """Keeps some pictures of each epoch."""

    def __init__(self):
        super().__init__()
        self.means = []

    def on_epoch_end(self, epoch, logs=None):
        """Paint from the same codes."""
        codes = np.random.default_rng(0).normal(size=(3, LATENT))
        painted = self.model.generator(ops.convert_to_tensor(codes, "float32"))
        self.means.append(float(ops.mean(painted)))


with strategy.scope():
    discriminator = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(8, 3, strides=2, padding="same"),
            layers.LeakyReLU(negative_slope=0.2),
            layers.Flatten(),
            layers.Dropout(0.2),
            layers.Dense(1, activation="sigmoid"),
        ]
    )
    generator = keras.Sequential(
        [
            keras.Input((LATENT,)),
            layers.Dense(4 * 4 * 8),
            layers.Reshape((4, 4, 8)),
            layers.Conv2DTranspose(8, 4, strides=2, padding="same"),
            layers.LeakyReLU(negative_slope=0.2),
            layers.Conv2D(1, 3, padding="same", activation="tanh"),
        ]
    )
    model = Adversaries(discriminator, generator)
    model.compile(
        d_optimizer=keras.optimizers.Adam(0.001),
        g_optimizer=keras.optimizers.Adam(0.001),
        loss_fn=keras.losses.BinaryCrossentropy(),
    )
dataset = tf.data.Dataset.from_tensor_slices(pictures)
dataset = dataset.shuffle(512, seed=5).batch(64)
painter = Painter()
history = model.fit(dataset, epochs=4, verbose=0, callbacks=[painter])
figures = {"history": history.history, "painted": painter.means}
