"""Scripts as they are published: on two workers they do what they do on one.

Each stands in scripts/ once, as it is for several workers. What it has more than its
single-worker form are the lines that the tutorial on images adds, and nothing else.
"""

import concurrent.futures
import contextlib
import difflib
import functools
import json
import pathlib
import re
import tempfile
import textwrap
import unittest
import zipfile
from typing import Any

import launch
import numpy as np
import pool
import pytest
from absl.testing import parameterized

from tf_dgc.launcher import script as script_lib
from tf_dgc.launcher import settings

FOLDER = launch.ROOT / "tests" / "jobs" / "scripts"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))
# Random numbers are each worker's own: noise, dropout.
NOISY = ("adversaries", "autoencoder")
FIRST = ("multi_worker", "series")  # the others by -m slow
# What these do with a strategy is theirs, whatever it is.
OF_STRATEGIES = {
    "loop": "strategy = tf.distribute.get_strategy()",
    "multi_worker": 'strategy = tf_dgc.DenseStrategy(transport="local")',
}
DGC = "tf_dgc.DGCStrategy(tf_dgc.DGCConfig(sparsity=0.5, min_elements=1))"
# Sums are rounded in another order, and 5 in 1000 is one row that is taken otherwise.
TOLERANCE = 5e-3


# Trained in one run, and in two of which the second begins with what the first left.
RESTORED = """
import keras
import numpy as np

x = np.random.default_rng(2).normal(size=(40, 3)).astype("float32")


def train(epochs, *callbacks):
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile(keras.optimizers.Adam(0.1), "mse")
    history = model.fit(
        x, x[:, :2], 8, epochs, shuffle=False, verbose=0, callbacks=callbacks
    )
    return {"epochs": history.epoch, "weights": model.get_weights()[0].tolist()}


kept = keras.callbacks.BackupAndRestore("kept", delete_checkpoint=False)
whole = train(4)["weights"]
figures = {"runs": [train(2, kept), train(4, kept)], "whole": whole}
"""


def plain(name: str) -> str:
    """Return a script without the lines that the tutorial's diff adds."""
    text = script(name)
    made = "strategy = tf_dgc.DenseStrategy()\n"
    if name in OF_STRATEGIES:
        return text.replace(made, OF_STRATEGIES[name] + "\n")
    text = text.replace(made, "").replace("import tf_dgc\n", "")
    scoped = r"^with strategy\.scope\(\):\n((?:(?: {4}.*)?\n)*)"
    blocks = re.split(scoped, text, flags=re.M)
    blocks[1::2] = map(textwrap.dedent, blocks[1::2])
    return "".join(blocks)


def named(*names: str) -> Any:
    """Test each of these scripts."""
    return parameterized.named_parameters(*((name, name) for name in names))


def script(name: str) -> str:
    """Return a script as it is for several workers."""
    return (FOLDER / f"{name}.py").read_text()


def run_text(text: str, name: str, folder: str) -> dict[str, Any]:
    """Run a script in a folder; return its figures, and those of its files."""
    path = pathlib.Path(folder, f"{name}-{hash(text)}.py")
    path.write_text(text)  # AutoGraph reads the text of what it traces
    with contextlib.chdir(folder):
        space = {"__name__": "__main__", "__file__": str(path)}
        exec(compile(text, str(path), "exec"), space)
    return space["figures"]


def run_set(text: str, name: str, folder: str, chosen: str) -> dict[str, Any]:
    """Run a script in which nothing is of a strategy, as `tf-dgc-run --strategy`."""
    script_lib.set_strategy(settings.of_text(chosen))
    return run_text(text, name, folder)


def outcomes(text: str, name: str, workers: int, folder: str) -> list[dict[str, Any]]:
    """Run a script on workers that share a folder; return what each tells."""
    launcher = "collective" if workers > 1 else "local"
    call = functools.partial(pool.run, launcher, workers, timeout=200)
    return call("test_scripts", "run_text", text=text, name=name, folder=folder)


_alone = concurrent.futures.ThreadPoolExecutor(1)


