"""Tests of how workers find each other, over sockets of this machine."""

import contextlib
import http.server
import importlib.util
import json
import os
import pickle
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import tensorflow as tf

from tf_dgc import _host
from tf_dgc.transports import leaving, peers, presence, rendezvous, turnstile, watchdog
from tf_dgc.transports.rendezvous import NoHybridTransport


def free_port() -> int:
    with socket.socket() as reserved:
        reserved.bind(("", 0))
        return reserved.getsockname()[1]


def outcomes(size: int, work: Callable[[int], Any]) -> list[Any]:
    """Run `work(rank)` on N threads; return what each returned or raised."""
    found: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            found[rank] = work(rank)
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def tf_config(cluster: Any = None, task: Any = None) -> str:
    return json.dumps({"cluster": cluster, "task": task})


WORKERS = {"worker": ["a:1", "b:2"]}


class ReadTFConfigTest(tf.test.TestCase):
    def assert_refused(self, text: str, message: str) -> None:
        with self.subTest(text), self.assertRaisesRegex(ValueError, message):
            rendezvous.read_tf_config(text)

    def test_without_a_cluster_there_are_no_addresses(self) -> None:
        for text in ("", "  \n", "{}", tf_config(), tf_config({}, {"index": 0})):
            self.assertEqual(rendezvous.read_tf_config(text), ([], 0))

    def test_ranks_follow_the_list_of_workers(self) -> None:
        for index in (0, 1):
            text = tf_config(WORKERS, {"type": "worker", "index": index})
            self.assertEqual(rendezvous.read_tf_config(text), (["a:1", "b:2"], index))

    def test_the_chief_is_rank_zero(self) -> None:
        cluster = WORKERS | {"chief": ["c:3"]}
        for kind, index, rank in (("chief", 0, 0), ("worker", 0, 1), ("worker", 1, 2)):
            text = tf_config(cluster, {"type": kind, "index": index})
            self.assertEqual(
                rendezvous.read_tf_config(text), (["c:3", "a:1", "b:2"], rank)
            )

    def test_must_be_a_json_object(self) -> None:
        for text in (
            "{",
            "worker",
            "null",
            "[]",
            "3",
            '"text"',
            tf_config("a:1"),
            tf_config(["a:1"]),
            tf_config({"worker": 3}),
            tf_config({"worker": None}),
            tf_config(WORKERS, "worker"),
            tf_config(WORKERS, ["worker", 0]),
            tf_config(WORKERS, 1),
        ):
            self.assert_refused(
                text,
                "TF_CONFIG must be a JSON object with `cluster` and `task`: .*"
                "Received: TF_CONFIG=",
            )

    def test_has_workers_and_a_chief_only(self) -> None:
        for job in ("ps", "master"):
            self.assert_refused(
                tf_config(WORKERS | {job: ["c:3"]}, {"type": "worker", "index": 0}),
                "TF_CONFIG must have no jobs but `chief`, `worker` and `evaluator`: .*"
                rf"Received: jobs .*'{job}'",
            )

    def test_kubeflow_may_name_an_evaluator_which_is_no_worker(self) -> None:
        # As the operator of TFJob writes it.
        cluster = {
            "chief": ["train-chief-0.default.svc:2222"],
            "worker": [f"train-worker-{i}.default.svc:2222" for i in range(2)],
        }
        rest = {"environment": "cloud"}
        for extra in ({}, {"evaluator": ["train-evaluator-0.default.svc:2222"]}):
            for rank, (kind, index) in enumerate(
                [("chief", 0), ("worker", 0), ("worker", 1)]
            ):
                task = {"type": kind, "index": index}
                text = json.dumps({"cluster": cluster | extra, "task": task} | rest)
                addresses = cluster["chief"] + cluster["worker"]
                self.assertEqual(rendezvous.read_tf_config(text), (addresses, rank))
                self.assertFalse(rendezvous.is_evaluator(text))
            task = {"type": "evaluator", "index": 0}
            text = json.dumps({"cluster": cluster | extra, "task": task} | rest)
            self.assertEqual(rendezvous.read_tf_config(text), ([], 0))
            self.assertTrue(rendezvous.is_evaluator(text))

    def test_addresses_are_checked(self) -> None:
        for worker in (["a"], ["a:1", "b"], ["http://a:1"], [None], [3], "a:1"):
            self.assert_refused(
                tf_config({"worker": worker}, {"type": "worker", "index": 0}),
                'A worker\'s address must be "host:port". Received: ',
            )

    def test_addresses_differ(self) -> None:
        self.assert_refused(
            tf_config({"worker": ["a:1", "a:1"]}, {"type": "worker", "index": 0}),
            r"TF_CONFIG names an address twice. Received: \['a:1', 'a:1'\]",
        )

    def test_the_task_is_a_member_of_the_cluster(self) -> None:
        for task in (
            None,
            {},
            {"type": "worker"},
            {"index": 0},
            {"type": "worker", "index": 2},
            {"type": "worker", "index": -1},
            {"type": "worker", "index": "0"},
            {"type": "chief", "index": 0},
            {"type": ["worker"], "index": 0},
        ):
            self.assert_refused(
                tf_config(WORKERS, task),
                "`task` in TF_CONFIG must have the `type` and `index` of a member of "
                "`cluster`. Received: task=.*, cluster=",
            )


