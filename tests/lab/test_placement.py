"""Training steps stay on a GPU, asked of TensorFlow's registry on any machine."""

import contextlib
import io
import itertools
import subprocess
import sys
from unittest import mock

import launch
import pytest
import tensorflow as tf
from absl.testing import parameterized

from tf_dgc.exchanges import fused, inplace
from tf_dgc.lab import kernels, placement
from tf_dgc.lab.kernels import KernelPlace, audit

# Between them all that is traced differently; the others are nightly.
FAST = "dgc"
LONG = (
    "dense_embedding",
    "dense_scaled",
    "dense_split",
    "averaging_compressed",
    "horovod_nodes",
)


def audited(
    function: tf.types.experimental.PolymorphicFunction, *shapes: list
) -> tuple:
    specs = [tf.TensorSpec(shape, dtype) for shape, dtype in shapes]
    return audit(tf.function(function).get_concrete_function(*specs), 10)


def waits(found: kernels.Audit) -> dict[str, int]:
    """Return what the host waits for, by operation."""
    counts: dict[str, int] = {}
    for place, count in found.waiting.items():
        counts[place.operation] = counts.get(place.operation, 0) + count
    return counts


class StepCase(parameterized.TestCase, tf.test.TestCase):
    def assert_stays(self, name: str) -> None:
        step = placement.STEPS[name]
        found = audit(placement.trace(step), placement.LARGE)
        self.assertGreater(found.operations, 300)
        self.assertGreater(found.compiled, 0)
        self.assertEmpty(placement.unwanted(found, step.embedding))


@pytest.mark.long
class StepTest(StepCase):
    def test_stays_on_the_gpu(self) -> None:
        self.assert_stays(FAST)

    def test_by_single_operations_it_does_too(self) -> None:
        with fused.forced(False):
            self.assert_stays(FAST)

    @pytest.mark.extended
    def test_what_the_host_waits_for_is_known(self) -> None:
        def looked_at(name: str) -> kernels.Audit:
            return audit(placement.trace(placement.STEPS[name]), placement.LARGE)

        # What workers tell one another: the vector of the reduction.
        dense, plain = looked_at("dense"), looked_at("plain")
        self.assertEqual(waits(plain), {})
        self.assertEqual(waits(dense), {"Reshape": 1})
        # And whether messages are sound, with the number of elements; the figures of a
        # step come from the host, and take a way over the GPU.
        whole = looked_at(FAST)
        known = {"Identity": 1, "Reshape": 1, "StatefulPartitionedCall": 1}
        self.assertEqual(waits(whole), known)
        # docs/evidence/performance.md says where a step by single operations waits.
        # Three of the lists are made only where too many elements pass.
        with fused.forced(False):
            singly = looked_at(FAST)
        self.assertEqual(waits(singly)["Where"], 7)
        self.assertLessEqual(
            4 * sum(waits(whole).values()), sum(waits(singly).values())
        )
        # The model's own operations are in both.
        launched = [each.launched - plain.launched for each in (whole, singly)]
        self.assertLessEqual(4 * launched[0], launched[1])


@pytest.mark.long
class LongStepTest(StepCase):
    @parameterized.parameters(*LONG)
    @pytest.mark.few(0, 2)
    def test_stays_on_the_gpu(self, name: str) -> None:
        self.assert_stays(name)

    @pytest.mark.slow
    def test_what_xla_compiles_is_lowered_for_gpus_and_changes_in_place(self) -> None:
        names = set()
        with mock.patch.dict(inplace._compiled, clear=True):  # of other tests
            for way, name in itertools.product((False, True), ("dgc", "dgc_gradients")):
                with fused.forced(way):
                    placement.trace(placement.STEPS[name])
            for compiled in inplace.compiled():
                names.add(compiled.name)
                self.assertEmpty(placement.lowered(compiled))
        expected = {"accumulate", "densify", "keep", "mark", "peaks", "subtract"}
        expected |= {"_clipped", "_parted", "_sent", "_taken"}
        self.assertContainsSubset(expected, names)


@pytest.mark.slow
class OtherStepsTest(StepCase):
    @parameterized.parameters(*sorted(placement.STEPS.keys() - {FAST, "plain", *LONG}))
    @pytest.mark.few(2)
    def test_stays_on_the_gpu(self, name: str) -> None:
        self.assert_stays(name)


