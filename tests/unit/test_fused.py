"""Tests of steps that XLA compiles as a whole, beside those of single operations."""

import os
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized
from ledgers import built, compressing, exchange, local_step_of, only
from loopback import OWNER, Loopback, Tampering, outcomes, run_workers
from test_dgc import TwinCase

import tf_dgc
from tf_dgc.compression.dgc import Momentum
from tf_dgc.config import DGCConfig
from tf_dgc.exchanges import fused
from tf_dgc.exchanges.parts import Part
from tf_dgc.transports.local import LocalTransport

SHAPES = [(24, 16), (5,), (9, 40), (), (7, 3)]
RATES = [1.0, 1.0, 0.25, 0.25, 0.1, 0.0, 1.0]


def whole(ledger: Any) -> int:
    """Return how many stages of an exchange are compiled as a whole."""
    return sum(isinstance(each, fused.FusedSum) for each in only(ledger).sums)


def trained(
    transport: Loopback,
    momentum: Momentum | None,
    settings: dict[str, Any],
    dtypes: tuple[str, ...] = ("float32",),
) -> dict[str, Any]:
    """Return the state and what was applied, after some steps."""
    config = DGCConfig(min_elements=30, **settings)
    ledger = compressing(transport, config)
    kinds = [dtypes[i % len(dtypes)] for i in range(len(SHAPES))]
    variables = [tf.Variable(tf.zeros(*v)) for v in zip(SHAPES, kinds, strict=True)]
    random, found = np.random.default_rng(transport.rank), []
    for step, rate in enumerate(RATES):
        own = None if momentum is None else momentum._replace(learning_rate=rate)
        local = [tf.cast(random.normal(size=v.shape), v.dtype) for v in variables]
        if step == 4 and transport.rank == 0:
            local[2] *= np.nan
        part = Part(tf.constant(rate), tf.constant(1.0 + 0.5 * transport.rank), 1)
        weighed = {} if momentum is None else {"part": part}
        update = ledger.gradients(OWNER, local, variables, own, **weighed)
        for gradient, variable in zip(update.gradients, variables, strict=True):
            found.append(variable if gradient is None else gradient)
        found = [tf.cast(each, tf.float32).numpy() for each in found]
    state = {name.split()[0]: v.numpy() for name, v in only(ledger).state.items()}
    stats = ledger.tensor_stats()
    traffic = [int(x) for x in ledger.stats(total=True)[:4]]
    return {
        "applied": found,
        **state,
        "density": [each.density for each in stats],
        "stale": [each.stale for each in stats],
        "traffic": traffic,
        "whole": whole(ledger),
    }


@pytest.mark.long
class BothWaysTest(parameterized.TestCase, tf.test.TestCase):
    @parameterized.parameters(
        (Momentum(0.9, False), {"clip_norm": 3.0}),
        (Momentum(0.9, True), {"momentum_masking": False, "value_dtype": "sign"}),
        (None, {"warmup_steps": 4, "warmup_stages": (0.3, 0.8)}, "float16", "bfloat16"),
        (Momentum(0.0, False), {"rate_correction": False}, "float32", "float16"),
    )
    @pytest.mark.few(0, 1)
    def test_workers_send_and_apply_the_same(
        self, momentum: Any, settings: dict[str, Any], *dtypes: str
    ) -> None:
        settings = {"sparsity": 0.95, "nonfinite": "skip"} | settings
        args = momentum, settings, dtypes or ("float32",)
        ways = []
        for way in (False, True):
            with fused.forced(way):
                ways.append(run_workers(2, lambda own: trained(own, *args)))
        for one, other in zip(*ways, strict=True):
            self.assertEqual(one.pop("whole"), 0)
            self.assertGreater(other.pop("whole"), 0)
            self.assertEqual(one.keys(), other.keys())
            for name, value in one.items():
                # Products and sums of one function may be rounded once.
                self.assertAllClose(value, other[name], 1e-5, 1e-6, name)
        first, second = ways[1]
        for one, other in zip(first["applied"], second["applied"], strict=True):
            self.assertEqual(one.tobytes(), other.tobytes())

    @pytest.mark.slow
    def test_so_do_other_optimizers(self) -> None:
        def work(transport: Loopback) -> list[np.ndarray]:
            config = DGCConfig(min_elements=0, sparsity=0.9, warmup_steps=0)
            ledger, adam = compressing(transport, config), keras.optimizers.Adam(0.1)
            variables = built(adam, [(16, 24), (5,)])
            step, found = local_step_of(adam, variables, 0.1), []
            for number in range(4):
                random = np.random.default_rng([transport.rank, number])
                local = [
                    tf.cast(random.normal(size=v.shape), tf.float32) for v in variables
                ]
                own = [v.value for v in variables]
                ledger.gradients(adam, local, own, step)
                found += [v.numpy() for v in own]
            return [*found, np.array(whole(ledger))]

        ways = []
        for way in (False, True):
            with fused.forced(way):
                ways.append(run_workers(2, work))
        for one, other in zip(ways[0], ways[1], strict=True):
            self.assertEqual([one.pop(), other.pop()], [0, 1])
            for before, after in zip(one, other, strict=True):
                self.assertAllClose(before, after, 1e-5, 1e-6)
        for one, other in zip(*ways[1], strict=True):
            self.assertEqual(one.tobytes(), other.tobytes())


@pytest.mark.slow
class TwinTest(TwinCase):
    steps = 24

    @parameterized.parameters(
        ("heavy-ball", True, 2, "float32"),
        ("Nesterov", False, 3, "float32"),
        ("none", True, 2, "log4"),
    )
    def test_numpy_computes_the_same(
        self, momentum: str, switched: bool, workers: int, value_dtype: str
    ) -> None:
        with fused.forced(True):
            args = momentum, switched, switched, switched, workers, value_dtype
            self.compare(*args)


