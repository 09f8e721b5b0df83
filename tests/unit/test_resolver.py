"""Tests of the choice of the transport."""

import atexit
import json
import os
from typing import Any
from unittest import mock

import tensorflow as tf
from loopback import Hub, Loopback

import tf_dgc
from tf_dgc import transports
from tf_dgc.strategies import randomness, watched
from tf_dgc.transports import base, handshake, resolver
from tf_dgc.transports.local import LocalTransport
from tf_dgc.transports.rendezvous import NoHybridTransport

LAUNCHED = (
    "HOROVOD_SIZE",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "SLURM_STEP_NUM_TASKS",
    "JOB_COMPLETION_INDEX",
    "TF_CONFIG",
)


def tf_config(workers: int) -> str:
    cluster = {"worker": [f"localhost:{port}" for port in range(1, workers + 1)]}
    return json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 0}})


# What Slurm tells a process, by where it runs in a job of four tasks.
ALLOCATED = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_NPROCS": "4"}
BATCH_SCRIPT = ALLOCATED | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
SRUN = ALLOCATED | {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_PROCID": "2",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "0",
}
INTERACTIVE_STEP = SRUN | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}


class Started(Loopback):
    """Stands for a transport that needs a network; remembers its arguments."""

    def __init__(self, *args: Any) -> None:
        super().__init__(Hub(1), 0)
        self.args = args


