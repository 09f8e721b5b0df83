"""Split layers: first values, models, state. Workers are threads, without a graph."""

import contextlib
import functools
import itertools
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
from loopback import Loopback, in_scopes, outcomes, run_workers

import tf_dgc
from tf_dgc import bands
from tf_dgc.bands import Band
from tf_dgc.layers import SplitDense, draws, logits, trials
from tf_dgc.transports.local import LocalTransport

X = np.random.default_rng(0).normal(size=(30, 6)).astype("float32")
Y = np.random.default_rng(1).integers(0, 5, 30)
FROM_LOGITS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def dense(units: int, seed: int, name: str, **arguments: Any) -> keras.layers.Dense:
    drawn = keras.initializers.GlorotUniform(seed)  # threads share what has no seed
    return keras.layers.Dense(units, kernel_initializer=drawn, name=name, **arguments)


def network() -> keras.Model:
    inner = keras.Sequential([keras.Input((9,)), dense(7, 1, "inner")])
    inputs = keras.Input((6,))
    x = dense(9, 2, "first", activation="tanh")(inputs)
    x = keras.layers.LayerNormalization()(x)
    return keras.Model(inputs, dense(5, 3, "last")(inner(x)))


def compiled(model: keras.Model, optimizer: Any = None) -> keras.Model:
    model.compile(
        optimizer or keras.optimizers.Adam(0.01),
        FROM_LOGITS,
        run_eagerly=True,
    )
    return model


def fit(model: keras.Model, **arguments: Any) -> Any:
    return model.fit(X, Y, batch_size=10, shuffle=False, verbose=0, **arguments)


