"""Tests of scripts/netlab.py, with real namespaces where this machine allows them."""

import contextlib
import functools
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import unittest
from collections.abc import Callable
from unittest import mock

import launch
import netlab
import pytest
from launch import finish

SCRIPT = launch.ROOT / "scripts" / "netlab.py"

SENT = 3_000_000  # bytes, where traffic is counted
PRELUDE = """
    import json, os, signal, socket, sys, time
    config = json.loads(os.environ.get("TF_CONFIG", "{}"))
    rank = config.get("task", {}).get("index", 0)
"""


@functools.cache
def obstacle() -> str:
    """Say why there can be no laboratory here, or nothing."""
    try:
        with netlab.Laboratory(2, "1gbit") as lab:
            failed = lab.run(["true"], launch="tf_config")
            return "a host runs no commands" if failed else ""
    except netlab.LabError as error:
        return str(error)


def needs_lab(test: Callable) -> Callable:
    """Skip a test, when it runs, where there can be no laboratory."""

    @functools.wraps(test)
    def run(*args: object) -> None:
        if why := obstacle():
            raise unittest.SkipTest(f"no laboratory here: {why}")
        test(*args)

    return run


def python(code: str) -> list[str]:
    return [sys.executable, "-S", "-c", textwrap.dedent(PRELUDE + code)]


