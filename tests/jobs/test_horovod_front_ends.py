"""Scripts that use Horovod without a strategy: what all front ends have in common.

The cases of `front_ends.py` run once on two real workers; each test looks at some.
"""

import itertools
from typing import Any, ClassVar

import keras
import launch
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized
from loopback import Loopback, run_workers

import tf_dgc
from tf_dgc import horovod as hvd
from tf_dgc.horovod import core
from tf_dgc.transports.local import LocalTransport

SCRIPT = str(launch.ROOT / "tests" / "jobs" / "front_ends.py")
# As there, which only workers can import.
CONFIGS = ("dense", "all", "tenth", "corrected")
FEW = (
    *(("dense", "plain"), ("all", "plain"), ("tenth", "plain")),
    *(("dense", "momentum"), ("corrected", "momentum")),
)


class FrontEnds(parameterized.TestCase, tf.test.TestCase):
    __test__ = False
    arguments: ClassVar[tuple[str, ...]] = ()
    found: ClassVar[list[dict[str, Any]] | Exception]

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        launch.skip_without_horovod()
        cls.found = launch.results_of(
            SCRIPT, *cls.arguments, launcher="horovod", timeout=900
        )

    def results(self, case: str) -> list[dict[str, Any]]:
        results = [worker[case] for worker in launch.checked(self.found)]
        for rank, result in enumerate(results):
            if "error" in result:
                self.fail(f"rank {rank}: {result['error']}")
        return results

    def assert_same(self, case: str, other: str) -> None:
        for one, two in zip(self.results(case), self.results(other), strict=True):
            self.assertAllClose(one["losses"], two["losses"], 1e-6, 1e-6)
            for own, theirs in zip(one["weights"], two["weights"], strict=True):
                self.assertAllClose(own, theirs, 1e-5, 1e-5)

    def assert_trains_as_a_strategy(
        self, front: str, config: str, optimizer: str
    ) -> None:
        if (front, config, optimizer) == ("by_tape", "corrected", "momentum"):
            self.skipTest("a tape knows no momentum")
        case = f"{front} {config} {optimizer}"
        self.assert_same(case, f"by_strategy {config} {optimizer}")


FRONTS = ("by_optimizer", "by_tape")


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(1000)
class AllFrontEndsTest(FrontEnds):
    __test__ = True
    arguments = ("--all",)

    @parameterized.product(front=FRONTS, config=CONFIGS, name=("plain", "momentum"))
    def test_all_front_ends_train_alike(
        self, front: str, config: str, name: str
    ) -> None:
        self.assert_trains_as_a_strategy(front, config, name)


@pytest.mark.processes
@pytest.mark.timeout(1000)
class FirstFrontEndsTest(FrontEnds):
    __test__ = True
    arguments = ("--first",)

    @parameterized.parameters(*FRONTS)
    def test_compressed_they_train_alike(self, front: str) -> None:
        self.assert_trains_as_a_strategy(front, "tenth", "plain")

    def test_weights_are_the_same_bits_on_all_workers(self) -> None:
        for case in launch.checked(self.found)[0]:
            if case not in ("rank", "theirs", "saved_form", "by_names"):
                with self.subTest(case):
                    one, two = self.results(case)
                    self.assertEqual(one["crc"], two["crc"])

    def test_operations_return_what_horovods_do(self) -> None:
        for rank, found in enumerate(self.results("by_names")):
            own = [1.0 + rank, 2.0]
            expected = {
                "mean": [1.5, 2.0],
                "sum": [3.0, 4.0],
                "halves": [1.5, 2.0],
                "named": 1.0,
                "grouped": [[3.0, 4.0]] * 2,
                "gathered": [1.0, 2.0, 2.0],
                "groups": [[1.0, 2.0, 2.0, 2.0]] * 2,
                "parts": [[3.0], [4.0]][rank],
                "root": [2.0, 2.0],
                "crossed": [[1.0, 2.0], [2.0, 2.0]][rank],
                "objects": [{"rank": 0}, {"rank": 1}],
                "places": [0, 1, True],
                "steps": [[-own[0], -2.0], [-1.5, -2.0]],
                "moving": [1.75],
                "finite": True,
            }
            self.assertEqual(found, expected)

    def test_a_script_written_for_horovod_trains(self) -> None:
        one, two = self.results("as_horovods_example")
        self.assertLess(one["losses"][-1], one["losses"][0])
        self.assertEqual(one["losses"], two["losses"])
        self.assertLess(one["rates"][0], one["rates"][1])
        self.assertAllClose(one["rates"][-1], 0.002)


