"""The wheel: what `pip install` brings, tried from outside of the checkout."""

import pathlib
import shutil
import site
import subprocess
import sys
import tempfile
import unittest
import zipfile

import pytest
from launch import ROOT, by_rank, worker_environment

# A script that knows nothing of this package; what it prints is for this test.
SCRIPT = """
import json
import keras
import numpy as np

keras.utils.set_random_seed(1)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
data = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
model.fit(data, data[:, :3], batch_size=8, epochs=1, verbose=0)
strategy = model.distribute_strategy
found = {
    "strategy": type(strategy).__name__,
    "workers": strategy.num_replicas_in_sync,
    "sparsity": strategy.config.sparsity,
    "file": __import__("tf_dgc").__file__,
    "weights": model.get_weights()[0].tolist(),
}
print(json.dumps(found))
"""


@pytest.mark.processes
class WheelTest(unittest.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        environment = worker_environment()
        del environment["PYTHONPATH"]
        self.environment = environment

    def call(self, *command: str) -> "subprocess.CompletedProcess[str]":
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=200,
        )
        self.assertEqual(done.returncode, 0, f"{done.stdout}\n{done.stderr}"[-4000:])
        return done

    def build(self) -> pathlib.Path:
        """Build the wheel from a copy, as that leaves files beside the sources."""
        copy = self.folder / "checkout"
        copy.mkdir()
        for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, copy)
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "tf_dgc", copy / "tf_dgc", ignore=ignored)
        own = ["--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", "."]
        self.call(sys.executable, "-m", "pip", "wheel", "-q", *own, str(copy))
        (wheel,) = self.folder.glob("*.whl")
        shutil.rmtree(copy)
        return wheel

    def install(self, wheel: pathlib.Path) -> pathlib.Path:
        """Install it into an environment that borrows TensorFlow from this one."""
        environment = self.folder / "environment"
        make = ["-m", "venv", "--without-pip", str(environment)]
        self.call(sys.executable, *make)
        (packages,) = environment.glob("lib/python*/site-packages")
        (packages / "borrowed.pth").write_text("\n".join(site.getsitepackages()))
        pip = ["-m", "pip", "--python", str(environment / "bin" / "python")]
        self.call(
            sys.executable, *pip, "install", "-q", "--no-deps", "--no-index", str(wheel)
        )
        return environment

    def test_all_of_the_package_is_in_the_wheel_and_nothing_else(self) -> None:
        with zipfile.ZipFile(self.build()) as wheel:
            names = [name for name in wheel.namelist() if ".dist-info/" not in name]
        sources = [
            str(path.relative_to(ROOT))
            for path in (ROOT / "tf_dgc").rglob("*")
            if path.suffix == ".py" or path.name == "py.typed"
        ]
        self.assertCountEqual(names, sources)

    @pytest.mark.slow
    def test_what_is_installed_trains_a_script_from_anywhere(self) -> None:
        environment = self.install(self.build())
        (self.folder / "train.py").write_text(SCRIPT)
        program = str(environment / "bin" / "tf-dgc-run")
        chosen = "--strategy", "dgc", "--sparsity", "0.75"
        done = self.call(program, "-n", "2", *chosen, "train.py")
        found = by_rank(done.stdout)
        self.assertEqual(sorted(found), [0, 1])
        self.assertEqual(found[0], found[1])
        (packages,) = environment.glob("lib/python*/site-packages")
        self.assertEqual(found[0]["file"], str(packages / "tf_dgc" / "__init__.py"))
        told = found[0]["strategy"], found[0]["workers"], found[0]["sparsity"]
        self.assertEqual(told, ("DGCStrategy", 2, 0.75))


if __name__ == "__main__":
    unittest.main()