class CheckAddressTest(tf.test.TestCase):
    def test_splits_host_and_port(self) -> None:
        for address, expected in (
            ("localhost:1", ("localhost", 1)),
            ("node-7.example_net.org:65535", ("node-7.example_net.org", 65535)),
            ("10.0.0.1:2222", ("10.0.0.1", 2222)),
            ("[fe80::1]:80", ("fe80::1", 80)),
        ):
            self.assertEqual(rendezvous.check_address(address), expected)

    def test_refuses_anything_else(self) -> None:
        for address in (
            "",
            ":",
            "a",
            ":1",
            "a:",
            "a:0",
            "a:65536",
            "a:-1",
            "a:1x",
            "a:123456",
            "a b:1",
            "a:1\n",
            "a:1 ",
            "fe80::1:80",
            "[a:1",
            "http://a:1",
            "a/../b:1",
            "a:\u0661",
            "a..b:1",
            "x" * 64 + ".org:1",
            "x." * 200 + "org:1",
            "[" + ":" * 300 + "]:1",
        ):
            with (
                self.subTest(address),
                self.assertRaisesRegex(
                    ValueError, 'A worker\'s address must be "host:port". Received: '
                ),
            ):
                rendezvous.check_address(address)

    def test_shows_only_the_beginning_of_a_long_text(self) -> None:
        with self.assertRaises(ValueError) as caught:
            rendezvous.check_address("\x1b" * 5000)
        self.assertLess(len(str(caught.exception)), 500)
        self.assertNotIn("\x1b", str(caught.exception))