@pytest.mark.long
class FaultTest(parameterized.TestCase, tf.test.TestCase):
    @parameterized.parameters(
        (0, 7, "is damaged: its header"),
        (5, 0x7FC00000, "is damaged: values that are not finite"),
        (3, 5, "not in the same step of the same training"),
    )
    @pytest.mark.slow
    def test_nothing_is_changed_by_a_message_that_is_damaged(
        self, place: int, word: int, what: str
    ) -> None:
        def damage(message: np.ndarray) -> None:
            message[0, place] = word

        config = DGCConfig(sparsity=0.9, min_elements=0, value_dtype="float32")

        def work(transport: Loopback) -> Any:
            transport = Tampering(transport, ".message", damage)
            ledger = compressing(transport, config)
            variables = [tf.Variable(tf.zeros([8, 16]))]
            gradient = tf.reshape(tf.range(128.0), [8, 16]) + transport.rank
            try:
                momentum = Momentum(0.9, False, 1.0)
                exchange(ledger, OWNER, [gradient], variables, momentum)
            except tf.errors.InvalidArgumentError as error:
                return str(error), only(ledger), gradient, variables
            return None

        with fused.forced(True):
            found = outcomes(2, work)
        for message, own, gradient, (variable,) in found:
            self.assertIn(what, message)
            self.assertAllEqual(own.residual.v, tf.reshape(gradient, [-1]))
            self.assertAllEqual(own.residual.u, tf.reshape(gradient, [-1]))
            self.assertAllEqual(variable, np.zeros([8, 16]))
            self.assertEqual(int(own.residual.step), 0)
            self.assertEqual(own.tensor_stats()[0].density, 0.0)

    def test_a_gradient_that_is_not_finite_is_named(self) -> None:
        config = DGCConfig(sparsity=0.9, min_elements=30, clip_norm=1.0)
        for number in range(len(SHAPES)):
            with fused.forced(True):
                ledger = compressing(LocalTransport(), config)
                variables = [
                    tf.Variable(tf.zeros(shape), name=f"v{i}")
                    for i, shape in enumerate(SHAPES)
                ]
                local = [tf.ones(shape) for shape in SHAPES]
                local[number] = local[number] * np.inf
                with self.assertRaisesRegex(
                    tf.errors.InvalidArgumentError, f"v{number}"
                ):
                    ledger.gradients(OWNER, local, variables)


class ChoiceTest(tf.test.TestCase):
    def exchange_of(self, transport: Any, **settings: Any) -> Any:
        config = DGCConfig(**({"min_elements": 0, "sparsity": 0.99} | settings))
        ledger = compressing(transport, config)
        variables = [tf.Variable(tf.zeros([64, 64]))]
        momentum = Momentum(0.9, False, 0.1)
        ledger.of(OWNER, variables, momentum)
        return ledger

    def test_gpus_take_a_step_as_a_whole_and_processors_do_not(self) -> None:
        transport = LocalTransport()
        for device, expected in (("/device:CPU:0", 0), ("/device:GPU:0", 1)):
            transport.device = device
            self.assertEqual(whole(self.exchange_of(transport)), expected)

    def test_where_much_is_sent_a_stage_is_taken_by_single_operations(self) -> None:
        transport = LocalTransport()
        transport.device = "/device:GPU:0"
        stages = {"warmup_steps": 3, "warmup_stages": (0.5, 0.9, 0.95)}
        ledger = self.exchange_of(transport, **stages)
        self.assertEqual(whole(ledger), 2)  # 0.95 and 0.99
        numbers = sorted(n for each in only(ledger).sums for n in each.numbers)
        self.assertEqual(numbers, [0, 1, 2, 3])

    def test_a_variable_of_the_environment_is_the_way_off(self) -> None:
        transport = LocalTransport()
        transport.device = "/device:GPU:0"
        with mock.patch.dict(os.environ, {fused.VARIABLE: "off"}):
            self.assertEqual(whole(self.exchange_of(transport)), 0)
        with (
            mock.patch.dict(os.environ, {fused.VARIABLE: "no"}),
            self.assertRaisesRegex(ValueError, "TF_DGC_XLA must be one of auto, off"),
        ):
            self.exchange_of(transport)


@pytest.mark.long
class FitTest(tf.test.TestCase):
    def weights(self, way: bool) -> tuple[list[np.ndarray], int]:
        keras.utils.set_random_seed(1)
        config = DGCConfig(sparsity=0.95, min_elements=100, warmup_steps=0)
        with fused.forced(way):
            strategy = tf_dgc.DGCStrategy(config, transport="local")
            with strategy.scope():
                layers = [keras.layers.Dense(40, "relu"), keras.layers.Dense(3)]
                model = keras.Sequential([keras.Input((20,)), *layers])
                model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
            x = np.random.default_rng(0).normal(size=(64, 20)).astype(np.float32)
            model.fit(x, x[:, :3], batch_size=16, epochs=3, shuffle=False, verbose=0)
        return model.get_weights(), whole(strategy._ledger)

    @pytest.mark.slow
    def test_trains_as_by_single_operations(self) -> None:
        (one, none), (other, some) = self.weights(False), self.weights(True)
        self.assertEqual([none, some], [0, 1])
        for before, after in zip(one, other, strict=True):
            self.assertAllClose(before, after, 1e-4, 1e-5)


if __name__ == "__main__":
    tf.test.main()