def start(*arguments: str) -> "subprocess.Popen[str]":
    """Start the script."""
    return subprocess.Popen(
        [sys.executable, SCRIPT, *arguments],
        env=os.environ | {"PATH": launch._path()},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Shells ignore SIGINT in what they start in the background, as these tests.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def left_of(pid: int) -> list[str]:
    """Return what is left of the laboratories of a process."""
    folders = ("/run/netns", "/etc/netns", tempfile.gettempdir())
    return [str(p) for f in folders for p in pathlib.Path(f).glob(f"netlab-{pid}-*")]


def is_alive(pid: int) -> bool:
    return not netlab._is_zombie(str(pid))


class ArgumentsOfDistanceTest(unittest.TestCase):
    def test_of_all_hosts_or_of_each(self) -> None:
        lab = netlab.Laboratory(2, "1gbit", delay="50ms", loss="0%,1.5%")
        self.assertTrue(lab.far)
        self.assertEqual(
            [d[:3] for d in lab._distances], [(0.05, 0, 0), (0.05, 0, 0.015)]
        )
        self.assertFalse(netlab.Laboratory(3, "1gbit").far)

    def test_what_is_no_distance_is_refused(self) -> None:
        for own in (
            {"delay": "50"},
            {"delay": "-5ms"},
            {"delay": "1ms,2ms,3ms"},
            {"loss": "100%"},
            {"loss": "0.1"},
            {"delay": "1ms", "jitter": "2ms"},
        ):
            with self.subTest(**own), self.assertRaisesRegex(ValueError, list(own)[-1]):
                netlab.Laboratory(2, "1gbit", **own)


@pytest.mark.processes
class DistanceTest(unittest.TestCase):
    CODE = """
    if rank:
        for _ in range(200):
            try:
                peer = socket.create_connection(("host1", 5000))
                break
            except ConnectionRefusedError:
                time.sleep(0.05)
        begin = time.monotonic()
        peer.sendall(b"?")
        peer.recv(1)
        print(time.monotonic() - begin)
        peer.sendall(bytes(SENT))
    else:
        peer, _ = socket.create_server(("", 5000)).accept()
        peer.sendall(peer.recv(1))
        left = SENT
        while left:
            left -= len(peer.recv(1 << 20))
        print("all")
    """

    @needs_lab
    def test_a_round_trip_waits_for_both_delays_and_lost_packets_come_again(
        self,
    ) -> None:
        code = self.CODE.replace("SENT", str(SENT))
        with netlab.Laboratory(2, "1gbit", delay="30ms,60ms", loss="0%,1%") as lab:
            environments = [
                {"TF_CONFIG": json.dumps({"task": {"index": i}})} for i in range(2)
            ]
            first, second = (
                lab.start(i, python(code), environment)
                for i, environment in enumerate(environments)
            )
            told, errors = second.communicate(timeout=120)
            self.assertEqual(second.returncode, 0, errors)
            self.assertGreaterEqual(float(told), 0.09)
            self.assertEqual(first.communicate(timeout=120)[0], b"all\n")
            sent = lab.traffic()[1].sent
            lateness = lab.end_distance()
        self.assertGreater(sent, SENT)
        self.assertGreater(lateness.dropped, 0)
        self.assertGreater(lateness.passed, SENT // 1500)

    @needs_lab
    def test_every_link_stays_limited(self) -> None:
        with netlab.Laboratory(2, "80mbit", delay="1ms") as lab:
            ends = [(lab.namespace(i), "out") for i in range(2)]
            ends += [(lab.switch, f"port{i + 1}") for i in range(2)]
            for namespace, interface in ends:
                shown = netlab._tool(
                    "tc", "-n", namespace, "qdisc", "show", "dev", interface
                )
                self.assertIn("tbf", shown)
                self.assertIn("rate 80Mbit", shown)

    @needs_lab
    def test_the_process_that_delays_ends_with_the_laboratory(self) -> None:
        waiting = """
    print("up", flush=True)
    time.sleep(60)
    """
        process = start("--delay", "5ms", "--", *python(waiting))
        self.assertEqual(process.stdout.readline(), "up\n")
        children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children")
        found = [int(pid) for pid in children.read_text().split()]
        relays = [pid for pid in found if b"distance.py" in command_line(pid)]
        self.assertEqual(len(relays), 1)
        process.kill()
        finish(process)
        for _ in range(200):
            if not any(is_alive(pid) for pid in relays):
                break
            time.sleep(0.05)
        self.assertFalse([pid for pid in relays if is_alive(pid)])
        subprocess.run(
            [sys.executable, SCRIPT, "--sweep"], check=True, capture_output=True
        )
        self.assertEqual(left_of(process.pid), [])


def command_line(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


@pytest.mark.processes
class NetworkTest(unittest.TestCase):
    @needs_lab
    def test_hosts_reach_each_other_by_name(self) -> None:
        code = """
    addresses = [a.split(":") for a in config["cluster"]["worker"]]
    if rank:
        while True:
            try:
                peer = socket.create_connection(("host1", int(addresses[0][1])))
                break
            except ConnectionRefusedError:
                time.sleep(0.05)
        print(socket.gethostname(), peer.recv(100).decode(), sorted(os.listdir("/sys/class/net")))
    else:
        server = socket.create_server(("", int(addresses[0][1])))
        for _ in addresses[1:]:
            peer, (address, _) = server.accept()
            peer.sendall(f"is {address}".encode())
            peer.close()
        time.sleep(0.5)
    """  # noqa: E501
        line = ["--hosts", "3", "--launch", "tf_config", "--", *python(code)]
        status, out, err = finish(start(*line))
        self.assertEqual(status, 0, err)
        expected = [
            f"[{i}] host{i + 1} is 10.177.0.{i + 1} ['eth0', 'lo']" for i in (1, 2)
        ]
        self.assertCountEqual(out.splitlines(), expected)
        self.assertEqual(len(re.findall("netlab: host. sent", err)), 3)

    @needs_lab
    def test_every_link_is_limited_at_both_ends(self) -> None:
        with netlab.Laboratory(2, "80mbit") as lab:
            ends = [(lab.namespace(i), "eth0") for i in range(2)]
            ends += [(lab.switch, f"port{i + 1}") for i in range(2)]
            for namespace, interface in ends:
                shown = ["tc", "-n", namespace, "-j", "qdisc", "show", "dev", interface]
                output = subprocess.run(shown, capture_output=True, check=True).stdout
                (qdisc,) = json.loads(output)
                self.assertEqual(qdisc["kind"], "tbf")
                self.assertEqual(qdisc["options"]["rate"], 80_000_000 // 8)

    @needs_lab
    def test_counted_bytes_are_the_sent_ones_and_their_headers(self) -> None:
        code = f"""
    if rank:
        time.sleep(0.3)
        peer = socket.create_connection(("host1", 5000))
        peer.sendall(bytes({SENT}))
        peer.shutdown(socket.SHUT_WR)
        peer.recv(1)
    else:
        server = socket.create_server(("", 5000))
        peer, _ = server.accept()
        got = 0
        while chunk := peer.recv(1 << 20):
            got += len(chunk)
        print(got)
    """
        with (
            tempfile.TemporaryFile() as out,
            netlab.Laboratory(2, "1gbit") as lab,
        ):
            status = lab.run(
                python(code), launch="tf_config", timeout=60, stdout=out, stderr=out
            )
            traffic = lab.traffic()
            out.seek(0)
            self.assertEqual((status, out.read()), (0, f"[0] {SENT}\n".encode()))
        received, sent = traffic
        # Headers are 66 bytes of each 1514 at most; the other way go acknowledgements.
        for name, count in (("sent", sent.sent), ("received", received.received)):
            with self.subTest(name):
                self.assertGreater(count, SENT)
                self.assertLess(count, SENT * 1.06 + 20_000)
        for name, count in (("sent", received.sent), ("received", sent.received)):
            with self.subTest(f"{name} back"):
                self.assertLess(count, SENT * 0.06 + 20_000)

    @needs_lab
    def test_two_at_once_do_not_meet(self) -> None:
        with netlab.Laboratory(1, "1gbit") as a, netlab.Laboratory(1, "1gbit") as b:
            self.assertNotEqual(a.namespace(0), b.namespace(0))
            for lab in (a, b):
                self.assertEqual(lab.run(["true"]), 0)
        self.assertEqual(left_of(os.getpid()), [])

    @needs_lab
    def test_ssh_runs_a_command_line_on_another_host(self) -> None:
        line = "ssh -o A=b -p 22 root@host2 -i key 'hostname; echo $FOO; echo \"a  b\"'"
        line += "; ssh host3 true; echo $?"
        with (
            mock.patch.dict(os.environ, FOO="not passed on"),
            mock.patch.dict(os.environ, PATH=launch._path()),
        ):
            status, out, err = finish(start("--hosts", "2", "--", "sh", "-c", line))
        self.assertEqual(status, 0)
        self.assertEqual(out.splitlines(), ["host2", "", "a  b", "255"])
        self.assertIn("ssh: could not resolve hostname host3", err)

    @needs_lab
    @pytest.mark.slow
    def test_horovodrun(self) -> None:
        launch.skip_without_horovod()
        code = """
    import socket, horovod.tensorflow as hvd, tensorflow as tf
    hvd.init()
    total = hvd.allreduce(tf.ones([2]), op=hvd.Sum).numpy().tolist()
    print(socket.gethostname(), hvd.rank(), hvd.local_size(), total)
    """
        command = [sys.executable, "-c", textwrap.dedent(code)]
        line = ["--launch", "horovodrun", "--timeout", "200", "--", *command]
        status, out, err = finish(start(*line), 250)
        self.assertEqual(status, 0, err)
        expected = [f"[{i}]<stdout>:host{i + 1} {i} 1 [2.0, 2.0]" for i in range(2)]
        self.assertCountEqual([s for s in out.splitlines() if s], expected)


@pytest.mark.processes
class EndTest(unittest.TestCase):
    # Prints its process's number, and starts a child in a session of its own.
    CODE = """
    import subprocess
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sleeper = [sys.executable, "-S", "-c", "import time; time.sleep(100)"]
    child = subprocess.Popen(sleeper, start_new_session=True)
    print(os.getpid(), child.pid, flush=True)
    """

    def _ready(self, *options: str) -> "tuple[subprocess.Popen[str], list[int]]":
        """Start a job whose workers do not end; return their processes too."""
        code = self.CODE + "time.sleep(100)\n"
        process = start("--launch", "tf_config", *options, "--", *python(code))
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(2)]
        return process, [int(pid) for line in lines for pid in line.split()[1:]]

    @needs_lab
    @pytest.mark.slow
    def test_nothing_is_left(self) -> None:
        for end, expected in (("sys.exit(0)", 0), ("sys.exit(3 * rank)", 3)):
            with self.subTest(end):
                code = self.CODE + f"{end}\n"
                process = start("--launch", "tf_config", "--", *python(code))
                status, out, _ = finish(process)
                self.assertEqual(status, expected)
                pids = [int(p) for line in out.splitlines() for p in line.split()[1:]]
                self.assertGreaterEqual(len(pids), 2)
                self.assertFalse(any(map(is_alive, pids)))
                self.assertEqual(left_of(process.pid), [])

    @needs_lab
    @pytest.mark.extended
    def test_signals(self) -> None:
        for signum in (signal.SIGINT, signal.SIGTERM):
            with self.subTest(signal=signum.name):
                process, pids = self._ready()
                process.send_signal(signum)
                time.sleep(0.2)
                process.send_signal(signum)  # comes while it cleans up
                status, _, _ = finish(process)
                self.assertEqual(status, 128 + signum)
                self.assertFalse(any(map(is_alive, pids)))
                self.assertEqual(left_of(process.pid), [])

    @needs_lab
    def test_signal_while_it_is_built(self) -> None:
        for seconds in (0.1, 0.2, 0.3, 0.4):
            process = start("--hosts", "8", "--", "sleep", "100")
            time.sleep(seconds)
            process.send_signal(signal.SIGTERM)
            finish(process)
            self.assertEqual(left_of(process.pid), [])

    @needs_lab
    @pytest.mark.slow
    def test_timeout(self) -> None:
        process, pids = self._ready("--timeout", "3")
        status, _, err = finish(process)
        self.assertEqual(status, 124)
        self.assertIn("netlab: no end after 3 seconds", err)
        self.assertFalse(any(map(is_alive, pids)))
        self.assertEqual(left_of(process.pid), [])

    @needs_lab
    def test_exception(self) -> None:
        with self.assertRaisesRegex(ZeroDivisionError, "division"):
            with netlab.Laboratory(2, "1gbit") as lab:
                process = lab.start(1, ["sleep", "100"])
                self.assertEqual(
                    lab.namespace(1),
                    f"netlab-{os.getpid()}-{lab.namespace(1).split('-')[2]}-host2",
                )
                raise ZeroDivisionError("division")
        self.assertIsNotNone(process.returncode)
        self.assertEqual(left_of(os.getpid()), [])

    @needs_lab
    def test_half_built(self) -> None:
        tool = netlab._tool

        def fail(*command: str) -> str:
            if "port2" in command:
                raise netlab.LabError("no more interfaces")
            return tool(*command)

        with mock.patch.object(netlab, "_tool", fail):
            with self.assertRaisesRegex(netlab.LabError, "no more interfaces"):
                with netlab.Laboratory(2, "1gbit"):
                    pass
        self.assertEqual(left_of(os.getpid()), [])

    @needs_lab
    def test_sweep_removes_what_sigkill_leaves(self) -> None:
        process, pids = self._ready()
        process.kill()
        finish(process)
        self.assertEqual(len(left_of(process.pid)), 6)  # namespaces, settings, ssh
        with netlab.Laboratory(1, "1gbit") as lab:
            status, _, err = finish(start("--sweep"))
            self.assertEqual(lab.run(["true"]), 0)
        self.assertEqual(status, 0)
        for name in ("host1", "host2", "switch"):
            self.assertRegex(err, rf"netlab: removed netlab-{process.pid}-1-{name}")
        self.assertFalse(any(map(is_alive, pids)))
        self.assertEqual(left_of(process.pid), [])

    @needs_lab
    def test_closed(self) -> None:
        with netlab.Laboratory(1, "1gbit") as lab:
            pass
        with self.assertRaisesRegex(netlab.LabError, "the laboratory is not open"):
            lab.run(["true"])


class RightsTest(unittest.TestCase):
    def test_without_root(self) -> None:
        with mock.patch.object(os, "geteuid", return_value=1000):
            with self.assertRaisesRegex(netlab.LabError, "need root; run this as root"):
                with netlab.Laboratory(2, "1gbit"):
                    pass

    def test_elsewhere(self) -> None:
        with mock.patch.object(sys, "platform", "darwin"):
            with self.assertRaisesRegex(netlab.LabError, "Linux; this is darwin"):
                netlab.check_rights()

    def test_without_a_tool(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            for tool, package in (
                ("ip", "iproute2"),
                ("tc", "iproute2"),
                ("unshare", "util-linux"),
            ):
                with (
                    self.subTest(tool),
                    mock.patch.object(os, "geteuid", return_value=0),
                    mock.patch.dict(os.environ, PATH=folder),
                    self.assertRaisesRegex(
                        netlab.LabError, f"`{tool}` is not in PATH; install {package}"
                    ),
                ):
                    netlab.check_rights()
                (pathlib.Path(folder) / tool).write_text("")
                (pathlib.Path(folder) / tool).chmod(0o755)

    def test_status_and_message_of_the_command(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            result = subprocess.run(
                [sys.executable, SCRIPT, "--", "true"],
                env=os.environ | {"PATH": folder},
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
        self.assertEqual(result.returncode, 125)
        self.assertRegex(result.stderr, "^netlab: (network namespaces|`ip` is not)")

    def test_a_tool_that_fails(self) -> None:
        with self.assertRaisesRegex(netlab.LabError, "`false 1` failed: "):
            netlab._tool("false", "1")


class ArgumentsTest(unittest.TestCase):
    def test_bad_arguments(self) -> None:
        for arguments, message in (
            (["--hosts", "0", "--", "true"], "`hosts` must be in [1, 200]. Received"),
            (["--hosts", "two", "--", "true"], "invalid int value: 'two'"),
            (["--rate", "fast", "--", "true"], "Received: rate='fast'"),
            (["--rate", "0gbit", "--", "true"], "`rate` must be a positive number"),
            (["--timeout", "0", "--", "true"], "`--timeout` must be a positive number"),
            (["--launch", "mpi", "--", "true"], "invalid choice: 'mpi'"),
            (["--hosts", "2", "--"], "no command to run; write it behind `--`"),
        ):
            with self.subTest(arguments=arguments):
                result = subprocess.run(
                    [sys.executable, SCRIPT, *arguments],
                    capture_output=True,
                    text=True,
                    timeout=60,
                    check=False,
                )
                self.assertEqual(result.returncode, 2)
                self.assertIn(message, result.stderr)

    def test_rates(self) -> None:
        for rate, bits in (("1gbit", 1e9), ("2.5mbit", 2.5e6), ("800kbit", 8e5)):
            self.assertEqual(netlab.bits_per_second(rate), bits)

    def test_launchers(self) -> None:
        lab = netlab.Laboratory(2, "1gbit")
        with self.assertRaisesRegex(ValueError, "Received: launch='mpi'"):
            lab.run(["true"], launch="mpi")
        configs = [json.loads(e["TF_CONFIG"]) for _, e in lab.lines(["a"], "tf_config")]
        workers = ["10.177.0.1:2222", "10.177.0.2:2222"]
        self.assertEqual([c["cluster"] for c in configs], [{"worker": workers}] * 2)
        self.assertEqual([c["task"]["index"] for c in configs], [0, 1])


if __name__ == "__main__":
    unittest.main()
