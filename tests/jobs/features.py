"""What a Keras user does, with each strategy: run by the workers of `pool.py`.

Every feature trains a small model on fixed data and returns figures that do not depend
on the number of workers. As a process of its own, by hand,

    python tests/jobs/features.py --strategy dense --transport auto [NAME ...]

runs several, and prints a JSON object on the last line of stdout.
"""

import argparse
import contextlib
import os
import sys
import tempfile
import traceback
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import launch
import numpy as np
import tensorflow as tf

import tf_dgc

STRATEGIES: dict[str, Callable[[str], Any]] = {
    "none": lambda transport: None,
    "dense": lambda transport: tf_dgc.DenseStrategy(transport=transport),
    "dgc_dense": lambda transport: tf_dgc.DGCStrategy(
        tf_dgc.DGCConfig(sparsity=0.0, min_elements=1),
        transport=transport,
    ),
    "dgc": lambda transport: tf_dgc.DGCStrategy(
        tf_dgc.DGCConfig(sparsity=0.9, min_elements=1, warmup_steps=6, clip_norm=5.0),
        transport=transport,
    ),
    # Rounds in the midst of an epoch of four steps, and at its end.
    "averaging": lambda transport: tf_dgc.ParameterAveragingStrategy(
        tf_dgc.AveragingConfig(period=3, synchronous_steps=2), transport=transport
    ),
    "averaging_every_step": lambda transport: tf_dgc.ParameterAveragingStrategy(
        tf_dgc.AveragingConfig(period=1, average_slots=True), transport=transport
    ),
    "averaging_by_all_means": lambda transport: tf_dgc.ParameterAveragingStrategy(
        tf_dgc.AveragingConfig(
            period="adaptive",
            min_period=2,
            max_period=3,
            outer_optimizer=lambda: keras.optimizers.SGD(0.7, momentum=0.5),
            compression=tf_dgc.DGCConfig(sparsity=0.9, min_elements=1),
        ),
        transport=transport,
    ),
    # Rounds that land in the midst of an epoch, and others at its end.
    "averaging_in_flight": lambda transport: tf_dgc.ParameterAveragingStrategy(
        tf_dgc.AveragingConfig(period=2, overlap=1), transport=transport
    ),
}
FEATURES: dict[str, Callable[[Any], dict[str, Any]]] = {}


def feature(function: Callable[[Any], dict[str, Any]]) -> Callable[..., Any]:
    FEATURES[function.__name__] = function
    return function


def scope(strategy: Any) -> Any:
    return contextlib.nullcontext() if strategy is None else strategy.scope()


def regression(rows: int = 64) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    x = random.normal(size=(rows, 8)).astype("float32")
    return x, np.tanh(x[:, :2] @ random.normal(size=(2, 1))).astype("float32")


def batches(rows: int = 64, batch: int = 16) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(regression(rows)).batch(batch)


def mlp(*extra: keras.layers.Layer) -> keras.Model:
    layers = [keras.layers.Input((8,)), keras.layers.Dense(16, activation="tanh")]
    return keras.Sequential([*layers, *extra, keras.layers.Dense(1)])


def outcome(model: keras.Model, history: Any) -> dict[str, Any]:
    weights = [w for v in model.weights if "seed" not in v.path for w in [v.numpy()]]
    return {
        "history": {k: [float(x) for x in v] for k, v in history.history.items()},
        "norms": [float(np.linalg.norm(w)) for w in weights],
        "crc": zlib.crc32(b"".join(w.tobytes() for w in weights)),
    }


def trained(
    strategy: Any,
    optimizer: Callable[[], Any],
    *extra: Callable[[], Any],
    data: Any = None,
    epochs: int = 3,
    fit: dict[str, Any] | None = None,
    **compiled: Any,
) -> dict[str, Any]:
    with scope(strategy):
        model = mlp(*[layer() for layer in extra])
        model.compile(optimizer(), "mse", metrics=["mae"], **compiled)
    data = batches() if data is None else data
    arguments = {"epochs": epochs, "verbose": 0} | (fit or {})
    if isinstance(data, tuple):
        return outcome(model, model.fit(*data, **arguments))
    return outcome(model, model.fit(data, shuffle=False, **arguments))


@feature
def sgd(strategy: Any) -> dict[str, Any]:
    return trained(strategy, lambda: keras.optimizers.SGD(0.05, momentum=0.9))


