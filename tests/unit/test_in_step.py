"""Tests of steps that workers take together on servers: those of one process."""

import functools
from typing import Any

import keras
import local_servers
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized
from test_served_rounds import BATCH, compiled, data, in_threads, network

BATCHES = 6


class Decays(keras.optimizers.SGD):
    """Assigns what it trains by itself, as Muon does for its weight decay."""

    def _apply_weight_decay(self, variables: Any) -> None:
        for variable in variables:
            rate = keras.ops.cast(self.learning_rate, variable.dtype)
            variable.assign(variable - 0.1 * rate * variable)


# Optimizers that keep, or change, something beside what they do with each variable.
OPTIMIZERS: dict[str, Any] = {
    "decays": lambda: Decays(0.02, 0.9),
    "nadam": lambda: keras.optimizers.Nadam(0.02),
    "muon": lambda: keras.optimizers.Muon(0.02, weight_decay=0.1),
    "adamw": lambda: keras.optimizers.AdamW(0.02, weight_decay=0.1),
    "adafactor": lambda: keras.optimizers.Adafactor(0.02),
    "adamax": lambda: keras.optimizers.Adamax(0.02),
    "ftrl": lambda: keras.optimizers.Ftrl(0.02),
    "lamb": lambda: keras.optimizers.Lamb(0.02),
    "lion": lambda: keras.optimizers.Lion(0.002, weight_decay=0.1),
    "nesterov": lambda: keras.optimizers.SGD(0.02, 0.9, True, weight_decay=0.1),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.02, momentum=0.9, centered=True),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(0.02), initial_scale=2.0**110, dynamic_growth_steps=3
    ),
}


class EqualityTest(parameterized.TestCase):
    def train(self, model: keras.Model, given: Any) -> None:
        batches = tf.data.Dataset.from_tensor_slices(given).batch(BATCH)
        model.fit(batches, epochs=1, verbose=0)
        model.optimizer.learning_rate = 0.01
        model.fit(batches, epochs=2, verbose=0)

    def check(self, name: str, kind: dict[str, Any], given: Any) -> None:
        """Compare two workers with one process: weights, and what optimizers keep."""
        plain = compiled(network(), OPTIMIZERS[name]())
        self.train(plain, given)
        with local_servers.Job(workers=2) as job:
            models = []
            for k in range(2):
                with job.worker(k, **kind).scope():
                    models.append(compiled(network(), OPTIMIZERS[name]()))
            in_threads([functools.partial(self.train, m, given) for m in models])
        for model in models:
            pairs = [
                *zip(model.weights, plain.weights, strict=True),
                *zip(model.optimizer.variables, plain.optimizer.variables, strict=True),
            ]
            for own, one in pairs:
                np.testing.assert_allclose(
                    keras.ops.convert_to_numpy(own),
                    keras.ops.convert_to_numpy(one),
                    rtol=1e-3,
                    atol=1e-4,
                    err_msg=one.path,
                )

    @parameterized.parameters("nadam", "decays")
    def test_what_an_optimizer_does_beside_its_variables_is_done_once(
        self, name: str
    ) -> None:
        self.check(name, {"synchronous": True}, data(BATCHES))

    @parameterized.parameters(*OPTIMIZERS)
    @pytest.mark.extended
    def test_each_optimizer_trains_as_in_one_process(self, name: str) -> None:
        self.check(name, {"synchronous": True}, data(BATCHES))

    def test_an_overflow_of_one_worker_is_one_for_all(self) -> None:
        x, y = data(BATCHES)
        x[BATCH * 3 + BATCH - 1] *= 1e6  # a row of worker 1
        self.check("scaled", {"synchronous": True}, (x, y))
