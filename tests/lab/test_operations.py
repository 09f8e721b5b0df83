"""Pages of docs/how-to: what they tell to run makes what the workers need."""

import ast
import os
import re
import unittest
from collections.abc import Iterator
from unittest import mock

import pytest
from launch import ROOT

from tf_dgc.transports import schedulers

PAGES = ROOT / "docs" / "how-to"
HEAD = "| message | what to do |\n|---|---|\n"


def block(kind: str) -> str:
    """Return the one block of code that is marked so."""
    text = (PAGES / "launch.md").read_text()
    (found,) = re.findall(rf"^```{kind}\n(.*?)^```", text, re.M | re.S)
    return found


def rows_of_messages() -> list[str]:
    """Return the rows of all tables of messages."""
    tables = (PAGES / "debugging.md").read_text().split(HEAD)[1:]
    return [row for table in tables for row in table.partition("\n\n")[0].split("\n")]


class OperationsTest(unittest.TestCase):
    def place_of(self, environment: dict[str, str]) -> schedulers.ProcessPlace:
        with mock.patch.dict(os.environ, environment, clear=True):
            return schedulers.find()

    def test_a_pod_finds_its_place(self) -> None:
        manifest = block("yaml")
        (service, job) = re.findall(r"^  name: (.*)$", manifest, re.M)
        (subdomain,) = re.findall(r"^ +subdomain: (.*)$", manifest, re.M)
        (completions,) = re.findall(r"^  completions: (.*)$", manifest, re.M)
        self.assertEqual(subdomain, service)
        variables = r"- name: (TF_DGC_\w+)\n +value: \"?(\w+)"
        told = dict(re.findall(variables, manifest))
        self.assertEqual(told["TF_DGC_WORKERS"], completions)
        for index in range(int(completions)):
            own = {"JOB_COMPLETION_INDEX": f"{index}", "HOSTNAME": f"{job}-{index}"}
            place = self.place_of(told | own)
            expected = [f"{job}-{i}.{service}" for i in range(int(completions))]
            hosts = [address.partition(":")[0] for address in place.addresses]
            self.assertEqual((hosts, place.rank), (expected, index))

    @pytest.mark.long
    def test_every_message_that_is_explained_is_in_the_sources(self) -> None:
        told = list(strings())
        table = rows_of_messages()
        self.assertGreater(len(table), 60)
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
