"""The text of a script that was drawn (see `drawn.py`): choices become lines."""

import textwrap
from collections.abc import Iterator
from typing import Any

STRATEGIES = {
    "dense": "tf_dgc.DenseStrategy()",
    "dgc": "tf_dgc.DGCStrategy(tf_dgc.DGCConfig(sparsity=0.0, min_elements=1))",
    "averaging": "tf_dgc.ParameterAveragingStrategy(\n    tf_dgc.AveragingConfig("
    "period=1, average_slots=True)\n)",
}

# Models: what stands before `train`, what makes `model`, and the data `x` and `y`.
_ROWS = "random.normal(size=({rows}, 6)).astype(floatx)"
_DENSE = """\
layers = keras.layers
model = keras.Sequential(
    [keras.Input((6,)), layers.Dense(8, activation="tanh"), layers.Dense({units})]
)
"""
MODELS = {
    "dense": _DENSE,
    "regularized": _DENSE.replace(
        'activation="tanh"', 'activation="tanh", kernel_regularizer="l2"'
    ),
    "embedding": """\
layers = keras.layers
model = keras.Sequential(
    [
        keras.Input((5,), dtype="int32"),
        layers.Embedding(10, 4, mask_zero=True),
        layers.LSTM(4),
        layers.Dense({units}),
    ]
)
""",
    "tokens": """\
layers = keras.layers
model = keras.Sequential(
    [
        keras.Input((5,), dtype="int32"),
        layers.Embedding(10, 4, mask_zero=True),
        layers.Dense({units}),
    ]
)
""",
    "convolution": """\
layers = keras.layers
model = keras.Sequential(
    [
        keras.Input((6, 6, 1)),
        layers.Conv2D(4, 3, use_bias=False),
        layers.BatchNormalization(synchronized=True, momentum=0.8, epsilon=0.1),
        layers.ReLU(),
        layers.GlobalAveragePooling2D(),
        layers.Dense({units}),
    ]
)
""",
    "recurrent": """\
layers = keras.layers
model = keras.Sequential(
    [keras.Input((4, 3)), layers.GRU(5), layers.Dense({units})]
)
""",
    "two_heads": """\
layers = keras.layers
inputs = {{
    "left": keras.Input((3,), name="left"), "right": keras.Input((3,), name="right")
}}
joined = layers.Concatenate()([inputs["left"], inputs["right"]])
outputs = {{
    "sum": layers.Dense(1, name="sum")(layers.Dense(4, activation="tanh")(joined)),
    "last": layers.Dense(1, name="last")(joined),
}}
model = keras.Model(inputs, outputs)
""",
    "own_step": "model = OwnStep()\nmodel.build((None, 6))\n",
    "own_step_unscaled": "model = OwnStep()\nmodel.build((None, 6))\n",
    "two_optimizers": "model = Adversaries()\nmodel.build((None, 6))\n",
    "no_targets": "model = Auto()\nmodel.build((None, 6))\n",
    "added_loss": "model = Auto()\nmodel.build((None, 6))\n",
}
_OWN_STEP = '''

class OwnStep(keras.Model):
    """As in the guides: a step of one's own, whose logs have names of their own."""

    def __init__(self):
        super().__init__()
        self.hidden = keras.layers.Dense(8, activation="tanh")
        self.last = keras.layers.Dense(1)
        self.tracker = keras.metrics.Mean(name="total_loss")

    def build(self, shape):
        self.hidden.build(shape)
        self.last.build((None, 8))
        self.built = True

    @property
    def metrics(self):
        return [self.tracker]

    def call(self, x):
        return self.last(self.hidden(x))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            difference = self(x, training=True) - tf.cast(y, self.compute_dtype)
            loss = tf.reduce_mean(difference**2)
            scaled = loss{scale}
        variables = self.trainable_variables
        gradients = tape.gradient(scaled, variables)
        self.optimizer.apply_gradients(zip(gradients, variables))
        self.tracker.update_state(loss)
        return {{"loss": self.tracker.result(), "own": loss}}

    def test_step(self, data):
        x, y = data
        difference = self(x) - tf.cast(y, self.compute_dtype)
        return {{"loss": tf.reduce_mean(difference**2)}}
'''
_WORKERS = " / tf.distribute.get_strategy().num_replicas_in_sync"
_TWO_OPTIMIZERS = '''

class Adversaries(keras.Model):
    """Two networks, each with an optimizer of its own."""

    def __init__(self):
        super().__init__()
        self.encoder, self.critic = keras.layers.Dense(5), keras.layers.Dense(1)
        self.tracker = keras.metrics.Mean(name="loss")

    def build(self, shape):
        self.encoder.build(shape)
        self.critic.build((None, 5))
        self.built = True

    def compile(self, first, second, **arguments):
        super().compile(**arguments)
        self.first, self.second = first, second
        self.first.build(self.encoder.trainable_variables)
        self.second.build(self.critic.trainable_variables)

    def call(self, x):
        return self.critic(self.encoder(x))

    def train_step(self, data):
        x, y = data
        workers = tf.distribute.get_strategy().num_replicas_in_sync
        with tf.GradientTape(persistent=True) as tape:
            difference = self(x) - tf.cast(y, self.compute_dtype)
            loss = tf.reduce_mean(difference**2)
            scaled = loss / workers
        for optimizer, layer in (
            (self.first, self.encoder), (self.second, self.critic)
        ):
            variables = layer.trainable_variables
            gradients = tape.gradient(scaled, variables)
            optimizer.apply_gradients(zip(gradients, variables))
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}

    def test_step(self, data):
        x, y = data
        difference = self(x) - tf.cast(y, self.compute_dtype)
        self.tracker.update_state(tf.reduce_mean(difference**2))
        return {"loss": self.tracker.result()}
'''
_AUTO = '''

class Auto(keras.Model):
    """Learns its inputs."""

    def __init__(self):
        super().__init__()
        self.code, self.decoded = keras.layers.Dense(3), keras.layers.Dense(6)

    def build(self, shape):
        self.code.build(shape)
        self.decoded.build((None, 3))
        self.built = True

    def call(self, x):
        y = self.decoded(self.code(x))
'''
_NO_TARGETS = """        return y

    def train_step(self, data):
        x = data[0] if isinstance(data, tuple) else data
        with tf.GradientTape() as tape:
            y = self(x, training=True)
            loss = tf.reduce_mean((y - tf.cast(x, y.dtype)) ** 2)
            scaled = loss / tf.distribute.get_strategy().num_replicas_in_sync
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(scaled, variables), variables)
        return {"loss": loss}
"""
_ADDED_LOSS = """        self.add_loss(tf.reduce_mean((y - x) ** 2))
        return y
"""
_BEFORE = {
    "own_step": _OWN_STEP.format(scale=_WORKERS),
    "own_step_unscaled": _OWN_STEP.format(scale=""),
    "two_optimizers": _TWO_OPTIMIZERS,
    "no_targets": _AUTO + _NO_TARGETS,
    "added_loss": _AUTO + _ADDED_LOSS,
}
_INPUTS = {
    "embedding": (
        "x = random.integers(1, 10, size=({rows}, 5))\n"
        "x[np.arange(5) >= random.integers(1, 6, size=({rows}, 1))] = 0  # padding\n"
    ),
    "convolution": "x = random.normal(size=({rows}, 6, 6, 1)).astype(floatx)\n",
    "recurrent": "x = random.normal(size=({rows}, 4, 3)).astype(floatx)\n",
}
_INPUTS["tokens"] = _INPUTS["embedding"]
WITHOUT_TARGETS = ("no_targets", "added_loss")
OWN_STEPS = ("own_step", "own_step_unscaled", "two_optimizers", "no_targets")
SUBCLASSES = (*OWN_STEPS, "added_loss")

