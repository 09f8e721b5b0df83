"""Tests of the table of what tests take."""

import unittest
from xml.etree import ElementTree

import durations

REPORT = """
<testsuites><testsuite>
<testcase classname="tests.unit.test_a.OneTest" name="test_x" time="1.5" />
<testcase classname="tests.unit.test_a.OneTest" name="test_y" time="0.25" />
<testcase classname="tests.jobs.test_b.TwoTest" name="test_z" time="30.0" />
<testcase classname="tests.jobs.test_b.ThreeTest" name="test_skipped" />
</testsuite></testsuites>
"""


class TableTest(unittest.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.rows = durations.by_class(ElementTree.fromstring(REPORT).iter("testcase"))

    def test_seconds_of_a_class_are_added_up_and_the_costliest_is_first(self) -> None:
        self.assertEqual(
            durations.table(self.rows[:2]).splitlines()[2:],
            ["| `jobs.test_b.TwoTest` | 1 | 30 |", "| `unit.test_a.OneTest` | 2 | 2 |"],
        )

    def test_the_whole_is_told(self) -> None:
        told = durations.told(self.rows)
        self.assertEqual(told, "4 tests, 32 s one after another")


if __name__ == "__main__":
    unittest.main()