class Folders(unittest.TestCase):
    """Two folders, for one process and for workers, that are gone after a test."""

    def setUp(self) -> None:
        super().setUp()
        self.one, self.several = (
            self.enterContext(tempfile.TemporaryDirectory()) for _ in range(2)
        )

    def run_both(self, name: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Run a script alone and on two workers, at the same time."""
        text = script(name)
        alone = _alone.submit(outcomes, plain(name), name, 1, self.one)
        try:
            found = outcomes(text, name, 2, self.several)
        finally:
            concurrent.futures.wait([alone])
        return alone.result()[0], found

    def files(self, folder: str) -> list[str]:
        """Name the files that a script has left; those of Keras must be whole."""
        paths = [p for p in pathlib.Path(folder).rglob("*") if p.suffix != ".py"]
        for path in paths:
            if path.suffix == ".keras":
                self.assertIsNone(zipfile.ZipFile(path).testzip())
        return sorted(str(path.relative_to(folder)) for path in paths)


class DifferenceTest(parameterized.TestCase):
    """What a script has more than its form for one process."""

    @named(*(name for name in NAMES if name not in OF_STRATEGIES))
    def test_it_is_what_the_tutorial_adds(self, name: str) -> None:
        page = launch.ROOT / "docs" / "tutorials" / "image-classifier.md"
        tutorial = page.read_text()
        promised = [
            r"import tf_dgc",
            r"strategy = tf_dgc\.",
            r"with strategy.scope\(\):",
        ]
        for each in promised:
            self.assertRegex(tutorial, rf"(?m)^\+{each}")
        one, several = (
            [line.strip() for line in text.splitlines()]
            for text in (plain(name), script(name))
        )
        added = [line[2:] for line in difflib.ndiff(one, several) if line[0] in "+-"]
        self.assertGreaterEqual(len(added), 3)
        for line in added:
            self.assertRegex(line, f"^({'|'.join(promised)})")
        self.assertNotRegex(plain(name), "tf_dgc|strategy")


@pytest.mark.processes
@pytest.mark.timeout(600)
class SetTest(parameterized.TestCase, Folders):
    """A strategy that is set before a script runs does what a scope does."""

    def assert_same(self, name: str, chosen: settings.Settings, scoped: str) -> None:
        call = functools.partial(pool.run, "collective", 2, "test_scripts", timeout=200)
        given = {"name": name, "folder": self.one, "chosen": chosen.text()}
        found = call("run_set", text=plain(name), **given)
        expected = call("run_text", text=scoped, name=name, folder=self.several)
        self.assertEqual(json.dumps(found), json.dumps(expected))
        self.assertEqual(self.files(self.one), self.files(self.several))

    @named("series")
    @pytest.mark.slow
    def test_no_line_is_changed(self, name: str) -> None:
        self.assert_same(name, settings.Settings("dense", {}), script(name))

    @named(*sorted({*NAMES} - {*OF_STRATEGIES, "series"}))
    @pytest.mark.slow
    def test_no_line_is_changed_of_any(self, name: str) -> None:
        self.assert_same(name, settings.Settings("dense", {}), script(name))

    @pytest.mark.slow
    def test_settings_are_those_of_the_command_line(self) -> None:
        chosen = settings.Settings("dgc", {"sparsity": 0.5, "min_elements": 1})
        scoped = script("series").replace("tf_dgc.DenseStrategy()", DGC)
        self.assert_same("series", chosen, scoped)

    @pytest.mark.slow
    def test_what_the_chief_restores_all_get(self) -> None:
        chosen = settings.Settings("dense", {}).text()
        given = {"name": "restored", "folder": self.one, "chosen": chosen}
        found = pool.run(
            "collective", 2, "test_scripts", "run_set", text=RESTORED, **given
        )
        self.assertEqual(json.dumps(found[1]), json.dumps(found[0]))
        self.assertEqual([run["epochs"] for run in found[0]["runs"]], [[0, 1], [2, 3]])
        whole, parts = found[0]["whole"], found[0]["runs"][1]["weights"]
        np.testing.assert_allclose(parts, whole, TOLERANCE, TOLERANCE)

    @pytest.mark.slow
    def test_parameters_are_averaged(self) -> None:
        chosen = settings.Settings("averaging", {"period": 2})
        averaging = (
            "tf_dgc.ParameterAveragingStrategy(tf_dgc.AveragingConfig(period=2))"
        )
        scoped = script("series").replace("tf_dgc.DenseStrategy()", averaging)
        self.assert_same("series", chosen, scoped)


@pytest.mark.processes
@pytest.mark.timeout(600)
class ScriptTest(parameterized.TestCase, Folders):
    @named(*FIRST)
    @pytest.mark.few(1)
    def test_two_workers_give_what_one_gives(self, name: str) -> None:
        self.check_alike(name)

    @named(*(name for name in NAMES if name not in (*NOISY, *FIRST)))
    @pytest.mark.slow
    def test_so_they_do_with_other_scripts(self, name: str) -> None:
        self.check_alike(name)

    def check_alike(self, name: str) -> None:
        expected, found = self.run_both(name)
        self.assertEqual(json.dumps(found[1]), json.dumps(found[0]))
        self.assert_near(found[0], expected)
        self.assertEqual(self.files(self.several), self.files(self.one))

    def assert_near(self, found: Any, expected: Any) -> None:
        if isinstance(expected, dict):
            self.assertEqual(found.keys(), expected.keys())
            for key in expected:
                with self.subTest(key):
                    self.assert_near(found[key], expected[key])
        elif isinstance(expected, list) and isinstance((*expected, 0)[0], str):
            self.assertEqual(found, expected)
        elif isinstance(expected, list) and isinstance((*expected, 0)[0], list):
            self.assertEqual(len(found), len(expected))
            for one, two in zip(found, expected, strict=True):
                self.assert_near(one, two)
        else:
            np.testing.assert_allclose(found, expected, TOLERANCE, TOLERANCE)

    @named(*NOISY)
    @pytest.mark.slow
    def test_with_noise_two_workers_agree_and_learn(self, name: str) -> None:
        expected, found = self.run_both(name)
        self.assertEqual(json.dumps(found[1]), json.dumps(found[0]))
        self.assertEqual(found[0].keys(), expected.keys())
        for key, values in found[0]["history"].items():
            one = expected["history"][key]
            self.assertEqual(len(values), len(one))
            self.assertTrue(np.isfinite(values).all())
            # Of the same size: other noise is not another training.
            np.testing.assert_allclose(values[-1], one[-1], rtol=0.5, atol=0.3)
        if name == "autoencoder":
            self.assertLess(found[0]["history"]["loss"][-1], 30.0)
        self.assertEqual(self.files(self.several), self.files(self.one))

    @named("series")
    @pytest.mark.slow
    def test_compressed_workers_agree(self, name: str) -> None:
        self.check_compressed(name)

    @named("transfer", "autoencoder")
    @pytest.mark.slow
    def test_compressed_workers_agree_of_others(self, name: str) -> None:
        self.check_compressed(name)

    def check_compressed(self, name: str) -> None:
        text = script(name)
        text = text.replace("tf_dgc.DenseStrategy()", DGC)
        found = outcomes(text, name, 2, self.several)
        self.assertEqual(json.dumps(found[1]), json.dumps(found[0]))
        self.files(self.several)


if __name__ == "__main__":
    unittest.main()
