"""Tests of what runs a script that knows nothing of this package."""

import concurrent.futures
import contextlib
import io
import json
import os
import pathlib
import sys
import tempfile
from collections.abc import Iterator
from unittest import mock

import keras
import tensorflow as tf

import tf_dgc
from tf_dgc._host import startup
from tf_dgc.launcher import script, settings


@contextlib.contextmanager
def as_before() -> Iterator[None]:
    """Take back what running a script changes in a process."""
    with (
        mock.patch.object(sys, "argv", sys.argv),
        mock.patch.object(sys, "path", list(sys.path)),
        mock.patch.dict(sys.modules),
    ):
        try:
            yield
        finally:
            if tf.distribute.has_strategy():
                tf.distribute.experimental_set_strategy(None)


class ScriptTest(tf.test.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.enterContext(as_before())

    def run_script(self, text: str, chosen: settings.Settings, *arguments: str) -> str:
        path = self.folder / "train.py"
        path.write_text(text)
        with contextlib.redirect_stdout(io.StringIO()) as out:
            script.main([chosen.text(), str(path), *arguments])
        return out.getvalue()

    def test_a_script_sees_what_python_gives_it(self) -> None:
        (self.folder / "beside.py").write_text("NAME = __name__")
        text = """
import json, pickle, sys
import beside
def function(): pass
same = pickle.loads(pickle.dumps(function)) is function
print(json.dumps([__name__, __file__, sys.argv, sys.path[0], beside.NAME, same]))
"""
        chosen = settings.Settings("dense", {})
        told = json.loads(self.run_script(text, chosen, "-x", "1"))
        path = str(self.folder / "train.py")
        place = os.path.realpath(self.folder)
        expected = ["__main__", path, [path, "-x", "1"], place, "beside", True]
        self.assertEqual(told, expected)

    def test_the_strategy_is_set_with_its_settings(self) -> None:
        averaging = {"period": 3, "compression": {"sparsity": 0.5}}
        for chosen, kind, expected in (
            (settings.Settings("dense", {}), "DenseStrategy", None),
            (settings.Settings("auto", {"allow": ["dgc"]}), "AutoStrategy", None),
            (
                settings.Settings("dgc", {"sparsity": 0.5}),
                "DGCStrategy",
                tf_dgc.DGCConfig(sparsity=0.5),
            ),
            (
                settings.Settings("averaging", averaging),
                "ParameterAveragingStrategy",
                tf_dgc.AveragingConfig(
                    period=3, compression=tf_dgc.DGCConfig(sparsity=0.5)
                ),
            ),
        ):
            with self.subTest(kind), as_before():
                script.set_strategy(chosen)
                model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
                model.compile("sgd", "mse")
                strategy = model.distribute_strategy
                self.assertEqual(type(strategy).__name__, kind)
                self.assertEqual(strategy.config, expected)

    def test_a_script_that_has_a_strategy_is_told_of_two(self) -> None:
        text = """
import tf_dgc
with tf_dgc.DenseStrategy().scope():
    pass
"""
        with self.assertRaisesRegex(RuntimeError, "Mixing different") as caught:
            self.run_script(text, settings.Settings("dense", {}))
        (note,) = caught.exception.__notes__
        self.assertRegex(note, "make no other one in it, or leave out --strategy")

    def test_the_strategy_is_made_when_it_is_needed(self) -> None:
        made: list[str] = []
        pending = script.Pending(lambda: made.append("") or tf_dgc.DenseStrategy())
        startup.before_first_use(pending.settle)
        tf.config.threading.get_intra_op_parallelism_threads()
        self.assertEqual(made, [])
        optimizer = keras.optimizers.SGD()
        self.assertEqual(made, [""])
        self.assertIs(optimizer._distribution_strategy, tf.distribute.get_strategy())
        self.assertIsInstance(tf.distribute.get_strategy(), tf_dgc.DenseStrategy)

    def test_variables_that_come_first_are_of_the_strategy(self) -> None:
        def build() -> tf.Variable:
            layer = keras.layers.Dense(1)
            layer.build((None, 2))
            return layer.kernel.value

        for make in (
            build,
            lambda: tf.Variable(1.0),
            lambda: keras.Variable(1.0).value,
        ):
            startup.before_first_use(script.Pending(tf_dgc.DenseStrategy).settle)
            variable = make()
            self.assertIs(variable._distribute_strategy, tf.distribute.get_strategy())
            self.assertTrue(tf.distribute.has_strategy())
            tf.distribute.experimental_set_strategy(None)

    def test_a_strategy_that_cannot_be_made_is_an_error_each_time(self) -> None:
        def make() -> None:
            raise TimeoutError("Worker 1 did not come")

        startup.before_first_use(script.Pending(make).settle)
        self.addCleanup(startup.before_first_use, lambda: True)
        for kind in (TimeoutError, RuntimeError):
            with self.assertRaisesRegex(kind, "Worker 1 did not come"):
                keras.optimizers.SGD()

    def test_other_threads_and_processes(self) -> None:
        pending = script.Pending(tf_dgc.DenseStrategy)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            self.assertFalse(pool.submit(pending.settle).result())
        self.assertFalse(tf.distribute.has_strategy())  # set in this thread only
        with mock.patch.object(os, "getpid", lambda: -1):
            self.assertTrue(pending.settle())
        self.assertFalse(tf.distribute.has_strategy())
        self.assertTrue(pending.settle())
        self.assertTrue(tf.distribute.has_strategy())

    def test_a_script_without_a_use_of_it_is_told(self) -> None:
        pending = script.Pending(tf_dgc.DenseStrategy)
        with self.assertLogs("tf_dgc") as logs:
            pending.warn_if_unused()
        self.assertIn("--strategy has done nothing", logs.output[0])
        failed = mock.patch.object(sys, "last_value", ValueError(), create=True)
        with failed, self.assertNoLogs("tf_dgc"):  # the error tells more
            pending.warn_if_unused()

    def test_what_is_there_already_may_be_of_another_worker(self) -> None:
        text = f"import os; os.makedirs({str(self.folder)!r})"
        with self.assertRaises(FileExistsError) as caught:
            self.run_script(text, settings.Settings("dense", {}))
        (note,) = caught.exception.__notes__
        self.assertIn("All workers run the whole script", note)

    def test_what_the_package_refuses_is_not_laid_to_another_worker(self) -> None:
        # Raised as if by a line of the package.
        text = f"exec(compile('raise FileExistsError(1)', {script.__file__!r}, 'exec'))"
        with self.assertRaises(FileExistsError) as raised:
            self.run_script(text, settings.Settings("dense", {}))
        self.assertEmpty(getattr(raised.exception, "__notes__", []))

    def test_what_a_script_raises_comes_through(self) -> None:
        chosen = settings.Settings("dense", {})
        with self.assertRaisesRegex(SystemExit, "7"):
            self.run_script("import sys; sys.exit(7)", chosen)
        with self.assertRaisesRegex(RuntimeError, "own") as caught:
            self.run_script("raise RuntimeError('own')", chosen)
        self.assertFalse(hasattr(caught.exception, "__notes__"))


class SettingsTest(tf.test.TestCase):
    def test_a_strategy_that_there_is_not_is_refused(self) -> None:
        with self.assertRaisesRegex(ValueError, "must be one of.*--strategy parallax"):
            settings.Settings("parallax", {})

    def test_the_command_line_counts_more_than_the_file(self) -> None:
        path = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory())) / "c.json"
        path.write_text(json.dumps({"sparsity": 0.9, "warmup_steps": 7}))
        found = settings.read("dgc", 0.5, str(path))
        self.assertEqual(found.record(), tf_dgc.DGCConfig(sparsity=0.5, warmup_steps=7))
        self.assertEqual(settings.of_text(found.text()), found)

    def test_a_strategy_that_chooses_itself_has_settings_of_what_it_may_choose(
        self,
    ) -> None:
        path = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory())) / "c.json"
        path.write_text(json.dumps({"allow": ["dgc"], "dgc": {"min_elements": 1}}))
        found = settings.read("auto", 0.5, str(path)).record()
        self.assertEqual(found.allow, ("dgc",))
        self.assertEqual(found.dgc, tf_dgc.DGCConfig(sparsity=0.5, min_elements=1))
        with self.assertRaisesRegex(ValueError, "`allow` must be one or more of"):
            settings.Settings("auto", {"allow": ["fast"]})

    def test_what_is_averaged_may_be_compressed(self) -> None:
        path = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory())) / "c.json"
        config = {"period": 4, "compression": {"min_elements": 1}}
        path.write_text(json.dumps(config))
        found = settings.read("averaging", 0.5, str(path)).record()
        # Means over senders need to know who sent.
        gathered = {"sparsity": 0.5, "exchange": "allgather"}
        expected = tf_dgc.DGCConfig(min_elements=1, **gathered)
        self.assertEqual((found.period, found.compression), (4, expected))
        self.assertEqual(
            settings.read("averaging", 0.5, None).record().compression,
            tf_dgc.DGCConfig(**gathered),
        )


if __name__ == "__main__":
    tf.test.main()
