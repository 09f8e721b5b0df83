"""The strategy that chooses itself: what it takes, why, and that all workers agree."""

import dataclasses
import json
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized
from loopback import Loopback, outcomes, run_workers

import tf_dgc
from tf_dgc.config import AutoConfig
from tf_dgc.exchanges import nodes
from tf_dgc.prediction import calibration, choices, costs
from tf_dgc.prediction.choices import Situation
from tf_dgc.prediction.costs import Measured, Network

SLOW, FAST = Network(1e6, 1e-4), Network(1e12, 1e-6)
WORK = Measured(1e-3, 3e-3, 1e-3, 1e-4, 0.0)
ROWS, INPUTS, UNITS = 16, 48, 64


def measured(network: Network) -> Any:
    """Let the network and the machine be these."""
    return mock.patch.multiple(
        calibration,
        network=lambda transport: network,
        machine=lambda *_: WORK,
    )


def model_of(**compiled: Any) -> keras.Model:
    """Return a model of two layers, the first of which is compressed."""
    random = keras.initializers.RandomNormal(seed=1)
    layers = [keras.layers.Dense(n, kernel_initializer=random) for n in (UNITS, 2)]
    model = keras.Sequential([keras.Input((INPUTS,)), *layers])
    sgd = keras.optimizers.SGD(0.05, momentum=0.9)
    settings: dict[str, Any] = {"optimizer": sgd, "loss": "mse", "run_eagerly": True}
    model.compile(**(settings | compiled))
    return model


def fitted(strategy: Any, epochs: int = 2, **compiled: Any) -> keras.Model:
    """Return a model after a `fit` of four batches an epoch."""
    random = np.random.default_rng(0)
    x = random.normal(size=(4 * ROWS, INPUTS)).astype("float32")
    y = random.normal(size=(4 * ROWS, 2)).astype("float32")
    with strategy.scope():
        model = model_of(**compiled)
    model.fit(x, y, batch_size=ROWS, epochs=epochs, shuffle=False, verbose=0)
    return model


def trained(strategy: Any, **compiled: Any) -> list[np.ndarray]:
    """Return the weights of such a model."""
    return list(fitted(strategy, **compiled).get_weights())


def on_two(work: Callable[[Loopback], Any], network: Network) -> list[Any]:
    with measured(network):
        return run_workers(2, work)