@pytest.mark.slow
class FrontEndsTest(FirstFrontEndsTest):
    arguments = ()

    @parameterized.parameters(*itertools.product(FRONTS, FEW))
    def test_all_front_ends_train_alike(
        self, front: str, settings: tuple[str, str]
    ) -> None:
        self.assert_trains_as_a_strategy(front, *settings)

    @parameterized.parameters("all", "tenth")
    def test_horovods_own_tape_trains_alike_with_the_compressor(
        self, config: str
    ) -> None:
        # Each tensor has a message of its own here, but so has each its thresholds.
        self.assert_same(f"by_compressor {config} plain", f"by_strategy {config} plain")

    def test_a_fit_script_of_horovod_trains_and_is_resumed(self) -> None:
        for result in self.results("by_fit_script"):
            # The last of four epochs, after what rank 0 alone has loaded.
            self.assertAllClose(result["resumed"]["losses"], result["losses"][3:])
            for one, two in zip(
                result["weights"], result["resumed"]["weights"], strict=True
            ):
                self.assertAllClose(one, two, 1e-5, 1e-5)
            self.assertAllClose(result["rates"], [0.015, 0.02, 0.02, 0.002])
            self.assertLess(result["losses"][-1], result["losses"][0])
        one, two = self.results("by_fit_script")
        self.assertEqual(one["score"], two["score"])

    def test_a_loop_of_horovod_trains(self) -> None:
        one, two = self.results("by_tape_script")
        self.assertEqual(one["losses"], two["losses"])
        self.assertLess(one["losses"][-1], one["losses"][0])
        self.assertEqual([one["saved"], two["saved"]], ["model-1"] * 2)

    def test_horovod_is_ended_and_started_anew(self) -> None:
        for result in self.results("by_end_and_start"):
            self.assertEqual(result["running"], [False, True])
        self.assert_same("by_end_and_start", "by_optimizer dense plain")

    def test_horovods_own_optimizer_does_not_synchronise_on_keras_3(self) -> None:
        # Should it one day, this front end has one reason less.
        one, two = self.results("theirs")
        self.assertNotEqual(one["crc"], two["crc"])

    def test_one_node_of_all_workers_sums_densely(self) -> None:
        self.assert_same("on_one_node", "by_optimizer dense plain")

    def test_compression_sends_less(self) -> None:
        (dense, _), (tenth, _) = (
            self.results(f"by_optimizer {config} plain")
            for config in ("dense", "tenth")
        )
        self.assertLess(tenth["sent"], dense["sent"] / 3)

    def test_passes_are_collected_before_they_are_exchanged(self) -> None:
        passes, _ = self.results("passes")
        every, _ = self.results("by_optimizer dense momentum")
        self.assertEqual(2 * passes["sent"], every["sent"])

    def test_a_saved_model_loads_as_if_it_had_not_been_distributed(self) -> None:
        for result in self.results("saved_form"):
            self.assertEqual(result["types"], [True, True])
            self.assertTrue(result["same"])
            self.assertTrue(result["form"])
            self.assertFalse(result["distributed"])

    def test_an_overflow_on_one_worker_is_one_for_all(self) -> None:
        one, two = self.results("mixed_precision")
        self.assertEqual(one["scale"], two["scale"])
        self.assertLess(one["scale"], 2.0**15)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(400)
class HierarchyTest(parameterized.TestCase, tf.test.TestCase):
    """Two nodes of two workers, on one machine under two names."""

    found: ClassVar[list[dict[str, Any]] | Exception]

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        launch.skip_without_horovod()
        script = str(launch.ROOT / "tests" / "jobs" / "hierarchy.py")
        options = "-H", "localhost:2,127.0.0.1:2"
        cls.found = launch.results_of(
            script, workers=4, launcher="horovod", options=options, timeout=350
        )

    def test_nodes_are_found(self) -> None:
        found = launch.checked(self.found)
        self.assertEqual([worker["node"] for worker in found], [0, 0, 1, 1])
        self.assertEqual([worker["nodes"] for worker in found], [2] * 4)

    def test_rows_go_from_node_to_node(self) -> None:
        for worker in launch.checked(self.found):
            self.assertEqual(worker["rows"], [worker["node"], 10 + worker["node"]])

    @parameterized.parameters("dense", "all", "tenth", "owners")
    def test_weights_are_the_same_bits_on_all_workers(self, config: str) -> None:
        found = launch.checked(self.found)
        self.assertLen({worker[f"{config} True"]["crc"] for worker in found}, 1)

    @parameterized.parameters("dense", "all")
    def test_where_nothing_is_left_out_it_is_flat_exchange(self, config: str) -> None:
        for worker in launch.checked(self.found):
            flat, nodes = worker[f"{config} False"], worker[f"{config} True"]
            self.assertAllClose(flat["losses"], nodes["losses"], 1e-6, 1e-6)
            for one, two in zip(flat["weights"], nodes["weights"], strict=True):
                self.assertAllClose(one, two, 1e-5, 1e-5)

    def test_only_messages_go_between_nodes_and_once_from_each(self) -> None:
        for rank, worker in enumerate(launch.checked(self.found)):
            node = [0, 1] if rank < 2 else [2, 3]
            between = [call for call in worker["calls"] if call[1] != node]
            if rank in (0, 2):
                flags, (name, ranks, size) = between
                # Of each worker, whether its gradient is finite, and what it counts.
                self.assertEqual(flags, ["allreduce", [0, 2], 4 * 3 * 4])
                self.assertEqual((name, ranks), ("allgather", [0, 2]))
                # 52 of 512 values, with their positions and the header.
                self.assertLess(size, 6 * 52)
            else:
                self.assertEqual(between, [])


