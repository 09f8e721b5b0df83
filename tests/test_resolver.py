"""Tests of the choice of the transport."""

import json
import os
from typing import Any
from unittest import mock

import tensorflow as tf
from loopback import Hub, Loopback

from tf_dgc import transports
from tf_dgc.transports import base, resolver
from tf_dgc.transports.local import LocalTransport
from tf_dgc.transports.rendezvous import NoHybridTransport

LAUNCHED = ("HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "TF_CONFIG")


def tf_config(workers: int) -> str:
    cluster = {"worker": [f"localhost:{port}" for port in range(1, workers + 1)]}
    return json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 0}})


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
