"""What docs/operations.md tells to run makes what the workers need."""

import ast
import os
import pathlib
import re
import subprocess
import tempfile
import textwrap
import unittest
from collections.abc import Iterator

from launch import ROOT

from tf_dgc.transports import rendezvous

TEXT = (ROOT / "docs" / "operations.md").read_text()


def block(kind: str) -> str:
    """Return the one block of code that is marked so."""
    (found,) = re.findall(rf"^```{kind}\n(.*?)^```", TEXT, re.M | re.S)
    return found


class OperationsTest(unittest.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.command("python", 'printf "%s" "$TF_CONFIG"')

    def command(self, name: str, script: str) -> None:
        """Let something else stand for a command."""
        path = self.folder / name
        path.write_text(f"#!/bin/bash\n{script}\n")
        path.chmod(0o755)

    def place_of(self, script: str, **environment: str) -> tuple[list[str], int]:
        """Return addresses and rank that a worker's script finds in TF_CONFIG."""
        done = subprocess.run(
            ["bash", "-c", script],
            env={"PATH": f"{self.folder}:{os.environ['PATH']}"} | environment,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=30,
        )
        return rendezvous.read_tf_config(done.stdout)

    def test_a_pod_finds_its_place(self) -> None:
        manifest = block("yaml")
        (script,) = re.findall(r"^ +- \|\n((?:^ {14}.*\n)+)", manifest, re.M)
        (service, job) = re.findall(r"^  name: (.*)$", manifest, re.M)
        (subdomain,) = re.findall(r"^ +subdomain: (.*)$", manifest, re.M)
        self.assertEqual(subdomain, service)
        for workers in (1, 2, 4, 11):
            for index in (0, workers - 1):
                addresses, rank = self.place_of(
                    textwrap.dedent(script),
                    WORKERS=str(workers),
                    JOB_COMPLETION_INDEX=str(index),
                )
                expected = [f"{job}-{i}.{service}:2222" for i in range(workers)]
                self.assertEqual((addresses, rank), (expected, index))

    def test_a_task_of_slurm_finds_its_place(self) -> None:
        self.command("scontrol", "printf '%s\\n' node-1 node-2 node-10")
        self.command("srun", 'shift 2; exec "$@"')
        for index in range(3):
            addresses, rank = self.place_of(
                block("bash"),
                SLURM_JOB_NODELIST="node-[1-2,10]",
                SLURM_PROCID=f"{index}",
            )
            self.assertEqual(addresses, ["node-1:2222", "node-2:2222", "node-10:2222"])
            self.assertEqual(rank, index)

    def test_every_message_that_is_explained_is_in_the_sources(self) -> None:
        told = list(strings())
        table = TEXT[TEXT.index("| message | what to do |") :].splitlines()[2:]
        self.assertGreater(len(table), 20)
        for row in table:
            for _, message in re.findall(r"(`+) ?(.+?) ?\1(?!`)", row.split(" | ")[0]):
                # Without what differs from time to time.
                for part in re.split(r"\.\.\.|\b\d+\b|\(c:\d+\)", message):
                    part = part.strip(" ,:")
                    found = any(part in each for each in told)
                    self.assertTrue(found or len(part) < 3, f"{part!r} of {row}")


def strings() -> Iterator[str]:
    """Yield all texts in the sources; what is put into them is left out."""
    for path in (ROOT / "tf_dgc").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
            if isinstance(node, ast.JoinedStr):
                parts = [p.value for p in node.values if isinstance(p, ast.Constant)]
                yield "".join(parts)


if __name__ == "__main__":
    unittest.main()
