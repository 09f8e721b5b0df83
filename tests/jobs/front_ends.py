"""The front ends for Horovod without a strategy, and the strategy: run by horovodrun.

    horovodrun -np 2 python tests/jobs/front_ends.py [--all]

Each trains the same model on the same data. The last line of stdout is a JSON object.
"""

import itertools
import os
import sys
import tempfile
import traceback
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import features
import horovod.tensorflow
import keras
import launch
import numpy as np
import tensorflow as tf

import tf_dgc
from tf_dgc import horovod as hvd
from tf_dgc.strategies import data

EPOCHS = 3
CONFIGS = {
    "dense": None,
    "all": tf_dgc.DGCConfig(sparsity=0.0, min_elements=1),
    "tenth": tf_dgc.DGCConfig(sparsity=0.9, min_elements=1, momentum_correction=False),
    "owners": tf_dgc.DGCConfig(
        sparsity=0.5,
        min_elements=1,
        exchange="owners",
        growth=1.0,
        momentum_correction=False,
    ),
    "corrected": tf_dgc.DGCConfig(sparsity=0.9, min_elements=1, clip_norm=5.0),
}
# Config and optimizer: by default each front end meets each, and by --all each pair.
FIRST = (("tenth", "plain"),)
FEW = (
    *(("dense", "plain"), ("all", "plain"), ("tenth", "plain")),
    *(("dense", "momentum"), ("corrected", "momentum")),
)


def own_batches(rows: int = 64) -> tf.data.Dataset:
    return data.share_of(features.batches(rows), hvd.rank(), hvd.size())


def outcome(model: keras.Model, losses: list[float]) -> dict[str, Any]:
    weights = [np.asarray(w) for w in model.get_weights()]
    return {
        "losses": losses,
        "weights": [w.ravel().tolist() for w in weights],
        "crc": zlib.crc32(b"".join(w.tobytes() for w in weights)),
    }


def sgd() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.05, momentum=0.9)


def plain_sgd() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.05)


def by_strategy(config: Any, optimizer: Callable[[], Any]) -> dict[str, Any]:
    over = hvd.transport()
    strategy = (
        tf_dgc.DGCStrategy(config, transport=over)
        if config
        else tf_dgc.DenseStrategy(transport=over)
    )
    with strategy.scope():
        model = features.mlp()
        model.compile(optimizer(), "mse")
    history = model.fit(features.batches(), epochs=EPOCHS, verbose=0, shuffle=False)
    return outcome(model, history.history["loss"])


def by_optimizer(
    config: Any, optimizer: Callable[[], Any], **options: Any
) -> dict[str, Any]:
    if hvd.rank():  # what others begin with does not count
        keras.utils.set_random_seed(100)
    model = features.mlp()
    model.compile(hvd.DistributedOptimizer(optimizer(), config, **options), "mse")
    callbacks = [hvd.callbacks.BroadcastVariables(), hvd.callbacks.MetricAverage()]
    fit = {"epochs": EPOCHS, "verbose": 0, "shuffle": False, "callbacks": callbacks}
    history = model.fit(own_batches(), **fit)
    found = outcome(model, history.history["loss"])
    found["sent"] = int(hvd.stats(model.optimizer, total=True).sent_bytes)
    return found


def in_a_loop(
    tape_of: Callable[[Any], Any], optimizer: keras.optimizers.Optimizer
) -> dict[str, Any]:
    model = features.mlp()
    optimizer.build(model.trainable_variables)

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        variables = [v.value for v in model.trainable_variables]
        gradients = tape_of(tape).gradient(loss, variables)
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    losses = []
    for _ in range(EPOCHS):
        own = [float(step(x, y)) for x, y in own_batches()]
        (total,) = hvd.transport().all_reduce([tf.constant(np.mean(own))], "loss")
        losses.append(float(total) / hvd.size())
    return outcome(model, losses)