class WaitForPeersTest(tf.test.TestCase):
    def wait(self, addresses: list[str], timeout: float = 30.0) -> list[Any]:
        """Let each worker wait, then answer on its port as TensorFlow's server does."""
        with contextlib.ExitStack() as servers:

            def work(rank: int) -> None:
                rendezvous.wait_for_peers(addresses, rank, timeout)
                host, port = rendezvous.check_address(addresses[rank])
                family = socket.AF_INET6 if ":" in host else socket.AF_INET
                servers.enter_context(socket.create_server((host, port), family=family))

            return outcomes(len(addresses), work)

    def test_workers_find_each_other(self) -> None:
        addresses = [f"127.0.0.1:{free_port()}" for _ in range(3)]
        self.assertEqual(self.wait(addresses), [None] * 3)

    def test_workers_find_each_other_by_name(self) -> None:
        addresses = [f"localhost:{free_port()}" for _ in range(2)]
        self.assertEqual(self.wait(addresses), [None] * 2)

    def test_workers_find_each_other_over_ipv6(self) -> None:
        try:
            socket.create_server(("::1", 0), family=socket.AF_INET6).close()
        except OSError:
            self.skipTest("This machine has no IPv6")
        addresses = [f"[::1]:{free_port()}" for _ in range(2)]
        self.assertEqual(self.wait(addresses, timeout=2.0), [None] * 2)

    def test_one_worker_waits_for_nobody(self) -> None:
        rendezvous.wait_for_peers([f"127.0.0.1:{free_port()}"], 0, 0.0)

    def test_the_port_is_free_again(self) -> None:
        port = free_port()
        for _ in range(2):
            rendezvous.wait_for_peers([f"127.0.0.1:{port}"], 0, 0.0)

    def test_the_timeout_names_every_worker_that_is_missing(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as present:
            ports = [
                free_port(),
                present.getsockname()[1],
                free_port(),
                free_port(),
            ]
            addresses = [f"127.0.0.1:{port}" for port in ports]
            with self.assertRaisesRegex(
                TimeoutError,
                rf"Worker 2 \(127\.0\.0\.1:{ports[2]}\), 3 \(127\.0\.0\.1:{ports[3]}\) "
                r"did not come within 0\.2 s\. Start every worker",
            ):
                rendezvous.wait_for_peers(addresses, 0, 0.2)

    def test_a_host_that_cannot_be_found_is_missing(self) -> None:
        address = f"127.0.0.1:{free_port()}"
        with (
            mock.patch.object(
                socket, "getaddrinfo", side_effect=socket.gaierror("unknown")
            ),
            self.assertRaisesRegex(TimeoutError, r"Worker 1 \(elsewhere:1\)"),
        ):
            rendezvous.wait_for_peers([address, "elsewhere:1"], 0, 0.1)

    def test_a_port_that_is_taken_is_named(self) -> None:
        with socket.create_server(("", 0)) as taken:
            port = taken.getsockname()[1]
            with self.assertRaisesRegex(
                OSError, rf"This worker's port is taken: 127\.0\.0\.1:{port} \(.*in use"
            ):
                rendezvous.wait_for_peers([f"127.0.0.1:{port}", "127.0.0.1:1"], 0, 0.2)


class UnreachableTest(tf.test.TestCase):
    def test_names_the_others_whose_port_does_not_answer(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as present:
            ports = [free_port(), present.getsockname()[1], free_port()]
            addresses = [f"127.0.0.1:{port}" for port in ports]
            self.assertEqual(rendezvous.unreachable(addresses, 0), [2])
            self.assertEqual(rendezvous.unreachable(addresses, 1), [0, 2])
            self.assertEqual(rendezvous.unreachable(addresses[1:2], 0), [])


class LeavingTest(tf.test.TestCase):
    """Rank 0 of two workers, which is done."""

    def waits(self, address: str, done_after: int, timeout: float = 100.0) -> int:
        """Return how often it looks for the other, and check that it leaves then."""
        own = leaving.Leaving(peers.Peers(["127.0.0.1:1", address], 0), timeout)
        asked: list[str] = []

        def wait_for_key(key: str, seconds: float) -> str:
            asked.append(key)
            self.assertBetween(seconds, 0.0, 10.0)
            if len(asked) <= done_after:
                raise tf.errors.DeadlineExceededError(None, None, key)
            return "1"

        with (
            mock.patch.object(sys, "last_value", None, create=True),
            mock.patch.object(_host.tensorflow, "wait_for_key", wait_for_key),
            mock.patch.object(_host.tensorflow, "publish") as publish,
        ):
            own.leave()
        self.assertEqual({*asked}, {"tf_dgc/seen/1"} if asked else set())
        told = [call.args[0] for call in publish.call_args_list]
        self.assertEqual(told, ["tf_dgc/done/0", "tf_dgc/seen/0"])
        return len(asked)

    def test_a_worker_that_is_done_waits_for_one_that_works_on(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as present:
            address = f"127.0.0.1:{present.getsockname()[1]}"
            self.assertEqual(self.waits(address, done_after=20), 21)

    def test_it_waits_for_none_that_is_gone_and_not_for_ever(self) -> None:
        gone = f"127.0.0.1:{free_port()}"
        self.assertEqual(self.waits(gone, done_after=20), 1)
        self.assertEqual(self.waits(gone, done_after=20, timeout=0.0), 0)

    def test_waiting_for_one_that_has_been_done_for_long_is_in_vain(self) -> None:
        calls = mock.Mock(where=turnstile.STEP)
        calls.calls.numpy.return_value = 7
        own = presence.Presence(peers.Peers(["a:1", "b:1"], 0), 5.0, calls)

        def wait_for_key(key: str, seconds: float) -> str:
            if key == "tf_dgc/done/1":
                return "1"
            raise tf.errors.DeadlineExceededError(None, None, key)

        with (
            mock.patch.object(_host.tensorflow, "wait_for_key", wait_for_key),
            mock.patch.object(_host.tensorflow, "publish"),
            mock.patch.object(presence.time, "monotonic") as clock,
        ):
            for now, expected in ((0.0, False), (9.0, False), (11.0, True)):
                clock.return_value = now
                self.assertEqual(own.in_vain(7), expected)
        told = watchdog.complaint(0, 5.0, own._places)
        self.assertIn("vain", told)
        self.assertIn("worker 1 in no more, as its script has ended", told)

    def told_of_abort(self, publish: Any) -> str:
        """Return what is said where worker 1 of three has waited too long."""
        calls = mock.Mock(where=turnstile.STEP)
        calls.calls.numpy.return_value = 7
        three = peers.Peers(["a:1", "b:1", "c:1"], 1)
        own = presence.Presence(three, 5.0, calls)

        def wait_for_key(key: str, seconds: float) -> str:
            if key == "tf_dgc/waits/7/0":
                return turnstile.STEP
            raise tf.errors.DeadlineExceededError(None, None, key)

        with (
            mock.patch.object(_host.tensorflow, "wait_for_key", wait_for_key),
            mock.patch.object(_host.tensorflow, "publish", publish),
            mock.patch.object(_host.tensorflow, "abort_collectives") as abort,
            mock.patch.object(rendezvous, "unreachable", return_value=[]),
        ):
            self.assertFalse(own.in_vain(7))
            own.abort()
        return str(abort.call_args.args[0])

    def test_who_is_not_in_the_collective_is_named(self) -> None:
        told = self.told_of_abort(mock.Mock())
        self.assertIn("worker 0 in a step; worker 1 in a step", told)
        self.assertTrue(told.endswith(" Not in it: worker 2 (c:1)."), told)

    def test_so_is_who_has_the_service_where_that_is_silent(self) -> None:
        silent = tf.errors.DeadlineExceededError(None, None, "silent")
        told = self.told_of_abort(mock.Mock(side_effect=silent))
        self.assertTrue(told.endswith(" Not in it: worker 0 (a:1)."), told)

    def test_nobody_waits_for_ever_for_a_silent_service(self) -> None:
        answers = threading.Event()
        context = mock.Mock()
        context.set_config_key_value = lambda key, value: answers.wait()
        with (
            mock.patch.object(_host.tensorflow.context, "context", lambda: context),
            mock.patch.object(_host.tensorflow, "_ANSWER_SECONDS", 0.05),
        ):
            with self.assertRaisesRegex(tf.errors.OpError, "worker 0 is silent"):
                _host.tensorflow.publish("key")
            answers.set()
            _host.tensorflow.publish("key")

    def test_one_that_is_stopped_for_less_than_the_timeout_is_not_missed(self) -> None:
        context = mock.Mock()
        with mock.patch.object(_host.tensorflow.context, "context", lambda: context):
            _host.tensorflow.configure_coordination(2, 40.0)
        given = context.configure_coordination_service.call_args.kwargs
        # Each half of it a worker speaks, and waits as long for an answer.
        self.assertGreaterEqual(given["heartbeat_timeout_in_ms"] / 2, 40_000)

    def all_leave(self, *published: str) -> bool:
        calls = mock.Mock()
        calls.calls.numpy.return_value = 8
        three = peers.Peers(["a:1", "b:1", "c:1"], 0)
        own = presence.Presence(three, 5.0, calls)

        def wait_for_key(key: str, seconds: float) -> str:
            if key.removeprefix("tf_dgc/") in published:
                return "1"
            raise tf.errors.DeadlineExceededError(None, None, key)

        with (
            mock.patch.object(_host.tensorflow, "wait_for_key", wait_for_key),
            mock.patch.object(_host.tensorflow, "publish") as publish,
            mock.patch.object(presence.time, "sleep"),
            mock.patch.object(presence.time, "monotonic", side_effect=range(999)),
            mock.patch.object(rendezvous, "unreachable", return_value=[]),
        ):
            found = own.all_leave()
        publish.assert_called_once_with("tf_dgc/leaves/8/0")
        return found

    def test_all_leave_where_all_do_after_the_same_call(self) -> None:
        self.assertTrue(self.all_leave("leaves/8/1", "leaves/8/2"))

    def test_not_all_leave_where_one_waits_in_the_next_call_or_never_comes(
        self,
    ) -> None:
        self.assertFalse(self.all_leave("leaves/8/1", "waits/9/2"))
        self.assertFalse(self.all_leave("leaves/8/1", "leaves/6/2"))


class Store(http.server.BaseHTTPRequestHandler):
    """What horovodrun serves: PUT and GET of /scope/key, 404 until it is there."""

    def do_PUT(self) -> None:
        length = int(self.headers["Content-Length"])
        self.server.items[self.path] = self.rfile.read(length)
        self.send_response(200)
        self.end_headers()

    def do_GET(self) -> None:
        content = self.server.items.get(self.path)
        status = self.server.failing or (404 if content is None else 200)
        self.send_response(status)
        if status == 302:
            self.send_header("Location", self.path.replace("tf_dgc", "elsewhere"))
        self.end_headers()
        if status == 200:
            self.wfile.write(content)

    def log_message(self, *args: object) -> None:
        """Stay silent."""


class ExchangeAddressesTest(tf.test.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Store)
        self.server.items = {}
        self.server.failing = 0
        thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        thread.start()
        self.addCleanup(thread.join)
        self.addCleanup(self.server.server_close)
        self.addCleanup(self.server.shutdown)
        place = {
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(self.server.server_address[1]),
        }
        self.enterContext(mock.patch.dict(os.environ, place))

    def exchange(self, *obstacles: str, timeout: float = 30.0) -> list[Any]:
        return outcomes(
            len(obstacles),
            lambda rank: rendezvous.exchange_addresses(
                rank, len(obstacles), obstacles[rank], timeout
            ),
        )

    def test_all_workers_learn_all_addresses(self) -> None:
        first, *others = self.exchange("", "", "")
        self.assertLen(first, 3)
        self.assertLen(set(first), 3)
        for address in first:
            host, port = rendezvous.check_address(address)
            self.assertEqual(host, "127.0.0.1")
            with socket.socket() as server:
                server.bind((host, port))
        self.assertEqual(others, [first, first])

    def test_only_text_is_stored(self) -> None:
        (addresses,) = self.exchange("")
        self.assertEqual(self.server.items, {"/tf_dgc/0": addresses[0].encode()})

    def test_the_store_is_never_asked_through_a_proxy(self) -> None:
        proxy = f"http://127.0.0.1:{free_port()}"
        with mock.patch.dict(os.environ, {"http_proxy": proxy, "HTTP_PROXY": proxy}):
            # What the environment says about proxies is read on import.
            spec = importlib.util.spec_from_file_location("fresh", rendezvous.__file__)
            fresh = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(fresh)
            self.assertLen(fresh.exchange_addresses(0, 1, "", 5.0), 1)

    def test_an_obstacle_on_one_worker_stops_all_alike(self) -> None:
        found = self.exchange("", "TensorFlow has run", "", "no network")
        for error in found:
            self.assertIsInstance(error, NoHybridTransport)
            self.assertEqual(
                str(error), "on rank 1, TensorFlow has run; on rank 3, no network"
            )

    def test_without_a_store_there_is_no_hybrid(self) -> None:
        for name in ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"):
            with (
                mock.patch.dict(os.environ, {name: ""}),
                self.assertRaisesRegex(
                    NoHybridTransport, "the launcher has no rendezvous store"
                ),
            ):
                rendezvous.exchange_addresses(0, 1, "", 1.0)

    def test_a_worker_that_stays_silent_is_named(self) -> None:
        with self.assertRaisesRegex(
            TimeoutError, "Worker 1 did not tell its address in time. Do all workers"
        ):
            rendezvous.exchange_addresses(0, 2, "", 0.1)

    def test_hostile_content_is_refused_and_never_run(self) -> None:
        class Bomb:
            def __reduce__(self) -> tuple:
                return (os._exit, (66,))

        for content in (
            pickle.dumps(Bomb()),
            b"",
            b"\xff\xfe\x00",
            b"host:1\nhost:2",
            b"http://host:1/",
            b"$(reboot):1",
            b"a:1" * 100_000,
        ):
            self.server.items["/tf_dgc/1"] = content
            with self.subTest(content=content[:20]):
                with self.assertRaisesRegex(
                    ValueError, 'A worker\'s address must be "host:port". Received: '
                ) as caught:
                    rendezvous.exchange_addresses(0, 2, "", 5.0)
                self.assertLess(len(str(caught.exception)), 500)

    def test_an_obstacle_is_shown_as_text_of_bounded_length(self) -> None:
        self.server.items["/tf_dgc/1"] = b"!" + b"\x1b[2J\n" * 3000
        with self.assertRaises(NoHybridTransport) as caught:
            rendezvous.exchange_addresses(0, 2, "", 5.0)
        self.assertLess(len(str(caught.exception)), 500)
        self.assertTrue(str(caught.exception).isprintable())

    def test_an_address_that_two_workers_tell_is_refused(self) -> None:
        self.server.items |= {f"/tf_dgc/{rank}": b"host:1" for rank in (1, 2)}
        with self.assertRaisesRegex(
            ValueError, "The rendezvous store names an address twice. Received: "
        ):
            rendezvous.exchange_addresses(0, 3, "", 5.0)

    def test_a_store_that_sends_elsewhere_is_not_followed(self) -> None:
        self.server.items["/elsewhere/0"] = b"host:1"
        self.server.failing = 302
        with self.assertRaisesRegex(OSError, "302"):
            rendezvous.exchange_addresses(0, 1, "", 5.0)

    def test_a_store_that_fails_is_an_error_at_once(self) -> None:
        self.server.failing = 500
        with self.assertRaisesRegex(OSError, "500"):
            rendezvous.exchange_addresses(0, 2, "", 30.0)

    def test_a_store_that_is_gone_is_an_error_at_once(self) -> None:
        port = str(free_port())
        with (
            mock.patch.dict(os.environ, {"HOROVOD_GLOO_RENDEZVOUS_PORT": port}),
            self.assertRaisesRegex(OSError, "refused"),
        ):
            rendezvous.exchange_addresses(0, 2, "", 30.0)


if __name__ == "__main__":
    tf.test.main()
