"""Scripts that are drawn: what a Keras user may write, in all its combinations.

A script is a dict of choices (`scripts` draws them), and a text (`drawn_text.source`
writes it), which runs as it stands, plain or on several workers:

    python SCRIPT.py FOLDER
    python scripts/run_local.py -n 2 -- python SCRIPT.py FOLDER
"""

import itertools
import linecache
import sys
import types
from collections.abc import Callable
from random import Random
from typing import Any

import drawn_text as text
from hypothesis import strategies as st

_numbers = itertools.count()


def run_script(
    script: dict[str, Any], folder: str, plain: bool = False
) -> dict[str, Any]:
    """Run a script in this process, which may be a worker; return its figures."""
    import keras

    keras.utils.clear_session()
    # AutoGraph reads the text of what it traces.
    lines, name = text.source(script), f"<drawn {next(_numbers)}>"
    linecache.cache[name] = (len(lines), None, lines.splitlines(True), name)
    module = sys.modules["drawn_script"] = types.ModuleType("drawn_script")
    space = vars(module)
    exec(compile(lines, name, "exec"), space)
    try:
        strategy = None if plain else eval(text.STRATEGIES[script["strategy"]], space)
        return space["train"](strategy, folder)
    finally:
        keras.config.set_dtype_policy("float32")
        keras.config.set_floatx("float32")


# The first of each is the ordinary one.
_CHOICES: dict[str, tuple[Any, ...]] = {
    "workers": (2, 2, 3),
    "strategy": ("dense", "dense", "dense", "dgc", "averaging"),
    "model": tuple(text.MODELS),
    "precision": ("float32", "float32", "float64", "mixed_bfloat16"),
    "data": (
        *("numpy", "dataset", "dataset_dropped", "dataset_unknown"),
        *("pydataset1", "pydataset2", "generator"),
    ),
    "rows": (24, 48, 26, 25, 33),
    "batch": (12, 6, 8),
    "nones": (False, True),
    "shuffle": (False, True),
    "epochs": (2, 3, 1),
    "steps": (0, 0, 2, 3),
    "class_weight": (False, True),
    "sample_weight": (False, False, False, True),
    "initial_epoch": (False, False, False, True),
    "validation": ("", "", "split", "data", "dataset"),
    "loss": tuple(text.LOSSES),
    "compile": (
        *({}, {}, {"steps_per_execution": "2"}, {"steps_per_execution": "3"}),
        {"run_eagerly": "True"},
    ),
}
_EMA = {"use_ema": "True", "ema_momentum": "0.8"}
_OPTIMIZERS: dict[str, tuple[Any, ...]] = {
    "name": ("SGD", "SGD", "SGD", *text.OPTIMIZERS),
    "momentum": ({}, {"momentum": "0.9"}, {"momentum": "0.9", "nesterov": "True"}),
    "clip": (
        *({}, {}, {}, {"clipnorm": "0.05"}, {"global_clipnorm": "0.1"}),
        {"clipvalue": "0.02"},
    ),
    "decay": ({}, {}, {"weight_decay": "0.1"}),
    "more": (
        *({}, {}, {}, _EMA, _EMA | {"ema_overwrite_frequency": "2"}),
        *({"gradient_accumulation_steps": "2"}, {"loss_scale_factor": "8.0"}),
    ),
    "rate": ("", "", "", *text.RATES),
    "loss_scale": (False, False, False, False, False, True),
}
_THEN = ("again", "frozen", "evaluated", "predicted")


@st.composite
def scripts(draw: Any) -> dict[str, Any]:
    """Draw a script that plain Keras runs, which hypothesis makes as short as it can.

    What is drawn depends on hypothesis, and on the modules that are loaded.
    """

    def sample(values: tuple[str, ...], most: int) -> list[str]:
        return list(draw(st.sets(st.sampled_from(values), max_size=most)))

    return _script(lambda values: draw(st.sampled_from(values)), sample)


def numbered(number: int) -> dict[str, Any]:
    """Return one of the scripts that `scripts` may draw, the same for each number."""
    random = Random(number)

    def sample(values: tuple[str, ...], most: int) -> list[str]:
        return random.sample(values, random.randint(0, most))

    return _script(random.choice, sample)


def _script(
    choose: Callable[[tuple[Any, ...]], Any],
    sample: Callable[[tuple[str, ...], int], list[str]],
) -> dict[str, Any]:
    """Choose all of a script: of every other one few things at once."""
    simple = choose((False, True))

    def one(values: tuple[Any, ...]) -> Any:
        return choose(values[:1] * len(values) * simple + values)

    def some(values: Any) -> list[str]:
        return sorted(sample(tuple(sorted(values)), 1 if simple else 3))

    script = {key: one(values) for key, values in _CHOICES.items()}
    script["seed"] = choose(tuple(range(1000)))
    script["callbacks"], script["then"] = some(text.CALLBACKS), some(_THEN)
    chosen = {key: one(values) for key, values in _OPTIMIZERS.items()}
    if script["strategy"] == "averaging":
        chosen["name"] = "SGD"  # the mean of steps is the step of the mean if linear
    if script["strategy"] != "dense":
        chosen["clip"] = {}
    if chosen["name"] != "SGD":
        chosen["momentum"] = {}
    arguments = chosen["momentum"] | chosen["clip"] | chosen["decay"] | chosen["more"]
    script["optimizer"] = {
        "name": chosen["name"],
        "arguments": arguments,
        "rate": chosen["rate"],
        "loss_scale": chosen["loss_scale"],
    }
    _make_sense(script)
    return script


