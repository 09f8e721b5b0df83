"""Tests of how a process knows at its exit whether it has failed."""

import pathlib
import subprocess
import sys
import unittest

ENDING = pathlib.Path(__file__).parents[2] / "tf_dgc" / "transports" / "ending.py"
HEAD = f"""
import atexit, importlib.util, sys, threading
spec = importlib.util.spec_from_file_location("ending", {str(ENDING)!r})
ending = importlib.util.module_from_spec(spec)
sys.modules["ending"] = ending
spec.loader.exec_module(ending)
ending.watch()
ending.watch()
atexit.register(lambda: print(repr(ending.failure())))
"""


class EndingTest(unittest.TestCase):
    def test_how_a_process_ends(self) -> None:
        for script, status, told in (
            ("", 0, "None"),
            ("sys.exit()", 0, "None"),
            ("sys.exit(0)", 0, "None"),
            ("sys.exit(3)", 3, "SystemExit(3)"),
            ("sys.exit('why')", 1, "SystemExit('why')"),
            ("def f(): sys.exit(4)\nf()", 4, "SystemExit(4)"),
            ("try: sys.exit(5)\nfinally: x = 1", 5, "SystemExit(5)"),
            ("try: sys.exit(5)\nexcept SystemExit: pass", 0, "None"),
            ("try: sys.exit(5)\nexcept SystemExit as e: raise e", 5, "SystemExit(5)"),
            ("1 / 0", 1, "ZeroDivisionError('division by zero')"),
            ("t = threading.Thread(target=sys.exit, args=[6]); t.start()", 0, "None"),
        ):
            with self.subTest(script):
                done = subprocess.run(
                    [sys.executable, "-S", "-c", HEAD + script],
                    capture_output=True,
                    text=True,
                    timeout=60,
                    check=False,
                )
                self.assertEqual(done.returncode, status, done.stderr)
                self.assertEqual(done.stdout.strip(), told)


if __name__ == "__main__":
    unittest.main()
