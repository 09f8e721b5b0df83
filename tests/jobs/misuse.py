"""What goes wrong, and what the user is told: by workers of `pool.py`, or as a process.

    python tests/jobs/misuse.py CASE

The last line of stdout is a JSON object: the error's type and text, if there was one.
"""

import atexit
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import keras
import launch
import numpy as np
import tensorflow as tf

import tf_dgc

CASES: dict[str, Callable[[], Any]] = {}
X = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


def case(function: Callable[[], Any]) -> Callable[[], Any]:
    CASES[function.__name__] = function
    return function


def network(width: int = 8) -> keras.Model:
    return keras.Sequential(
        [keras.layers.Input((4,)), keras.layers.Dense(width), keras.layers.Dense(1)]
    )


def fit(model: keras.Model, **arguments: Any) -> Any:
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)
    return model.fit(data, verbose=0, shuffle=False, **arguments)


def own_rank() -> int:
    """Tell this worker's rank before there is a strategy."""
    if "HOROVOD_RANK" in os.environ:
        return int(os.environ["HOROVOD_RANK"])
    return int(json.loads(os.environ["TF_CONFIG"])["task"]["index"])


@case
def configs_differ() -> None:
    tf_dgc.DGCStrategy(tf_dgc.DGCConfig(sparsity=0.9 + 0.05 * own_rank()))


@case
def strategies_differ() -> None:
    (tf_dgc.DenseStrategy if own_rank() else tf_dgc.DGCStrategy)()


@case
def averaging_configs_differ() -> None:
    def outer() -> keras.optimizers.Optimizer:
        return keras.optimizers.SGD(0.7 + 0.1 * own_rank(), momentum=0.9)

    config = tf_dgc.AveragingConfig(outer_optimizer=outer)
    tf_dgc.ParameterAveragingStrategy(config)


@case
def outer_optimizer_made_too_early() -> None:
    config = tf_dgc.AveragingConfig(outer_optimizer=keras.optimizers.SGD(0.7))
    tf_dgc.ParameterAveragingStrategy(config)


@case
def metric_read_on_the_chief() -> None:
    strategy = tf_dgc.DenseStrategy()
    with strategy.scope():
        metric = keras.metrics.Mean()
    data = tf.data.Dataset.from_tensor_slices(X).batch(8)
    for _ in range(2):
        for x in strategy.experimental_distribute_dataset(data):
            strategy.run(metric.update_state, (x,))
        if strategy.is_chief:
            metric.result()


@case
def parameters_not_finite() -> None:
    config = tf_dgc.AveragingConfig(period=3)
    strategy = tf_dgc.ParameterAveragingStrategy(config)
    with strategy.scope():
        model = network()
        model.compile("sgd", "mse")
        model.optimizer.build(model.trainable_variables)

    def spoil(batch: int, logs: Any = None) -> None:
        if strategy.rank == 1:
            model.layers[1].bias.assign([np.nan])

    fit(model, callbacks=[keras.callbacks.LambdaCallback(on_train_batch_begin=spoil)])


@case
def models_differ() -> None:
    strategy = tf_dgc.DenseStrategy()
    with strategy.scope():
        network(8 + strategy.rank)


@case
def trained_variables_differ() -> None:
    strategy = tf_dgc.DGCStrategy()
    with strategy.scope():
        model = network()
        model.layers[0].trainable = strategy.is_chief
        model.compile("sgd", "mse")
    fit(model)


def _fit_own(batches: Callable[[int], int]) -> None:
    """Train on a dataset that is this worker's own, of so many batches for its rank."""
    strategy = tf_dgc.DGCStrategy(tf_dgc.DGCConfig(min_elements=1))
    with strategy.scope():
        model = network()
        model.compile("sgd", "mse")
    options = tf.data.Options()
    policy = tf.data.experimental.AutoShardPolicy.OFF
    options.experimental_distribute.auto_shard_policy = policy
    own = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)
    own = own.take(batches(strategy.rank)).with_options(options)
    model.fit(own, verbose=0, shuffle=False)


@case
def lengths_differ() -> None:
    _fit_own(lambda rank: 4 - rank)


