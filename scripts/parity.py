#!/usr/bin/env python
"""Train densely and compressed at equal epochs and compare; write a table and a plot.

    scripts/parity.py cifar10 --epochs 24 --seeds 1 2 3 --rows dense dgc
    scripts/parity.py text --jobs 2 --rows dense dgc rate_1:learning_rate=1.0
    scripts/parity.py digits --epochs 12 --warmup-epochs 0 --workers 2 \
        --rows dense dgc downpour downpour_dgc

Trains a ResNet-8 on CIFAR-10, or a larger one (`--blocks`), language models of
characters, an LSTM or a small transformer (with Adam), or the network of
examples/digits.py, on logical workers in one process (`tf_dgc.simulate`); with a
`period`, which averages parameters, or `servers`, which train asynchronously, on real
ones (`run_local.py`). A row of the table is a name from ROWS below, or a name of one's
own with settings: of DGCConfig, of the task (learning_rate, batch_size, ...; schedule,
"cosine" or "step"; optimizer, as of OPTIMIZERS), of averaging, of servers, or a budget
(BUDGET); `warmup_epochs` is counted in epochs. With `servers` a step of the schedule
is a push, W of which make an epoch's step, there is no warm-up, and `clip_norm` is of
compression.

Each run leaves a JSON file in the folder of results. Runs that are there are not
repeated, so that a table can grow; table.md and plot.png show all that is there.

References:
    Lin, Han, Mao, Wang, Dally: Deep Gradient Compression, ICLR 2018,
    https://arxiv.org/abs/1712.01887
    Karpathy: char-rnn, https://github.com/karpathy/char-rnn (the text)
"""

import argparse
import ast
import concurrent.futures
import dataclasses
import json
import math
import pathlib
import re
import statistics
import subprocess
import sys
import time
import zlib
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "examples"), str(HERE)]

TEXT = "https://storage.googleapis.com/download.tensorflow.org/data/shakespeare.txt"
ROUND_SIGNS = {"compress": True, "sparsity": 0.95, "value_dtype": "sign"}
ROWS: dict[str, dict[str, Any]] = {
    # Keras's own momentum on the sum of the gradients: plain synchronous SGD. Where the
    # task clips, each worker clips its own gradient, as in compressed training.
    "dense": {"sparsity": 0.0, "momentum_correction": False, "warmup_epochs": 0},
    "dgc": {},
    "dgc_99": {"sparsity": 0.99},
    "no_correction": {"momentum_correction": False},
    "no_masking": {"momentum_masking": False},
    "no_warmup": {"warmup_epochs": 0},
    "float16": {"value_dtype": "float16"},
    # As many bytes as of float32 at 0.999.
    "sign": {"value_dtype": "sign", "sparsity": 0.996},
    "log4": {"value_dtype": "log4", "sparsity": 0.997},
    "powersgd_1": {"peer": "powersgd", "rank": 1},
    "powersgd_2": {"peer": "powersgd", "rank": 2},
    "signsgd": {"peer": "signsgd"},
    "period_4": {"period": 4},
    "period_16": {"period": 16},
    "period_64": {"period": 64},
    "outer_4": {"period": 4, "outer_rate": 0.7},
    "outer_16": {"period": 16, "outer_rate": 0.7},
    "outer_64": {"period": 64, "outer_rate": 0.7},
    "compressed_16": {"period": 16, "compress": True, "sparsity": 0.99},
    "signs_16": {"period": 16} | ROUND_SIGNS,
    "flight_16": {"period": 16, "overlap": "auto"},
    "flight_16_signs": {"period": 16, "overlap": "auto"} | ROUND_SIGNS,
    "downpour": {"servers": 1},
    "downpour_dgc": {"servers": 1, "compress": True},
}
TASKS: dict[str, dict[str, Any]] = {
    "cifar10": {
        "batch_size": 128,
        "learning_rate": 0.1,
        "momentum": 0.9,
        "weight_decay": 1e-3,
        "clip_norm": None,
        "min_elements": 0,
    },
    "text": {
        "batch_size": 32,
        "learning_rate": 2.0,
        "momentum": 0.9,
        "weight_decay": None,
        "clip_norm": 0.25,
        "min_elements": 0,
    },
    "transformer": {
        "batch_size": 32,
        "learning_rate": 2e-3,
        "optimizer": "adam",
        "weight_decay": None,
        "clip_norm": None,
        "min_elements": 0,
    },
    "digits": {
        "batch_size": 64,
        "learning_rate": 0.3,
        "momentum": 0.0,
        "weight_decay": None,
        "clip_norm": None,
        "min_elements": 1024,
        "sparsity": 0.99,
    },
}
DEFAULTS: dict[str, Any] = {
    "sparsity": 0.999,
    "warmup_stages": (0.75, 0.9375, 0.984375, 0.996),
    "momentum_correction": True,
    "momentum_masking": True,
    "sample_fraction": 0.01,
    "value_dtype": "float32",
    "rate_correction": True,
    "schedule": "cosine",
    "optimizer": "sgd",
}
# Of a budget in bytes, in the place of others of DGCConfig.
BUDGET: dict[str, Any] = {
    "sparsity": None,
    "value_dtype": None,
    "momentum_masking": None,
    "warmup_epochs": 0,
    "ratio": None,
    "known_length": False,
}
# Of how selections are summed, in addition.
SUMS: dict[str, Any] = {"exchange": "auto", "growth": 4.0}
# Of what others do, see peers.py; momentum is after the sum.
PEERS: dict[str, Any] = {
    "peer": None,
    "rank": 1,
    "momentum_correction": False,
    "warmup_epochs": 0,
}
OPTIMIZERS = {
    "sgd": "SGD",
    "adagrad": "Adagrad",
    "adam": "Adam",
    "adamw": "AdamW",
    "lion": "Lion",
    "muon": "Muon",
    "nadam": "Nadam",
    "rmsprop": "RMSprop",
}
# Of averaging, and of servers; they are no part of other rows.
AVERAGING: dict[str, Any] = {
    "period": None,
    "synchronous_steps": 0,
    "outer_rate": None,
    "outer_momentum": 0.9,
    "compress": False,
    "overlap": None,
}
SERVED: dict[str, Any] = {
    "servers": None,
    "compress": False,
    "fetch_period": 1,
    "push_period": 1,
    "max_staleness": None,
    "staleness_rate": True,
}


