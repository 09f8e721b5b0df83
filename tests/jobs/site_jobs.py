"""Sites of workers that average: run by the workers of `pool.py`, or by itself.

    tf-dgc-run --hosts a:2,b:2 tests/jobs/site_jobs.py

The last line of stdout is a JSON object: what `trained` returns.
"""

import os
import pathlib
import tempfile
import zlib
from typing import Any
from unittest import mock

import features
import keras
import launch

import tf_dgc

DGC = tf_dgc.DGCConfig(sparsity=0.75, min_elements=1)
SETTINGS: dict[str, dict[str, Any]] = {
    "dense": {"period": 1, "within": "dense"},
    "in flight": {
        "period": 3,
        "within": "dense",
        "overlap": 2,
        "compression": tf_dgc.DGCConfig(sparsity=0.5, min_elements=1),
    },
    "dgc": {"period": 3, "within": DGC, "outer_optimizer": lambda: outer()},
}


def outer() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.7, momentum=0.5)


def crc(model: keras.Model) -> int:
    variables = [v.numpy() for v in model.trainable_variables]
    return zlib.crc32(b"".join(each.tobytes() for each in variables))


def trained(kind: str, transport: str, sites: str, folder: str) -> dict[str, Any]:
    """Train, save, train on, restore and flush; return what became of it.

    Args:
        kind: of `SETTINGS`.
        transport: by name.
        sites: of the workers, as TF_DGC_SITES has them; "" is as it comes.
        folder: for the state.
    """
    config = tf_dgc.AveragingConfig(**SETTINGS[kind])
    with mock.patch.dict(os.environ, TF_DGC_SITES=sites):
        strategy = tf_dgc.ParameterAveragingStrategy(config, transport=transport)
    with strategy.scope():
        layers = [keras.layers.Dense(24, "tanh"), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((8,)), *layers])
        momentum = 0.0 if kind == "dense" else 0.9
        sgd = keras.optimizers.SGD(0.05, momentum=momentum)
        model.compile(sgd, "mse", metrics=["mae"])
    steps: list[int] = []
    look = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: steps.append(crc(model))
    )
    options: dict[str, Any] = {"verbose": 0, "shuffle": False, "callbacks": [look]}
    history = model.fit(features.batches(62, 16), epochs=3, **options).history
    found = {
        "rank": strategy.rank,
        "sites": strategy.mesh.voices.size,
        "together": strategy.mesh.together.size,
        "rounds": int(strategy.round_stats().rounds),
        "history": history,
        "steps": steps,
        "norm": float(strategy.stats().residual_norm),
        "crc": crc(model),
    }
    strategy.save_state(folder)
    model.fit(features.batches(), epochs=1, **options)
    strategy.restore_state(folder)
    found["restored"] = float(strategy.stats().residual_norm)
    model.fit(features.batches(), epochs=1, **options)
    strategy.flush(model)
    left = float(strategy.stats().residual_norm)
    files = sorted(path.name[:10] for path in pathlib.Path(folder).iterdir())
    return found | {"flushed": crc(model), "left": left, "files": files}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        launch.say(trained("in flight", "auto", "", folder))


if __name__ == "__main__":
    main()