@feature
def nesterov(strategy: Any) -> dict[str, Any]:
    return trained(
        strategy, lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True)
    )


@feature
def sgd_without_momentum(strategy: Any) -> dict[str, Any]:
    return trained(strategy, lambda: keras.optimizers.SGD(0.05))


@feature
def adam(strategy: Any) -> dict[str, Any]:
    return trained(strategy, lambda: keras.optimizers.Adam(0.01))


@feature
def adamw(strategy: Any) -> dict[str, Any]:
    return trained(strategy, lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1))


@feature
def weight_decay_and_average(strategy: Any) -> dict[str, Any]:
    return trained(
        strategy,
        lambda: keras.optimizers.SGD(
            0.05,
            momentum=0.9,
            weight_decay=0.01,
            use_ema=True,
            ema_momentum=0.9,
            ema_overwrite_frequency=5,
        ),
    )


@feature
def steps_per_execution(strategy: Any) -> dict[str, Any]:
    return trained(
        strategy,
        lambda: keras.optimizers.SGD(0.05, momentum=0.9),
        steps_per_execution=4,
    )


@feature
def gradient_accumulation(strategy: Any) -> dict[str, Any]:
    return trained(
        strategy,
        lambda: keras.optimizers.SGD(0.05, momentum=0.9, gradient_accumulation_steps=2),
    )


@feature
def accumulation_and_steps_per_execution(strategy: Any) -> dict[str, Any]:
    return trained(
        strategy,
        lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2),
        steps_per_execution=2,
    )


@feature
def loss_scaling(strategy: Any) -> dict[str, Any]:
    # The first rows overflow at the initial scale: on one of several workers only.
    x, y = regression()
    y[:8] *= 1e4
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(16)
    return trained(
        strategy,
        lambda: keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(1e-7, momentum=0.9), initial_scale=2.0**121
        ),
        data=data,
    )


@feature
def mixed_precision(strategy: Any) -> dict[str, Any]:
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        return trained(strategy, lambda: keras.optimizers.SGD(0.05, momentum=0.9))
    finally:
        keras.mixed_precision.set_global_policy("float32")


@feature
def synchronized_batch_norm(strategy: Any) -> dict[str, Any]:
    return trained(
        strategy,
        lambda: keras.optimizers.SGD(0.05, momentum=0.9),
        lambda: keras.layers.BatchNormalization(synchronized=True),
        run_eagerly=False,
    )


@feature
def batch_norm_and_dropout(strategy: Any) -> dict[str, Any]:
    result = trained(
        strategy,
        lambda: keras.optimizers.SGD(0.05, momentum=0.9),
        lambda: keras.layers.BatchNormalization(),
        lambda: keras.layers.Dropout(0.5),
    )
    # Statistics and masks are each worker's own: only say that training went on.
    return {"finite": bool(np.isfinite(result["norms"]).all())}


@feature
def eager(strategy: Any) -> dict[str, Any]:
    return trained(
        strategy,
        lambda: keras.optimizers.SGD(0.05, momentum=0.9),
        epochs=2,
        run_eagerly=True,
    )


@feature
def last_batch_uneven(strategy: Any) -> dict[str, Any]:
    return trained(
        strategy,
        lambda: keras.optimizers.SGD(0.05, momentum=0.9),
        data=batches(rows=56, batch=16),
    )


@feature
def dataset_of_unknown_length(strategy: Any) -> dict[str, Any]:
    data = batches().filter(lambda x, y: tf.reduce_all(tf.math.is_finite(x)))
    return trained(
        strategy, lambda: keras.optimizers.SGD(0.05, momentum=0.9), data=data
    )


@feature
def numpy_input_shuffled(strategy: Any) -> dict[str, Any]:
    x, y = regression()
    return trained(
        strategy,
        lambda: keras.optimizers.SGD(0.05, momentum=0.9),
        data=(x, y),
        fit={"batch_size": 16, "shuffle": True, "validation_split": 0.25},
    )


@feature
def regularized(strategy: Any) -> dict[str, Any]:
    return trained(
        strategy,
        lambda: keras.optimizers.SGD(0.05, momentum=0.9),
        lambda: keras.layers.Dense(8, kernel_regularizer="l2"),
    )


