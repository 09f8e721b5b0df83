"""Tests of the faults that scripts/seeded_faults.py puts into the package."""

import ast
import unittest

import seeded_faults
from launch import ROOT


class FaultsTest(unittest.TestCase):
    def test_each_place_is_there_once_and_is_python_with_the_fault(self) -> None:
        for fault in seeded_faults.FAULTS:
            with self.subTest(fault.meaning):
                sound = (ROOT / "tf_dgc" / fault.path).read_text()
                text = seeded_faults.broken(fault, sound)
                self.assertNotEqual(
                    ast.dump(ast.parse(text)), ast.dump(ast.parse(sound))
                )

    def test_a_place_that_is_gone_is_named(self) -> None:
        fault = seeded_faults.FAULTS[0]
        with self.assertRaisesRegex(ValueError, f"{fault.path} must have this once"):
            seeded_faults.broken(fault, "")

    def test_the_tests_about_each_place_are_there(self) -> None:
        for fault in seeded_faults.FAULTS:
            for file in seeded_faults.files_of(fault):
                self.assertTrue((ROOT / file).is_file(), file)

    def test_there_are_40_of_all_parts(self) -> None:
        faults = seeded_faults.FAULTS
        self.assertGreaterEqual(len({fault.meaning for fault in faults}), 40)
        self.assertGreaterEqual(len({f.path.split("/")[0] for f in faults}), 9)


if __name__ == "__main__":
    unittest.main()