class ChoiceTest(parameterized.TestCase, tf.test.TestCase):
    """What is chosen in a situation, whatever was measured."""

    def _choose(
        self,
        network: Network,
        shapes: Any = ((1000, 1000), (1000,)),
        workers: int = 4,
        steps: int | None = 1000,
        refused: str = "",
        **wanted: Any,
    ) -> choices.Choice:
        variables = [tf.Variable(tf.zeros(shape)) for shape in shapes]
        tensors = costs.tensors_of(variables, tf_dgc.DGCConfig())
        situation = Situation(tensors, workers, steps, refused)
        return choices.choose(AutoConfig(**wanted), situation, network, lambda _: WORK)

    def test_a_slow_network_compresses_within_a_budget_of_the_training(self) -> None:
        found = self._choose(SLOW)
        self.assertEqual(found.strategy, "dgc")
        config = tf_dgc.DGCConfig.from_config(found.config)
        self.assertFalse(config.has_budget)
        self.assertBetween(config.warmup_steps, 1, 500)
        for text in ("1 Mbit/s", "0.1 ms", "2 ms for compression", "dense", "dgc"):
            self.assertIn(text, found.reason)

    def test_the_budget_is_kept_over_the_training(self) -> None:
        config = tf_dgc.DGCConfig.from_config(self._choose(SLOW).config)
        tensors = costs.tensors_of([tf.Variable(tf.zeros([1000, 1000]))], config)
        sent = 0.0
        stages = choices.warmup.stages(config)
        ends = [each.first_step for each in stages[1:]] + [1000]
        for stage, end in zip(stages, ends, strict=True):
            cost = choices.formats.cost(tensors.layout, stage.sparsity, config, 4)
            sent += (end - stage.first_step) * cost.sent / 1000
        self.assertLess(sent + 4000, 4 * 1_001_000 / choices.RATIO)

    def test_a_fast_network_is_dense(self) -> None:
        self.assertEqual(self._choose(FAST).strategy, "dense")

    def test_without_steps_there_is_no_warmup(self) -> None:
        found = tf_dgc.DGCConfig.from_config(self._choose(SLOW, steps=None).config)
        self.assertEqual((found.sparsity, found.warmup_steps), (0.996, 0))

    def test_a_budget_of_the_user_gets_the_steps(self) -> None:
        config = tf_dgc.DGCConfig(ratio=100)
        found = tf_dgc.DGCConfig.from_config(self._choose(SLOW, dgc=config).config)
        self.assertGreater(found.warmup_steps, 0)
        with self.assertRaisesRegex(ValueError, "`ratio` must be"):
            self._choose(SLOW, dgc=tf_dgc.DGCConfig(ratio=1e6))

    def test_biases_that_outweigh_the_budget_leave_the_default(self) -> None:
        found = self._choose(SLOW, shapes=((64, 64), (64,)))
        self.assertEqual(found.config["sparsity"], 0.996)

    @parameterized.parameters(
        (("dense", "dgc"), "dgc"),
        (("dense",), "dense"),
        (("averaging", "dense"), "averaging"),
        (("averaging",), "averaging"),
    )
    def test_nothing_is_chosen_that_is_not_allowed(
        self, allow: tuple[str, ...], expected: str
    ) -> None:
        self.assertEqual(self._choose(SLOW, allow=allow).strategy, expected)

    def test_of_what_is_about_as_fast_the_most_exact_is_taken(self) -> None:
        found = self._choose(Network(1e15, 0.0), allow=("averaging", "dense"))
        self.assertEqual(found.strategy, "dense")

    @pytest.mark.extended
    def test_what_is_chosen_is_at_most_5_percent_slower_than_the_better(self) -> None:
        for bandwidth in np.geomspace(1e6, 1e12, 49):
            for workers in (2, 4, 33, 256):
                network = Network(float(bandwidth), 1e-4)
                found = self._choose(network, workers=workers)
                told = found.reason.partition(": ")[2].partition(";")[0].split(", ")
                seconds = {s.split()[0]: float(s.split()[1]) for s in told}
                least = min(seconds.values())
                self.assertLessEqual(seconds[found.strategy], 1.06 * least, found)

    def test_many_workers_exchange_by_owners(self) -> None:
        for workers, expected in ((4, "allgather"), (1024, "owners")):
            found = self._choose(Network(1e8, 1e-6), workers=workers)
            self.assertEqual(found.config["exchange"], expected)

    def test_what_is_left_out_is_said(self) -> None:
        small = self._choose(SLOW, shapes=((10, 10),))
        self.assertEqual(small.strategy, "dense")
        self.assertIn("dgc is left out: no tensor is large enough", small.reason)
        found = self._choose(SLOW, refused="it clips", allow=("dgc",))
        self.assertEqual(found.strategy, "dense")
        self.assertIn("dgc is left out: it clips", found.reason)


class SettingsTest(tf.test.TestCase):
    def test_wrong_settings_are_named(self) -> None:
        for error, settings, message in (
            (ValueError, {"allow": ("fast",)}, "`allow` must be one or more of"),
            (ValueError, {"allow": ()}, "`allow` must be one or more of"),
            (TypeError, {"allow": "dgc"}, "`allow` must be a sequence of names"),
            (TypeError, {"dgc": 0.99}, "`dgc` must be a DGCConfig or None"),
            (ValueError, {"dgc": {"nonfinite": "skip"}}, "nonfinite='raise'"),
            (TypeError, {"averaging": 4}, "`averaging` must be a AveragingConfig"),
        ):
            with self.assertRaisesRegex(error, message):
                AutoConfig(**settings)

    def test_settings_survive_json(self) -> None:
        config = AutoConfig(
            allow=("dgc", "dense"),
            dgc=tf_dgc.DGCConfig(ratio=9),
            averaging=tf_dgc.AveragingConfig(period=3),
        )
        text = json.dumps(config.get_config())
        self.assertEqual(AutoConfig.from_config(json.loads(text)), config)
        self.assertEqual(config.allow, ("dense", "dgc"))


