"""Whatever a Keras user does gives on N workers what it gives on one.

Each class runs all of `features.py` once on real workers; each feature is a test.
"""

from typing import Any, ClassVar

import features
import launch
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

# float16 rounds what is summed, and sums in another order on N workers.
TOLERANCE = {"mixed_precision": 2e-3}
pytestmark = [pytest.mark.processes, pytest.mark.timeout(1000)]
EVERY = [(name, name) for name in features.FEATURES]


class Features(parameterized.TestCase, tf.test.TestCase):
    """Runs the features; subclasses say where and compare."""

    __test__: ClassVar[bool] = False
    strategy: ClassVar[str] = "dense"
    transport: ClassVar[str]
    workers: ClassVar[int] = 2
    names: ClassVar[tuple[str, ...]] = ()  # of the features; by default all
    alone: ClassVar[dict[str, Any]]
    found: ClassVar[list[dict[str, Any]] | Exception]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.__test__ = hasattr(cls, "transport")

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        if cls.transport in ("horovod", "hybrid"):
            launch.skip_without_horovod()
        script = str(launch.ROOT / "tests" / "features.py")
        options = ["--strategy", cls.strategy, "--transport", cls.transport, *cls.names]
        cls.found = launch.results_of(
            script,
            *options,
            workers=cls.workers,
            launcher=cls.transport,
            timeout=900,
        )
        cls.alone = baseline(script)

    def outcomes(self, name: str) -> list[dict[str, Any]]:
        found = launch.checked(self.found)
        self.assertEqual([r["rank"] for r in found], list(range(self.workers)))
        self.assertEqual({r["transport"] for r in found}, {self.transport})
        for rank, result in enumerate(found):
            if "error" in result[name]:
                self.fail(f"rank {rank}: {result[name]['error']}")
        return [result[name] for result in found]

    def assert_like_one_worker(self, name: str) -> None:
        tolerance = TOLERANCE.get(name, 1e-5)
        for rank, outcome in enumerate(self.outcomes(name)):
            expected = self.alone[name]
            self.assertEqual(outcome.keys(), expected.keys())
            for key in expected.keys() - {"crc"}:
                self.assertAllClose(
                    outcome[key],
                    expected[key],
                    rtol=tolerance,
                    atol=tolerance,
                    msg=f"rank {rank}, {key}",
                )

    def assert_same_weights(self, name: str) -> None:
        self.assertLen({outcome.get("crc") for outcome in self.outcomes(name)}, 1)


_baseline: dict[str, Any] = {}


def baseline(script: str) -> dict[str, Any]:
    """Return what plain Keras does, without this package's strategies."""
    if not _baseline:
        run = launch.run(script, "--strategy", "none", workers=1, timeout=600)
        _baseline.update(launch.results(run)[0])
    return _baseline


class Equal(Features):
    """Strategies that compute what one worker does."""

    @parameterized.named_parameters(*EVERY)
    def test_n_workers_train_as_one(self, name: str) -> None:
        self.assert_same_weights(name)
        self.assert_like_one_worker(name)


class DenseOverCollectives(Equal):
    strategy, transport = "dense", "collective"


class DenseOverHorovod(Equal):
    strategy, transport = "dense", "horovod"


@pytest.mark.slow
class DenseOverBoth(Equal):
    strategy, transport = "dense", "hybrid"


@pytest.mark.slow
class DenseOnFourWorkers(Equal):
    strategy, transport, workers = "dense", "collective", 4


class DenseAlone(Equal):
    strategy, transport, workers = "dense", "local", 1


class NothingLeftOutOverCollectives(Equal):
    strategy, transport = "dgc_dense", "collective"


class NothingLeftOutAlone(Equal):
    strategy, transport, workers = "dgc_dense", "local", 1


class Compressed(Features):
    """Deep Gradient Compression at 90%, with warm-up and clipping."""

    strategy: ClassVar[str] = "dgc"
    # The learning rate of loss_scaling is next to nothing.
    unsteady: ClassVar[tuple[str, ...]] = ("loss_scaling",)

    @parameterized.named_parameters(*EVERY)
    def test_weights_are_the_same_bits_everywhere(self, name: str) -> None:
        self.assert_same_weights(name)

    @parameterized.named_parameters(*EVERY)
    def test_training_makes_progress(self, name: str) -> None:
        for outcome in self.outcomes(name):
            loss = outcome.get("history", {}).get("loss", [])
            self.assertTrue(np.isfinite(loss).all())
            if len(loss) > 1 and name not in self.unsteady:
                self.assertLess(loss[-1], loss[0])


class CompressedOverCollectives(Compressed):
    transport = "collective"


@pytest.mark.slow
class CompressedOverHorovod(Compressed):
    transport = "horovod"


class CompressedOverBoth(Compressed):
    transport = "hybrid"


@pytest.mark.slow
class CompressedOnFourWorkers(Compressed):
    transport, workers = "collective", 4


class CompressedAlone(Compressed):
    transport, workers = "local", 1


class Averaged(Compressed):
    """Local steps: after them, weights are the same bits, too."""

    strategy: ClassVar[str] = "averaging"

    def test_state_continues_in_the_midst_of_a_period(self) -> None:
        for found in self.outcomes("state_saved_in_the_midst_of_an_epoch"):
            self.assertTrue(found["continued"])


class AveragedOverCollectives(Averaged):
    transport = "collective"


class AveragedByAllMeans(Averaged):
    """A tenth of a change is sent, with momentum: it overshoots in so short a time."""

    strategy: ClassVar[str] = "averaging_by_all_means"
    unsteady: ClassVar[tuple[str, ...]] = tuple(
        {*features.FEATURES} - {"adam", "two_optimizers", "custom_loop"}
    )


class AveragedByAllMeansOverBoth(AveragedByAllMeans):
    transport = "hybrid"


FEW = (
    "adam",
    "batch_norm_and_dropout",
    "data_that_end_early_on_some_workers",
    "embedding",
    "evaluate_and_predict",
    "gradient_accumulation",
    "state_saved_in_the_midst_of_an_epoch",
    "steps_per_execution",
    "two_optimizers",
)


class InShort(Features):
    """What is most its own, on other numbers of workers."""

    strategy: ClassVar[str] = "averaging_by_all_means"
    names: ClassVar[tuple[str, ...]] = FEW

    @parameterized.parameters(*FEW)
    def test_weights_are_the_same_bits_everywhere(self, name: str) -> None:
        self.assert_same_weights(name)
        for found in self.outcomes(name):
            self.assertTrue(found.get("continued", True))


class AveragedOnThreeWorkersOverHorovod(InShort):
    transport, workers = "horovod", 3


class AveragedOnFourWorkers(InShort):
    transport, workers = "collective", 4


class AveragedAlone(InShort):
    transport, workers = "local", 1


class CompressedInShortOnFourWorkers(InShort):
    strategy, transport, workers = "dgc", "collective", 4


class AveragedEveryStep(Features):
    """With a period of one, and an optimizer that is linear, it is dense training."""

    strategy, transport = "averaging_every_step", "collective"
    names = (
        "sgd",
        "nesterov",
        "sgd_without_momentum",
        "weight_decay_and_average",
        "steps_per_execution",
        "gradient_accumulation",
        "mixed_precision",
        "eager",
        "regularized",
        "evaluate_and_predict",
    )

    @parameterized.parameters(*names)
    def test_n_workers_train_as_one(self, name: str) -> None:
        self.assert_same_weights(name)
        self.assert_like_one_worker(name)
