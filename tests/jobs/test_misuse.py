"""Bad input and lost workers: real processes, and what they say."""

import concurrent.futures
from typing import Any, ClassVar

import launch
import pool
import pytest
import tensorflow as tf
from absl.testing import parameterized

from tf_dgc.launcher.workers import free_ports

SCRIPT = str(launch.ROOT / "tests" / "jobs" / "misuse.py")


def outcomes(
    case: str, launcher: str = "collective", workers: int = 2, timeout: float = 60
) -> tuple[dict[int, dict[str, Any]], str, int]:
    """Run a case; return each rank's result, all output, and the exit status."""
    completed = launch.run(
        SCRIPT,
        case,
        workers=workers,
        launcher=launcher,
        environment={"TF_DGC_TIMEOUT": str(timeout)},
        timeout=240,
    )
    output = completed.stdout + completed.stderr
    return launch.by_rank(completed.stdout), output, completed.returncode


# Cases that end a job, or need one that has not begun: they have workers of their own.
# Others leave workers that can do something else.
ENDS = {
    "outer_optimizer_made_too_early",
    "parameters_not_finite",
    "data_differ",
    "replicas_drift_dense",
    "replicas_drift_dgc",
    "replicas_drift_averaging",
    "scope_forgotten",
    "tensorflow_started_collective",
}


# Case, error and what it says.
CASES = (
    (
        "configs_differ",
        "ValueError",
        r"`sparsity` differs: 0\.9 on ranks \[0\]",
    ),
    (
        "strategies_differ",
        "ValueError",
        r"`strategy` differs: 'DGCStrategy' on",
    ),
    (
        "averaging_configs_differ",
        "ValueError",
        r"`outer_optimizer` differs:.*'learning_rate': 0\.69.* on ranks \[0\]",
    ),
    (
        "outer_optimizer_made_too_early",
        "RuntimeError",
        "The outer optimizer is such a call: give a function",
    ),
    (
        "parameters_not_finite",
        "InvalidArgumentError",
        r"all workers stop, it was not averaged.*\[1\] \[3\] \[.*kernel",
    ),
    (
        "models_differ",
        "ValueError",
        r"`shape` differs: \[4, 8\] on ranks \[0\]",
    ),
    (
        "trained_variables_differ",
        "ValueError",
        r"same trained variables.*`variable 2` differs",
    ),
    *(
        (case, "ValueError", rf"same data.*`number of batches` differs: {text}")
        for case, text in (
            ("lengths_differ", r"4 on ranks \[0\]; 3 on ranks \[1\]"),
            ("nothing_for_one", r"4 on ranks \[0\]; 0 on ranks \[1\]"),
            ("global_lengths_differ", r"4 on ranks \[0\]; 3 on ranks \[1\]"),
        )
    ),
    (
        "compiled_outside_the_scope",
        "ValueError",
        r"optimizer 'sgd' was made outside the scope",
    ),
    ("built_outside_the_scope", "ValueError", "was made outside the scope"),
    (
        "built_outside_the_scope_without_momentum",
        "ValueError",
        "was made outside the scope",
    ),
    (
        "built_outside_the_scope_and_compressed",
        "ValueError",
        "was made outside the scope",
    ),
    (
        "scope_forgotten",
        "ValueError",
        "outside the scope of the strategy.* inside `with strategy.scope",
    ),
    ("compiled_by_xla", "ValueError", "`jit_compile` must not be True"),
    (
        "step_without_run",
        "RuntimeError",
        "call the step in it by `strategy.run",
    ),
    (
        "step_without_run_on_distributed_data",
        "RuntimeError",
        "call the step in it by `strategy.run",
    ),
    (
        "data_differ",
        "InvalidArgumentError",
        r"read different data; all stop, the step was not.*\[1\]",
    ),
    *(
        (
            f"replicas_drift_{strategy}",
            "InvalidArgumentError",
            rf"drifted apart; all stop.*\[{step}\] \[.*{name}.*\] \[1\]",
        )
        for strategy, step, name in (
            ("dense", 3, "bias"),
            ("dgc", 3, "bias"),
            ("averaging", 4, "kernel"),
        )
    ),
    (
        "check_intervals_differ",
        "ValueError",
        r"`TF_DGC_CHECK_STEPS` differs: '3' on ranks \[0\]",
    ),
    (
        "check_interval_is_no_number",
        "ValueError",
        "must be a number of steps.*TF_DGC_CHECK_STEPS='often'",
    ),
    ("reduced_and_never_applied", "RuntimeError", "did not apply them"),
    ("changed_after_reduction", "RuntimeError", "changed gradients between"),
    (
        "tensorflow_started_collective",
        "RuntimeError",
        "Create the strategy before any other TensorFlow",
    ),
)
# Others are like them, and start workers of their own.
LONGER = {
    "parameters_not_finite",
    "outer_optimizer_made_too_early",
    "replicas_drift_dgc",
    "replicas_drift_averaging",
}


