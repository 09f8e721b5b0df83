#!/usr/bin/env python3
"""Compare the bits of trained weights between two checkouts, on this machine.

    tests/jobs/bits.py OLD_CHECKOUT NEW_CHECKOUT [--steps 30] [--only collective ...]

Every strategy, over every transport, with SGD, Nesterov and Adam, on 2 and 3 workers,
and the simulator: checksums of the weights after so many steps. Prints what differs;
the exit status is 1 where something does. Both are run by this interpreter.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import zlib
from typing import Any

WORKERS = {"collective": (2, 3), "horovod": (2, 3), "hybrid": (2, 3), "simulated": (1,)}
MARK = "BITS "
OPTIMIZERS = ("SGD", "Nesterov", "Adam")
TIMEOUT_SECONDS = 900


def strategies(transport: str) -> dict[str, Any]:
    """Returns what makes each strategy, by name."""
    import keras

    import tf_dgc

    def dgc(**settings: Any) -> Any:
        config = tf_dgc.DGCConfig(min_elements=1, **settings)
        return lambda: tf_dgc.DGCStrategy(config, transport=transport)

    def averaging(**settings: Any) -> Any:
        config = tf_dgc.AveragingConfig(**settings)
        return lambda: tf_dgc.ParameterAveragingStrategy(config, transport=transport)

    compression = tf_dgc.DGCConfig(min_elements=1, sparsity=0.75)
    return {
        "dense": lambda: tf_dgc.DenseStrategy(transport=transport),
        "dgc": dgc(sparsity=0.95, warmup_steps=12, clip_norm=1.0),
        "dgc float16": dgc(sparsity=0.9, value_dtype="float16", nonfinite="skip"),
        "averaging": averaging(period=4),
        "averaging outer": averaging(
            period=3,
            outer_optimizer=lambda: keras.optimizers.SGD(0.7, momentum=0.9),
            compression=compression,
        ),
    }


def trained(strategy: Any, optimizer: str, steps: int) -> int:
    """Returns a checksum of the weights after so many steps."""
    import keras
    import numpy as np

    makers = {
        "SGD": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
        "Nesterov": lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
        "Adam": lambda: keras.optimizers.Adam(0.01),
    }
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    random = np.random.default_rng(0)
    x = random.normal(size=(12 * steps, 20)).astype("float32")
    y = (x @ random.normal(size=(20, 4))).astype("float32")
    with strategy.scope():
        layers = [keras.layers.Dense(64, activation="tanh"), keras.layers.Dense(4)]
        model = keras.Sequential([keras.Input((20,)), *layers])
        model.compile(makers[optimizer](), "mse")
    model.fit(x, y, batch_size=12, epochs=1, shuffle=False, verbose=0)
    return zlib.crc32(b"".join(w.tobytes() for w in model.get_weights()))


def work(transport: str, steps: int) -> None:
    """Trains as one of the workers; rank 0 prints the checksums."""
    import tf_dgc

    found = {}
    if transport == "simulated":
        config = tf_dgc.DGCConfig(sparsity=0.9, min_elements=1, warmup_steps=9)
        for workers in (2, 3):
            for each in (None, config):
                strategy = tf_dgc.simulate.SimulatedStrategy(workers, each)
                for optimizer in OPTIMIZERS:
                    name = f"{workers} {'dgc' if each else 'dense'} {optimizer}"
                    found[name] = trained(strategy, optimizer, steps)
    else:
        for name, make in strategies(transport).items():
            strategy = make()
            for optimizer in OPTIMIZERS:
                found[f"{name} {optimizer}"] = trained(strategy, optimizer, steps)
        if strategy.rank:
            return
    sys.stdout.write(f"\n{MARK}{json.dumps(found)}\n")


def checksums(checkout: pathlib.Path, steps: int, only: list[str]) -> dict[str, int]:
    """Returns the checksums of all settings, by this checkout's package."""
    me = [sys.executable, str(pathlib.Path(__file__).resolve()), "--steps", str(steps)]
    local = [sys.executable, str(checkout / "scripts/run_local.py")]
    known = {"PYTHONPATH": str(checkout), "TF_CPP_MIN_LOG_LEVEL": "3"}
    known["PATH"] = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    found = {}
    for transport, workers in [(each, n) for each in only for n in WORKERS[each]]:
        own = [*me, "--work", transport]
        if transport == "collective":
            own = [*local, "-n", str(workers), "--", *own]
        elif transport != "simulated":
            own = ["horovodrun", "-np", str(workers), *own]
        done = subprocess.run(
            own,
            env=os.environ | known,
            cwd=checkout,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
        lines = [line for line in done.stdout.splitlines() if MARK in line]
        if done.returncode or len(lines) != 1:
            raise RuntimeError(f"{own} failed in {checkout}:\n{done.stderr[-3000:]}")
        for name, value in json.loads(lines[0].partition(MARK)[2]).items():
            found[f"{transport} x{workers} {name}"] = value
    return found


def main() -> int:
    """Compares, or works."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkouts", nargs="*", type=pathlib.Path)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--only", nargs="*", default=[*WORKERS], choices=[*WORKERS])
    parser.add_argument("--work", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args.work, args.steps)
        return 0
    if len(args.checkouts) != 2:
        parser.error("two checkouts are compared")
    old, new = (
        checksums(path.resolve(), args.steps, args.only) for path in args.checkouts
    )
    different = sorted(name for name in old | new if old.get(name) != new.get(name))
    for name in different:
        sys.stdout.write(f"differs: {name}: {old.get(name)} {new.get(name)}\n")
    sys.stdout.write(f"{len(old)} settings, {len(different)} differ\n")
    return bool(different)


if __name__ == "__main__":
    sys.exit(main())