# Settings of an optimizer of each kind: its rate, and what else is given always, so
# that rounding errors of next to no gradient do not become steps.
OPTIMIZERS = {
    "SGD": (0.1, {}),
    "Adam": (0.02, {"epsilon": 1e-3}),
    "AdamW": (0.02, {"epsilon": 1e-3}),
    "RMSprop": (0.01, {"epsilon": 1e-3}),
    "Adagrad": (0.1, {"epsilon": 1e-3}),
    "Lion": (0.01, {}),
    "Adafactor": (0.05, {}),
}
RATES = {
    "exponential": "keras.optimizers.schedules.ExponentialDecay({rate}, 2, 0.7)",
    "cosine": "keras.optimizers.schedules.CosineDecay({rate}, 6, alpha=0.1)",
}
LOSSES = {
    "mse": '"mse"',
    "huber": '"huber"',
    "mse_sum": 'keras.losses.MeanSquaredError(reduction="sum")',
    "mse_weighted": (
        'keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")'
    ),
    "classes": "keras.losses.SparseCategoricalCrossentropy(from_logits=True)",
}
CALLBACKS = {
    "stopping": (
        'keras.callbacks.EarlyStopping("{monitor}", patience=1, '
        "restore_best_weights=True)"
    ),
    "stopping_at_once": 'keras.callbacks.EarlyStopping("{monitor}", min_delta=9.0)',
    "plateau": (
        'keras.callbacks.ReduceLROnPlateau("{monitor}", patience=0, min_delta=0.2)'
    ),
    "scheduler": "keras.callbacks.LearningRateScheduler(lambda e, rate: rate * 0.5)",
    "csv": 'keras.callbacks.CSVLogger(f"{{folder}}/log.csv")',
    "checkpoint": 'keras.callbacks.ModelCheckpoint(f"{{folder}}/model.keras")',
    "best": (
        'keras.callbacks.ModelCheckpoint(\n    f"{{folder}}/best.keras", '
        'monitor="{monitor}", save_best_only=True\n)'
    ),
    "weights": (
        "keras.callbacks.ModelCheckpoint(\n"
        '    f"{{folder}}/{{{{epoch}}}}.weights.h5", save_weights_only=True\n)'
    ),
    "backup": 'keras.callbacks.BackupAndRestore(f"{{folder}}/backup")',
}
_KILLED = '''

class Killed(keras.callbacks.Callback):
    """Ends a training, as if it were killed."""

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1:
            raise KeyboardInterrupt
'''
_ROWS_OF = '''

def rows_of(part, rows):
    """Return some rows of an array, or of all arrays of a dict."""
    return keras.tree.map_structure(lambda array: array[rows], part)
'''
_PY_DATASET = '''

class Batches(keras.utils.PyDataset):
    """Rows in batches, as a folder of files gives them."""

    def __init__(self, parts, batch, **arguments):
        super().__init__(**arguments)
        self.parts, self.batch = parts, batch

    def __len__(self):
        return -(-{rows} // self.batch)

    def __getitem__(self, i):
        parts, rows = self.parts, slice(i * self.batch, (i + 1) * self.batch)
        return {item}
'''
_GENERATOR = '''

def batches(parts, batch):
    """Yield the batches of epochs without end."""
    while True:
        for start in range(0, {rows}, batch):
            rows = slice(start, start + batch)
            yield {item}
'''
_HEAD = '''\
"""{title}

python SCRIPT.py FOLDER                                             # plain Keras
python scripts/run_local.py -n {workers} -- python SCRIPT.py FOLDER   # {strategy}
"""

import contextlib
import os
import sys

import keras
import numpy as np
import tensorflow as tf

import tf_dgc
'''
_START = '''

def train(strategy, folder):
    """Return what is the same on one worker and on several."""
    keras.utils.set_random_seed({seed})
    scope = contextlib.nullcontext if strategy is None else strategy.scope
    floatx = "{floatx}"
    keras.config.set_floatx(floatx)
    keras.config.set_dtype_policy("{precision}")
    random = np.random.default_rng({seed})
'''
_END = '''
    optimizers = {optimizers}
    return found | {{
        "history": {{
            key: [float(each) for each in logs] for key, logs in history.history.items()
        }},
        "epochs": history.epoch,
        "rates": [float(each.learning_rate) for each in optimizers],
        "steps": [int(each.iterations) for each in optimizers],
        "slots": [
            v.numpy().tolist() for each in optimizers for v in each.variables
        ],
        "weights": [w.tolist() for w in model.get_weights()],
    }}


def main():
    """Train, and print what came of it."""
    strategy = None
    if "TF_CONFIG" in os.environ:
        strategy = {strategy}
    print(train(strategy, sys.argv[1]))


if __name__ == "__main__":
    main()
'''


