"""What is asked of optimizers under compression, and steps that are left out whole."""

import logging
import unittest
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tf_dgc
from tf_dgc import horovod as hvd
from tf_dgc import optimizers
from tf_dgc.simulate import SimulatedStrategy
from tf_dgc.transports.local import LocalTransport

WHOLE = ("Adafactor", "Lamb", "Muon")
ELEMENTWISE = (
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Ftrl",
    "Lion",
    "Nadam",
    "RMSprop",
    "SGD",
    "ScheduleFreeAdamW",
)
# Of newer versions of Keras.
LATER = ("Muon", "MultiOptimizer", "OptimizerMap", "ScheduleFreeAdamW")
WRAPPERS = ("LossScaleOptimizer", "MultiOptimizer", "Optimizer")
CONFIG = tf_dgc.DGCConfig(sparsity=0.9, min_elements=1)


class Lars(keras.optimizers.SGD):
    """Steps as large as the weights of a tensor are; SGD with momentum else."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        trust = tf.norm(variable) / (tf.norm(gradient) + 1e-6)
        super().update_step(trust * gradient, variable, learning_rate)


class Odd(keras.optimizers.SGD):
    """An optimizer that cannot be copied."""

    def __init__(self, secret: Any) -> None:
        super().__init__(0.1)

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        super().update_step(gradient, variable, learning_rate)


class RepeatedRowsTest(parameterized.TestCase, tf.test.TestCase):
    @parameterized.named_parameters(("SGD", "SGD", 0), ("Adam", "Adam", 1))
    @pytest.mark.long
    def test_rows_that_are_added_up_before_a_square_are_told_once(
        self, name: str, warnings: int
    ) -> None:
        with tf_dgc.DenseStrategy(transport="local").scope():
            model = keras.Sequential(
                [
                    keras.Input((3,)),
                    keras.layers.Embedding(5, 2),
                    keras.layers.Flatten(),
                ]
            )
            model.compile(getattr(keras.optimizers, name)(0.1), "mse")
        x = np.zeros((4, 3), "int32")
        with self.assertLogs("tf_dgc") as logs:
            logging.getLogger("tf_dgc").warning("nothing else is")
            model.fit(x, np.ones((4, 6)), verbose=0)
            model.fit(x, np.ones((4, 6)), verbose=0)
        found = [line for line in logs.output if "row by row" in line]
        self.assertLen(found, warnings)
        self.assertEqual(all("embedding" in line for line in found), True)


def optimizer_of(name: str, **settings: Any) -> keras.optimizers.Optimizer:
    return of_keras(name)(**settings)


def of_keras(name: str) -> Any:
    found = getattr(keras.optimizers, name, None)
    if found is None and name in LATER:
        raise unittest.SkipTest(f"this Keras has no {name}")
    return found


def compiled(
    strategy: Any, make: Callable[[], Any], units: int = 8, **settings: Any
) -> keras.Model:
    with strategy.scope():
        layers = [keras.layers.Dense(units, **settings), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((4,)), *layers])
        model.compile(make(), "mse")
    return model


def fit(model: keras.Model, value: float = 1.0) -> None:
    x = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    model.fit(x, np.full((8, 1), value, np.float32), batch_size=8, verbose=0)


def skip_what_fails_alone(name: str) -> None:
    if name == "Muon" and tuple(map(int, keras.__version__.split(".")[:2])) < (3, 11):
        raise unittest.SkipTest("Muon of this Keras takes no variables of TensorFlow")


class ElementwiseTest(parameterized.TestCase, tf.test.TestCase):
    def test_all_optimizers_of_keras_are_known_here(self) -> None:
        found = {
            name
            for name, value in vars(keras.optimizers).items()
            if isinstance(value, type) and issubclass(value, keras.optimizers.Optimizer)
        }
        self.assertContainsSubset(found, {*WHOLE, *ELEMENTWISE, *WRAPPERS})

    @parameterized.parameters(*WHOLE, *ELEMENTWISE)
    def test_what_works_element_by_element(self, name: str) -> None:
        skip_what_fails_alone(name)
        schedule = keras.optimizers.schedules.CosineDecay(0.0, 10, warmup_steps=5)
        for settings in (
            {},
            {"learning_rate": schedule, "global_clipnorm": 1.0},
            {"gradient_accumulation_steps": 3},
        ):
            found = optimizers.is_elementwise(optimizer_of(name, **settings))
            self.assertEqual(found, name in ELEMENTWISE)

    def test_so_are_those_of_the_user(self) -> None:
        self.assertFalse(optimizers.is_elementwise(Lars(0.1, momentum=0.9)))
        self.assertTrue(optimizers.is_elementwise(Odd(object())))

    @parameterized.parameters(*ELEMENTWISE)
    def test_whose_steps_are_of_gradients_alone(self, name: str) -> None:
        found = optimizers.steps_by_gradients(optimizer_of(name))
        self.assertEqual(found, name not in ("Ftrl", "ScheduleFreeAdamW"))

    def test_what_sets_the_rate_decides_nothing(self) -> None:
        class Unsaved(keras.optimizers.schedules.LearningRateSchedule):
            def __call__(self, step: Any) -> float:
                return 0.001

        for rate in (Unsaved(), lambda: 0.001):
            adam, lamb = keras.optimizers.Adam(rate), keras.optimizers.Lamb(rate)
            self.assertTrue(optimizers.steps_by_gradients(adam))
            self.assertFalse(optimizers.is_elementwise(lamb))
            self.assertIs(adam._learning_rate, rate)

    @parameterized.parameters("Adam", "Lion", "Adadelta", "Nadam", "SGD")
    def test_what_reads_weights_in_some_step_does_not(self, name: str) -> None:
        kind = getattr(keras.optimizers, name)

        class Penalised(kind):  # type: ignore[misc, valid-type]
            def update_step(self, gradient: Any, variable: Any, rate: Any) -> None:
                own = gradient + 0.01 * tf.convert_to_tensor(variable)
                super().update_step(own, variable, rate)

        class Late(kind):  # type: ignore[misc, valid-type]
            def update_step(self, gradient: Any, variable: Any, rate: Any) -> None:
                super().update_step(gradient, variable, rate)
                keras.ops.cond(
                    self.iterations > 20,
                    lambda: variable.assign(0.9 * variable),
                    lambda: variable.assign(variable),
                )

        class Same(kind):  # type: ignore[misc, valid-type]
            def update_step(self, gradient: Any, variable: Any, rate: Any) -> None:
                super().update_step(2.0 * gradient, variable, rate)

        for own, expected in ((Penalised, False), (Late, False), (Same, True)):
            self.assertEqual(optimizers.steps_by_gradients(own(0.1)), expected)

    def test_what_is_not_known_to_step_by_gradients_alone_does_not(self) -> None:
        self.assertFalse(optimizers.steps_by_gradients(Lars(0.1, momentum=0.9)))
        self.assertFalse(optimizers.steps_by_gradients(Odd(object())))

    @parameterized.product(
        name=[*WHOLE, "Lars"], wrapper=[None, "LossScaleOptimizer", "MultiOptimizer"]
    )
    @pytest.mark.long
    def test_others_are_refused_before_the_first_step(
        self, name: str, wrapper: str | None
    ) -> None:
        def make() -> Any:
            one = Lars(0.1) if name == "Lars" else optimizer_of(name)
            return one if wrapper is None else optimizer_of(wrapper, **given(one))

        def given(one: Any) -> dict[str, Any]:
            if wrapper == "LossScaleOptimizer":
                return {"inner_optimizer": one}
            return {"optimizer_map": of_keras("OptimizerMap")(one)}

        skip_what_fails_alone(name)
        strategy = tf_dgc.DGCStrategy(CONFIG, transport="local")
        model = compiled(strategy, make)
        before = model.get_weights()
        rule = rf"element by element.* Received: optimizer '.*', {name},.*Use DenseStr"
        with self.assertRaisesRegex(ValueError, rule):
            fit(model)
        self.assertAllEqual(model.get_weights()[0], before[0])

    @pytest.mark.long
    def test_so_are_they_in_the_other_front_ends(self) -> None:
        lamb = hvd.DistributedOptimizer(
            keras.optimizers.Lamb(), CONFIG, over=LocalTransport()
        )
        with self.assertRaisesRegex(ValueError, "Received: optimizer 'lamb.*', Lamb"):
            fit(compiled(tf.distribute.get_strategy(), lambda: lamb))
        with self.assertRaisesRegex(ValueError, "Received: optimizer 'lamb.*', Lamb"):
            fit(compiled(SimulatedStrategy(2, CONFIG), keras.optimizers.Lamb))
        config = tf_dgc.AveragingConfig(
            outer_optimizer=keras.optimizers.Lamb, compression=CONFIG
        )
        averaging = tf_dgc.ParameterAveragingStrategy(config, transport="local")
        with self.assertRaisesRegex(ValueError, "Received: optimizer 'lamb.*', Lamb"):
            fit(compiled(averaging, keras.optimizers.SGD))

    @pytest.mark.slow
    def test_they_may_train_what_is_not_compressed(self) -> None:
        for strategy in (
            tf_dgc.DGCStrategy(tf_dgc.DGCConfig(min_elements=999), transport="local"),
            tf_dgc.DenseStrategy(transport="local"),
            tf_dgc.ParameterAveragingStrategy(transport="local"),
        ):
            fit(compiled(strategy, keras.optimizers.Lamb))


class UnselectedTest(tf.test.TestCase):
    def test_what_servers_cannot_do_with_the_largest_elements_is_refused(self) -> None:
        sgd, plain = keras.optimizers.SGD(0.1, momentum=0.9), keras.optimizers.SGD(0.1)
        uncorrected = tf_dgc.DGCConfig(momentum_correction=False)
        for optimizer, config, tables, text in (
            (keras.optimizers.Adam(), tf_dgc.DGCConfig(), [], "needs keras.optimiz"),
            (sgd, uncorrected, [], "must be True, or the optimizer without momentum"),
            (sgd, tf_dgc.DGCConfig(), ["table"], "must be without momentum.*'table'"),
        ):
            settings = tf_dgc.DownpourConfig(compression=config)
            with self.assertRaisesRegex(ValueError, text):
                optimizers.refuse_unselected(optimizer, settings, tables)
        for optimizer, config, tables in (
            (sgd, tf_dgc.DGCConfig(), []),
            (plain, uncorrected, ["table"]),
            (plain, tf_dgc.DGCConfig(), ["table"]),
        ):
            settings = tf_dgc.DownpourConfig(compression=config)
            optimizers.refuse_unselected(optimizer, settings, tables)


@pytest.mark.long
class WholeStepsTest(parameterized.TestCase, tf.test.TestCase):
    """With nonfinite="skip"."""

    CONFIG = tf_dgc.DGCConfig(sparsity=0.5, min_elements=1, nonfinite="skip")

    @parameterized.parameters("plain", "accumulating", "scaled", "simulated", "horovod")
    @pytest.mark.few(1)
    def test_nothing_moves_in_a_step_that_is_left_out(self, kind: str) -> None:
        def make() -> Any:
            settings: dict[str, Any] = {"momentum": 0.9, "weight_decay": 0.1}
            settings |= {"use_ema": True, "ema_momentum": 0.5}
            if kind == "accumulating":
                settings["gradient_accumulation_steps"] = 2
            sgd = keras.optimizers.SGD(0.01, **settings)
            if kind == "scaled":
                return keras.optimizers.LossScaleOptimizer(sgd, initial_scale=2.0)
            if kind == "horovod":
                hvd.DistributedOptimizer(sgd, self.CONFIG, over=LocalTransport())
            return sgd

        strategy = tf_dgc.DGCStrategy(self.CONFIG, transport="local")
        if kind == "simulated":
            strategy = SimulatedStrategy(2, self.CONFIG)
        if kind == "horovod":
            strategy = tf.distribute.get_strategy()
        # MaxNorm changes some bits whenever it is applied.
        limit = {"kernel_constraint": keras.constraints.MaxNorm(0.1)}
        model = compiled(strategy, make, **limit)
        model.jit_compile = False  # which a GPU makes "auto" without a strategy
        sgd = getattr(model.optimizer, "inner_optimizer", model.optimizer)
        for value in (1.0, np.nan, 1.0, np.nan, 1.0):
            before = [v.numpy() for v in (*model.weights, *sgd.variables)]
            fit(model, value)
            after = [v.numpy() for v in (*model.weights, *sgd.variables)]
            if np.isnan(value):
                for one, two in zip(before, after, strict=True):
                    self.assertAllEqual(one, two)
        taken = 3 // (sgd.gradient_accumulation_steps or 1)
        self.assertEqual(int(sgd.iterations), taken)
        self.assertFalse(any(np.isnan(w).any() for w in model.get_weights()))

    def test_two_optimizers_leave_it_out_together(self) -> None:
        make, mapped = of_keras("MultiOptimizer"), of_keras("OptimizerMap")
        strategy = tf_dgc.DGCStrategy(self.CONFIG, transport="local")
        with strategy.scope():
            weights = [keras.Variable(np.ones((4, 4), np.float32)) for _ in range(2)]
            each = [keras.optimizers.SGD(0.1) for _ in weights]
            pairs = mapped(keras.optimizers.SGD(0.1))
            for variable, optimizer in zip(weights, each, strict=True):
                pairs[variable.path] = optimizer
            both = make(pairs)
        for bad in (0, 1):
            gradients = [tf.ones([4, 4]), tf.ones([4, 4])]
            gradients[bad] *= np.nan
            strategy.run(lambda found: both.apply(found, weights), args=(gradients,))
            for variable in weights:
                self.assertAllEqual(variable, np.ones((4, 4)))
        self.assertEqual([int(o.iterations) for o in (both, *each)], [0, 0, 0])


if __name__ == "__main__":
    tf.test.main()
