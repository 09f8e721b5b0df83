"""The front ends for Horovod without a strategy, and the strategy: run by horovodrun.

    horovodrun -np 2 python tests/front_ends.py

Each trains the same model on the same data. The last line of stdout is a JSON object.
"""

import os
import tempfile
import traceback
import zlib
from collections.abc import Callable
from typing import Any

import features
import horovod.tensorflow
import keras
import launch
import numpy as np
import tensorflow as tf

import tf_dgc
from tf_dgc import data
from tf_dgc import horovod as hvd

EPOCHS = 3
CONFIGS = {
    "dense": None,
    "all": tf_dgc.DGCConfig(sparsity=0.0, momentum_masking=False, min_elements=1),
    "tenth": tf_dgc.DGCConfig(sparsity=0.9, min_elements=1, momentum_correction=False),
    "corrected": tf_dgc.DGCConfig(sparsity=0.9, min_elements=1, clip_norm=5.0),
}


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


def cases() -> dict[str, Callable[[], dict[str, Any]]]:
    found: dict[str, Callable[[], dict[str, Any]]] = {}
    for name, optimizer in (("plain", plain_sgd), ("momentum", sgd)):
        for config, settings in CONFIGS.items():
            for front in (by_strategy, by_optimizer, by_tape):
                key = f"{front.__name__} {config} {name}"
                found[key] = lambda f=front, s=settings, o=optimizer: f(s, o)
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
    return found


def main() -> None:
    hvd.init()
    results: dict[str, Any] = {"rank": hvd.rank()}
    for name, run in cases().items():
        keras.utils.clear_session()
        keras.utils.set_random_seed(1)
        try:
            results[name] = run()
        except Exception:
            results[name] = {"error": traceback.format_exc()}
    launch.say(results)


if __name__ == "__main__":
    main()
