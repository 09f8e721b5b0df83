"""Whatever a Keras user does gives on N workers what it gives on one.

A few features are enough for each kind of strategy to meet each transport. That each
feature meets both is the tier `extended`; the others of their product run by -m slow. A
job of `pool.py` runs all that has the same place.
"""

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import features
import numpy as np
import pool
import pytest
import tensorflow as tf
from absl.testing import parameterized

# float16 rounds what is summed, and sums in another order on N workers.
TOLERANCE = {"mixed_precision": 2e-3}
pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]

# Transport and number of workers.
ALONE = ("local", 1)
PAIRS = (("collective", 2), ("horovod", 2), ("hybrid", 2))
FOUR = ("collective", 4)
PLACES = (ALONE, *PAIRS, FOUR)
# Three cannot share batches of 16 evenly: not all train there, and none as one does.
THREES = (("collective", 3), ("horovod", 3))
# These meet each kind of strategy on each transport.
FIRST = (
    "sgd",
    "sgd_without_momentum",
    "adam",
    "adamw",
    "steps_per_execution",
    "custom_loop",
    "evaluate_and_predict",
    "rows_that_n_does_not_divide",
    "masked_losses",
    "callbacks",
)
FEW = (
    "adam",
    "batch_norm_and_dropout",
    "data_that_end_early_on_some_workers",
    "data_that_end_early_within_an_execution",
    "embedding",
    "evaluate_and_predict",
    "gradient_accumulation",
    "state_saved_in_the_midst_of_an_epoch",
    "steps_per_execution",
    "two_optimizers",
)
# With a period of one, and an optimizer that is linear, averaging is dense training.
LINEAR = (
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
# Strategies that compute what one worker does.
EQUAL = ("dense", "dgc_dense", "averaging_every_step")
AVERAGING = {0: "averaging_by_all_means", 1: "averaging_in_flight"}  # of five
INEXACT = ("dgc", "averaging", *AVERAGING.values())
# What need not make progress in so short a time. The learning rate of loss_scaling is
# next to nothing; a tenth of a change is sent, with momentum: it overshoots.
UNSTEADY = {
    "dgc": {"loss_scaling"},
    "averaging": {"loss_scaling"},
    "averaging_in_flight": {"loss_scaling"},
    "averaging_by_all_means": {*features.FEATURES}
    - {"adam", "two_optimizers", "custom_loop"},
}

Case = tuple[str, tuple[str, int], str]  # strategy, place, feature


def names_of(strategy: str) -> Iterable[str]:
    return LINEAR if strategy == "averaging_every_step" else features.FEATURES


def pairs() -> Iterator[Case]:
    """Yield cases: each feature meets each kind of strategy, and each transport.

    The kinds: one that computes what one worker does, compression, averaging. Of the
    settings of a kind each feature meets one, the next feature another.
    """
    for i, name in enumerate(features.FEATURES):
        turn = i % 3 + i // 3
        exact = EQUAL[i % 3] if name in names_of(EQUAL[i % 3]) else EQUAL[i % 2]
        averaging = AVERAGING.get(i // 2 % 5, "averaging")
        for number, strategy in enumerate((exact, "dgc", averaging)):
            yield strategy, PAIRS[(turn + number) % 3], name


def few() -> Iterator[Case]:
    """Yield one case of each of the first features."""
    for i, case in enumerate(pairs()):
        if i % 3 == i // 3 % 3 and case[2] in FIRST:
            yield case


def product() -> Iterator[Case]:
    for strategy in features.STRATEGIES:
        if strategy != "none":
            for place in PLACES:
                yield from ((strategy, place, name) for name in names_of(strategy))
            if strategy not in EQUAL:
                yield from ((strategy, place, name) for place in THREES for name in FEW)


def named(cases: Iterable[Case]) -> Any:
    """Return them with names in whose order, unittest's, one job follows another."""
    return parameterized.named_parameters(
        *(
            (f"{place[0]}_{place[1]}_{s}_{f}", s, place, f)
            for s, place, f in sorted({*cases})
        )
    )


@functools.cache
def one_worker(name: str) -> dict[str, Any]:
    """Return what plain Keras does, without this package's strategies."""
    arguments = {"strategy": "none", "transport": "local", "name": name}
    (found,) = pool.run("local", 1, "features", "found", timeout=300, **arguments)
    return dict(found["figures"])


class Features(parameterized.TestCase, tf.test.TestCase):
    __test__ = False

    def check(self, strategy: str, place: tuple[str, int], name: str) -> None:
        transport, workers = place
        arguments = {"strategy": strategy, "transport": transport, "name": name}
        found = pool.run(*place, "features", "found", timeout=300, **arguments)
        self.assertEqual([each["rank"] for each in found], list(range(workers)))
        self.assertEqual({each["transport"] for each in found}, {transport})
        figures = [each["figures"] for each in found]
        self.assertLen({own.get("crc") for own in figures}, 1, "weights differ")
        for rank, own in enumerate(figures):
            self.assertTrue(own.get("continued", True))
            if strategy in EQUAL:
                self.assert_like_one_worker(own, name, f"rank {rank}")
            else:
                steady = name not in UNSTEADY.get(strategy, {"loss_scaling"})
                self.assert_training(own.get("history", {}).get("loss", []), steady)

    def assert_like_one_worker(self, own: Any, name: str, who: str) -> None:
        tolerance, expected = TOLERANCE.get(name, 1e-5), one_worker(name)
        self.assertEqual(own.keys(), expected.keys())
        for key in expected.keys() - {"crc"}:
            self.assertAllClose(
                own[key], expected[key], tolerance, tolerance, msg=f"{who}, {key}"
            )

    def assert_training(self, loss: list[float], steady: bool) -> None:
        self.assertTrue(np.isfinite(loss).all())
        if len(loss) > 1 and steady:
            self.assertLess(loss[-1], loss[0])


class PairsTest(Features):
    """Weights are the same bits on all workers, and training goes as it should."""

    __test__ = True

    @named(few())
    @pytest.mark.few(2, 5)
    def test_n_workers_train_alike(
        self, strategy: str, place: tuple[str, int], name: str
    ) -> None:
        self.check(strategy, place, name)


@pytest.mark.slow
class OtherPairsTest(Features):
    __test__ = True

    @named({*pairs()} - {*few()})
    def test_n_workers_train_alike(
        self, strategy: str, place: tuple[str, int], name: str
    ) -> None:
        self.check(strategy, place, name)


@pytest.mark.slow
class ProductTest(Features):
    __test__ = True

    @named({*product()} - {*pairs()})
    def test_n_workers_train_alike(
        self, strategy: str, place: tuple[str, int], name: str
    ) -> None:
        self.check(strategy, place, name)


class ChoiceTest(parameterized.TestCase):
    """What runs by default."""

    @parameterized.parameters(*features.FEATURES)
    def test_each_feature_meets_each_kind_of_strategy_and_transport(
        self, name: str
    ) -> None:
        own = [(strategy, place) for strategy, place, each in pairs() if each == name]
        together = {(strategy, place) for strategy, place in own if place in PAIRS}
        for kind in (EQUAL, INEXACT[:1], INEXACT[1:]):
            self.assertLen([one for one, _ in together if one in kind], 1)
        self.assertEqual({place for _, place in together}, {*PAIRS})
        self.assertContainsSubset(own, [case[:2] for case in product()])

    def test_the_first_meet_each_kind_on_each_transport(self) -> None:
        kinds = {
            name: kind for kind in (EQUAL, INEXACT[:1], INEXACT[1:]) for name in kind
        }
        met = {(kinds[strategy], place) for strategy, place, _ in few()}
        self.assertLen(met, 9)

    def test_each_strategy_meets_each_place(self) -> None:
        for strategy in features.STRATEGIES:
            met = {place for each, place, _ in pairs() if each == strategy}
            if strategy != "none":
                self.assertContainsSubset(PAIRS, met, strategy)
            self.assertNotIn(FOUR, met)