@feature
def sample_and_class_weights(strategy: Any) -> dict[str, Any]:
    x, y = regression()
    weights = np.linspace(0.5, 2.0, len(x)).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((x, y, weights)).batch(16)
    return trained(
        strategy, lambda: keras.optimizers.SGD(0.05, momentum=0.9), data=data
    )


@feature
def embedding(strategy: Any) -> dict[str, Any]:
    random = np.random.default_rng(0)
    words = random.integers(0, 20, size=(64, 5))
    y = (words.sum(axis=1, keepdims=True) / 50).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((words, y)).batch(16)
    with scope(strategy):
        model = keras.Sequential(
            [
                keras.layers.Input((5,), dtype="int32"),
                keras.layers.Embedding(20, 4),
                keras.layers.Flatten(),
                keras.layers.Dense(1),
            ]
        )
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    return outcome(model, model.fit(data, epochs=3, verbose=0, shuffle=False))


@feature
def dict_inputs(strategy: Any) -> dict[str, Any]:
    x, y = regression()
    data = tf.data.Dataset.from_tensor_slices(
        ({"left": x[:, :3], "right": x[:, 3:]}, {"sum": y, "last": x[:, -1:]})
    ).batch(16)
    with scope(strategy):
        left, right = keras.Input((3,), name="left"), keras.Input((5,), name="right")
        joined = keras.layers.Concatenate()([left, right])
        outputs = {
            "sum": keras.layers.Dense(1, name="sum")(joined),
            "last": keras.layers.Dense(1, name="last")(joined),
        }
        model = keras.Model({"left": left, "right": right}, outputs)
        model.compile("adam", {"sum": "mse", "last": "mae"})
    return outcome(model, model.fit(data, epochs=3, verbose=0, shuffle=False))


class Adversaries(keras.Model):
    """A custom train_step with two optimizers."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.critic = keras.layers.Dense(6), keras.layers.Dense(1)
        self.tracker = keras.metrics.Mean(name="loss")

    def build(self, shape: Any) -> None:
        self.encoder.build(shape)
        self.critic.build((None, 6))
        self.built = True

    def compile(self, first: Any, second: Any) -> None:
        super().compile()
        self.first, self.second = first, second
        self.first.build(self.encoder.trainable_variables)
        self.second.build(self.critic.trainable_variables)

    def call(self, x: Any) -> Any:
        return self.critic(self.encoder(x))

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        workers = tf.distribute.get_strategy().num_replicas_in_sync
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_mean((self(x) - y) ** 2)
            scaled = loss / workers
        for optimizer, layer in (
            (self.first, self.encoder),
            (self.second, self.critic),
        ):
            variables = layer.trainable_variables
            gradients = tape.gradient(scaled, variables)
            optimizer.apply_gradients(zip(gradients, variables, strict=True))
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}


@feature
def two_optimizers(strategy: Any) -> dict[str, Any]:
    with scope(strategy):
        model = Adversaries()
        model.build((None, 8))
        model.compile(
            keras.optimizers.SGD(0.05, momentum=0.9), keras.optimizers.Adam(0.01)
        )
    return outcome(model, model.fit(batches(), epochs=3, verbose=0, shuffle=False))


class OwnStep(keras.Model):
    """What is trained by its own step, and has no call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = keras.Sequential([keras.layers.Dense(1)])  # of unknown input
        self.tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self) -> list[Any]:
        return [self.tracker]

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        workers = tf.distribute.get_strategy().num_replicas_in_sync
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.inner(x) - y) ** 2)
            scaled = loss / workers
        variables = self.inner.trainable_variables
        self.optimizer.apply(tape.gradient(scaled, variables), variables)
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}


@feature
def models_without_call(strategy: Any) -> dict[str, Any]:
    with scope(strategy):
        model = OwnStep()
        model.compile(keras.optimizers.Adam(0.05))
    return outcome(
        model.inner, model.fit(batches(), epochs=3, verbose=0, shuffle=False)
    )