def named(longer: bool) -> Any:
    """Test those cases that take longer, or the others."""
    return parameterized.named_parameters(
        (case[0], *case) for case in CASES if (case[0] in LONGER) == longer
    )


@pytest.mark.processes
class MisuseTest(parameterized.TestCase, tf.test.TestCase):
    @named(longer=False)
    @pytest.mark.few(12, 23)
    def test_every_worker_stops_with_a_clear_error(
        self, case: str, error: str, text: str
    ) -> None:
        self.check_stops(case, error, text)

    @named(longer=True)
    @pytest.mark.slow
    def test_so_does_every_worker_of_others(
        self, case: str, error: str, text: str
    ) -> None:
        self.check_stops(case, error, text)

    def check_stops(self, case: str, error: str, text: str) -> None:
        output = ""
        if case in ENDS:
            by_rank, output, status = outcomes(case)
            self.assertEqual(status, 3, output)
            found = list(by_rank.values())
        else:
            found = pool.run("collective", 2, "misuse", "told", case=case)
        self.assertNotEmpty(found, output)
        for result in found:
            self.assertEqual(result.get("error"), error, output or str(result))
            self.assertRegex(result["text"], text)

    @pytest.mark.slow
    def test_a_metric_that_one_worker_reads_is_named_before_the_time_is_out(
        self,
    ) -> None:
        found, output, status = outcomes("metric_read_on_the_chief", timeout=1000)
        self.assertNotEqual(status, 0, output)
        self.assertNotEmpty(found, output)
        for result in found.values():
            self.assertIn("worker 0 in the reading of a metric", result["text"])
            self.assertIn("All workers must read metrics together", result["text"])

    def test_workers_that_let_such_an_error_through_end(self) -> None:
        _, output, status = outcomes("trained_variables_differ")
        self.assertEqual(status, 3, output)

    def test_inputs_that_python_makes_may_differ_where_targets_do_not(self) -> None:
        case = "data_are_augmented_on_each"
        found = pool.run("collective", 2, "misuse", "told", case=case)
        self.assertEqual(found, [{}, {}])

    @pytest.mark.slow
    def test_numpy_input_is_shuffled_alike_without_a_seed(self) -> None:
        found, output, status = outcomes("rows_of_numpy_input_without_a_seed")
        self.assertEqual(status, 0, output)
        first, second = (found[rank]["seen"][-32:] for rank in range(2))
        orders = []
        for epoch in (slice(0, 16), slice(16, 32)):
            rows = first[epoch] + second[epoch]
            self.assertEqual(sorted(rows), list(range(32)))
            orders.append(rows)
        self.assertNotEqual(*orders)

    def test_a_scope_forgotten_in_a_loop_is_told_at_the_end(self) -> None:
        _, output, _ = outcomes("scope_forgotten_in_a_loop")
        self.assertIn("nothing was synchronised", output)

    @pytest.mark.slow
    def test_nan_on_one_worker_stops_all_and_changes_nothing(self) -> None:
        found, output, _ = outcomes("nan_raises")
        self.assertNotEmpty(found, output)
        for result in found.values():
            self.assertRegex(result["text"], r"holds NaN or infinity")
            self.assertRegex(
                result["text"], r"\[1\] \[0\] \[\W*sequential/dense/kernel"
            )
            self.assertTrue(result["unchanged"])
            self.assertEqual(result["norm"], 0.0)

    @pytest.mark.extended
    def test_nan_on_one_worker_can_be_skipped_by_all(self) -> None:
        found = pool.run("collective", 2, "misuse", "told", case="nan_skips")
        for result in found:
            self.assertNotIn("error", result)
            self.assertTrue(result["unchanged"])
            self.assertEqual((result["norm"], result["iterations"]), (0.0, 0))

    def test_a_worker_that_never_comes_is_named(self) -> None:
        cluster = '{"worker": ["127.0.0.1:%d", "127.0.0.1:%d"]}'
        ports = free_ports(2)
        completed = launch.run(
            SCRIPT,
            "configs_differ",
            workers=1,
            environment={
                "TF_CONFIG": '{"cluster": %s, "task": {"type": "worker", "index": 0}}'
                % (cluster % tuple(ports)),
                "TF_DGC_TIMEOUT": "3",
            },
        )
        (result,) = launch.by_rank(completed.stdout).values()
        self.assertEqual(result["error"], "TimeoutError")
        self.assertIn(f"Worker 1 (127.0.0.1:{ports[1]}) did not come", result["text"])
        self.assertLess(result["seconds"], 30)

    @pytest.mark.slow
    def test_who_waits_for_one_that_has_caught_an_error_is_told_of_it(self) -> None:
        # Long before the timeout, in which launch.run gives up.
        found, output, _ = outcomes("caught_on_the_chief", timeout=1000)
        told = found[1]["text"]
        self.assertIn("worker 0 no more, as it has left its `fit`", told, output)
        self.assertIn("OSError: no room", told)

    @pytest.mark.slow
    def test_a_worker_that_is_done_stays_for_those_who_are_not(self) -> None:
        # They may still be fetching from it what it has sent them.
        found, output, status = outcomes("one_is_done_before_the_other")
        self.assertEqual(status, 0, output)
        self.assertLen(found, 2)
        done = max(each["done"] for each in found.values())
        self.assertLess(done, min(each["left"] for each in found.values()))


