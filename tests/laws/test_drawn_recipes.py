"""Drawn recipes give on N workers what one process gives, or are named.

Few hold each choice of each table once: the first by default. `-m slow` draws more, and
TF_DGC_RECIPES=1000-1200 those of these seeds. What fails prints its script, which runs
as it stands, with its choices and its seed.
"""

import contextlib
import linecache
import logging
import os
import pathlib
import random
import re
import sys
import tempfile
import types
import unittest
import warnings
from collections.abc import Iterator
from typing import Any

import drawn_recipes as recipes
import numpy as np
import pool
import pytest
import serving
from absl.testing import parameterized

_SOURCE = 400  # draws of which the few are taken
FEW, MORE = 3, 9
SERVED = pathlib.Path(__file__).parents[1] / "jobs" / "served_recipes.py"
_OF_STEPS = re.compile("A loss.* made of something else.*|(?:A|The) training step .*")
_TOLERANCE = 2e-4  # of values that are around one
MANY = 40

pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]


def run(
    recipe: dict[str, Any], folder: str, plain: bool = False, strategy: Any = None
) -> dict[str, Any]:
    """Run a recipe in this process, which may be a worker; tell what it gives."""
    import keras
    import tensorflow as tf

    # As in a process that has just begun: nothing has a seed.
    random.seed()
    np.random.seed()
    tf.random.set_seed(None)
    keras.utils.clear_session()
    # AutoGraph reads the text of what it traces.
    lines, name = recipes.source(recipe), f"<recipe {recipe['seed']} {plain}>"
    linecache.cache[name] = (len(lines), None, lines.splitlines(True), name)
    module = sys.modules["drawn_recipe"] = types.ModuleType("drawn_recipe")
    space = vars(module)
    found: dict[str, Any] = {}
    said: list[str] = []
    with _heard(said):
        exec(compile(lines, name, "exec"), space)
        try:
            if not plain and strategy is None:
                strategy = eval(recipes.choices(recipe)[0].text, space)
            found = space["train"](strategy, folder)
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
            found["error"] = said[-1][:2000]
        finally:
            if tf.distribute.has_strategy():
                tf.distribute.experimental_set_strategy(None)
    return found | {"said": said}