class FirstValuesTest(parameterized.TestCase, tf.test.TestCase):
    @parameterized.product(
        initializer=[
            keras.initializers.GlorotUniform,
            keras.initializers.GlorotNormal,
            keras.initializers.HeNormal,
            keras.initializers.LecunUniform,
            keras.initializers.RandomNormal,
            keras.initializers.RandomUniform,
            keras.initializers.TruncatedNormal,
            keras.initializers.Orthogonal,
            keras.initializers.Ones,
        ],
        form=[(7, 5, 2), (33, 10, 3), (8, 3, 4)],
        axis=[bands.ROWS, bands.COLUMNS],
    )
    @pytest.mark.few(9)
    def test_they_are_parts_of_what_one_worker_draws(
        self, initializer: Any, form: tuple[int, int, int], axis: int
    ) -> None:
        rows, units, workers = form
        own = Band(0, workers, form[axis], axis)
        seeded = initializer is not keras.initializers.Ones
        initializer = initializer(seed=4) if seeded else initializer()
        # Blocks of a few rows; a GPU rounds otherwise.
        with pytest.MonkeyPatch.context() as patch, tf.device("CPU:0"):
            patch.setattr(draws, "_BLOCK", 8 * units)
            parts = [
                draws.own_part(
                    initializer,
                    (rows, units),
                    own._replace(rank=rank),
                    "float32",
                    LocalTransport(),
                )
                for rank in range(workers)
            ]
            whole = np.asarray(initializer((rows, units), dtype="float32"))
        self.assertAllEqual(own.join(parts), whole)
        self.assertAllEqual(own._replace(rank=1).cut(whole), parts[1])
        # What there are no units for is zero.
        end = np.concatenate(parts, axis)
        end = end[rows:] if axis == bands.ROWS else end[:, units:]
        self.assertAllEqual(end, np.zeros_like(end))

    def test_no_worker_draws_a_large_matrix_at_once(self) -> None:
        seen: list[Any] = []
        stream = draws._stream_of(keras.initializers.RandomUniform(seed=1), 2**12, 2**8)
        assert stream is not None

        def drawn(**arguments: Any) -> Any:
            seen.append(arguments["shape"])
            return tf.raw_ops.StatelessRandomUniformV2(**arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(draws, "_BLOCK", 2**12)
            part = draws._in_blocks(
                stream._replace(draw=drawn), 1, (2**12, 2**8), Band(1, 4, 2**8)
            )
        self.assertEqual(part.shape, (2**12, 2**6))
        self.assertLessEqual(max(map(np.prod, seen)), 2**12)


class TrialsTest(tf.test.TestCase):
    def test_what_looks_at_single_bands_is_told_from_what_does_not(self) -> None:
        r, c = keras.regularizers, keras.constraints
        for axis in (bands.ROWS, bands.COLUMNS):
            for each in (r.L1(0.1), r.L2(0.1), r.L1L2(0.1, 0.2)):
                self.assertTrue(trials.sums_over(each, axis))
            norms = c.MaxNorm(1.0, axis=1 - axis), c.UnitNorm(axis=1 - axis)
            for each in (*norms, c.NonNeg()):
                self.assertTrue(trials.keeps_to(each, axis))
            for each in (c.MaxNorm(1.0, axis=axis), c.UnitNorm(axis=[0, 1])):
                self.assertFalse(trials.keeps_to(each, axis))
        self.assertFalse(trials.sums_over(r.OrthogonalRegularizer(), bands.COLUMNS))


@pytest.mark.long
class ModelTest(parameterized.TestCase, tf.test.TestCase):
    @parameterized.parameters(1, 2, 4)
    @pytest.mark.few(1)
    def test_joined_is_what_was_split_bit_for_bit(self, workers: int) -> None:
        given = compiled(network())
        fit(given)
        expected = given.get_weights()

        def work(strategy: Any) -> Any:
            model = network()
            model.set_weights(expected)
            split = tf_dgc.split_dense(model, 40)
            kinds = [type(each).__name__ for each in split.layers]
            first, last = (split.get_layer(name) for name in ("first", "last"))
            ways = first.by, split.layers[3].layers[0].by
            widths = first.kernel.shape[1], last.kernel.shape[1]
            return tf_dgc.joined(split).get_weights(), kinds, widths, ways

        for weights, kinds, widths, ways in in_scopes(workers, work):
            for one, other in zip(weights, expected, strict=True):
                self.assertAllEqual(one, other)
            # The last one is smaller than asked for.
            self.assertEqual([kinds[1], kinds[-1]], ["SplitDense", "Dense"])
            self.assertEqual(widths, (-(-9 // workers), 5))
            self.assertEqual(ways, ("columns", "columns" if workers == 1 else "rows"))

    @pytest.mark.slow
    def test_joined_loads_without_this_package_and_goes_on_alike(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "joined.keras")

            def work(strategy: Any) -> Any:
                model = compiled(tf_dgc.split_dense(network(), 1))
                fit(model)
                tf_dgc.joined(model).save(path)  # which the chief writes
                return fit(model).history["loss"], tf_dgc.joined(model).get_weights()

            history, weights = in_scopes(2, work)[0]
            self.assertNotIn(b"tf_dgc", path.read_bytes())
            loaded = keras.models.load_model(path)
        loaded.run_eagerly = True
        self.assertAllClose(fit(loaded).history["loss"], history, 1e-5)
        for one, other in zip(loaded.get_weights(), weights, strict=True):
            self.assertAllClose(one, other, 1e-5, 1e-5)

    def test_frozen_layers_stay_frozen(self) -> None:
        model = network()
        model.get_layer("first").trainable = False
        split = tf_dgc.split_dense(model, 1)
        self.assertFalse(split.get_layer("first").trainable)
        self.assertTrue(split.get_layer("last").trainable)
        self.assertFalse(tf_dgc.joined(split).get_layer("first").trainable)

    def test_without_a_strategy_it_is_a_dense_layer(self) -> None:
        layer = SplitDense(4, kernel_initializer="ones")
        self.assertAllEqual(
            layer(X), keras.layers.Dense(4, kernel_initializer="ones")(X)
        )
        self.assertFalse(layer.is_split)

    def test_where_one_worker_takes_local_steps_it_is_a_dense_layer(self) -> None:
        def work(strategy: Any) -> Any:
            layer = SplitDense(4)
            layer.build((None, 6))
            return layer.kernel.value.shape, bands.of(layer.kernel.value)

        make = tf_dgc.ParameterAveragingStrategy
        self.assertEqual(in_scopes(1, work, make), [((6, 4), None)])

    @parameterized.product(by=["columns", "rows"], workers=[2, 4])
    @pytest.mark.few(1)
    def test_its_gradient_is_that_of_dense(self, by: str, workers: int) -> None:
        kernel = np.random.default_rng(2).normal(size=(6, 7)).astype("float32")

        def gradients(layer: Any, rank: int, size: int) -> Any:
            rows = tf.constant(np.array_split(X[:29], size)[rank])
            layer.build(rows.shape)
            layer.load_own_variables({"0": kernel, "1": np.zeros(7, "float32")})
            with tf.GradientTape() as outer:
                outer.watch(rows)
                with tf.GradientTape() as tape:
                    tape.watch(rows)
                    loss = tf.reduce_sum(layer(rows) ** 2)
                first = tape.gradient(loss, [rows, layer.kernel.value])
                penalty = tf.reduce_sum(first[0] ** 2)
            return first, outer.gradient(penalty, [rows, layer.kernel.value])

        expected = gradients(keras.layers.Dense(7), 0, 1)
        own = Band(0, workers, *((7, 1) if by == "columns" else (6, 0)))
        found = in_scopes(
            workers, lambda s: gradients(SplitDense(7, by=by), s.rank, workers)
        )
        for order in range(2):
            rows, parts = zip(*(each[order] for each in found), strict=True)
            self.assertAllClose(np.concatenate(rows), expected[order][0], 1e-4, 1e-3)
            # Without a step of Keras's it is a mean over workers, to be multiplied.
            whole = workers * own.join(parts)
            self.assertAllClose(whole, expected[order][1], 1e-4, 1e-2)


@pytest.mark.long
class CrossEntropyTest(parameterized.TestCase, tf.test.TestCase):
    def fitted(
        self, split: bool, loss: Any, head: dict[str, Any], form: tuple[int, ...]
    ) -> Any:
        random = np.random.default_rng(3)
        x = random.normal(size=(29, *form, 6)).astype("float32")
        y = random.integers(0, 13, (29, *form))
        weights = random.uniform(size=(29, *form)).astype("float32")
        model = keras.Sequential([keras.Input((*form, 6)), dense(8, 1, "first")])
        model.add(dense(13, 2, "last", kernel_regularizer="l2", **head))
        model = tf_dgc.split_dense(model, 1) if split else model
        fit = {"batch_size": 10, "shuffle": False, "verbose": 0}
        # The norm is that of all parts together.
        sgd = keras.optimizers.SGD(0.5, momentum=0.9, global_clipnorm=0.1)
        model.compile(sgd, loss, run_eagerly=True)
        losses = model.fit(x, y, sample_weight=weights, **fit)
        evaluated = model.evaluate(x, y, batch_size=10, verbose=0)
        predicted = model.predict(x, batch_size=10, verbose=0)
        whole = tf_dgc.joined(model) if split else model
        return losses.history["loss"], evaluated, predicted, whole.get_weights()

    @parameterized.parameters(
        (2, FROM_LOGITS, {}, ()),
        (3, FROM_LOGITS, {"use_bias": False}, (3,)),
        (3, "sparse_categorical_crossentropy", {"activation": "softmax"}, ()),
        (2, FROM_LOGITS, {"activation": "tanh"}, ()),  # which comes home
    )
    @pytest.mark.few(0, 1)
    def test_it_is_that_of_one_worker(self, workers: int, *case: Any) -> None:
        expected = self.fitted(False, *case)
        for found in in_scopes(workers, lambda _: self.fitted(True, *case)):
            for one, other in zip(found, expected, strict=True):
                self.assertAllClose(one, other, 1e-5, 1e-5)

    def test_logits_stay_where_they_are_but_for_metrics_that_read_them(self) -> None:
        classes, rows = 1000, 10

        def measure() -> Any:
            return keras.metrics.SparseCategoricalCrossentropy("same", from_logits=True)

        def work(*metrics: Any) -> Callable[[Loopback], Any]:
            def run(transport: Loopback) -> Any:
                strategy = tf_dgc.DenseStrategy(transport=transport)
                with strategy.scope():
                    model = keras.Sequential(
                        [keras.Input((6,)), dense(classes, 1, "a")]
                    )
                    model = tf_dgc.split_dense(model, 1)
                    model.compile(
                        keras.optimizers.SGD(3.0),
                        FROM_LOGITS,
                        metrics=[metric() for metric in metrics],
                        run_eagerly=True,
                    )
                first = len(transport.sent)
                history = model.fit(X[:rows], Y[:rows], batch_size=rows, verbose=0)
                names = {each.name for each in transport.sent[first:]}
                return history.history, [n for n in names if n.endswith((".y", ".dy"))]

            return run

        (alone, nothing), _ = run_workers(2, work())
        (measured, home), _ = run_workers(2, work(measure))
        self.assertEqual(nothing, [])
        self.assertLen(home, 1)  # and no gradient of theirs
        self.assertEqual(alone["loss"], measured["loss"])
        # Of the logits before the step.
        self.assertAllClose(measured["same"], measured["loss"])

    def test_other_losses_are_not_those_of_parts(self) -> None:
        sparse = keras.losses.SparseCategoricalCrossentropy
        for loss, expected in (
            (sparse(from_logits=True), True),
            (sparse(), False),
            (keras.losses.sparse_categorical_crossentropy, False),
            (sparse(from_logits=True, ignore_class=2), None),
            (keras.losses.CategoricalCrossentropy(from_logits=True), None),
            ("mse", None),
            ([sparse(from_logits=True)], None),
            (None, None),
        ):
            self.assertIs(logits._reads_logits(loss), expected, loss)

    @pytest.mark.extended
    def test_outputs_may_be_computed_with(self) -> None:
        class Doubled(keras.metrics.Mean):
            def update_state(self, y_true: Any, y_pred: Any, **_: Any) -> None:
                found = 2 * y_pred - y_pred * 1 + (-y_pred)[:, 0, None]
                super().update_state(tf.reduce_max(abs(found)))

        def work(strategy: Any) -> Any:
            model = keras.Sequential([keras.Input((6,)), SplitDense(5)])
            own = [Doubled(name="own")]
            model.compile("sgd", FROM_LOGITS, metrics=own, run_eagerly=True)
            return fit(model).history["own"]

        self.assertGreater(in_scopes(2, work)[0][0], 0.0)

    def test_labels_that_are_no_classes_stop_all_workers(self) -> None:
        def work(strategy: Any) -> None:
            model = model_with(optimizer="sgd")
            labels = np.where(np.arange(30) == 17, 5, Y)
            model.fit(X, labels, batch_size=10, shuffle=False, verbose=0)

        for error in told_on_two(work):
            self.assertIsInstance(error, tf.errors.InvalidArgumentError)
            self.assertRegex(str(error), r"must be in \[0, 5\)")


@pytest.mark.long
class StateTest(parameterized.TestCase, tf.test.TestCase):
    def trained(
        self,
        workers: int,
        epochs: int,
        folder: str | None = None,
        make: Any = None,
        last: int | None = None,
        **backup: Any,
    ) -> Any:
        """Train up to an epoch, or to a step, from what is in a folder on."""

        def work(strategy: Any) -> Any:
            model = compiled(tf_dgc.split_dense(network(), 1))
            steps = itertools.count()

            class Ends(keras.callbacks.Callback):
                def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                    if next(steps) == last:
                        raise ArithmeticError

            kept = tf_dgc.callbacks.BackupState
            callbacks = [kept(folder, False, **backup)] if folder else []
            with contextlib.suppress(ArithmeticError):
                fit(model, epochs=epochs, callbacks=[*callbacks, Ends()])
            self.taken = next(steps)  # of three an epoch
            whole = tf_dgc.joined(model)
            return [v.numpy() for v in [*whole.variables, *whole.optimizer.variables]]

        return in_scopes(workers, work, make or tf_dgc.DenseStrategy)

    def assert_alike(self, found: Any, expected: Any, tolerance: float) -> None:
        for each in found:
            for one, other in zip(each, expected, strict=True):
                self.assertAllClose(one, other, tolerance, tolerance)

    @pytest.mark.slow
    def test_a_backup_of_four_workers_goes_on_with_two_and_with_one(self) -> None:
        (expected,) = self.trained(1, 4)
        with tempfile.TemporaryDirectory() as folder:
            for epochs, workers in enumerate((4, 2, 1, 3), 1):
                found = self.trained(workers, epochs, folder)
                self.assertEqual(self.taken, 3)
        self.assert_alike(found, expected, 1e-5)

    @pytest.mark.slow
    def test_a_backup_of_own_steps_goes_on_with_another_number(self) -> None:
        config = tf_dgc.DGCConfig(sparsity=0.5, min_elements=1)
        make = functools.partial(tf_dgc.DGCStrategy, config)
        with tempfile.TemporaryDirectory() as folder:
            for epochs, workers in enumerate((2, 3, 1), 1):
                found = self.trained(workers, epochs, folder, make=make)
                self.assertEqual(self.taken, 3)
                self.assert_alike(found, found[0], 0.0)

    @pytest.mark.slow
    def test_a_backup_within_an_epoch_goes_on_bit_for_bit(self) -> None:
        expected = self.trained(2, 2)
        with tempfile.TemporaryDirectory() as folder:
            self.trained(2, 2, folder, last=5, save_freq=2)
            found = self.trained(2, 2, folder, save_freq=2)
        self.assertEqual(self.taken, 1)
        self.assert_alike(found, expected[0], 0.0)

    @parameterized.parameters(tf_dgc.DenseStrategy, tf_dgc.DGCStrategy)
    @pytest.mark.few(0, 1)
    def test_a_backup_of_as_many_workers_goes_on_bit_for_bit(self, make: Any) -> None:
        expected = self.trained(3, 2, make=make)
        with tempfile.TemporaryDirectory() as folder:
            self.trained(3, 1, folder, make=make)
            found = self.trained(3, 2, folder, make=make)
        self.assertEqual(self.taken, 3)
        self.assert_alike(found, expected[0], 0.0)


def told_on_two(work: Callable[[Any], Any], make: Any = tf_dgc.DenseStrategy) -> Any:
    """Return what each of two workers raises."""

    def run(transport: Loopback) -> None:
        strategy = make(transport=transport)
        with strategy.scope():
            work(strategy)

    return outcomes(2, run)


def layer_of(**arguments: Any) -> Callable[[Any], Any]:
    return lambda strategy: SplitDense(4, **arguments)(X[:2])


def model_with(**arguments: Any) -> keras.Model:
    model = keras.Sequential([keras.Input((6,)), SplitDense(5, name="wide")])
    model.compile(loss=FROM_LOGITS, run_eagerly=True, **arguments)
    return model


def clipping(transport: Any) -> Any:
    config = tf_dgc.DGCConfig(clip_norm=1.0)
    return tf_dgc.DGCStrategy(config, transport=transport)


def later(act: Callable[[keras.Model], Any]) -> Callable[[Any], Any]:
    return lambda strategy: act(model_with())


def other_shape(strategy: Any) -> None:
    layer = SplitDense(4, name="wide")
    layer.build((None, 6))
    layer.load_own_variables({"0": np.zeros((6, 3)), "1": np.zeros(4)})


def without_kernel(strategy: Any) -> None:
    layer = SplitDense(4, name="wide")
    layer.build((None, 6))
    layer.load_own_variables({"1": np.zeros(4)})


def not_finite(strategy: Any) -> None:
    model = model_with(optimizer="sgd")
    x = np.where(np.arange(30)[:, None] == 17, np.inf, X)
    model.fit(x, Y, batch_size=10, shuffle=False, verbose=0)


def state_of_others(strategy: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = model_with(optimizer="sgd")
        fit(model)
        strategy.save_state(folder, model)
        other = keras.Sequential([keras.Input((6,)), SplitDense(7)])
        strategy.restore_state(folder, other)


C, R = keras.constraints, keras.regularizers
SGD = keras.optimizers.SGD
REFUSED: dict[str, tuple[Any, Any, str, str]] = {
    "local_steps": (
        tf_dgc.ParameterAveragingStrategy,
        layer_of(),
        "ValueError",
        "workers that meet in each step.*Received: ParameterAveragingStrategy",
    ),
    "lora": (
        tf_dgc.DenseStrategy,
        layer_of(lora_rank=2),
        "ValueError",
        "neither quantization nor LoRA.*lora_rank=2",
    ),
    "quantized": (
        tf_dgc.DenseStrategy,
        layer_of(dtype="int8_from_float32"),
        "ValueError",
        "neither quantization nor LoRA.*quantization_mode='int8'",
    ),
    "constraint": (
        tf_dgc.DenseStrategy,
        layer_of(kernel_constraint=C.MaxNorm(1.0, axis=1)),
        "ValueError",
        "`kernel_constraint` that looks at single columns.*MaxNorm",
    ),
    "constraint_by_rows": (
        tf_dgc.DenseStrategy,
        layer_of(by="rows", kernel_constraint=C.MaxNorm(1.0, axis=0)),
        "ValueError",
        "`kernel_constraint` that looks at single rows.*MaxNorm",
    ),
    "regularizer": (
        tf_dgc.DenseStrategy,
        layer_of(kernel_regularizer=R.OrthogonalRegularizer()),
        "ValueError",
        "`kernel_regularizer` that is a sum over columns.*Orthogonal",
    ),
    "sparse": (
        tf_dgc.DenseStrategy,
        lambda strategy: SplitDense(4)(tf.sparse.from_dense(X[:2])),
        "TypeError",
        "`inputs` of the split layer.*dense tensor.*SparseTensor",
    ),
    "other_way": (
        tf_dgc.DenseStrategy,
        lambda strategy: SplitDense(
            4, by=("rows", "columns")[strategy.rank], name="wide"
        )(X[:2]),
        "ValueError",
        "same split layer 'wide'.*`by` differs: 'rows' on ranks \\[0\\]",
    ),
    "other_units": (
        tf_dgc.DenseStrategy,
        lambda strategy: SplitDense(4 + strategy.rank, name="wide")(X[:2]),
        "ValueError",
        "same split layer 'wide'.*`units` differs: 4 on ranks \\[0\\]",
    ),
    "lora_later": (
        tf_dgc.DenseStrategy,
        later(lambda model: model.layers[0].enable_lora(2)),
        "ValueError",
        "'wide' can have no LoRA. Use `tf_dgc.joined",
    ),
    "quantized_later": (
        tf_dgc.DenseStrategy,
        later(lambda model: model.layers[0].quantize("int8")),
        "ValueError",
        "'wide' can have no quantization. Use `tf_dgc.joined",
    ),
    "save": (
        tf_dgc.DenseStrategy,
        later(lambda model: model.save("unused.keras")),
        "ValueError",
        "part of one of 2 workers only. Save `tf_dgc.joined",
    ),
    "save_weights": (
        tf_dgc.DenseStrategy,
        later(lambda model: model.save_weights("unused.weights.h5")),
        "ValueError",
        "part of one of 2 workers only. Save `tf_dgc.joined",
    ),
    "export": (
        tf_dgc.DenseStrategy,
        later(lambda model: model.export("unused")),
        "ValueError",
        "part of one of 2 workers only. Save `tf_dgc.joined",
    ),
    "save_layer": (
        tf_dgc.DenseStrategy,
        later(lambda model: model.layers[0].save_own_variables({})),
        "ValueError",
        "The model of 'wide' has split layers.*Save `tf_dgc.joined",
    ),
    "backup_of_keras": (
        tf_dgc.DenseStrategy,
        later(
            lambda model: fit(
                model, callbacks=[keras.callbacks.BackupAndRestore("unused")]
            )
        ),
        "ValueError",
        "which BackupAndRestore would save.*`tf_dgc.callbacks.BackupState`",
    ),
    "whole_tensors": (
        tf_dgc.DenseStrategy,
        lambda strategy: fit(model_with(optimizer=keras.optimizers.Lamb())),
        "ValueError",
        "must work element by element.*Lamb",
    ),
    "norm_of_keras": (
        tf_dgc.DGCStrategy,
        lambda strategy: fit(model_with(optimizer=SGD(global_clipnorm=1.0))),
        "ValueError",
        "no worker has their norm.*Received: global_clipnorm=1.0",
    ),
    "norm_of_dgc": (
        clipping,
        lambda strategy: fit(model_with(optimizer=SGD())),
        "ValueError",
        r"no worker has their norm.*Received: DGCConfig\(clip_norm=1.0\)",
    ),
    "other_shape": (
        tf_dgc.DenseStrategy,
        other_shape,
        "ValueError",
        r"'wide' must be of shape \(6, 4\). Received: \(6, 3\)",
    ),
    "without_kernel": (
        tf_dgc.DenseStrategy,
        without_kernel,
        "ValueError",
        "no kernel of the split layer 'wide'.*BackupState` reads",
    ),
    "not_finite": (
        tf_dgc.DGCStrategy,
        not_finite,
        "InvalidArgumentError",
        "gradient of a split layer holds NaN or inf; all workers stop",
    ),
    "state_of_others": (
        tf_dgc.DenseStrategy,
        state_of_others,
        "ValueError",
        r"must be of split layers.*\(6, 7\).*Received: .*\(6, 5\).*Give",
    ),
}


@pytest.mark.long
class RefusalTest(parameterized.TestCase, tf.test.TestCase):
    @parameterized.named_parameters((name, *case) for name, case in REFUSED.items())
    @pytest.mark.slow
    def test_all_workers_are_told(
        self, make: Any, work: Any, kind: str, text: str
    ) -> None:
        for error in told_on_two(work, make):
            self.assertEqual(type(error).__name__, kind, error)
            self.assertRegex(str(error).replace("\n", " "), text)

    @parameterized.parameters(
        (lambda: tf_dgc.split_dense(network(), 2.0), TypeError, "must be an integer"),
        (lambda: tf_dgc.split_dense(network(), True), TypeError, "must be an integer"),
        (lambda: tf_dgc.split_dense(network(), 0), ValueError, "must be 1 or more"),
        (lambda: SplitDense(4, by="units"), ValueError, 'or "rows". Received: by='),
        (
            lambda: tf_dgc.joined(keras.layers.Dense(3)),
            TypeError,
            "sequential or functional",
        ),
        (lambda: tf_dgc.split_dense(keras.Sequential()), ValueError, "built first"),
    )
    def test_what_is_no_model_to_split_is_told(
        self, act: Any, kind: type[Exception], text: str
    ) -> None:
        with self.assertRaisesRegex(kind, text):
            act()

    def test_a_dense_layer_with_lora_or_quantized_is_named(self) -> None:
        for change in (lambda d: d.enable_lora(2), lambda d: d.quantize("int8")):
            model = network()
            change(model.get_layer("last"))
            with self.assertRaisesRegex(ValueError, "'last' cannot be split"):
                tf_dgc.split_dense(model, 1)

    def test_workers_of_parameter_servers_are_told(self) -> None:
        strategy = tf_dgc.DenseStrategy(transport="local")
        # As of DownpourStrategy, whose workers do not meet: each has no other.
        config = mock.PropertyMock(return_value=tf_dgc.DownpourConfig())
        with (
            strategy.scope(),
            mock.patch.object(tf_dgc.DenseStrategy, "config", config, create=True),
            self.assertRaisesRegex(ValueError, "workers that meet in each step"),
        ):
            SplitDense(4)(X)

    def test_a_job_of_horovod_without_a_strategy_is_told(self) -> None:
        hvd = mock.Mock(is_initialized=lambda: True, size=lambda: 2)
        with (
            mock.patch.dict("sys.modules", {"horovod.tensorflow": hvd}),
            mock.patch("tf_dgc.layers.refusals.import_horovod", lambda: hvd),
            self.assertRaisesRegex(ValueError, "must be made in the scope"),
        ):
            SplitDense(4)(X)


if __name__ == "__main__":
    tf.test.main()