SIDE_BY_SIDE = 3  # jobs that mostly wait
TRANSPORTS = ("collective", "horovod", "hybrid")


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(600)
class LostPeerTest(parameterized.TestCase, tf.test.TestCase):
    found: ClassVar[dict[str, Any]]

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        there = TRANSPORTS[:1] if launch.horovod_missing() else TRANSPORTS
        with concurrent.futures.ThreadPoolExecutor(SIDE_BY_SIDE) as jobs:
            cls.found = {
                f"{what}_{transport}": jobs.submit(
                    outcomes, f"peer_{what}_{transport}", transport, timeout=seconds
                )
                for transport in there
                for what, seconds in (("killed", 60.0), ("absent", 12.0))
            }

    def outcome(self, what: str, transport: str) -> Any:
        if transport != "collective":
            launch.skip_without_horovod()
        return self.found[f"{what}_{transport}"].result()

    @parameterized.parameters(*TRANSPORTS)
    def test_when_a_worker_is_killed_the_others_end(self, transport: str) -> None:
        found, output, status = self.outcome("killed", transport)
        self.assertNotEqual(status, 0, output)
        for result in found.values():
            self.assertIn("error", result)

    @parameterized.parameters(*TRANSPORTS)
    def test_when_a_worker_stays_away_the_others_end(self, transport: str) -> None:
        found, output, status = self.outcome("absent", transport)
        self.assertNotEqual(status, 0, output)
        self.assertIn("has waited for more than 12 s in a collective", output)
        self.assertIn("error", found[0])


@pytest.mark.processes
class HybridChoiceTest(tf.test.TestCase):
    def setUp(self) -> None:
        super().setUp()
        launch.skip_without_horovod()

    @pytest.mark.slow
    def test_asked_for_by_name_it_raises_on_all_where_one_cannot(self) -> None:
        found, output, _ = outcomes("tensorflow_started_hybrid", "hybrid")
        self.assertNotEmpty(found, output)
        for result in found.values():
            self.assertEqual(result["error"], "NoHybridTransport")
            self.assertIn("on rank 1, TensorFlow has already run", result["text"])

    def test_auto_falls_back_to_horovod_on_all_and_says_why(self) -> None:
        found, output, status = outcomes("tensorflow_started_auto", "hybrid")
        self.assertEqual(status, 0, output)
        for rank in range(2):
            self.assertEqual(found[rank]["transport"], "horovod")
            self.assertEqual(found[rank]["total"], 4.0)
        self.assertIn("on rank 1, TensorFlow has already run operations", output)

    def test_processes_of_mpirun_do_not_train_alone_without_mpi(self) -> None:
        world = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}
        for case, text in (
            (
                "sums_over_the_transport_of_auto",
                "mpirun does not tell processes the hosts of the others, and Horovod "
                "has no MPI. Received: OMPI_COMM_WORLD_SIZE=2",
            ),
            (
                "sums_over_horovod",
                r"must see as many workers as the launcher started\. "
                r"Received: hvd.size\(\)=1, OMPI_COMM_WORLD_SIZE=2.*transport='local'",
            ),
        ):
            completed = launch.run(SCRIPT, case, workers=1, environment=world)
            (found,) = launch.by_rank(completed.stdout).values()
            self.assertEqual(found["error"], "RuntimeError")
            self.assertRegex(found["text"], text)

    def test_horovodrun_counts_before_what_is_left_of_another_launcher(self) -> None:
        completed = launch.run(
            SCRIPT,
            "sums_over_the_transport_of_auto",
            launcher="hybrid",
            environment={"PMI_SIZE": "4"},
        )
        expected = {"transport": "hybrid", "total": 4.0}
        for found in launch.results(completed):
            self.assertEqual(found, found | expected)
