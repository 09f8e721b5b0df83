"""Tests of which cases of a test run by default."""

import unittest
from types import SimpleNamespace
from typing import Any

import pytest
import tiers
from absl.testing import parameterized


class StaysTest(parameterized.TestCase):
    @parameterized.parameters((1, 5, [0]), (2, 6, [0, 3]), (3, 3, [0, 1, 2]))
    def test_few_are_far_apart(self, few: int, count: int, expected: Any) -> None:
        found = [i for i in range(count) if tiers.stays(i, few, count)]
        self.assertEqual(found, expected)

    @parameterized.product(few=(1, 2, 3, 7), count=(7, 8, 30))
    def test_there_are_as_many_as_wanted(self, few: int, count: int) -> None:
        found = [i for i in range(count) if tiers.stays(i, few, count)]
        self.assertLen(found, few)

    def test_of_less_all_stay(self) -> None:
        self.assertTrue(all(tiers.stays(i, 5, 2) for i in range(2)))


class MarkedTest(parameterized.TestCase):
    @pytest.mark.few(2)
    def marked(self) -> None:
        """Have the mark of a test."""

    def test_the_others_of_each_test_are_slow_or_extended(self) -> None:
        (mark,) = self.marked.pytestmark
        added: list[str] = []

        def item(name: str, mark: Any) -> Any:
            return SimpleNamespace(
                parent="class",
                get_closest_marker={"few": mark}.get,
                add_marker=lambda other: added.append(f"{name} {other}"),
            )

        other = pytest.mark.few(1, 2).mark
        items = [item("plain", None), *(item(f"a{i}", mark) for i in range(4))]
        tiers.sort_out([*items, *(item(f"b{i}", other) for i in range(4))])
        self.assertEqual(
            added, ["a1 slow", "a3 slow", "b0 slow", "b1 extended", "b2 slow"]
        )


if __name__ == "__main__":
    unittest.main()