class ArgumentsTest(parameterized.TestCase, tf.test.TestCase):
    """What is refused, and what one worker alone can tell."""

    def distributed(self, optimizer: Any, *args: Any, **options: Any) -> Any:
        over = LocalTransport()
        return hvd.DistributedOptimizer(optimizer, *args, over=over, **options)

    def test_types_are_checked(self) -> None:
        for optimizer in ("sgd", None, keras.optimizers.SGD):
            with self.assertRaisesRegex(TypeError, "must be one of Keras"):
                self.distributed(optimizer)
        for config in (0.99, tf_dgc.AveragingConfig()):
            with self.assertRaisesRegex(TypeError, "must be a DGCConfig or None"):
                self.distributed(keras.optimizers.SGD(), config)
            with self.assertRaisesRegex(TypeError, "must be a DGCConfig"):
                hvd.DGCCompressor(config, over=LocalTransport())

    def test_settings_must_be_the_same_on_all_workers(self) -> None:
        def work(transport: Loopback) -> None:
            config = tf_dgc.DGCConfig(sparsity=0.9 + transport.rank / 100)
            variables = [tf.Variable(tf.ones([4]))]
            means = core.Means(transport, config)
            means.gradients(core.Owner(), [tf.ones([4])], variables)

        with self.assertRaisesRegex(ValueError, "settings.*`sparsity` differs: 0.9 on"):
            run_workers(2, work)

    def test_an_optimizer_is_distributed_once(self) -> None:
        optimizer = self.distributed(keras.optimizers.SGD())
        with self.assertRaisesRegex(ValueError, "is distributed already"):
            self.distributed(optimizer)
        with self.assertRaisesRegex(ValueError, "is distributed already"):
            self.distributed(keras.optimizers.LossScaleOptimizer(optimizer))

    def test_passes_are_given_in_time_and_once(self) -> None:
        for steps in (0, 1.5, -2):
            with self.assertRaisesRegex(ValueError, "an integer of at least 1"):
                sgd = keras.optimizers.SGD()
                self.distributed(sgd, backward_passes_per_step=steps)
        built = keras.optimizers.SGD()
        built.build([keras.Variable([1.0])])
        for optimizer in (keras.optimizers.SGD(gradient_accumulation_steps=3), built):
            with self.assertRaisesRegex(ValueError, "before the optimizer is built"):
                self.distributed(optimizer, backward_passes_per_step=2)

    def test_whose_steps_cannot_be_accumulated_is_told(self) -> None:
        with self.assertLogs("tf_dgc", "WARNING") as logs:
            self.distributed(keras.optimizers.Ftrl(), tf_dgc.DGCConfig())
        self.assertIn("accumulated, and not its own steps", logs.output[0])

    def test_a_tape_keeps_structure_and_missing_gradients(self) -> None:
        x, unused = keras.Variable([2.0, 3.0]), tf.Variable(1.0)
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_sum(x * x)
        wrapped = hvd.DistributedGradientTape(tape, over=LocalTransport())
        found = wrapped.gradient(loss, {"x": x, "rest": [unused]})
        self.assertAllEqual(found["x"], [4.0, 6.0])
        self.assertEqual(found["rest"], [None])

    @parameterized.parameters((1.0, 2.0), (np.nan, 0.0))
    def test_sparse_gradients_stay_sparse_and_a_skipped_step_is_zero(
        self, factor: float, expected: float
    ) -> None:
        table = tf.Variable(tf.ones([4, 2]))
        with tf.GradientTape() as tape:
            loss = factor * tf.reduce_sum(tf.gather(table, [1, 1]))
        config = tf_dgc.DGCConfig(nonfinite="skip")
        wrapped = hvd.DistributedGradientTape(tape, config, over=LocalTransport())
        found = wrapped.gradient(loss, table)
        self.assertIsInstance(found, tf.IndexedSlices)
        dense = tf.convert_to_tensor(found)
        self.assertAllEqual(dense[:, 0], [0.0, expected, 0.0, 0.0])

    def test_a_tape_records_as_the_one_it_wraps(self) -> None:
        x = tf.constant(3.0)
        over = LocalTransport()
        with hvd.DistributedGradientTape(tf.GradientTape(), over=over) as tape:
            tape.watch(x)
            loss = x * x
        self.assertAllEqual(tape.gradient(loss, x), 6.0)

    def test_a_compressor_outside_of_graphs_is_for_one_tensor(self) -> None:
        config = tf_dgc.DGCConfig(sparsity=0.5, min_elements=1)
        compressor = hvd.DGCCompressor(config, over=LocalTransport())
        compressor.compress(tf.ones([4, 4]))
        with self.assertRaisesRegex(ValueError, r"must have shape \(4, 4\)"):
            compressor.compress(tf.ones([5, 4]))

    def test_a_compressor_has_no_budget_of_a_step(self) -> None:
        config = tf_dgc.DGCConfig(bytes_per_step=10**6)
        with self.assertRaisesRegex(ValueError, "Received: bytes_per_step=1000000"):
            hvd.DGCCompressor(config, over=LocalTransport())

    def test_a_compressor_leaves_small_tensors_to_horovod(self) -> None:
        compressor = hvd.DGCCompressor(tf_dgc.DGCConfig(), over=LocalTransport())
        tensor = tf.ones([4])
        left, context = compressor.compress(tensor)
        self.assertIs(left, tensor)
        self.assertIs(compressor.decompress(left, context), tensor)

    @parameterized.parameters(0, 2)
    def test_variables_begin_as_those_of_the_root(self, root: int) -> None:
        def work(transport: Loopback) -> list[np.ndarray]:
            with lock:
                model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
                adam = keras.optimizers.Adam()
                model.compile(hvd.DistributedOptimizer(adam, over=transport), "mse")
            model.layers[0].kernel.assign(tf.fill([3, 2], float(transport.rank)))
            callback = hvd.callbacks.BroadcastVariables(root, over=transport)
            callback.set_model(model)
            callback.on_train_begin()
            return model.get_weights()

        import threading

        lock = threading.Lock()
        for kernel, _ in run_workers(3, work):
            self.assertAllEqual(kernel, np.full([3, 2], root))

    def test_there_must_be_such_a_root(self) -> None:
        for root in (-1, 1):
            with self.assertRaisesRegex(ValueError, r"must be in \[0, 1\)"):
                hvd.callbacks.BroadcastVariables(root, over=LocalTransport())

    def test_logs_become_means(self) -> None:
        def work(transport: Loopback) -> dict[str, float]:
            logs = {"loss": 1.0 + transport.rank, "mae": 3.0}
            average = hvd.callbacks.MetricAverage(over=transport)
            average.on_epoch_end(0, logs)
            average.on_epoch_end(1, None)
            return logs

        self.assertEqual(run_workers(3, work), [{"loss": 2.0, "mae": 3.0}] * 3)

    def test_the_learning_rate_rises(self) -> None:
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        model.compile(keras.optimizers.SGD(0.4), "mse")
        warmup = hvd.callbacks.LearningRateWarmup(4, 0.5)
        rates = []
        watch = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: rates.append(
                float(model.optimizer.learning_rate)
            )
        )
        x, y = np.ones((6, 3), "float32"), np.ones((6, 2), "float32")
        model.fit(x, y, batch_size=1, verbose=0, callbacks=[warmup, watch])
        self.assertAllClose(rates, [0.2, 0.25, 0.3, 0.35, 0.4, 0.4])
        alone = LocalTransport()
        horovods = hvd.callbacks.LearningRateWarmupCallback(
            0.1, 2, verbose=1, over=alone
        )
        with self.assertLogs("tf_dgc", "INFO") as logs:
            model.fit(x, y, batch_size=2, epochs=3, verbose=0, callbacks=[horovods])
        self.assertLen(logs.output, 1)
        self.assertIn("has reached 0.1", logs.output[0])
        with self.assertRaisesRegex(ValueError, "`steps_per_epoch` must be given"):
            endless = tf.data.Dataset.from_generator(
                lambda: iter([(x, y)]),
                output_signature=(tf.TensorSpec([6, 3]), tf.TensorSpec([6, 2])),
            )
            model.fit(endless, verbose=0, callbacks=[horovods])
        for steps, initial in ((0, 0.0), (4, 1.5)):
            with self.assertRaisesRegex(ValueError, "`steps` must be 1 or more"):
                hvd.callbacks.LearningRateWarmup(steps, initial)


if __name__ == "__main__":
    tf.test.main()