def by_tape(config: Any, optimizer: Callable[[], Any]) -> dict[str, Any]:
    return in_a_loop(
        lambda tape: hvd.DistributedGradientTape(tape, config), optimizer()
    )


def by_compressor(config: Any, optimizer: Callable[[], Any]) -> dict[str, Any]:
    compressor = hvd.DGCCompressor(config)
    return in_a_loop(
        lambda tape: horovod.tensorflow.DistributedGradientTape(
            tape, compression=compressor
        ),
        optimizer(),
    )


def by_horovods_optimizer() -> dict[str, Any]:
    model = features.mlp()
    optimizer = horovod.tensorflow.DistributedOptimizer(sgd())
    model.compile(optimizer, "mse")
    history = model.fit(own_batches(), epochs=1, verbose=0, shuffle=False)
    return outcome(model, history.history["loss"])


def saved_form() -> dict[str, Any]:
    model = features.mlp()
    model.compile(hvd.DistributedOptimizer(sgd(), tf_dgc.DGCConfig()), "mse")
    model.fit(own_batches(), verbose=0)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.keras")
        model.save(path)
        loaded = keras.models.load_model(path)
    same = zip(loaded.get_weights(), model.get_weights(), strict=True)
    return {
        "types": [type(m.optimizer) is keras.optimizers.SGD for m in (model, loaded)],
        "same": all(np.array_equal(one, two) for one, two in same),
        "form": keras.optimizers.serialize(model.optimizer)
        == keras.optimizers.serialize(loaded.optimizer),
        "distributed": "_backend_update_step" in vars(loaded.optimizer),
    }


def mixed_precision() -> dict[str, Any]:
    """One worker alone overflows, at a scale that compile has wrapped around."""
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        x, y = features.regression()
        y[:8] *= 1e4
        every = tf.data.Dataset.from_tensor_slices((x, y)).batch(16)
        model = features.mlp()
        model.compile(hvd.DistributedOptimizer(plain_sgd()), "mse")
        callbacks = [hvd.callbacks.BroadcastVariables()]
        own = data.share_of(every, hvd.rank(), hvd.size())
        model.fit(own, verbose=0, callbacks=callbacks, shuffle=False)
        scale = float(model.optimizer.dynamic_scale)
        return outcome(model, []) | {"scale": scale}
    finally:
        keras.mixed_precision.set_global_policy("float32")


def as_horovods_example() -> dict[str, Any]:
    """What Horovod's own script for Keras calls, by the names it has there."""
    assert 0 <= hvd.local_rank() < hvd.local_size() == hvd.size()
    keras.utils.set_random_seed(1 + hvd.rank())
    layers = [keras.layers.Dense(8, activation="relu"), keras.layers.Dense(1)]
    model = keras.Sequential(layers)  # is not built before the first batch
    rate = 0.001 * hvd.size()
    adam = hvd.DistributedOptimizer(keras.optimizers.Adam(rate), CONFIGS["tenth"])
    model.compile(adam, "mse", metrics=["mae"])
    rates: list[float] = []
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(
            initial_lr=rate, warmup_epochs=2, verbose=1
        ),
        keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: rates.append(float(adam.learning_rate))
        ),
    ]
    data = own_batches().repeat()
    fit = {"steps_per_epoch": 4, "epochs": 3, "verbose": 0, "callbacks": callbacks}
    history = model.fit(data, **fit)
    return outcome(model, history.history["loss"]) | {"rates": rates}