@case
def nothing_for_one() -> None:
    _fit_own(lambda rank: 4 * (1 - rank))


@case
def global_lengths_differ() -> None:
    strategy = tf_dgc.DenseStrategy()
    with strategy.scope():
        model = network()
        model.compile("sgd", "mse")
    rows = 32 - 8 * strategy.rank
    data = tf.data.Dataset.from_tensor_slices((X[:rows], Y[:rows])).batch(8)
    model.fit(data, verbose=0, shuffle=False)


@case
def rows_of_numpy_input_without_a_seed() -> dict[str, Any]:
    class Watched(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            return tf.ensure_shape(tf.numpy_function(watch, [x], tf.float32), x.shape)

        def compute_output_shape(self, shape: Any) -> Any:
            return shape

    def watch(x: np.ndarray) -> np.ndarray:
        seen.append(x[:, 0].tolist())
        return x

    seen: list[list[float]] = []
    strategy = tf_dgc.DGCStrategy(tf_dgc.DGCConfig(min_elements=1))
    with strategy.scope():
        inputs = keras.layers.Input((4,))
        watched = Watched()(inputs)
        outputs = keras.layers.Dense(1)(watched)
        model = keras.Model(inputs, outputs)
        model.compile("sgd", "mse")
    x = np.repeat(np.arange(32, dtype=np.float32)[:, np.newaxis], 4, axis=1) / 100
    seen.clear()
    model.fit(x, Y, batch_size=8, epochs=2, verbose=0, shuffle=True)
    return {"seen": [round(100 * row) for part in seen for row in part]}


@case
def compiled_outside_the_scope() -> None:
    strategy = tf_dgc.DenseStrategy()
    with strategy.scope():
        model = network()
    model.compile("sgd", "mse")
    fit(model)


@case
def built_outside_the_scope() -> None:
    strategy = tf_dgc.DenseStrategy()
    model = network()
    with strategy.scope():
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    fit(model)


@case
def built_outside_the_scope_without_momentum() -> None:
    strategy = tf_dgc.DenseStrategy()
    model = network()
    with strategy.scope():
        model.compile(keras.optimizers.SGD(0.1), "mse")
    fit(model)


@case
def built_outside_the_scope_and_compressed() -> None:
    # What the exchange changes itself comes to no optimizer.
    strategy = tf_dgc.DGCStrategy(tf_dgc.DGCConfig(min_elements=0))
    dense = keras.layers.Dense(1, use_bias=False)
    model = keras.Sequential([keras.Input((4,)), dense])
    with strategy.scope():
        model.compile(keras.optimizers.SGD(0.1), "mse")
    fit(model)


def _step_without_run(distribute: bool) -> None:
    strategy = tf_dgc.DenseStrategy()
    with strategy.scope():
        model = network()
        optimizer = keras.optimizers.Adam(weight_decay=0.1)
        optimizer.build(model.trainable_variables)

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)

    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)
    if distribute:
        data = strategy.experimental_distribute_dataset(data)
    for x, y in data:
        step(x, y)


@case
def step_without_run() -> None:
    _step_without_run(False)


@case
def step_without_run_on_distributed_data() -> None:
    _step_without_run(True)


@case
def scope_forgotten() -> dict[str, Any]:
    strategy = tf_dgc.DenseStrategy()
    model = network()
    model.compile("sgd", "mse")
    fit(model)
    return {"rank": strategy.rank}


@case
def scope_forgotten_in_a_loop() -> dict[str, Any]:
    strategy = tf_dgc.DenseStrategy()
    keras.optimizers.SGD(0.1).apply([tf.ones([])], [tf.Variable(1.0)])
    return {"rank": strategy.rank}


@case
def compiled_by_xla() -> None:
    strategy = tf_dgc.DenseStrategy()
    with strategy.scope():
        model = network()
        model.compile("sgd", "mse", jit_compile=True)
    fit(model)