@feature
def custom_loop(strategy: Any) -> dict[str, Any]:
    strategy = strategy or tf.distribute.get_strategy()
    with strategy.scope():
        model = mlp()
        optimizer = keras.optimizers.SGD(0.05, momentum=0.9)

    def replica_step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
            scaled = loss / strategy.num_replicas_in_sync
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(scaled, variables), variables)
        return loss

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        return strategy.reduce("MEAN", strategy.run(replica_step, (x, y)), axis=None)

    losses = []
    for _ in range(3):
        for x, y in strategy.experimental_distribute_dataset(batches()):
            losses.append(float(step(x, y)))
    if isinstance(strategy, tf_dgc.ParameterAveragingStrategy):
        strategy.flush(model)
    weights = model.get_weights()
    return {
        "history": {"loss": losses},
        "norms": [float(np.linalg.norm(w)) for w in weights],
        "crc": zlib.crc32(b"".join(w.tobytes() for w in weights)),
    }


@feature
def evaluate_and_predict(strategy: Any) -> dict[str, Any]:
    with scope(strategy):
        model = mlp()
        model.compile(
            keras.optimizers.SGD(0.05, momentum=0.9),
            "mse",
            metrics=["mae", keras.metrics.RootMeanSquaredError()],
        )
    history = model.fit(
        batches(), epochs=2, verbose=0, shuffle=False, validation_data=batches(40, 16)
    )
    x, y = regression(57)  # 57 rows in batches of 8: the last has one
    evaluated = model.evaluate(x, y, batch_size=19, verbose=0, return_dict=True)
    predicted = model.predict(x, batch_size=8, verbose=0)
    from_dataset = model.predict(
        tf.data.Dataset.from_tensor_slices(x).batch(8), verbose=0
    )
    with scope(strategy):
        recurrent = keras.Sequential([keras.Input((4, 8)), keras.layers.LSTM(3)])
    one_row = recurrent.predict(np.ones((1, 4, 8), np.float32), verbose=0)
    return outcome(model, history) | {
        "fewer_rows_than_workers": list(one_row.shape),
        "evaluated": [float(v) for v in evaluated.values()],
        "predicted": predicted[:, 0].tolist(),
        "from_dataset": from_dataset[:, 0].tolist(),
    }


@feature
def rows_that_n_does_not_divide(strategy: Any) -> dict[str, Any]:
    # The last batch has one row: of the other worker all stays as it was.
    x, y = regression(41)
    weights = np.linspace(0.0, 2.0, len(x), dtype="float32")
    return trained(
        strategy,
        lambda: keras.optimizers.SGD(0.05, momentum=0.9),
        data=(x, y),
        fit={"sample_weight": weights, "batch_size": 20, "shuffle": False},
        steps_per_execution=2,
    )


@feature
def masked_losses(strategy: Any) -> dict[str, Any]:
    tokens = np.tile(np.arange(1, 7), (9, 1))
    tokens[:4, 1:] = 0  # short texts first
    with scope(strategy):
        model = keras.Sequential(
            [
                keras.Input((6,), dtype="int32"),
                keras.layers.Embedding(10, 4, mask_zero=True),
                keras.layers.Dense(3),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.5), loss)
    fit = {"batch_size": 5, "epochs": 2, "shuffle": False, "verbose": 0}
    history = model.fit(tokens, tokens % 3, **fit)
    return outcome(model, history)