def fit_script(folder: str, epochs: int) -> keras.Model:
    """As Horovod's scripts for `fit` are: resumed where rank 0 has a checkpoint."""
    hvd.init()
    path = os.path.join(folder, "checkpoint-{epoch}.keras")
    last = 0
    for epoch in range(epochs, 0, -1):
        if os.path.exists(path.format(epoch=epoch)):
            last = epoch
            break
    last = hvd.broadcast(last if hvd.rank() == 0 else -1, 0, name="resume_from_epoch")
    rate = 0.01 * hvd.size()
    if last > 0 and hvd.rank() == 0:
        model = hvd.load_model(
            path.format(epoch=last), compression=hvd.Compression.none
        )
    else:
        model = features.mlp()
        optimizer = hvd.DistributedOptimizer(
            keras.optimizers.SGD(rate, momentum=0.9),
            compression=hvd.Compression.none,
            backward_passes_per_step=1,
            average_aggregated_gradients=True,
            op=hvd.Average,
        )
        model.compile(optimizer, "mse", metrics=["mae"])
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(
            initial_lr=rate, warmup_epochs=2, verbose=0, momentum_correction=False
        ),
        hvd.callbacks.LearningRateScheduleCallback(
            start_epoch=2, end_epoch=3, multiplier=1.0, initial_lr=rate
        ),
        hvd.callbacks.LearningRateScheduleCallback(
            start_epoch=3, multiplier=lambda epoch: 0.1, initial_lr=rate
        ),
    ]
    if hvd.rank() == 0:
        callbacks.append(keras.callbacks.ModelCheckpoint(path))
    model.fit(
        own_batches(),
        initial_epoch=last,
        epochs=epochs,
        verbose=0,
        shuffle=False,
        callbacks=callbacks,
    )
    return model


def by_fit_script() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:  # of its own on each worker
        whole = fit_script(folder, 4)
    keras.utils.set_random_seed(1)
    with tempfile.TemporaryDirectory() as folder:
        fit_script(folder, 3)
        keras.utils.set_random_seed(100 + hvd.rank())
        resumed = fit_script(folder, 4)
    score = hvd.allreduce(whole.evaluate(own_batches(), verbose=0))
    found = outcome(whole, whole.history.history["loss"])
    found["score"] = [float(each) for each in score]
    found["rates"] = whole.history.history["lr"]
    found["resumed"] = outcome(resumed, resumed.history.history["loss"])
    return found


def by_tape_script() -> dict[str, Any]:
    """As Horovod's scripts for loops are."""
    hvd.init()
    keras.utils.set_random_seed(1 + hvd.rank())
    model = features.mlp()
    adam = keras.optimizers.Adam(0.001 * hvd.size())
    checkpoint = tf.train.Checkpoint(model=model, optimizer=adam)

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor, first: bool) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        tape = hvd.DistributedGradientTape(tape, compression=hvd.Compression.fp16)
        gradients = tape.gradient(loss, model.trainable_variables)
        adam.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        if first:  # by when the optimizer has its variables
            hvd.broadcast_variables(model.variables, root_rank=1)
            hvd.broadcast_variables(adam.variables, root_rank=1)
        return loss

    losses = []
    for epoch in range(EPOCHS):
        for i, (x, y) in enumerate(own_batches()):
            loss = hvd.allreduce(step(x, y, epoch == 0 and i == 0), name="loss")
        losses.append(float(loss))
    saved = ""
    if hvd.rank() == 0:
        with tempfile.TemporaryDirectory() as folder:
            saved = os.path.basename(checkpoint.save(os.path.join(folder, "model")))
    saved = hvd.broadcast_object(saved, root_rank=0)
    return outcome(model, losses) | {"saved": saved}


