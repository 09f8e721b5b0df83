"""Scripts of the first steps and tutorials: they print what their page shows."""

import pathlib
import re
import shlex
import sys
import tempfile
import unittest

import pytest
from launch import ROOT
from test_run_terminal import on_a_terminal, screen_of

DOCS = ROOT / "docs"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)
PROGRAMS = {"python": [], "tf-dgc-run": ["-m", "tf_dgc.run"]}
# Figures of a training differ between machines; bytes and counts do not.
TRAINED = re.compile(r"accuracy|loss|^\[|rate")
NUMBER = re.compile(r"\d[\d,.]*(e[+-]?\d+)?(ms|us|s)?\b")


def shape(line: str) -> str:
    """Return a line of output without the figures that differ between machines."""
    return NUMBER.sub("#", line) if TRAINED.search(line) else line


def missing(shown: list[str], printed: list[str]) -> list[str]:
    """Return the lines of a page that were not printed, or not in this order.

    Three dots on a page stand for what is left out of a line.
    """
    left = iter([shape(line) for line in printed])
    patterns = {line: re.escape(shape(line)).replace(r"\.\.\.", ".*") for line in shown}
    return [
        line
        for line in shown
        if not any(re.fullmatch(patterns[line], other) for other in left)
    ]


def changed(script: str, additions: list[str], end: str) -> str:
    """Return a script with more imports, and another end from its first line on."""
    *_, last = re.finditer(r"^(?:import|from) .*\n", script, re.M)
    imports = [line for line in additions if line + "\n" not in script]
    kept = script[: script.index(end.partition("\n")[0])]
    return kept[: last.end()] + "".join(f"{i}\n" for i in imports) + kept[last.end() :]


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(600)
class PagesTest(unittest.TestCase):
    """Each script of a page is saved and started as the page says."""

    def setUp(self) -> None:
        super().setUp()
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

    def run_line(self, line: str) -> list[str]:
        """Run a command of a page in the folder of its scripts; return its output."""
        program, *arguments = shlex.split(line)
        command = [sys.executable, *PROGRAMS[program], *arguments]
        status, text = on_a_terminal(command, self.folder)
        self.assertEqual(status, 0, text)
        return screen_of(text)

    def follow(self, page: str) -> int:
        """Follow a page; return how many of its commands were run and compared."""
        text = (DOCS / page).read_text()
        name, imports, runs, begin = "", [], 0, 0
        for found in BLOCK.finditer(text):
            before, (language, code) = text[begin : found.start()], found.groups()
            begin = found.end()
            saved = re.search(r"Save this as `(\w+\.py)`", before)
            if language == "diff":
                imports = re.findall(r"^\+((?:import|from) .*)$", code, re.M)
            elif language == "python" and saved:
                name = saved[1]
                (self.folder / name).write_text(code)
            elif language == "python" and before.endswith("the script now reads:\n\n"):
                path = self.folder / name
                path.write_text(changed(path.read_text(), imports, code) + code)
            elif language == "console" and name:
                line, *shown = code.removeprefix("$ ").splitlines()
                if line.endswith(name):
                    runs += 1
                    printed = self.run_line(line)
                    self.assertEqual(missing(shown, printed), [], (line, printed))
        return runs

    def test_two_workers(self) -> None:
        self.assertEqual(self.follow("start/two-workers.md"), 2)

    def test_notebook(self) -> None:
        page = (DOCS / "start/notebook.md").read_text()
        (_, cell), (_, shown), *_ = BLOCK.findall(page)
        (self.folder / "cell.py").write_text(cell)
        printed = self.run_line("python cell.py")
        self.assertEqual(missing(shown.splitlines(), printed), [], printed)

    def test_image_classifier(self) -> None:
        self.assertEqual(self.follow("tutorials/image-classifier.md"), 5)
        self.assertTrue((self.folder / "training.png").stat().st_size)

    def test_own_loop(self) -> None:
        self.assertEqual(self.follow("tutorials/own-loop.md"), 1)

    def test_split_layers(self) -> None:
        self.assertEqual(self.follow("tutorials/split-layers.md"), 1)

    def test_search(self) -> None:
        self.assertEqual(self.follow("tutorials/search.md"), 1)


if __name__ == "__main__":
    unittest.main()
