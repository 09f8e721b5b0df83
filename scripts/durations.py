#!/usr/bin/env python3
"""Print which classes of tests take longest, as reports of pytest tell.

    .ci/run                             # leaves one of each tier in build/tests
    scripts/durations.py [--rows 25] build/tests/*.xml

Seconds are those of single tests, added up: two processes of pytest share them, so that
a tier takes about half as long.
"""

import argparse
import collections
import pathlib
import sys
from collections.abc import Iterable
from typing import NamedTuple
from xml.etree import ElementTree


class Row(NamedTuple):
    """Tests of one class."""

    name: str
    seconds: float
    tests: int


def main() -> int:
    """Print a table of each report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("reports", nargs="+", type=pathlib.Path, metavar="REPORT")
    parser.add_argument("--rows", type=int, default=25, help="classes of each")
    arguments = parser.parse_args()
    for path in arguments.reports:
        rows = by_class(ElementTree.parse(path).iter("testcase"))
        print(f"{path.stem}: {told(rows)}\n\n{table(rows[: arguments.rows])}\n")
    return 0


def by_class(cases: Iterable[ElementTree.Element]) -> list[Row]:
    """Add up the test cases of each class, the costliest first."""
    seconds: collections.Counter[str] = collections.Counter()
    tests: collections.Counter[str] = collections.Counter()
    for case in cases:
        name = case.get("classname", "").removeprefix("tests.")
        seconds[name] += float(case.get("time", 0))
        tests[name] += 1
    return [Row(name, total, tests[name]) for name, total in seconds.most_common()]


def told(rows: Iterable[Row]) -> str:
    """Say how many tests there are, and what they take together."""
    rows = list(rows)
    total = sum(row.seconds for row in rows)
    return f"{sum(row.tests for row in rows)} tests, {total:.0f} s one after another"


def table(rows: Iterable[Row]) -> str:
    """Write rows in Markdown."""
    lines = [f"| `{name}` | {tests} | {seconds:.0f} |" for name, seconds, tests in rows]
    return "\n".join(["| Class | Tests | Seconds |", "|---|---|---|", *lines])


if __name__ == "__main__":
    sys.exit(main())