@pytest.mark.long
class AutoStrategyTest(parameterized.TestCase, tf.test.TestCase):
    @parameterized.parameters(
        ("dense", FAST, ("dense", "dgc")),
        ("dgc", SLOW, ("dense", "dgc")),
        ("averaging", Network(1e6, 1.0), ("dense", "dgc", "averaging")),
    )
    @pytest.mark.slow
    def test_it_trains_as_what_it_has_chosen(
        self, expected: str, network: Network, allow: tuple[str, ...]
    ) -> None:
        averaging = tf_dgc.AveragingConfig(period=3)

        def auto(transport: Loopback) -> Any:
            settings = {"averaging": averaging, "transport": transport}
            strategy = tf_dgc.AutoStrategy(allow, **settings)
            return trained(strategy), strategy.choice, strategy.config

        found = on_two(auto, network)
        _, choice, config = found[0]
        self.assertEqual(choice.strategy, expected)
        self.assertEqual([own for _, own, _ in found], [choice] * 2)

        def alone(transport: Loopback) -> Any:
            if expected == "dense":
                return trained(tf_dgc.DenseStrategy(transport=transport))
            if expected == "dgc":
                return trained(tf_dgc.DGCStrategy(config, transport=transport))
            by_rounds = tf_dgc.ParameterAveragingStrategy
            return trained(by_rounds(averaging, transport=transport))

        for (own, *_), theirs in zip(found, run_workers(2, alone), strict=True):
            for one, other in zip(own, theirs, strict=True):
                np.testing.assert_array_equal(one, other)

    @parameterized.parameters(((SLOW, FAST), "dgc"), ((FAST, SLOW), "dense"))
    @pytest.mark.few(1)
    def test_the_chiefs_measurements_decide(
        self, networks: tuple[Network, Network], expected: str
    ) -> None:
        def work(transport: Loopback) -> str:
            strategy = tf_dgc.AutoStrategy(transport=transport)
            trained(strategy)
            assert strategy.choice is not None
            return strategy.choice.strategy

        with mock.patch.multiple(
            calibration,
            network=lambda transport: networks[transport.rank],
            machine=lambda *_: WORK,
        ):
            self.assertEqual(run_workers(2, work), [expected] * 2)

    @pytest.mark.extended
    def test_a_choice_is_restored_and_not_made_again(self) -> None:
        folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

        def save(transport: Loopback) -> Any:
            strategy = tf_dgc.AutoStrategy(transport=transport)
            model = fitted(strategy)
            strategy.save_state(folder, model)
            return strategy.choice

        def restore(transport: Loopback) -> Any:
            strategy = tf_dgc.AutoStrategy(transport=transport)
            strategy.restore_state(folder)
            trained(strategy)
            return strategy.choice, strategy.config

        (before, _) = on_two(save, SLOW)
        with mock.patch.object(calibration, "network", side_effect=AssertionError):
            for choice, config in run_workers(2, restore):
                self.assertEqual(choice, before)
                self.assertEqual(config.get_config(), before.config)

    @parameterized.parameters(("auto", True), (True, True), ("auto", False))
    @pytest.mark.few(1, 3)
    def test_messages_go_between_hosts_where_that_was_asked_or_pays(
        self, wanted: bool | str, pays: bool
    ) -> None:
        folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        config = tf_dgc.DGCConfig(sparsity=0.9, hierarchical=wanted)

        def on_one_host(transport: Loopback) -> None:
            transport.addresses = ["a:1", "a:2", "b:1"]

        def save(transport: Loopback) -> Any:
            on_one_host(transport)
            strategy = tf_dgc.AutoStrategy(("dgc",), dgc=config, transport=transport)
            model = fitted(strategy)
            strategy.save_state(folder, model)
            return strategy.choice, strategy.mesh.voices.size, model.get_weights()

        def restore(transport: Loopback) -> Any:
            on_one_host(transport)
            strategy = tf_dgc.AutoStrategy(("dgc",), dgc=config, transport=transport)
            strategy.restore_state(folder)
            return strategy.choice, strategy.mesh.voices.size

        def told(transport: Loopback) -> Any:
            on_one_host(transport)
            settled = dataclasses.replace(config, hierarchical=pays)
            return trained(tf_dgc.DGCStrategy(settled, transport=transport))

        with measured(SLOW), mock.patch.object(nodes, "_pays", return_value=pays):
            found = run_workers(3, save)
        for (choice, voices, weights), expected in zip(
            found, run_workers(3, told), strict=True
        ):
            self.assertEqual((voices, choice.config["hierarchical"]), (3 - pays, pays))
            self.assertAllEqual(weights[0], expected[0])
        with mock.patch.object(nodes, "_pays", side_effect=AssertionError):
            for restored in run_workers(3, restore):
                self.assertEqual(restored, found[0][:2])

    @pytest.mark.slow
    def test_a_state_of_another_choice_is_refused_after_a_step(self) -> None:
        folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

        def save(transport: Loopback) -> None:
            strategy = tf_dgc.AutoStrategy(transport=transport)
            model = fitted(strategy)
            strategy.save_state(folder, model)

        def restore(transport: Loopback) -> None:
            strategy = tf_dgc.AutoStrategy(transport=transport)
            model = fitted(strategy)
            strategy.restore_state(folder, model)

        on_two(save, SLOW)
        with measured(FAST):
            for error in outcomes(2, restore):
                self.assertIsInstance(error, ValueError)
                self.assertRegex(str(error), "before the first step.*'dgc'.*'dense'")

    @pytest.mark.slow
    def test_another_strategy_reads_its_state(self) -> None:
        folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

        def save(transport: Loopback) -> Any:
            strategy = tf_dgc.AutoStrategy(transport=transport)
            model = fitted(strategy)
            strategy.save_state(folder, model)
            return strategy.config

        def restore(transport: Loopback) -> None:
            strategy = tf_dgc.DGCStrategy(config, transport=transport)
            strategy.restore_state(folder)
            trained(strategy)

        config, _ = on_two(save, SLOW)
        run_workers(2, restore)

    def test_one_worker_is_plain(self) -> None:
        with mock.patch.object(calibration, "network", side_effect=AssertionError):
            strategy = tf_dgc.AutoStrategy(transport="local")
            trained(strategy)
        self.assertIsNone(strategy.choice)
        self.assertIsNone(strategy.config)

    @pytest.mark.extended
    def test_what_dgc_would_change_is_dense(self) -> None:
        class Own(keras.Sequential):
            def train_step(self, data: Any) -> Any:
                return super().train_step(data)

        def clips(strategy: Any) -> None:
            trained(strategy, optimizer=keras.optimizers.SGD(0.1, clipnorm=1.0))

        def normalizes(strategy: Any) -> None:
            trained(strategy, optimizer=keras.optimizers.Lamb(0.1))

        def steps_itself(strategy: Any) -> None:
            with strategy.scope():
                layers = [keras.Input((INPUTS,)), keras.layers.Dense(UNITS)]
                model = Own(layers)
                model.compile("sgd", "mse", run_eagerly=True)
            model.fit(np.zeros((4, INPUTS)), np.zeros((4, UNITS)), verbose=0)

        for train, reason in (
            (clips, "clips each worker's own gradient"),
            (normalizes, "do not depend on gradients alone"),
            (steps_itself, "train_step is its own"),
        ):

            def work(transport: Loopback, train: Any = train) -> Any:
                strategy = tf_dgc.AutoStrategy(transport=transport)
                with strategy.scope():
                    train(strategy)
                return strategy.choice

            for choice in on_two(work, SLOW):
                self.assertEqual(choice.strategy, "dense")
                self.assertIn("dgc is left out: ", choice.reason)
                self.assertIn(reason, choice.reason)

    @pytest.mark.slow
    def test_a_loop_of_ones_own_chooses_in_its_first_step(self) -> None:
        def loop(strategy: Any) -> Any:
            with strategy.scope():
                model = model_of()

            def step(x: tf.Tensor) -> None:
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(tf.square(model(x)))
                weights = model.trainable_variables
                gradients = tape.gradient(loss, weights)
                model.optimizer.apply(gradients, weights)

            for i in range(3):
                strategy.run(step, (tf.random.stateless_normal([4, INPUTS], [1, i]),))
            return strategy.config, model.get_weights()

        def auto(transport: Loopback) -> Any:
            every = ("dense", "dgc", "averaging")
            return loop(tf_dgc.AutoStrategy(every, transport=transport))

        found = on_two(auto, SLOW)
        config = found[0][0]
        self.assertIsInstance(config, tf_dgc.DGCConfig)

        def dgc(transport: Loopback) -> Any:
            return loop(tf_dgc.DGCStrategy(config, transport=transport))

        for (_, own), (_, theirs) in zip(found, run_workers(2, dgc), strict=True):
            for one, other in zip(own, theirs, strict=True):
                np.testing.assert_array_equal(one, other)

    def test_workers_must_allow_the_same(self) -> None:
        def work(transport: Loopback) -> None:
            allow = ("dense", "dgc") if transport.rank else ("dense",)
            tf_dgc.AutoStrategy(allow, transport=transport)

        for error in outcomes(2, work):
            self.assertRegex(str(error), "`allow` differs")


@pytest.mark.long
class CalibrationTest(tf.test.TestCase):
    @pytest.mark.slow
    def test_what_is_measured_is_positive(self) -> None:
        def work(transport: Loopback) -> Any:
            return calibration.network(transport)

        for found in run_workers(2, work):
            self.assertGreater(found.bandwidth, 0)
            self.assertGreater(found.latency, 0)
            self.assertFalse(found.grid)
        variables = [tf.Variable(tf.zeros([300, 100]))]
        config = tf_dgc.DGCConfig()
        layout = costs.tensors_of(variables, config).layout
        found = calibration.machine(layout, config, "/device:CPU:0", 4)
        self.assertGreater(found.compressed, found.dense)
        self.assertGreater(found.message, 0)
        dense = dataclasses.replace(config, sparsity=0.0)
        found = calibration.machine(layout, dense, "/device:CPU:0", 4)
        self.assertEqual(found.compressed, found.dense)


if __name__ == "__main__":
    tf.test.main()
