"""Any script gives on N workers what it gives in one plain Keras process.

Drawn from `drawn.scripts`: by default those few that hold the most pairs of choices.
`-m slow` draws hundreds, and TF_DGC_DRAWS=5000 so many, other ones with each run.
"""

import concurrent.futures
import csv
import functools
import json
import os
import pathlib
import re
import tempfile
import unittest
import zipfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import drawn
import drawn_text
import h5py
import numpy as np
import pool
import pytest
from absl.testing import parameterized
from hypothesis import HealthCheck, given, settings

FEW, MORE = 5, 20
_SOURCE = 600  # draws of which the few are taken
# Of values that are around one. Products of bfloat16 are rounded before they are summed
# over workers.
_TOLERANCE = {"float32": 1e-4, "float64": 1e-7, "mixed_bfloat16": 4e-2}

pytestmark = [pytest.mark.processes, pytest.mark.timeout(1500)]


class Refusal(NamedTuple):
    """What the product may refuse, by a ValueError before the first step, and why."""

    reason: str
    applies: Callable[[dict[str, Any]], bool]
    message: str  # regular expression


REFUSALS = (
    Refusal(
        "a sparse gradient leads an optimizer astray that looks at whole tensors",
        lambda script: (
            script["strategy"] == "dgc" and script["optimizer"]["name"] == "Adafactor"
        ),
        "works element by element",
    ),
)


def run_all(script: dict[str, Any], folder: str, plain: bool) -> dict[str, Any]:
    """Run a script in a worker of the pool; return its figures, or its refusal."""
    try:
        return drawn.run_script(script, folder, plain)
    except ValueError as error:
        return {"refused": f"{type(error).__name__}: {error}"}


_alone = concurrent.futures.ThreadPoolExecutor(1)


def compared(script: dict[str, Any]) -> None:
    """Run a script plain and on its workers, and compare all there is.

    Raises:
        AssertionError: something differs; with the whole script.
    """
    try:
        with tempfile.TemporaryDirectory() as plain, tempfile.TemporaryDirectory() as n:
            call = functools.partial(pool.run, timeout=150, script=script)
            here = "test_drawn", "run_all"
            # Both at the same time.
            alone = _alone.submit(call, "local", 1, *here, folder=plain, plain=True)
            several = functools.partial(call, "collective", script["workers"], *here)
            try:
                found = several(folder=n, plain=False)
            finally:
                expected = alone.result()[0]  # its errors come first
            _compare_workers(script, found)
            if "refused" not in found[0]:
                _compare(script, expected, found[0])
                _compare_files(script, pathlib.Path(plain), pathlib.Path(n))
    except (AssertionError, pool.WorkerError) as error:
        raise AssertionError(f"{error}\n\n{reproduced(script)}") from error


def reproduced(script: dict[str, Any]) -> str:
    """Write what is wrong as a script that stands alone."""
    return f"# {json.dumps(script)}\n{drawn_text.source(script)}"


def _compare_workers(script: dict[str, Any], found: list[dict[str, Any]]) -> None:
    """Compare what the workers tell of the same script, or say that they refuse it."""
    if "refused" in found[0]:
        said = [each.get("refused", "") for each in found]
        for refusal in REFUSALS:
            if refusal.applies(script) and all(
                re.search(refusal.message, each) for each in said
            ):
                return
        raise AssertionError(f"refused: {said}")
    for rank, each in enumerate(found[1:], 1):
        for key in each.keys() - {"slots"}:
            # As text: NaN is not equal to itself.
            if json.dumps(each[key]) != json.dumps(found[0][key]):
                raise AssertionError(
                    f"{key} differs between rank 0 and {rank}: "
                    f"{found[0][key]}, {each[key]}"
                )


def _compare(
    script: dict[str, Any], alone: dict[str, Any], found: dict[str, Any]
) -> None:
    if "refused" in alone:
        raise AssertionError(f"Keras alone: {alone['refused']}")
    if _keeps_else(script):
        alone, found = ({**each, "slots": []} for each in (alone, found))
    if _counts_else(script):
        alone, found = ({**each, "steps": []} for each in (alone, found))
    for key in ("epochs", "steps", "history", *sorted(alone)):
        expected, value = (_comparable(script, each[key]) for each in (alone, found))
        _assert_near(key, value, expected, _TOLERANCE[script["precision"]])


def _comparable(script: dict[str, Any], logs: Any) -> Any:
    """Leave out of logs what differs by design: see docs/how-to/input.md."""
    if isinstance(logs, dict) and drawn.logs_are_rough(script):
        return {
            key: value for key, value in logs.items() if not re.search("loss|own", key)
        }
    return logs


def _keeps_else(script: dict[str, Any]) -> bool:
    """Say whether an optimizer keeps something else than that of one process."""
    sums_its_own = "gradient_accumulation_steps" in script["optimizer"]["arguments"]
    return script["strategy"] != "dense" or sums_its_own or _counts_else(script)


def _counts_else(script: dict[str, Any]) -> bool:
    """Say whether Keras alone may count a step more at the end of data."""
    return bool(script["data"] == "dataset_unknown")