@contextlib.contextmanager
def _heard(said: list[str]) -> Iterator[None]:
    """Hear what is said by warnings, and by the product."""

    class Hears(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    hears = Hears(logging.WARNING)
    logger = logging.getLogger("tf_dgc")
    logger.addHandler(hears)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            yield
    finally:
        logger.removeHandler(hears)
        told = [str(each.message) for each in caught]
        said += [each for each in told if "__array__" not in each]


def compared(recipe: dict[str, Any], workers: int = 2) -> None:
    """Run a recipe plain and on its workers, and compare all there is.

    Raises:
        AssertionError: something differs, and nothing says so; with the script.
    """
    with _folders(workers) as plain, _folders(workers) as several:
        here, options = ("test_drawn_recipes", "run"), {"recipe": recipe}
        kind = (
            ("local", 1) if recipe["mode"] == "simulated" else ("collective", workers)
        )
        try:
            alone = _alone(recipe, plain)
            found = pool.run(*kind, *here, folder=several, timeout=200, **options)
            check(recipe, alone, found)
        except (AssertionError, pool.WorkerError) as error:
            raise AssertionError(f"{error}\n\n{recipes.source(recipe)}") from error


@contextlib.contextmanager
def _folders(workers: int) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(workers):
            pathlib.Path(folder, str(rank)).mkdir()
        yield folder


def _alone(recipe: dict[str, Any], folder: str) -> dict[str, Any]:
    here, options = ("test_drawn_recipes", "run"), {"recipe": recipe, "plain": True}
    (alone,) = pool.run("local", 1, *here, folder=folder, timeout=100, **options)
    return alone


def served(drawn: list[dict[str, Any]]) -> None:
    """Run recipes plain, and on two workers of synchronous servers; compare.

    Raises:
        AssertionError: something differs, and nothing says so; with the script.
    """
    with _folders(1) as folder, serving.Job(2, 1, SERVED) as job:
        results = job.run("train", recipes=drawn, folder=folder)
        for i, recipe in enumerate(drawn):
            found = [each["found"][i] for each in results]
            with _folders(1) as plain:
                try:
                    check(recipe, _alone(recipe, plain), found)
                except AssertionError as error:
                    text = f"{error}\n\n{recipes.source(recipe)}"
                    raise AssertionError(text) from error


def check(
    recipe: dict[str, Any], alone: dict[str, Any], found: list[dict[str, Any]]
) -> None:
    """Compare what workers give with what one process gives.

    Raises:
        AssertionError: they differ, and nothing that is said names why.
    """
    if "error" in alone:
        raise AssertionError(f"one process: {alone['error']}")
    said = "\n".join({text: None for each in found for text in each.pop("said")})
    named = "|".join(each.named for each in recipes.choices(recipe) if each.named)
    try:
        _compare(recipe, alone, found)
        if not named and (false := _OF_STEPS.search(said)):
            raise AssertionError(f"nothing differs, and it is named: {false[0]}")
    except AssertionError as error:
        if not named or not re.search(named, said):
            raise AssertionError(f"{error}\nIt said: {said[-3000:]}") from None


def _compare(
    recipe: dict[str, Any], alone: dict[str, Any], found: list[dict[str, Any]]
) -> None:
    if errors := [each["error"] for each in found if "error" in each]:
        raise AssertionError("\n".join(errors))
    loose = {each.loose for each in recipes.choices(recipe)}
    for rank, each in enumerate(found[1:], 1):
        keys = each.keys() - {"history"}  # within an epoch logs are a worker's own
        one, two = ({k: f[k] for k in keys} for f in (found[0], each))
        _assert_near(f"rank {rank}", two, one)
    if "all" in loose:
        return
    if "order" in loose:
        alone, found = (_of_any_order(each) for each in (alone, found[0]))
    else:
        found = found[0]
    left_out = {"said"} | ({"history"} if "logs" in loose else set())
    if recipe["data"] in recipes.OF_UNKNOWN_SIZE:
        left_out.add("steps")
    one, several = (
        {k: v for k, v in each.items() if k not in left_out} for each in (alone, found)
    )
    _assert_near("", several, one)


def _of_any_order(found: dict[str, Any]) -> dict[str, Any]:
    """Return what does not depend on the order of rows."""
    history = [
        {key: fit[key] for key in ("seen", "squares")} for fit in found["history"]
    ]
    return {"history": history, "steps": found["steps"]}


def _assert_near(name: str, found: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        if found.keys() != expected.keys():
            raise AssertionError(f"{name}: {[*found]} instead of {[*expected]}")
        for key, value in expected.items():
            _assert_near(f"{name} {key}", found[key], value)
    elif isinstance(expected, list):
        if len(found) != len(expected):
            raise AssertionError(f"{name}: {len(found)} instead of {len(expected)}")
        for i, (one, two) in enumerate(zip(found, expected, strict=True)):
            _assert_near(f"{name} {i}", one, two)
    elif not np.isclose(found, expected, _TOLERANCE, _TOLERANCE, equal_nan=True):
        raise AssertionError(f"{name}: {found} instead of {expected}")


def few() -> list[dict[str, Any]]:
    """Return draws that together hold each choice of each table."""
    draws = [recipes.drawn(seed) for seed in range(_SOURCE)]
    missing = {
        (name, choice)
        for name, table in (recipes.TABLES | recipes.MORE).items()
        for choice in table
    }
    taken = []
    while missing:
        best = max(draws, key=lambda each: len(missing & each.items()))
        if not missing & best.items():
            raise ValueError(f"no draw has {missing}")
        taken.append(best)
        missing -= best.items()
    return taken


def named(drawn: list[dict[str, Any]]) -> Any:
    """Test each of these draws."""
    return parameterized.named_parameters(
        *((f"{r['seed']}_{r['data']}_{r['loss']}_{r['around']}", r) for r in drawn)
    )


def _many() -> list[dict[str, Any]]:
    begin, _, end = os.environ.get("TF_DGC_RECIPES", "").partition("-")
    seeds = range(int(begin), int(end)) if end else range(_SOURCE, _SOURCE + MANY)
    return [recipes.drawn(seed) for seed in seeds]


class DrawnRecipesTest(parameterized.TestCase, unittest.TestCase):
    @named(few()[:FEW])
    @pytest.mark.few(1, 3)
    def test_n_workers_give_what_one_process_gives_or_it_is_named(
        self, recipe: dict[str, Any]
    ) -> None:
        compared(recipe)

    @named(few()[FEW:MORE])
    @pytest.mark.slow
    def test_so_they_do_with_other_choices(self, recipe: dict[str, Any]) -> None:
        compared(recipe)

    @pytest.mark.slow
    def test_a_queue_of_all_rows_is_written_by_workers_that_have_none(self) -> None:
        keeps = {"state": "queue", "size": "one_left", "mode": "scope"}
        plain = {"data": "numpy", "loss": "mean", "update": "applied", "stop": "none"}
        compared(recipes.drawn(0, **keeps, **plain))

    @named(few()[MORE:] + _many())
    @pytest.mark.slow
    def test_so_they_do_with_more_recipes(self, recipe: dict[str, Any]) -> None:
        compared(recipe, workers=2 + recipe["seed"] % 2)

    @pytest.mark.slow
    def test_so_do_synchronous_servers(self) -> None:
        drawn = [recipes.drawn(seed, **recipes.ON_SERVERS) for seed in range(2)]
        gathers = recipes.ON_SERVERS | {"loss": "gathered"}
        draws = recipes.ON_SERVERS | {"draws": "stateless"}
        served([*drawn, recipes.drawn(2, **gathers), recipes.drawn(0, **draws)])

    @pytest.mark.slow
    def test_so_do_synchronous_servers_with_more_recipes(self) -> None:
        served([recipes.drawn(seed, **recipes.ON_SERVERS) for seed in range(2, 14)])

    @named([recipes.drawn(seed, **recipes.SIMULATED) for seed in range(2)])
    @pytest.mark.extended
    def test_so_do_simulated_workers(self, recipe: dict[str, Any]) -> None:
        compared(recipe)

    @named([recipes.drawn(seed, **recipes.SIMULATED) for seed in range(2, 14)])
    @pytest.mark.slow
    def test_so_do_simulated_workers_with_more_recipes(
        self, recipe: dict[str, Any]
    ) -> None:
        compared(recipe)