def logs_are_rough(script: dict[str, Any]) -> bool:
    """Say whether logs of losses are means by rows, or workers, of what is not such."""
    rows, batch, workers = script["rows"], script["batch"], script["workers"]
    uneven = any(count % workers for count in (batch, rows % batch))
    evaluates = script["validation"] or "evaluated" in script["then"]
    # Keras does not weigh the losses of outputs by rows where it does not know these.
    by_batch = (*text.OWN_STEPS, "two_heads")
    if script["model"] in by_batch and (uneven or evaluates):
        return True
    return script["model"] == "tokens" or script["loss"] in ("mse_weighted", "mse_sum")


def _make_sense(script: dict[str, Any]) -> None:
    """Take back what Keras itself does not take, or what nobody can compare."""
    model, optimizer = script["model"], script["optimizer"]
    local = script["strategy"] == "averaging"
    if local and model == "tokens":
        model = script["model"] = "embedding"  # each worker's masks divide its own loss
    if local or model == "convolution":
        # Steps of one worker, statistics of a batch.
        script["rows"] = 24 if script["rows"] < 26 else 48
        script["batch"] = 6 if script["batch"] == 6 else 12
        if script["validation"] == "split":
            script["validation"] = "data"
    if model in (*text.SUBCLASSES, "two_heads") or (
        model == "tokens" and script["loss"] not in ("classes", "mse")
    ):
        script["loss"] = "mse"
    if script["loss"] == "mse_weighted":
        script["sample_weight"] = True
        if local or model == "convolution":
            script["loss"] = "mse"
    if local and script["loss"] == "mse_sum":
        script["loss"] = "mse"  # a local step is that of fewer rows
    if model in text.OWN_STEPS and script["precision"] == "mixed_bfloat16":
        # Keras leaves its logs tensors, of which this callback makes no text.
        script["callbacks"] = [n for n in script["callbacks"] if n != "csv"]
    unweighted = script["loss"] != "classes" or model == "tokens"
    if unweighted or script["data"] == "generator":
        script["class_weight"] = False
    if model in (*text.SUBCLASSES, "two_heads", "tokens") or script["class_weight"]:
        script["sample_weight"] = False
    if model in text.SUBCLASSES or script["data"] != "generator":
        script["nones"] = False
    if model in text.OWN_STEPS or model in ("embedding", "tokens"):
        # Keras itself does not scale losses of steps of one's own, or IndexedSlices.
        optimizer["loss_scale"] = False
        optimizer["arguments"].pop("loss_scale_factor", None)
    if model in text.OWN_STEPS:
        script["then"] = [n for n in script["then"] if n != "frozen"]
    if model == "no_targets":
        script["validation"] = ""
        script["then"] = [n for n in script["then"] if n != "evaluated"]
    if model in text.WITHOUT_TARGETS and script["validation"]:
        script["validation"] = "split" if script["data"] == "numpy" else ""
    if script["validation"] == "split" and script["data"] != "numpy":
        script["validation"] = "data"
    if script["data"] == "generator" and not script["steps"]:
        script["steps"] = 2
    if script["data"].startswith("pydataset") or script["data"] == "numpy":
        script["steps"] = 0
    if script["initial_epoch"] or "backup" in script["callbacks"]:
        script["epochs"] = 3
    if "backup" in script["callbacks"]:
        script["initial_epoch"] = False
        if script["data"] == "generator":
            script["callbacks"].remove("backup")
    if optimizer["rate"]:
        unfit = ("plateau", "scheduler")
        script["callbacks"] = [n for n in script["callbacks"] if n not in unfit]
    if model in text.SUBCLASSES:
        saved = ("checkpoint", "best")
        script["callbacks"] = [n for n in script["callbacks"] if n not in saved]
    if {"checkpoint", "best"} & {*script["callbacks"]}:
        script["then"].append("loaded")
    if model in ("embedding", "tokens") and optimizer["name"] != "SGD":
        # Keras squares what several rows give to one word before it adds them up.
        optimizer["name"] = "SGD"
    rough = script["precision"] == "mixed_bfloat16"
    if rough and optimizer["name"] in ("Lion", "Adafactor"):
        optimizer["name"] = "RMSprop"  # rounding decides on signs
    if rough or logs_are_rough(script):  # and on what is best
        unfit = ("best", "stopping", "plateau")
        script["callbacks"] = [n for n in script["callbacks"] if n not in unfit]
        if "checkpoint" not in script["callbacks"]:
            script["then"] = [n for n in script["then"] if n != "loaded"]
    if optimizer["name"] == "Adafactor":
        for name in ("clipnorm", "global_clipnorm", "clipvalue"):
            optimizer["arguments"].pop(name, None)