@case
def reduced_and_never_applied() -> None:
    class Forgetful(keras.optimizers.SGD):
        def _backend_update_step(self, grads: Any, variables: Any, rate: Any) -> None:
            pairs = [(g, v.value) for g, v in zip(grads, variables, strict=True)]
            self._all_reduce_sum_gradients(pairs)

    strategy = tf_dgc.DenseStrategy()
    with strategy.scope():
        model = network()
        model.compile(Forgetful(), "mse")
    fit(model)


@case
def changed_after_reduction() -> None:
    class Meddling(keras.optimizers.SGD):
        def _all_reduce_sum_gradients(self, pairs: Any) -> Any:
            reduced = super()._all_reduce_sum_gradients(pairs)
            return [(2.0 * g, v) for g, v in reduced]

    strategy = tf_dgc.DenseStrategy()
    with strategy.scope():
        model = network()
        model.compile(Meddling(), "mse")
    fit(model)


def _fit_rows(rows: Callable[[], tf.data.Dataset]) -> None:
    strategy = tf_dgc.DenseStrategy()
    with strategy.scope():
        model = network()
        model.compile("sgd", "mse")
    model.fit(rows().batch(8), verbose=0, shuffle=False)


@case
def data_differ() -> None:
    order = np.random.default_rng(own_rank()).permutation(len(X))
    _fit_rows(lambda: tf.data.Dataset.from_tensor_slices((X[order], Y[order])))


@case
def data_are_augmented_on_each() -> None:
    def rows() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for x, y in zip(X, Y, strict=True):
            yield x + np.float32(0.01) * own_rank(), y

    spec = tuple(tf.TensorSpec(a.shape[1:], a.dtype) for a in (X, Y))
    _fit_rows(lambda: tf.data.Dataset.from_generator(rows, output_signature=spec))


class _Nudge(keras.callbacks.Callback):
    """Changes a weight of the second worker after the second batch."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 1 and own_rank() == 1:
            bias = self.model.layers[1].bias
            bias.assign(bias.numpy() + 0.01)


def _drift(strategy: Any) -> None:
    with strategy.scope():
        model = network()
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
    fit(model, epochs=2, callbacks=[_Nudge()])


@case
def replicas_drift_dense() -> None:
    os.environ["TF_DGC_CHECK_STEPS"] = "3"
    _drift(tf_dgc.DenseStrategy())


@case
def replicas_drift_dgc() -> None:
    os.environ["TF_DGC_CHECK_STEPS"] = "3"
    _drift(tf_dgc.DGCStrategy(tf_dgc.DGCConfig(sparsity=0.5, min_elements=1)))


@case
def replicas_drift_averaging() -> None:
    class Own(keras.optimizers.SGD):
        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            super().update_step(gradient + own_rank(), variable, learning_rate)

    os.environ["TF_DGC_CHECK_STEPS"] = "3"
    config = tf_dgc.AveragingConfig(period=2, outer_optimizer=lambda: Own(0.7))
    _drift(tf_dgc.ParameterAveragingStrategy(config))


@case
def check_intervals_differ() -> None:
    os.environ["TF_DGC_CHECK_STEPS"] = str(3 + own_rank())
    _drift(tf_dgc.DenseStrategy())


@case
def check_interval_is_no_number() -> None:
    os.environ["TF_DGC_CHECK_STEPS"] = "often"
    tf_dgc.DenseStrategy()


def _with_nan_on_rank_one(nonfinite: str) -> dict[str, Any]:
    """Train where only the second worker's rows of each batch hold NaN."""
    config = tf_dgc.DGCConfig(sparsity=0.5, min_elements=1, nonfinite=nonfinite)
    strategy = tf_dgc.DGCStrategy(config)
    with strategy.scope():
        model = network()
        # Keras decays weights before an error is found, not where steps are left out.
        decay = 0.1 if nonfinite == "skip" else None
        sgd = keras.optimizers.SGD(0.01, momentum=0.9, weight_decay=decay)
        model.compile(sgd, "mse")
    bad = np.where(np.arange(32) % 8 >= 4, np.nan, 1.0).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((X, Y * bad[:, None])).batch(8)
    before = model.get_weights()
    result = {}
    try:
        model.fit(data, verbose=0, shuffle=False)
    except tf.errors.InvalidArgumentError as error:
        result = {"error": type(error).__name__, "text": str(error)}
    pairs = zip(before, model.get_weights(), strict=True)
    result["unchanged"] = all(np.array_equal(a, b) for a, b in pairs)
    result["norm"] = float(strategy.stats().residual_norm)
    result["iterations"] = int(model.optimizer.iterations)
    return result


