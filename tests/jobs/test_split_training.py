"""Split layers on real workers give what one worker computes without them."""

import functools
from typing import Any

import pool
import pytest
import split_layers
import tensorflow as tf
from absl.testing import parameterized

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]

PLACES = [
    (transport, workers)
    for transport in ("collective", "horovod", "hybrid")
    for workers in (2, 3, 4)
]
# The others of the product run by -m slow.
FEW = [
    ("dense", "collective", 3, "adamw"),
]
ALL = [
    (strategy, transport, workers, optimizer)
    for strategy in ("dense", "dgc_dense")
    for transport, workers in PLACES
    for optimizer in split_layers.OPTIMIZERS
    if strategy == "dense" or "clipnorm" not in optimizer
]


def named(cases: Any) -> Any:
    cases = [("_".join(map(str, case)), *case) for case in sorted(cases)]
    return parameterized.named_parameters(*cases)


@functools.cache
def one_worker(optimizer: str, **options: Any) -> dict[str, Any]:
    """Return what plain Keras gives without a strategy."""
    args = {"strategy": "none", "transport": "local", "optimizer": optimizer}
    (found,) = pool.run("local", 1, "split_layers", "trained", **args, **options)
    return dict(found)


class Equal(parameterized.TestCase, tf.test.TestCase):
    __test__ = False

    def check(
        self,
        case: tuple[str, str, int, str],
        tolerance: float = 1e-6,
        **options: Any,
    ) -> None:
        strategy, transport, workers, optimizer = case
        args = {"strategy": strategy, "transport": transport, "optimizer": optimizer}
        every = pool.run(
            transport, workers, "split_layers", "trained", **args, **options
        )
        expected = one_worker(optimizer, **options)
        for rank, found in enumerate(every):
            for part, (*whole, _) in zip(
                found["kernels"], expected["kernels"], strict=True
            ):
                axis = ("rows", "columns").index(part.pop())
                whole[axis] = -(-whole[axis] // workers)
                self.assertEqual(part, whole)
            self.assertNotIn("SplitDense", found["classes"])
            self.assertEqual(found["classes"], expected["classes"])
            keys = ["weights", "slots", "evaluated", "predicted"]
            if strategy != "dense":  # which takes over momentum
                keys.remove("slots")
            for key in keys:
                for one, other in zip(found[key], expected[key], strict=True):
                    self.assertAllClose(one, other, tolerance, tolerance, msg=rank)
            for key, value in expected["history"].items():
                self.assertAllClose(found["history"][key], value, tolerance, tolerance)
            self.assertEqual(found["weights"], every[0]["weights"])


class FewTest(Equal):
    __test__ = True

    @named(FEW)
    @pytest.mark.slow
    def test_it_is_as_on_one_worker(self, *case: Any) -> None:
        self.check(case)

    @pytest.mark.slow
    def test_workers_without_rows_train_their_part(self) -> None:
        # The last batch has a single row.
        self.check(("dense", "collective", 3, "adamw"), batch=89)


@pytest.mark.slow
class AllTest(Equal):
    __test__ = True

    @named(ALL)
    def test_it_is_as_on_one_worker(self, *case: Any) -> None:
        self.check(case)

    def test_mixed_precision(self) -> None:
        case = "dense", "horovod", 2, "adam"
        for policy in ("mixed_float16", "mixed_bfloat16"):
            self.check(case, 2e-2, policy=policy)


if __name__ == "__main__":
    tf.test.main()