def settings_of(args: argparse.Namespace, row: str) -> dict[str, Any]:
    """Returns all settings of a row; `row` is NAME or NAME:key=value,...

    Raises:
        ValueError: a setting is unknown, or is no constant of Python.
    """
    name, _, own = row.partition(":")
    if name not in ROWS and not own:
        raise ValueError(
            f"{name!r} is not one of {', '.join(ROWS)}, and has no settings"
        )
    settings = DEFAULTS | TASKS[args.task] | {"warmup_epochs": args.warmup_epochs}
    settings |= BUDGET if has(row, "ratio") else {}
    settings |= SUMS if has(row, "exchange") else {}
    settings |= PEERS if has(row, "peer") else {}
    settings |= AVERAGING if has(row, "period") else {}
    settings |= SERVED if has(row, "servers") else {}
    settings |= ROWS.get(name, {})
    call = ast.parse(f"dict({own})", mode="eval").body
    assert isinstance(call, ast.Call)
    given = {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
    if call.args or given.keys() - settings.keys():
        raise ValueError(f"{own!r} must set some of {', '.join(settings)}")
    return settings | given


def has(row: str, setting: str) -> bool:
    """Tells whether a row sets `period`, `servers`, `ratio`, `peer`, or `exchange`."""
    name, _, own = row.partition(":")
    return setting in ROWS.get(name, {}) or re.search(rf"\b{setting}=", own) is not None


def load_images(args: argparse.Namespace) -> tuple[Any, Any, int, Any]:
    """Returns training data, unseen data, steps of an epoch, and the model's maker."""
    import cifar10
    import numpy as np
    import tensorflow as tf

    train, test = cifar10.load(args.data, args.limit)
    if (factor := 32 // args.image_size) > 1:  # means of squares of pixels

        def shrink(images: np.ndarray) -> np.ndarray:
            blocks = [len(images), args.image_size, factor, args.image_size, factor, 3]
            return images.reshape(blocks).mean(axis=(2, 4)).astype(np.uint8)

        train, test = (shrink(train[0]), train[1]), (shrink(test[0]), test[1])
    size, pad = args.image_size, args.image_size // 8

    def augment(images: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        count = tf.shape(images)[0]
        for axis in (1, 2):
            padding = [[0, 0]] * axis + [[pad, pad]] + [[0, 0]] * (3 - axis)
            start = tf.random.uniform([count, 1], 0, 2 * pad + 1, tf.int32)
            places = start + tf.range(size)
            images = tf.gather(tf.pad(images, padding), places, axis=axis, batch_dims=1)
        mirror = tf.random.uniform([count, 1, 1, 1]) < 0.5
        return tf.where(mirror, tf.reverse(images, [2]), images), labels

    batch = args.batch_size
    data = tf.data.Dataset.from_tensor_slices(train).shuffle(len(train[0]))
    data = data.batch(batch, drop_remainder=True).map(augment)
    unseen = tf.data.Dataset.from_tensor_slices(test).batch(500)
    return (
        data,
        unseen,
        len(train[0]) // batch,
        lambda: cifar10.build(args.blocks, size),
    )


def load_text(args: argparse.Namespace, length: int = 64) -> tuple[Any, Any, int, Any]:
    """Returns the same for text: a tenth of it, the end, is unseen."""
    import keras
    import numpy as np
    import tensorflow as tf

    file = args.data or keras.utils.get_file("shakespeare.txt", TEXT)
    text = pathlib.Path(file).read_text()
    characters = sorted(set(text))
    codes = np.array([characters.index(c) for c in text[: args.limit]], np.int32)
    cut = len(codes) * 9 // 10

    def windows(part: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        count = (len(part) - 1) // length
        inputs = part[: count * length].reshape(count, length)
        return inputs, part[1 : count * length + 1].reshape(count, length)

    train, test = windows(codes[:cut]), windows(codes[cut:])
    data = tf.data.Dataset.from_tensor_slices(train).shuffle(len(train[0]))
    data = data.batch(args.batch_size, drop_remainder=True)
    unseen = tf.data.Dataset.from_tensor_slices(test).batch(200, drop_remainder=True)
    build = {"text": lstm, "transformer": transformer}[args.task]
    steps = len(train[0]) // args.batch_size
    return data, unseen, steps, lambda: build(length, len(characters))


def lstm(length: int, characters: int) -> Any:
    """Returns a recurrent language model."""
    import keras

    return keras.Sequential(
        [
            keras.Input((length,), dtype="int32"),
            keras.layers.Embedding(characters, 64),
            keras.layers.LSTM(128, return_sequences=True, unroll=True),
            keras.layers.LSTM(128, return_sequences=True, unroll=True),
            keras.layers.Dense(characters, activation="softmax"),
        ]
    )


def transformer(length: int, characters: int, width: int = 128, blocks: int = 2) -> Any:
    """Returns a causal language model with attention, normalised before each block."""
    import keras
    from keras import layers, ops

    inputs = keras.Input((length,), dtype="int32")
    places = ops.cumsum(ops.ones_like(inputs), axis=1) - 1
    x = layers.Embedding(characters, width)(inputs)
    x = x + layers.Embedding(length, width)(places)
    for _ in range(blocks):
        y = layers.LayerNormalization()(x)
        attention = layers.MultiHeadAttention(4, width // 4)
        x = x + attention(y, y, use_causal_mask=True)
        y = layers.LayerNormalization()(x)
        y = layers.Dense(4 * width, activation="gelu")(y)
        x = x + layers.Dense(width)(y)
    x = layers.LayerNormalization()(x)
    outputs = layers.Dense(characters, activation="softmax")(x)
    return keras.Model(inputs, outputs)


def load_digits(args: argparse.Namespace) -> tuple[Any, Any, int, Any]:
    """Returns the same for handwritten digits."""
    import digits
    import tensorflow as tf

    train, _, test = digits.load()
    train = tuple(array[: args.limit] for array in train)
    data = tf.data.Dataset.from_tensor_slices(train).shuffle(len(train[0]))
    data = data.batch(args.batch_size, drop_remainder=True)
    unseen = tf.data.Dataset.from_tensor_slices(test).batch(len(test[0]))
    return data, unseen, len(train[0]) // args.batch_size, digits.build


LOAD = {
    "cifar10": load_images,
    "text": load_text,
    "transformer": load_text,
    "digits": load_digits,
}


def compression_of(
    settings: dict[str, Any], warmup_steps: int = 0, total_steps: int | None = None
) -> Any:
    """Returns the settings that are of DGCConfig."""
    import tf_dgc

    known = {field.name for field in dataclasses.fields(tf_dgc.DGCConfig)}
    own = {key: value for key, value in settings.items() if key in known}
    if settings.get("known_length"):
        own["total_steps"] = total_steps
    return tf_dgc.DGCConfig(warmup_steps=warmup_steps, **own)


def averaging_of(settings: dict[str, Any]) -> Any:
    """Joins the real workers that this process is one of."""
    import keras

    import tf_dgc

    def outer() -> keras.optimizers.Optimizer:
        momentum = settings["outer_momentum"]
        return keras.optimizers.SGD(settings["outer_rate"], momentum, nesterov=True)

    config = tf_dgc.AveragingConfig(
        period=settings["period"],
        synchronous_steps=settings["synchronous_steps"],
        outer_optimizer=outer if settings["outer_rate"] else None,
        compression=compression_of(settings) if settings["compress"] else None,
        overlap=settings["overlap"],
    )
    return tf_dgc.ParameterAveragingStrategy(config)


def downpour_of(settings: dict[str, Any]) -> Any:
    """Joins the servers, or serves and does not return."""
    import tf_dgc

    names = SERVED.keys() - {"servers", "compress"}
    config = tf_dgc.DownpourConfig(
        compression=compression_of(settings) if settings["compress"] else None,
        **{name: settings[name] for name in names},
    )
    return tf_dgc.DownpourStrategy(config)


def optimizer_of(settings: dict[str, Any], steps: int, clip_norm: Any = None) -> Any:
    """Returns the optimizer of a training of so many steps; it may clip by itself."""
    import keras

    rate, decay = schedule_of(settings, steps), settings["weight_decay"]
    own: dict[str, Any] = {"global_clipnorm": clip_norm}
    own |= {"momentum": settings["momentum"]} if settings["optimizer"] == "sgd" else {}
    kind = getattr(keras.optimizers, OPTIMIZERS[settings["optimizer"]])
    return kind(rate, weight_decay=decay, **own)


def schedule_of(settings: dict[str, Any], steps: int) -> Any:
    """Returns the learning rate: a cosine to 0, or tenths after half and 3/4."""
    import keras

    rate = settings["learning_rate"]
    if settings["schedule"] not in ("cosine", "step"):
        raise ValueError(
            "`schedule` must be 'cosine' or 'step'. Received: "
            f"schedule={settings['schedule']!r}"
        )
    if settings["schedule"] == "cosine":
        return keras.optimizers.schedules.CosineDecay(rate, steps)
    rates = [rate, rate / 10, rate / 100]
    ends = [steps // 2, steps * 3 // 4]
    return keras.optimizers.schedules.PiecewiseConstantDecay(ends, rates)


def train(args: argparse.Namespace, row: str, seed: int) -> dict[str, Any]:
    """Returns what one run gave."""
    import keras
    import peers
    import tensorflow as tf

    from tf_dgc import simulate

    if args.threads:
        tf.config.threading.set_intra_op_parallelism_threads(args.threads)
        tf.config.threading.set_inter_op_parallelism_threads(args.threads)
    settings = settings_of(args, row)
    args.batch_size = settings["batch_size"]
    served = has(row, "servers")
    strategy = averaging_of(settings) if has(row, "period") else None
    strategy = downpour_of(settings) if served else strategy
    keras.utils.set_random_seed(seed)
    data, unseen, steps, build = LOAD[args.task](args)
    if strategy is None:
        warmup = round(settings["warmup_epochs"] * steps)
        config = compression_of(settings, warmup, args.epochs * steps)
        if has(row, "peer"):
            with peers.exchanged(settings["peer"], settings["rank"]):
                strategy = simulate.SimulatedStrategy(args.workers)
        else:
            strategy = simulate.SimulatedStrategy(args.workers, config)
    with strategy.scope():
        model = build()
        updates = args.epochs * steps * (args.workers if served else 1)
        clip_norm = settings["clip_norm"] if has(row, "period") else None
        if clip_norm is not None:  # as elsewhere, of a worker's own gradient
            clip_norm /= math.sqrt(args.workers)
        optimizer = optimizer_of(settings, updates, clip_norm)
        model.compile(
            optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"]
        )
    start = time.monotonic()
    history = model.fit(
        data,
        epochs=args.epochs,
        validation_data=unseen,
        verbose=args.verbose if strategy.is_chief else 0,
    ).history
    seconds = time.monotonic() - start
    total = strategy.stats(total=True)
    traffic = {
        "sent_bytes": int(total.sent_bytes),
        "received_bytes": int(total.received_bytes),
    }
    if served:
        traffic = at_servers(strategy.server_stats())
        strategy.barrier()  # the last epochs of all have ended
        for name, value in model.evaluate(unseen, return_dict=True, verbose=0).items():
            history[f"val_{name}"][-1] = value
        strategy.barrier()
    strategy.flush(model)
    if served:
        strategy.barrier()
    flushed = model.evaluate(unseen, return_dict=True, verbose=0)
    return conditions_of(args, row) | {
        "seed": seed,
        "steps": steps * args.epochs,
        "parameters": model.count_params(),
        "history": history,
        "flushed": {f"val_{name}": [value] for name, value in flushed.items()},
        **traffic,
        "dense_bytes": int(total.dense_bytes),
        "seconds": round(seconds),
        "chief": bool(strategy.is_chief),
    }


def at_servers(stats: Any) -> dict[str, Any]:
    """Returns what this worker did with the servers."""
    return {
        "sent_bytes": int(stats.sent_bytes),
        "received_bytes": int(stats.received_bytes),
        "staleness": float(stats.staleness) / int(stats.pushes),
    }


def conditions_of(args: argparse.Namespace, row: str) -> dict[str, Any]:
    """Returns all that a run depends on, but for its seed."""
    own = {"row": row.partition(":")[0], "settings": settings_of(args, row)}
    names = ("task", "epochs", "workers", "image_size", "limit")
    found = own | {name: getattr(args, name) for name in names}
    return found if args.blocks == 1 else found | {"blocks": args.blocks}


def file_of(args: argparse.Namespace, row: str, seed: int) -> pathlib.Path:
    """Returns the file of a run's results."""
    conditions = conditions_of(args, row)
    text = json.dumps(conditions, sort_keys=True).encode()
    name = f"{args.task}-{conditions['row']}-{zlib.crc32(text):08x}-seed{seed}.json"
    return args.results / name


def run_all(args: argparse.Namespace) -> int:
    """Runs what is missing, each in a process of its own; returns how many failed."""
    wanted = [(row, seed) for seed in args.seeds for row in args.rows]
    missing = [pair for pair in wanted if not file_of(args, *pair).exists()]

    def run(pair: tuple[str, int]) -> bool:
        row, seed = pair
        own = ["--rows", row, "--one", str(seed)]
        command = [sys.executable, __file__, *sys.argv[1:], *own]
        if has(row, "period") or has(row, "servers"):
            several = [sys.executable, str(HERE / "run_local.py")]
            servers = settings_of(args, row).get("servers", 0)
            several += ["-n", str(args.workers), "--ps", str(servers)]
            command = [*several, "--", *command]
        ok = subprocess.run(command, check=False).returncode == 0
        print(f"{row}, seed {seed}: {'done' if ok else 'FAILED'}", flush=True)
        return ok

    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        return sum(not ok for ok in pool.map(run, missing))


def figure_of(task: str, logs: dict[str, list[float]]) -> list[float]:
    """Returns accuracy in percent, perplexity, or loss in nats, on unseen data."""
    if task == "text":
        return [math.exp(loss) for loss in logs["val_loss"]]
    if task == "transformer":
        return logs["val_loss"]
    return [100 * accuracy for accuracy in logs["val_accuracy"]]


def report(folder: pathlib.Path) -> None:
    """Writes table.md and plot.png about all results in a folder."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for file in sorted(folder.glob("*.json")):
        result = json.loads(file.read_text())
        names = ("task", "epochs", "row", "settings", "workers", "image_size", "limit")
        key = json.dumps([*(result[name] for name in names), result.get("blocks")])
        groups.setdefault(key, []).append(result)
    columns = "task epochs workers row seeds mean spread flushed traffic sent received"
    columns = f"{columns} staleness settings".split()
    table = [columns, ["---"] * len(columns)]
    for results in groups.values():
        names = ("task", "epochs", "workers", "row")
        task, *_ = own = [results[0][name] for name in names]
        last = [figure_of(task, result["history"])[-1] for result in results]
        flushed = [figure_of(task, result["flushed"])[0] for result in results]
        sent = sum(result["sent_bytes"] for result in results)
        dense = sum(result["dense_bytes"] for result in results)
        steps = sum(result["steps"] for result in results)
        received = [r["received_bytes"] for r in results if "received_bytes" in r]
        staleness = [r["staleness"] for r in results if "staleness" in r]
        usual = DEFAULTS | AVERAGING | SERVED | SUMS | TASKS[task]
        if "peer" in results[0]["settings"]:
            usual |= PEERS
        if "ratio" in results[0]["settings"]:
            usual |= BUDGET
        changed = [
            f"{key}={value}"
            for key, value in results[0]["settings"].items()
            if json.dumps(usual.get(key)) != json.dumps(value)
        ]
        cells = [*own, len(last), f"{statistics.mean(last):.2f}"]
        cells += [f"{min(last):.2f} to {max(last):.2f}"]
        cells += [f"{statistics.mean(flushed):.2f}", f"1/{dense / sent:.1f}"]
        cells += [
            round(sent / steps),
            round(sum(received) / steps) if received else "-",
        ]
        cells += [f"{statistics.mean(staleness):.2f}" if staleness else "-"]
        table.append([*map(str, cells), ", ".join(changed)])
    lines = [f"| {' | '.join(cells)} |" for cells in table]
    (folder / "table.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    if groups:
        draw(list(groups.values()), folder / "plot.png")


def draw(groups: list[list[dict[str, Any]]], file: pathlib.Path) -> None:
    """Draws the mean of the seeds over epochs, a panel for each task, length and W."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    def panel_of(group: list[dict[str, Any]]) -> tuple[str, int, int]:
        return tuple(group[0][name] for name in ("task", "epochs", "workers"))

    panels = sorted(set(map(panel_of, groups)))
    colors = {
        row: f"C{i}" for i, row in enumerate(sorted({g[0]["row"] for g in groups}))
    }
    down = -(-len(panels) // 2)
    figure, axes = pyplot.subplots(down, 2, figsize=(12, 4.5 * down), squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    for axis, panel in zip(axes.flat, panels, strict=False):
        for results in groups:
            if panel_of(results) != panel:
                continue
            runs = [figure_of(panel[0], result["history"]) for result in results]
            curves = list(zip(*runs, strict=True))
            epochs = range(1, len(curves) + 1)
            row = results[0]["row"]
            means = [statistics.mean(c) for c in curves]
            axis.plot(epochs, means, label=row, color=colors[row])
            lowest, highest = [min(c) for c in curves], [max(c) for c in curves]
            axis.fill_between(epochs, lowest, highest, alpha=0.2, color=colors[row])
        names = {"text": "perplexity", "transformer": "loss, nats"}
        what = names.get(panel[0], "accuracy, %")
        axis.set(
            xlabel="epoch",
            ylabel=f"{what}, unseen data",
            title=f"{panel[0]}, {panel[2]} workers",
        )
        axis.legend()
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(file, dpi=100)


def arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", choices=TASKS)
    parser.add_argument(
        "--rows", nargs="*", metavar="ROW", default=list(ROWS), help="of the table"
    )
    parser.add_argument("--data", metavar="FILE", help="images (npz) or text")
    parser.add_argument("--epochs", type=int, default=24)
    parser.add_argument("--warmup-epochs", type=float, default=2)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--image-size", type=int, choices=(8, 16, 32), default=32)
    parser.add_argument(
        "--blocks", type=int, default=1, help="n of ResNet-(6n + 2), for CIFAR-10"
    )
    parser.add_argument("--limit", type=int, help="use so much of the data only")
    parser.add_argument("--results", type=pathlib.Path, default="parity")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument("--threads", type=int, help="of each run")
    parser.add_argument("--verbose", type=int, default=0, help="as in Model.fit")
    parser.add_argument("--one", type=int, metavar="SEED", help=argparse.SUPPRESS)
    args = parser.parse_args()
    for row in args.rows:
        try:
            settings_of(args, row)
        except (ValueError, SyntaxError) as error:
            parser.error(f"--rows {row}: {error}")
    return args


def main() -> int:
    """Runs and reports; returns the exit status."""
    args = arguments()
    args.results.mkdir(parents=True, exist_ok=True)
    if args.one is not None:
        (row,) = args.rows
        result = train(args, row, args.one)
        if not result.pop("chief"):
            return 0
        file = file_of(args, row, args.one)
        unfinished = file.with_suffix(".tmp")
        unfinished.write_text(json.dumps(result, indent=1))
        unfinished.replace(file)
        return 0
    failed = run_all(args)
    report(args.results)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