class Own(keras.Model):
    """Divides by nothing, and returns what is no metric, as published models do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp(keras.layers.BatchNormalization())
        self.other = keras.layers.Dense(8)
        self.seen = keras.metrics.Mean(name="seen")

    def build(self, shape: Any) -> None:
        self.other.build((None, 1))
        self.built = True

    def train_step(self, data: Any) -> dict[str, Any]:
        data, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape(persistent=True) as tape:
            code = self.inner(data, training=False)
            loss = tf.reduce_mean((self.other(code) - data) ** 2)
            size = tf.reduce_mean(code**2)
            both = loss + size
        for optimizer, value, layer in (
            (self.optimizer, loss, self.inner),
            (self.second, both, self.other),
        ):
            variables = layer.trainable_variables
            optimizer.apply_gradients(
                zip(tape.gradient(value, variables), variables, strict=True)
            )
        self.seen.update_state(loss)
        return {"loss": loss, "size": size, "named": self.seen.result()}

    def test_step(self, data: Any) -> dict[str, Any]:
        data, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        loss = tf.reduce_mean((self.other(self.inner(data)) - data) ** 2)
        return {"loss": loss}


@feature
def own_steps_undivided(strategy: Any) -> dict[str, Any]:
    x, _ = regression(33)
    with scope(strategy):
        model = Own()
        model.second = keras.optimizers.SGD(0.05)
        model.build((None, 8))
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9))
    stop = keras.callbacks.EarlyStopping("loss", patience=1, min_delta=1e-4)
    fit = {"batch_size": 11, "shuffle": False, "verbose": 0, "callbacks": [stop]}
    history = model.fit(x, epochs=3, **fit)
    evaluated = model.evaluate(x, batch_size=17, verbose=0, return_dict=True)
    found = outcome(model, history)
    return found | {"evaluated": evaluated["loss"]}


@feature
def callbacks(strategy: Any) -> dict[str, Any]:
    with scope(strategy):
        model = mlp()
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    with shared_folder(strategy) as folder:
        path = os.path.join(folder, "model.keras")
        log = os.path.join(folder, "log.csv")
        used: list[keras.callbacks.Callback] = [
            keras.callbacks.LearningRateScheduler(lambda epoch, lr: lr * 0.5),
            keras.callbacks.EarlyStopping("loss", min_delta=10.0, patience=3),
            keras.callbacks.BackupAndRestore(os.path.join(folder, "backup")),
            keras.callbacks.ModelCheckpoint(path),
            keras.callbacks.CSVLogger(log),
        ]
        history = model.fit(
            batches(), epochs=9, verbose=0, shuffle=False, callbacks=used
        )
        same = [is_saved(path, model)]
        again = os.path.join(folder, "again.keras")
        model.save(again)
        same.append(is_saved(again, model))
        with open(log) as file:
            rows = len(file.readlines())
    return outcome(model, history) | {
        "epochs": len(history.epoch),
        "same": same,
        "rows": rows,
    }


def is_saved(path: str, model: keras.Model) -> bool:
    loaded = keras.models.load_model(path, compile=False)
    pairs = zip(loaded.get_weights(), model.get_weights(), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


@contextlib.contextmanager
def shared_folder(strategy: Any) -> Iterator[str]:
    """Yield a folder that all workers see; it goes when all have left it."""
    with tempfile.TemporaryDirectory() as folder:
        if strategy is None:
            yield folder
            return
        own = tf.constant(list(folder.encode()), tf.uint8)
        (octets,) = strategy.transport.broadcast([own], "folder")
        yield octets.numpy().tobytes().decode()
        strategy.barrier()


@feature
def stateful_layers(strategy: Any) -> dict[str, Any]:
    rows = 16 // (1 if strategy is None else strategy.num_replicas_in_sync)
    with scope(strategy):
        inputs = keras.Input(batch_shape=(rows, 8, 1))
        hidden = keras.layers.SimpleRNN(4, stateful=True)(inputs)
        model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
        model.compile(keras.optimizers.SGD(0.05), "mse")
    x, y = regression()
    history = model.fit(
        x[..., np.newaxis], y, batch_size=16, epochs=2, verbose=0, shuffle=False
    )
    found = outcome(model, history)
    return {"history": found["history"]}  # each worker has states of its own


@feature
def noise_of_each_worker(strategy: Any) -> dict[str, Any]:
    if strategy is None or strategy.num_replicas_in_sync == 1:
        return {"differ": [True] * 5, "alike outside": True, "states alike": True}
    with scope(strategy):
        generator = keras.random.SeedGenerator(5)
        of_tensorflow = tf.random.Generator.from_seed(7)
        dropout = keras.layers.Dropout(0.5, seed=6)
    draws: list[Callable[[], Any]] = [
        lambda: tf.random.normal([8]),
        lambda: keras.random.normal([8]),
        lambda: keras.random.normal([8], seed=generator),
        lambda: dropout(tf.ones([64]), training=True),
        lambda: of_tensorflow.normal([8]),
    ]

    def alike(value: Any) -> bool:
        gathered = strategy.gather(value[tf.newaxis], axis=0).numpy()
        return len(np.unique(gathered, axis=0)) < len(gathered)

    keras.utils.set_random_seed(3)
    outside = alike(keras.random.normal([8])) and alike(tf.random.normal([8]))
    drawn = [strategy.run(each) for each in [*draws, *map(tf.function, draws)]]
    return {
        "differ": [
            not alike(one) and not alike(two)
            for one, two in zip(drawn[:5], drawn[5:], strict=True)
        ],
        "alike outside": outside,
        "states alike": alike(generator.state.value),
    }


@feature
def state_saved_in_the_midst_of_an_epoch(strategy: Any) -> dict[str, Any]:
    def model_of() -> keras.Model:
        with scope(strategy):
            model = mlp(keras.layers.BatchNormalization())
            model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
            model.optimizer.build(model.trainable_variables)  # so that it is loaded
        return model

    def crc_of(model: keras.Model) -> int:
        return zlib.crc32(b"".join(v.numpy().tobytes() for v in model.weights))

    whole = model_of()
    with tempfile.TemporaryDirectory() as folder:
        weights = os.path.join(folder, "own.weights.h5")
        state = os.path.join(folder, "state")

        def save(batch: int, logs: Any) -> None:
            if batch == 4:
                whole.save_weights(weights)
                if strategy is not None:
                    strategy.save_state(state, whole)

        fit = {"verbose": 0, "shuffle": False}
        watch = keras.callbacks.LambdaCallback(on_train_batch_end=save)
        data = batches(64, 8)
        whole.fit(data, callbacks=[watch], **fit)
        resumed = model_of()
        if strategy is not None and strategy.num_replicas_in_sync == 1:
            resumed.fit(data.take(2), **fit)  # it is taken over after steps, too
        resumed.load_weights(weights)
        if strategy is not None:
            strategy.restore_state(state, resumed)
    resumed.fit(data.skip(5), **fit)
    return {"continued": crc_of(resumed) == crc_of(whole)}


def _fit_data_that_end_early(strategy: Any, **compiled: Any) -> dict[str, Any]:
    if not isinstance(strategy, tf_dgc.ParameterAveragingStrategy):
        return {}  # others need as many batches on every worker
    if strategy.config.synchronous_steps:
        return {}
    with scope(strategy):
        model = mlp(keras.layers.BatchNormalization())
        adamw = keras.optimizers.AdamW(0.01, weight_decay=0.1)
        model.compile(adamw, "mse", **compiled)

    def own(context: tf.distribute.InputContext) -> tf.data.Dataset:
        return batches(64, 8).take(7 - 2 * context.input_pipeline_id)

    data = strategy.distribute_datasets_from_function(own)
    return outcome(model, model.fit(data, epochs=3, verbose=0))


@feature
def data_that_end_early_on_some_workers(strategy: Any) -> dict[str, Any]:
    return _fit_data_that_end_early(strategy)


@feature
def data_that_end_early_within_an_execution(strategy: Any) -> dict[str, Any]:
    # Who waits meets the others while these are in a loop of a graph.
    return _fit_data_that_end_early(strategy, steps_per_execution=4)


@feature
def a_saved_model_goes_on(strategy: Any) -> dict[str, Any]:
    before = mlp()
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True)
    before.compile(optimizer, "mse", metrics=["mae"])
    optimizer.build(before.trainable_variables)
    random = np.random.default_rng(4)
    for slot in optimizer.momentums:
        slot.assign(random.normal(scale=0.01, size=slot.shape))
    with shared_folder(strategy) as folder, scope(strategy):
        path = os.path.join(folder, f"{getattr(strategy, 'rank', 0)}.keras")
        before.save(path)
        model = keras.models.load_model(path)
    return outcome(model, model.fit(batches(), epochs=3, verbose=0, shuffle=False))


def found(strategy: str, transport: str, name: str) -> dict[str, Any]:
    """Return the figures of a feature; for the workers of `pool.py`."""
    used = STRATEGIES[strategy](transport)
    figures = FEATURES[name](used)
    if used is None:
        return {"figures": figures}
    place = {"transport": used.transport.name, "rank": used.rank}
    return {"figures": figures} | place


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", choices=STRATEGIES, default="dense")
    parser.add_argument("--transport", default="auto")
    parser.add_argument("names", nargs="*")
    arguments = parser.parse_args()
    strategy = STRATEGIES[arguments.strategy](arguments.transport)
    results: dict[str, Any] = {}
    for name in arguments.names or FEATURES:
        keras.utils.clear_session()
        keras.utils.set_random_seed(1)
        print(name, file=sys.stderr, flush=True)
        try:
            results[name] = FEATURES[name](strategy)
        except Exception:
            results[name] = {"error": traceback.format_exc()}
    if strategy is not None:
        results["transport"] = strategy.transport.name
        results["rank"] = strategy.rank
    launch.say(results)


if __name__ == "__main__":
    main()
