"""Tests of the count of steps on servers, which a script may assign; one process."""

import functools
from typing import Any

import keras
import local_servers
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized
from test_served_rounds import BATCH, compiled, data, in_threads, network

BATCHES = 7


def rows() -> tuple[np.ndarray, np.ndarray]:
    """Return data of which each of two workers has the rows of the other."""
    x, y = data(BATCHES)
    half = BATCH // 2
    for begin in range(0, len(x), BATCH):
        for array in (x, y):
            array[begin + half : begin + BATCH] = array[begin : begin + half]
    return x, y


def optimizer(**options: Any) -> keras.optimizers.Optimizer:
    rate = keras.optimizers.schedules.ExponentialDecay(0.05, 2, 0.7)
    return keras.optimizers.Adam(rate, **options)


class Assign(keras.callbacks.Callback):
    """Sets the optimizer's counter while `fit` runs, as it begins a batch."""

    def __init__(self, batch: int, value: int) -> None:
        super().__init__()
        self.batch, self.value, self.seen = batch, value, 0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self.seen == self.batch:
            self.model.optimizer._iterations.assign(self.value)
        self.seen += 1


def script(model: keras.Model, within: int | None, value: int) -> list[int]:
    """Train twice; set the counter in the first `fit`, or between them."""
    batches = tf.data.Dataset.from_tensor_slices(rows()).batch(BATCH)
    steps = []
    given = [] if within is None else [Assign(within, value)]
    model.fit(batches, epochs=2, verbose=0, callbacks=given)
    steps.append(int(model.optimizer.iterations))
    if within is None:
        model.optimizer._iterations.assign(value)
    model.fit(batches, epochs=1, verbose=0)
    steps.append(int(model.optimizer.iterations))
    return steps


class AssignedTest(parameterized.TestCase):
    @parameterized.parameters(
        ({}, None), ({"synchronous": True}, 9), ({"local_steps": 3}, None)
    )
    def test_training_goes_on_from_the_step_that_a_script_has_set(
        self, kind: dict[str, Any], within: int | None
    ) -> None:
        self.check(kind, within, 0)

    @parameterized.product(
        kind=[{}, {"synchronous": True}, {"local_steps": 3}, {"local_steps": 1}],
        within=[None, 3, 9],
        value=[0, 40],
    )
    @pytest.mark.extended
    def test_it_does_so_wherever_and_whatever_that_is(
        self, kind: dict[str, Any], within: int | None, value: int
    ) -> None:
        self.check(kind, within, value)

    def check(self, kind: dict[str, Any], within: int | None, value: int) -> None:
        workers = 2 if kind else 1
        plain = compiled(network(), optimizer())
        expected = script(plain, within, value)
        with local_servers.Job(workers=workers) as job:
            models = []
            for k in range(workers):
                with job.worker(k, **kind).scope():
                    models.append(compiled(network(), optimizer()))
            call = functools.partial(script, within=within, value=value)
            found = in_threads([functools.partial(call, model) for model in models])
        self.assertEqual(found, [expected] * workers)
        for model in models:
            for own, one in zip(model.get_weights(), plain.get_weights(), strict=True):
                np.testing.assert_allclose(own, one, rtol=2e-4, atol=2e-5)

    @parameterized.parameters({}, {"synchronous": True}, {"local_steps": 3})
    def test_what_is_set_as_the_last_epoch_ends_stays(self, **kind: Any) -> None:
        def end(model: keras.Model) -> None:
            model.optimizer.iterations.assign(0)

        batches = tf.data.Dataset.from_tensor_slices(rows()).batch(BATCH)
        with local_servers.Job(workers=1) as job:
            with job.worker(0, **kind).scope():
                model = compiled(network(), optimizer())
            ends = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: end(model))
            model.fit(batches, epochs=2, verbose=0, callbacks=[ends])
            model.evaluate(batches, verbose=0)
            self.assertEqual(int(model.optimizer.iterations), 0)
            model.fit(batches, epochs=1, verbose=0)
            self.assertEqual(int(model.optimizer.iterations), BATCHES)

    @parameterized.parameters({}, {"local_steps": 3})
    def test_gradients_that_are_added_up_are_no_assignment(self, **kind: int) -> None:
        accumulates = functools.partial(optimizer, gradient_accumulation_steps=3)
        plain = compiled(network(), accumulates())
        expected = script(plain, None, 0)
        with local_servers.Job(workers=1) as job:
            with job.worker(0, **kind).scope():
                model = compiled(network(), accumulates())
            self.assertEqual(script(model, None, 0), expected)
        for own, one in zip(model.get_weights(), plain.get_weights(), strict=True):
            np.testing.assert_allclose(own, one, rtol=2e-4, atol=2e-5)