class AuditTest(tf.test.TestCase):
    """What the audit is to find, it finds."""

    def test_operations_without_a_kernel(self) -> None:
        def best(x: tf.Tensor) -> list[tf.Tensor]:
            order = tf.math.top_k(x, 3, index_type=tf.int64).indices
            text = tf.strings.as_string(order)
            return [tf.pad(order, [[0, 1]]), tf.argmax(tf.cast(x, tf.int32)), text]

        found = audited(best, ([20], tf.int64))
        operations = {place.operation for place in found.missing}
        self.assertEqual(operations, {"TopKV2", "Pad", "ArgMax", "AsString"})
        self.assertIn(
            KernelPlace("ArgMax", "T=int32 Tidx=int32 output_type=int64"), found.missing
        )
        self.assertLen(placement.unwanted(found), 4)

    def test_also_in_branches_and_loops(self) -> None:
        def last(x: tf.Tensor) -> tf.Tensor:
            def pad() -> tf.Tensor:
                return tf.pad(x, [[1, 0]])[1:]

            def body(y: tf.Tensor) -> list[tf.Tensor]:
                return [tf.cond(x[0] > 0, pad, lambda: y) - 1]

            return tf.while_loop(lambda y: y[0] > 0, body, [x])[0]

        found = audited(last, ([20], tf.int64))
        self.assertEqual({place.operation for place in found.missing}, {"Pad"})
        waiting = {place.operation for place in found.waiting}
        self.assertContainsSubset({"StatelessIf", "StatelessWhile"}, waiting)

    def test_what_a_kernel_refuses_when_it_runs(self) -> None:
        def summed(x: tf.Tensor) -> tf.Tensor:
            return tf.raw_ops.CollectiveReduceV2(
                input=x,
                group_size=2,
                group_key=1,
                instance_key=1,
                ordering_token=[],
                merge_op="Add",
                final_op="Id",
            )

        for dtype, missing in ((tf.int32, 1), (tf.int64, 0), (tf.float32, 0)):
            self.assertLen(audited(summed, ([20], dtype)).missing, missing)

    def test_large_tensors_that_kernels_want_on_the_host(self) -> None:
        def first(x: tf.Tensor) -> list[tf.Tensor]:
            return [tf.reshape(x, [5, -1]), tf.reduce_sum(x), x[:3] + 1]

        found = audited(first, ([20], tf.int32))
        operations = {place.operation for place in found.copied}
        self.assertContainsSubset({"Reshape", "Sum", "StridedSlice"}, operations)
        self.assertEmpty(audited(first, ([20], tf.float32)).copied)

    def test_what_the_program_pins_to_the_host(self) -> None:
        def both(x: tf.Tensor) -> tf.Tensor:
            with tf.device("CPU:0"):
                y = tf.sqrt(x)
            return y[0] + tf.reduce_sum(x)

        found = audited(both, ([20], tf.float32))
        self.assertEqual([place.operation for place in found.pinned], ["Sqrt"])
        self.assertIn("Sqrt T=float32 is pinned to", placement.unwanted(found)[0])
        self.assertEmpty(placement.unwanted(audited(both, ([5], tf.float32))))

    def test_what_the_host_reads_from_the_gpu_makes_it_wait(self) -> None:
        def both(x: tf.Tensor) -> tf.Tensor:
            made, size = tf.exp(x), tf.size(x)  # TensorFlow has sizes on the host
            with tf.device("CPU:0"):
                return tf.sqrt(made) + tf.square(made) + tf.cast(size, tf.float32)

        waiting = audited(both, ([20], tf.float32)).waiting
        self.assertEqual(waiting, {KernelPlace("Exp", "T=float32"): 1})

    def test_a_function_that_copies_a_variable_is_told(self) -> None:
        with tf.device("CPU:0"):
            variable = tf.Variable(tf.zeros([30]))

        def shorter(value: tf.Tensor) -> tf.Tensor:
            return value + 1.0

        inplace.update("/device:CPU:0", shorter, variable)
        (own,) = [each for each in inplace.compiled() if each.name == "shorter"]
        self.assertEmpty(placement.lowered(own))
        copying = own._replace(run=lambda handle: tf.zeros([30]))
        self.assertEqual(
            placement.lowered(copying), ["shorter copies 1 of 1 variables"]
        )


@pytest.mark.long
class CommandTest(tf.test.TestCase):
    @pytest.mark.slow
    def test_prints_a_table_of_the_steps_named(self) -> None:
        # By itself: it lowers all that this process has let XLA compile.
        done = subprocess.run(
            [sys.executable, "-m", "tf_dgc.lab.placement", "dense"],
            cwd=launch.ROOT,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        head, dense, lowered, counted, again = done.stdout.splitlines()
        self.assertEqual(head.split()[:4], ["step", "operations", "XLA", "launched"])
        self.assertEqual([dense.split()[0], dense.split()[4]], ["dense", "0"])
        self.assertIn("functions lowered for GPUs", lowered)
        self.assertEqual(counted.split()[:3], ["step", "launched", "waits"])
        self.assertEqual(again.split()[::2], ["dense", "1", "1"])

    def test_a_step_that_is_not_known(self) -> None:
        with (
            contextlib.redirect_stderr(io.StringIO()) as told,
            self.assertRaises(SystemExit),
        ):
            placement.main(["sparse"])
        self.assertIn("STEP must be one of plain, dense, ", told.getvalue())
        self.assertIn("Received: sparse", told.getvalue())


if __name__ == "__main__":
    tf.test.main()