def _assert_near(name: str, found: Any, expected: Any, tolerance: float) -> None:
    if isinstance(expected, dict):
        if found.keys() != expected.keys():
            raise AssertionError(f"{name}: {[*found]} instead of {[*expected]}")
        for key, value in expected.items():
            _assert_near(f"{name} {key}", found[key], value, tolerance)
    elif isinstance(expected, list):
        if len(found) != len(expected):
            raise AssertionError(f"{name}: {found} instead of {expected}")
        for i, (one, two) in enumerate(zip(found, expected, strict=True)):
            _assert_near(f"{name} {i}", one, two, tolerance)
    elif isinstance(expected, str):
        if found != expected:
            raise AssertionError(f"{name}: {found} instead of {expected}")
    elif not np.isclose(found, expected, tolerance, tolerance, equal_nan=False):
        raise AssertionError(f"{name}: {found} instead of {expected}")


def _compare_files(
    script: dict[str, Any], alone: pathlib.Path, found: pathlib.Path
) -> None:
    names = [
        sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
        for folder in (alone, found)
    ]
    if names[0] != names[1]:
        raise AssertionError(f"files: {names[1]} instead of {names[0]}")
    for name in names[0]:
        expected, there = (dict(_contents(folder / name)) for folder in (alone, found))
        if _keeps_else(script):
            expected, there = (
                {k: v for k, v in each.items() if not k.startswith("optimizer")}
                for each in (expected, there)
            )
        expected, there = (
            {key: _comparable(script, value) for key, value in each.items()}
            for each in (expected, there)
        )
        _assert_near(name, there, expected, _TOLERANCE[script["precision"]])


def _contents(path: pathlib.Path) -> Iterator[tuple[str, Any]]:
    """Read the rows or arrays of a file, by name."""
    if path.suffix == ".csv":
        with path.open(newline="") as lines:
            for i, row in enumerate(csv.DictReader(lines)):
                yield str(i), {key: _number(value) for key, value in row.items()}
    elif path.suffix == ".keras":
        with zipfile.ZipFile(path) as archive:
            yield "members", sorted(archive.namelist())
            with archive.open("model.weights.h5") as file, h5py.File(file) as h5:
                yield from _arrays(h5)
    elif path.suffix == ".h5":
        with h5py.File(path) as h5:
            yield from _arrays(h5)


def _number(text: str) -> float | str:
    return text if text == "NA" else float(text)


def _arrays(h5: Any) -> Iterable[tuple[str, Any]]:
    found: dict[str, Any] = {}
    h5.visititems(
        lambda name, item: (
            found.update({name: np.asarray(item, float).tolist()})
            if isinstance(item, h5py.Dataset)
            else None
        )
    )
    return found.items()


def pairs(script: dict[str, Any]) -> set[tuple[str, str]]:
    """Return all pairs of choices that a script holds."""
    chosen = []
    for key, value in script.items():
        parts = value.items() if isinstance(value, dict) else [("", value)]
        for name, part in parts:
            several = part if isinstance(part, list | dict) else [part]
            chosen += [f"{key} {name} {each}" for each in several]
    chosen = [each for each in chosen if not each.startswith("seed")]
    return {(a, b) for a in chosen for b in chosen if a < b}


def few(count: int) -> list[dict[str, Any]]:
    """Return those draws that together hold the most pairs of choices."""
    rest = [(script, pairs(script)) for script in map(drawn.numbered, range(_SOURCE))]
    taken: list[dict[str, Any]] = []
    seen: set[tuple[str, str]] = set()
    while len(taken) < count:
        best = max(rest, key=lambda each: len(each[1] - seen))
        rest.remove(best)
        taken.append(best[0])
        seen |= best[1]
    return taken


def named(begin: int, end: int) -> Any:
    """Test each of these draws."""
    chosen = list(enumerate(few(end)))[begin:]
    return parameterized.named_parameters(
        (f"{i}_{s['model']}_{s['data']}_{s['strategy']}", s) for i, s in chosen
    )


class DrawnScriptTest(parameterized.TestCase, unittest.TestCase):
    @named(0, FEW)
    @pytest.mark.few(1, 2)
    def test_n_workers_give_what_one_process_gives(
        self, script: dict[str, Any]
    ) -> None:
        compared(script)

    @named(FEW, MORE)
    @pytest.mark.slow
    def test_so_they_do_with_other_choices(self, script: dict[str, Any]) -> None:
        compared(script)

    @named(MORE, 2 * MORE)
    @pytest.mark.slow
    def test_so_they_do_with_more_scripts(self, script: dict[str, Any]) -> None:
        compared(script)


@pytest.mark.slow
@pytest.mark.timeout(100_000)
class ManyDrawnScriptsTest(unittest.TestCase):
    def test_n_workers_give_what_one_process_gives(self) -> None:
        number = os.environ.get("TF_DGC_DRAWS")
        settings(
            max_examples=int(number or 300),
            derandomize=not number,
            deadline=None,
            database=None,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        )(given(drawn.scripts())(compared))()