def _keywords(arguments: dict[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in arguments.items())


def _item(script: dict[str, Any]) -> str:
    """Write the batch of a generator or PyDataset: rows of every part."""
    if script["model"] in WITHOUT_TARGETS:
        return "(rows_of(parts[0], rows),)"
    pieces = [f"rows_of(parts[{i}], rows)" for i in range(2)]
    if script["sample_weight"]:
        pieces.append("rows_of(parts[2], rows)")
    elif script["nones"]:  # which Keras does not take from a PyDataset
        pieces.append("None")
    return "(" + ", ".join(pieces) + ")"


def _data(script: dict[str, Any]) -> str:
    """Write the lines that make `x`, `y`, `w` and `parts`."""
    rows, model = script["rows"], script["model"]
    text = _INPUTS.get(model, f"x = {_ROWS}\n").format(rows=rows)
    if model in WITHOUT_TARGETS:
        return text + "parts = (x,)\n"
    flat = "x" if model == "tokens" else f"x.reshape({rows}, -1)"
    if script["loss"] == "classes":
        target = f"{flat}.astype(int) % 3"
        if model != "tokens":
            target = f"abs({flat}.sum(axis=1)).astype(int) % 3"
    elif model == "tokens":
        target = "(x[..., None] / 10).astype(floatx)"
    else:
        target = f"np.tanh({flat}.mean(axis=1, keepdims=True)).astype(floatx)"
    text += f"y = {target}\n"
    if model == "two_heads":
        text += 'y = {"sum": y, "last": x[:, 5:]}\n'
        text += 'x = {"left": x[:, :3], "right": x[:, 3:]}\n'
    if script["sample_weight"]:
        text += f"w = np.linspace(0.5, 2.0, {rows}).astype(floatx)\n"
        return text + "parts = (x, y, w)\n"
    return text + "parts = (x, y)\n"


def _optimizer(script: dict[str, Any]) -> str:
    chosen = script["optimizer"]
    rate, always = OPTIMIZERS[chosen["name"]]
    rate *= 0.1 if script["loss"] == "mse_sum" else 1.0
    schedule = RATES.get(chosen["rate"], "{rate}").format(rate=rate)
    others = _keywords(always | chosen["arguments"])
    text = f"keras.optimizers.{chosen['name']}({schedule}, {others})"
    if chosen["loss_scale"]:
        text = f"keras.optimizers.LossScaleOptimizer({text}, initial_scale=1024.0)"
    return text.replace(", )", ")")


def _compile(script: dict[str, Any]) -> str:
    """Write the arguments of `compile`."""
    model, optimizer = script["model"], _optimizer(script)
    arguments = []
    if model == "two_optimizers":
        arguments += [optimizer, "keras.optimizers.SGD(0.05)"]
    elif model in SUBCLASSES:
        arguments += [optimizer]
    elif model == "two_heads":
        arguments += [optimizer, '{"sum": "mse", "last": "mae"}']
    else:
        arguments += [optimizer, LOSSES[script["loss"]]]
        metric = "accuracy" if script["loss"] == "classes" else "mae"
        name = "weighted_metrics" if script["sample_weight"] else "metrics"
        arguments += [f'{name}=["{metric}"]']
    arguments += [f"{name}={value}" for name, value in script["compile"].items()]
    return ",\n".join(arguments)


def _source_of_data(script: dict[str, Any]) -> tuple[str, dict[str, str]]:
    """Return the first arguments of `fit` as text, and those that belong to them."""
    batch, form, fit = script["batch"], script["data"], {}
    if form == "numpy":
        names = ["x"] if script["model"] in WITHOUT_TARGETS else ["x", "y"]
        if script["sample_weight"]:
            fit["sample_weight"] = "w"
        return ", ".join(names), fit | {"batch_size": str(batch)}
    if form.startswith("pydataset"):
        return f"Batches(parts, {batch}, workers={form[-1]})", fit
    if form == "generator":
        return f"batches(parts, {batch})", fit
    # A dataset of x alone has tensors as elements, not tuples.
    taken = "x" if script["model"] in WITHOUT_TARGETS else "parts"
    text = f"tf.data.Dataset.from_tensor_slices({taken})"
    if script["shuffle"]:
        # Under a strategy Keras begins to read once more than without, to build.
        text += f".shuffle(64, seed={script['seed']}, reshuffle_each_iteration=False)"
    dropped = ", drop_remainder=True" if form == "dataset_dropped" else ""
    text += f".batch({batch}{dropped})"
    if form == "dataset_unknown":
        text += ".filter(lambda *parts: True)"
    if script["steps"]:
        text += ".repeat()"
    return text, fit


def _fit(script: dict[str, Any]) -> dict[str, str]:
    """Return the arguments of `fit` beside the data."""
    fit = {"epochs": str(script["epochs"]), "verbose": "0"}
    if script["data"] != "numpy" or not script["shuffle"]:
        fit["shuffle"] = "False"
    if script["steps"]:
        fit["steps_per_epoch"] = str(script["steps"])
    if script["class_weight"]:
        fit["class_weight"] = "{0: 0.5, 1: 1.0, 2: 2.0}"
    if script["initial_epoch"]:
        fit["initial_epoch"] = "1"
    if script["validation"] == "split":
        fit["validation_split"] = "0.25"
    if script["validation"] == "data":
        fit["validation_data"] = "parts if len(parts) > 1 else x"
        fit["validation_batch_size"] = "9"
    if script["validation"] == "dataset":
        fit["validation_data"] = "tf.data.Dataset.from_tensor_slices(parts).batch(9)"
    return fit


def _callbacks(script: dict[str, Any], *extra: str) -> str:
    monitor = "val_loss" if script["validation"] else "loss"
    used = [CALLBACKS[n].format(monitor=monitor) for n in script["callbacks"]]
    return "[\n" + textwrap.indent(",\n".join([*used, *extra]), "    ") + "\n]"


def _calls(script: dict[str, Any]) -> Iterator[str]:
    """Write what comes after `compile`."""
    source, own = _source_of_data(script)
    fit = own | _fit(script)
    used = {"callbacks": _callbacks(script)} if script["callbacks"] else {}
    if "backup" in script["callbacks"]:
        killed = {"callbacks": _callbacks(script, "Killed()")}
        yield "try:"
        yield f"    model.fit({source}, {_keywords(fit | killed)})"
        yield "except KeyboardInterrupt:"
        yield "    pass"
    yield f"history = model.fit({source}, {_keywords(fit | used)})"
    yield "found = {}"
    if "frozen" in script["then"]:
        yield "model.layers[0].trainable = False"
        yield "with scope():"
        yield textwrap.indent(f"model.compile({_compile(script)})", "    ")
    if {"again", "frozen"} & {*script["then"]}:
        again = _keywords(fit | {"epochs": f"{script['epochs'] + 1}"})
        yield f"history = model.fit({source}, {again})"
    if "evaluated" in script["then"]:
        target = "" if script["model"] in WITHOUT_TARGETS else "y, "
        yield 'found["evaluated"] = keras.tree.map_structure('
        # A step of one's own gives tensors where Keras runs it eagerly.
        yield "    float,"
        yield "    model.evaluate("
        yield f"        x, {target}batch_size=7, verbose=0, return_dict=True"
        yield "    ),"
        yield ")"
    if "predicted" in script["then"]:
        yield "predicted = model.predict(x, batch_size=7, verbose=0)"
        yield 'found["predicted"] = keras.tree.map_structure('
        yield "    lambda part: np.array("
        yield "        keras.ops.convert_to_numpy(part), float"
        yield "    ).tolist(),"
        yield "    predicted,"
        yield ")"
    if "loaded" in script["then"]:
        name = "best" if "best" in script["callbacks"] else "model"
        yield f'loaded = keras.models.load_model(f"{{folder}}/{name}.keras")'
        yield 'found["loaded"] = [w.tolist() for w in loaded.get_weights()]'


def source(script: dict[str, Any], title: str = "Drawn.") -> str:
    """Write a script whose `train(strategy, folder)` returns what may be compared."""
    model = script["model"]
    floatx = "float64" if script["precision"] == "float64" else "float32"
    parts = [_HEAD.format(title=title, **script), _BEFORE.get(model, "")]
    if script["data"].startswith("pydataset"):
        made = _ROWS_OF + _PY_DATASET
        parts.append(made.format(item=_item(script), rows=script["rows"]))
    if script["data"] == "generator":
        made = _ROWS_OF + _GENERATOR
        parts.append(made.format(item=_item(script), rows=script["rows"]))
    if "backup" in script["callbacks"]:
        parts.append(_KILLED)
    units = 3 if script["loss"] == "classes" else 1
    made = MODELS[model].format(units=units)
    made += f"model.compile(\n{textwrap.indent(_compile(script), '    ')},\n)\n"
    parts.append(_START.format(floatx=floatx, **script))
    body = _data(script) + "with scope():\n" + textwrap.indent(made, "    ")
    body += "\n".join(_calls(script))
    parts.append(textwrap.indent(body, "    "))
    used = (
        "[model.first, model.second]"
        if model == "two_optimizers"
        else "[getattr(model.optimizer, 'inner_optimizer', model.optimizer)]"
    )
    made_by = textwrap.indent(STRATEGIES[script["strategy"]], " " * 8).strip()
    parts.append(_END.format(optimizers=used, strategy=made_by))
    return "".join(parts)