def by_names() -> dict[str, Any]:
    """What Horovod's operations return here."""
    own = tf.constant([1.0 + hvd.rank(), 2.0])
    variable = keras.Variable(own)
    grouped = hvd.grouped_allreduce([own, variable], op=hvd.Sum)
    hvd.barrier()
    # That of rank 0 alone is there already, where exchanges are hierarchical.
    alone = hvd.add_process_set(hvd.ProcessSet([1]))
    steps = []
    for among in (alone, hvd.global_process_set):
        weight = keras.Variable([0.0, 0.0])
        sgd = keras.optimizers.SGD(1.0)
        hvd.DistributedOptimizer(sgd, process_set=among).apply([own], [weight])
        steps.append(np.array(weight).tolist())
    layer = hvd.SyncBatchNormalization(momentum=0.0)

    @tf.function
    def normalized(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(layer(x, training=True) ** 2)
        return tape.gradient(loss, x)

    layer.build([None, 1])
    back = normalized(own[:, tf.newaxis])
    return {
        "mean": hvd.allreduce(variable).numpy().tolist(),
        "sum": hvd.allreduce(own, op=hvd.Sum, name="sum").numpy().tolist(),
        "halves": hvd.allreduce(own, compression=hvd.Compression.fp16).numpy().tolist(),
        "named": float(hvd.allreduce(hvd.rank() + 0.5, "named")),
        "grouped": [each.numpy().tolist() for each in grouped],
        "gathered": hvd.allgather(own[: 1 + hvd.rank()]).numpy().tolist(),
        "groups": [t.numpy().tolist() for t in hvd.grouped_allgather([own, variable])],
        "parts": hvd.reducescatter(own, op=hvd.Sum).numpy().tolist(),
        "root": hvd.broadcast(variable, 1).numpy().tolist(),
        "crossed": hvd.alltoall(own).numpy().tolist(),
        "objects": hvd.allgather_object({"rank": hvd.rank()}),
        "places": [hvd.cross_rank(), hvd.cross_size(), hvd.gloo_built()],
        "steps": steps,
        "moving": layer.moving_mean.numpy().tolist(),
        "finite": bool(tf.reduce_all(tf.math.is_finite(back))),
    }


def by_end_and_start() -> dict[str, Any]:
    """Horovod is ended, and started anew."""
    hvd.shutdown()
    running = [hvd.is_initialized()]
    hvd.init()
    running.append(hvd.is_initialized())
    model = by_optimizer(None, plain_sgd)
    return model | {"running": running}


def cases(which: Sequence[str]) -> dict[str, Callable[[], dict[str, Any]]]:
    found: dict[str, Callable[[], dict[str, Any]]] = {}
    whole, first = "--all" in which, "--first" in which
    product = list(itertools.product(CONFIGS, ("plain", "momentum")))
    for config, name in product if whole else FIRST if first else FEW:
        settings, optimizer = CONFIGS[config], plain_sgd if name == "plain" else sgd
        for front in (by_strategy, by_optimizer, by_tape):
            key = f"{front.__name__} {config} {name}"
            found[key] = lambda f=front, s=settings, o=optimizer: f(s, o)
    if whole:
        return found
    if first:
        return found | {
            "as_horovods_example": as_horovods_example,
            "by_names": by_names,
        }
    found["by_compressor all plain"] = lambda: by_compressor(CONFIGS["all"], plain_sgd)
    found["by_compressor tenth plain"] = lambda: by_compressor(
        CONFIGS["tenth"], plain_sgd
    )
    found["passes"] = lambda: by_optimizer(None, sgd, backward_passes_per_step=2)
    found["on_one_node"] = lambda: by_optimizer(
        CONFIGS["all"], plain_sgd, hierarchical=True
    )
    found["as_horovods_example"] = as_horovods_example
    found["theirs"] = by_horovods_optimizer
    found["saved_form"] = saved_form
    found["mixed_precision"] = mixed_precision
    found["by_fit_script"] = by_fit_script
    found["by_tape_script"] = by_tape_script
    found["by_names"] = by_names
    found["by_end_and_start"] = by_end_and_start  # the last, as it starts Horovod
    return found


def main() -> None:
    hvd.init()
    results: dict[str, Any] = {"rank": hvd.rank()}
    for name, run in cases(sys.argv).items():
        keras.utils.clear_session()
        keras.utils.set_random_seed(1)
        try:
            results[name] = run()
        except Exception:
            results[name] = {"error": traceback.format_exc()}
    launch.say(results)


if __name__ == "__main__":
    main()