@case
def nan_raises() -> dict[str, Any]:
    return _with_nan_on_rank_one("raise")


@case
def nan_skips() -> dict[str, Any]:
    return _with_nan_on_rank_one("skip")


@case
def tensorflow_started_collective() -> None:
    tf.zeros([])
    tf_dgc.DenseStrategy(transport="collective")


@case
def tensorflow_started_hybrid() -> None:
    if own_rank() == 1:
        tf.zeros([])
    tf_dgc.DenseStrategy(transport="hybrid")


@case
def tensorflow_started_auto() -> dict[str, Any]:
    if own_rank() == 1:
        tf.zeros([])
    return sums_over_the_transport_of_auto()


@case
def sums_over_horovod() -> dict[str, Any]:
    return sums_over_the_transport_of_auto("horovod")


@case
def sums_over_the_transport_of_auto(transport: str = "auto") -> dict[str, Any]:
    strategy = tf_dgc.DenseStrategy(transport=transport)
    (total,) = strategy.transport.all_reduce([tf.constant(2.0)], "total")
    return {"transport": strategy.transport.name, "total": float(total)}


@case
def caught_on_the_chief() -> None:
    strategy = tf_dgc.DenseStrategy()

    def fail(batch: int, logs: Any = None) -> None:
        if strategy.rank == 0 and batch == 1:
            raise OSError("no room")

    with strategy.scope():
        model = network()
        model.compile("sgd", "mse")
    fails = keras.callbacks.LambdaCallback(on_train_batch_end=fail)
    try:
        fit(model, epochs=3, callbacks=[fails])
    except OSError:
        strategy.barrier()


@case
def one_is_done_before_the_other() -> dict[str, Any]:
    # What is registered first runs last, after the transport has said good-bye.
    # The clock is the machine's; in which order lines of two come says nothing.
    done: list[float] = []
    atexit.register(
        lambda: print(json.dumps({"done": done[0], "left": time.monotonic()}))
    )
    strategy = tf_dgc.DenseStrategy()
    time.sleep(4 * strategy.rank)
    done.append(time.monotonic())
    return {}


def _train_until(event: Callable[[int], None], transport: str) -> None:
    strategy = tf_dgc.DGCStrategy(tf_dgc.DGCConfig(min_elements=1), transport=transport)
    with strategy.scope():
        model = network()
        model.compile("sgd", "mse")

    class Event(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 2 and strategy.rank == 1:
                event(epoch)

    fit(model, epochs=200, callbacks=[Event()])


def _kill(epoch: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _sleep(epoch: int) -> None:
    time.sleep(60)


@case
def peer_killed_collective() -> None:
    _train_until(_kill, "collective")


@case
def peer_killed_hybrid() -> None:
    _train_until(_kill, "hybrid")


@case
def peer_killed_horovod() -> None:
    _train_until(_kill, "horovod")


@case
def peer_absent_collective() -> None:
    _train_until(_sleep, "collective")


@case
def peer_absent_horovod() -> None:
    _train_until(_sleep, "horovod")


@case
def peer_absent_hybrid() -> None:
    _train_until(_sleep, "hybrid")


def told(case: str) -> dict[str, Any]:
    """Return what comes of a case: its result, or the error's type and text."""
    try:
        return CASES[case]() or {}
    except Exception as error:
        return {"error": type(error).__name__, "text": str(error)}


def main() -> None:
    start = time.monotonic()
    result = told(sys.argv[1])
    result["seconds"] = time.monotonic() - start
    launch.say(result)
    if "error" in result:
        # What a script does that lets the error through, without its traceback.
        sys.stderr.flush()
        os._exit(3)  # at once, as a script whose error nobody catches


if __name__ == "__main__":
    main()