class ResolveTest(tf.test.TestCase):
    def setUp(self) -> None:
        super().setUp()
        resolver._shared.cache_clear()
        self.addCleanup(resolver._shared.cache_clear)
        kept = {k: v for k, v in os.environ.items() if k not in LAUNCHED}
        self.enterContext(mock.patch.dict(os.environ, kept, clear=True))
        self.started = {
            name: self.enterContext(
                mock.patch.object(resolver, name, side_effect=Started)
            )
            for name in ("CollectiveTransport", "HorovodTransport", "HybridTransport")
        }

    def started_names(self) -> list[str]:
        return [name for name, mocked in self.started.items() if mocked.called]

    def resolve_in(self, **environment: str) -> tuple[transports.Transport, list[str]]:
        """Return what "auto" gives and what it started."""
        resolver._shared.cache_clear()
        for mocked in self.started.values():
            mocked.reset_mock()
        with mock.patch.dict(os.environ, environment):
            return transports.resolve("auto"), self.started_names()

    def test_a_transport_is_taken_as_it_is(self) -> None:
        transport = Loopback(Hub(1), 0)
        self.assertIs(transports.resolve(transport), transport)

    def test_unknown_names_are_refused(self) -> None:
        for name in ("", "mpi", "Local", "auto-hybrid", "nccl"):
            with self.assertRaisesRegex(
                ValueError,
                r"`transport` must be one of \('auto', 'local', 'collective', "
                r"'horovod', 'hybrid'\), or a Transport\. "
                rf"Received: transport='{name}'",
            ):
                transports.resolve(name)

    def test_other_types_are_refused(self) -> None:
        for value in (None, 3, LocalTransport, ["local"], b"local"):
            with self.assertRaisesRegex(
                TypeError,
                r"`transport` must be one of .*, or a Transport\. Received: transport=",
            ):
                transports.resolve(value)

    def test_each_name_is_that_transport(self) -> None:
        with mock.patch.dict(os.environ, {"TF_CONFIG": tf_config(2)}):
            for name, expected in (
                ("local", []),
                ("collective", ["CollectiveTransport"]),
                ("horovod", ["HorovodTransport"]),
                ("hybrid", ["HybridTransport"]),
            ):
                for mocked in self.started.values():
                    mocked.reset_mock()
                transport = transports.resolve(name)
                self.assertEqual(isinstance(transport, LocalTransport), name == "local")
                self.assertEqual(self.started_names(), expected)

    def test_there_is_one_of_each_name(self) -> None:
        with mock.patch.dict(os.environ, {"TF_CONFIG": tf_config(2)}):
            for name in base.NAMES:
                first = transports.resolve(name)
                self.assertIs(transports.resolve(name), first)
            self.assertIs(transports.resolve("auto"), transports.resolve("collective"))
        for mocked in self.started.values():
            self.assertLessEqual(mocked.call_count, 1)

    def test_auto_is_hybrid_and_shares_it(self) -> None:
        with mock.patch.dict(os.environ, {"HOROVOD_SIZE": "2"}):
            auto = transports.resolve("auto")
        self.assertIs(transports.resolve("hybrid"), auto)

    def test_auto_is_local_for_a_worker_that_is_alone(self) -> None:
        for environment in (
            {},
            {"TF_CONFIG": ""},
            {"TF_CONFIG": "{}"},
            {"TF_CONFIG": tf_config(1)},
            {"HOROVOD_SIZE": "1"},
            {"OMPI_COMM_WORLD_SIZE": "1"},
        ):
            with self.subTest(environment):
                transport, started = self.resolve_in(**environment)
                self.assertIsInstance(transport, LocalTransport)
                self.assertEqual(started, [])

    def test_auto_is_hybrid_under_a_launcher(self) -> None:
        self.enterContext(mock.patch.object(resolver, "has_mpi", return_value=True))
        for name in ("HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
            for others in ({}, {"TF_CONFIG": tf_config(2)}):
                with self.subTest(name=name, others=others):
                    _, started = self.resolve_in(**{name: "2"}, **others)
                    self.assertEqual(started, ["HybridTransport"])

    def test_auto_is_collective_with_a_tf_config(self) -> None:
        transport, started = self.resolve_in(TF_CONFIG=tf_config(3))
        self.assertEqual(started, ["CollectiveTransport"])
        addresses = ["localhost:1", "localhost:2", "localhost:3"]
        self.assertEqual(transport.args, (addresses, 0))

    def test_a_launcher_of_one_worker_leaves_tf_config_to_count(self) -> None:
        _, started = self.resolve_in(HOROVOD_SIZE="1", TF_CONFIG=tf_config(2))
        self.assertEqual(started, ["CollectiveTransport"])

    def test_processes_of_srun_find_each_other(self) -> None:
        for told in ({}, {"TF_CONFIG": "{}"}, {"PMI_SIZE": "4"}):
            with (
                mock.patch.object(resolver, "has_mpi", return_value=False),
                self.assertLogs("tf_dgc", "INFO") as logged,
            ):
                transport, started = self.resolve_in(**SRUN, **told)
            self.assertEqual(started, ["CollectiveTransport"])
            first = 12000 + 31 * 7 * 80  # of job 7, step 0
            ports = first, first + 1
            addresses = [f"{host}:{port}" for host in ("n1", "n2") for port in ports]
            self.assertEqual(transport.args, (addresses, 2))
            self.assertIn(f"srun: worker 2 of {', '.join(addresses)}", logged.output[0])

    def test_collective_by_name_takes_what_a_scheduler_tells(self) -> None:
        with mock.patch.dict(os.environ, SRUN):
            transport = transports.resolve("collective")
        self.assertEqual(transport.args[1], 2)

    def test_half_of_what_srun_tells_is_an_error(self) -> None:
        half = {k: v for k, v in SRUN.items() if k != "SLURM_PROCID"}
        with self.assertRaisesRegex(
            RuntimeError,
            "srun started this process as one of several.* Received: no SLURM_PROCID. "
            "Set them, or TF_CONFIG; .* transport='local'",
        ):
            self.resolve_in(**half)
        self.assertEqual(self.started_names(), [])

    def test_an_evaluator_trains_alone_and_says_so(self) -> None:
        config = json.loads(tf_config(2))
        config["task"] = {"type": "evaluator", "index": 0}
        with self.assertLogs("tf_dgc", "WARNING") as logged:
            transport, _ = self.resolve_in(TF_CONFIG=json.dumps(config))
        self.assertIsInstance(transport, LocalTransport)
        self.assertIn("an evaluator is no worker", logged.output[0])

    def test_one_process_of_an_allocation_is_alone(self) -> None:
        for environment in (ALLOCATED, BATCH_SCRIPT, INTERACTIVE_STEP):
            with self.subTest(environment):
                transport, _ = self.resolve_in(**environment)
                self.assertIsInstance(transport, LocalTransport)

    def test_other_launchers_count_within_an_allocation(self) -> None:
        self.enterContext(mock.patch.object(resolver, "has_mpi", return_value=True))
        for environment in (BATCH_SCRIPT, SRUN):
            for told, started in (
                ({"TF_CONFIG": tf_config(2)}, ["CollectiveTransport"]),
                ({"TF_CONFIG": tf_config(1)}, []),
                ({"HOROVOD_SIZE": "2"}, ["HybridTransport"]),
                ({"HOROVOD_SIZE": "1"}, []),
                ({"PMI_SIZE": "4"}, ["HybridTransport"]),
            ):
                with self.subTest(environment=environment, told=told):
                    _, found = self.resolve_in(**environment, **told)
                    self.assertEqual(found, started)

    def test_each_process_of_srun_may_be_told_to_train_alone(self) -> None:
        with mock.patch.dict(os.environ, SRUN):
            self.assertIsInstance(transports.resolve("local"), LocalTransport)

    def test_auto_takes_horovod_where_there_is_no_hybrid_and_says_why(self) -> None:
        refused = NoHybridTransport("on rank 1, TensorFlow has already run")
        self.started["HybridTransport"].side_effect = refused
        with (
            mock.patch.dict(os.environ, {"HOROVOD_SIZE": "2"}),
            self.assertLogs("tf_dgc", "WARNING") as logged,
        ):
            auto = transports.resolve("auto")
        self.assertEqual(self.started_names(), ["HorovodTransport", "HybridTransport"])
        self.assertIn("on rank 1, TensorFlow has already run", logged.output[0])
        self.assertIs(transports.resolve("horovod"), auto)

    def test_hybrid_by_name_does_not_give_way(self) -> None:
        self.started["HybridTransport"].side_effect = NoHybridTransport("no store")
        with self.assertRaisesRegex(NoHybridTransport, "no store"):
            transports.resolve("hybrid")
        self.assertEqual(self.started_names(), ["HybridTransport"])

    def test_other_errors_of_hybrid_do_not_give_way(self) -> None:
        self.started["HybridTransport"].side_effect = TimeoutError("worker 1")
        with (
            mock.patch.dict(os.environ, {"HOROVOD_SIZE": "2"}),
            self.assertRaisesRegex(TimeoutError, "worker 1"),
        ):
            transports.resolve("auto")
        self.assertEqual(self.started_names(), ["HybridTransport"])

    def test_a_transport_that_failed_may_be_asked_for_again(self) -> None:
        self.started["HorovodTransport"].side_effect = ImportError("no Horovod")
        with self.assertRaisesRegex(ImportError, "no Horovod"):
            transports.resolve("horovod")
        self.started["HorovodTransport"].side_effect = Started
        self.assertIsInstance(transports.resolve("horovod"), Started)

    def test_collective_needs_a_tf_config(self) -> None:
        for environment in ({}, {"TF_CONFIG": "{}"}):
            with (
                mock.patch.dict(os.environ, environment),
                self.assertRaisesRegex(
                    ValueError,
                    "transport='collective' needs the environment variable TF_CONFIG",
                ),
            ):
                transports.resolve("collective")

    def test_a_malformed_tf_config_is_an_error(self) -> None:
        for name in ("auto", "collective"):
            with (
                mock.patch.dict(os.environ, {"TF_CONFIG": "{"}),
                self.assertRaisesRegex(ValueError, "TF_CONFIG must be a JSON object"),
            ):
                transports.resolve(name)


class Placed(Loopback):
    """One of several workers, which know each other's addresses, or do not."""

    def __init__(self, rank: int, size: int, *addresses: str) -> None:
        super().__init__(Hub(size), rank)
        self.addresses = addresses


def is_chief(task_type: str | None, task_id: int | None, cluster_spec: Any) -> bool:
    """Tell as TensorFlow's tutorial of multi-worker training with a loop does."""
    return (
        task_type is None
        or task_type == "chief"
        or (
            task_type == "worker"
            and task_id == 0
            and "chief" not in cluster_spec.as_dict()
        )
    )


class ClusterResolverTest(tf.test.TestCase):
    def place_of(self, transport: Any, config: Any = None) -> tuple[Any, ...]:
        """Return task, cluster, master, and whether the tutorial takes it for chief."""
        kept = {k: v for k, v in os.environ.items() if k not in LAUNCHED}
        told = {} if config is None else {"TF_CONFIG": json.dumps(config)}
        with mock.patch.dict(os.environ, kept | told, clear=True):
            found = self.strategy(transport).cluster_resolver
            task = found.task_type, found.task_id
            spec = found.cluster_spec()
            return task, spec.as_dict(), found.master(), is_chief(*task, spec)

    def strategy(self, transport: Any) -> Any:
        # The other workers are not there to compare settings with.
        with (
            mock.patch.object(handshake, "agree"),
            mock.patch.object(randomness, "agree"),
            mock.patch.object(atexit, "register"),
            mock.patch.object(watched, "of_several", set()),
        ):
            return tf_dgc.DenseStrategy(transport=transport)

    def test_tasks_are_those_of_tf_config(self) -> None:
        cluster = {"chief": ["a:1"], "worker": ["b:2", "c:3"]}
        for rank, (kind, index) in enumerate(
            [("chief", 0), ("worker", 0), ("worker", 1)]
        ):
            config = {"cluster": cluster, "task": {"type": kind, "index": index}}
            transport = Placed(rank, 3, "a:1", "b:2", "c:3")
            found = self.place_of(transport, config)
            master = f"grpc://{transport.addresses[rank]}"
            self.assertEqual(found, ((kind, index), cluster, master, rank == 0))

    def test_a_worker_that_is_alone_has_what_tensorflow_gives_it(self) -> None:
        self.assertEqual(self.place_of("local"), ((None, None), {}, "", True))
        cluster = {"worker": ["a:1"]}
        config = {"cluster": cluster, "task": {"type": "worker", "index": 0}}
        found = self.place_of("local", config)
        self.assertEqual(found, (("worker", 0), cluster, "", True))

    def test_under_horovodrun_rank_is_the_task(self) -> None:
        # Whatever TF_CONFIG is left of another launcher.
        two = {"worker": ["x:1", "y:2"]}
        left = {"cluster": two, "task": {"type": "worker", "index": 0}}
        for config in (None, left, {"cluster": {"ps": ["z:1"]}}):
            for rank in (0, 1):
                place, cluster, master, chief = self.place_of(
                    Placed(rank, 2, "a:1", "b:2"), config
                )
                self.assertEqual((place, chief), (("worker", rank), rank == 0))
                self.assertEqual(cluster, {"worker": ["a:1", "b:2"]})
                self.assertEqual(master, f"grpc://{cluster['worker'][rank]}")
                place, cluster, _, chief = self.place_of(Placed(rank, 2), config)
                self.assertEqual((place, chief), (("worker", rank), rank == 0))
                self.assertEqual(cluster, {"worker": ["worker-0", "worker-1"]})

    def test_each_worker_that_trains_alone_is_a_chief(self) -> None:
        config = json.loads(tf_config(2))
        config["task"]["index"] = 1
        self.assertTrue(self.place_of("local", config)[-1])


class DefaultTimeoutTest(tf.test.TestCase):
    def test_is_what_the_environment_says(self) -> None:
        for text, expected in (("", 300.0), ("5", 5.0), ("0.5", 0.5), ("1e3", 1000.0)):
            with mock.patch.dict(os.environ, {"TF_DGC_TIMEOUT": text}):
                self.assertEqual(base.default_timeout(), expected)

    def test_is_positive_and_finite(self) -> None:
        for text in ("0", "-1", "nan", "inf", "soon", "5 s"):
            with (
                mock.patch.dict(os.environ, {"TF_DGC_TIMEOUT": text}),
                self.assertRaisesRegex(
                    ValueError,
                    "TF_DGC_TIMEOUT must be a positive number of seconds. "
                    f"Received: TF_DGC_TIMEOUT='{text}'",
                ),
            ):
                base.default_timeout()


if __name__ == "__main__":
    tf.test.main()
