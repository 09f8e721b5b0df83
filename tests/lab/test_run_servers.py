"""Tests of the launchers with parameter servers, most with plain Python tasks."""

import contextlib
import io
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from typing import Any

import pytest
import sshd
from launch import ROOT, finish
from test_run import HOSTS, Launched, all_end, children_of, in_process, is_alive

from tf_dgc import run
from tf_dgc.launcher import door
from tf_dgc.launcher.workers import CannotStart, free_ports

# A server ends well by SIGTERM.
PRELUDE = """
kind = config["task"]["type"]
attempt = int(os.environ.get("TF_DGC_ATTEMPT", 0))
def serve():
    signal.signal(signal.SIGTERM, lambda *_: (tell("told to end"), sys.exit(0)))
    tell("serves", os.getpid())
    open(serving(config["task"]["index"]), "w").close()
    time.sleep(120)
def serving(server):
    return os.path.join(os.path.dirname(__file__), f"serving{server}")
def wait_for_servers():
    while not all(map(os.path.exists, map(serving, range(servers)))):
        time.sleep(0.05)
servers = len(config["cluster"]["ps"])
"""


def pids_in(lines: list[str]) -> list[int]:
    return [int(x.split()[-1]) for x in lines if "serves" in x or "ready" in x]


class WithServers(Launched):
    def script(self, code: str, name: str = "train.py") -> str:
        path = pathlib.Path(super().script(code, name))
        head, tail = path.read_text().split("rank =", 1)
        path.write_text(f"{head}{PRELUDE}rank ={tail}")
        return str(path)


@pytest.mark.processes
class JoiningTest(WithServers):
    """Workers that come from elsewhere to a job that runs."""

    def script_of_both(self) -> str:
        """Return a script: the host's worker ends when a guest has told its place."""
        return self.script("""
            if kind == "ps":
                serve()
            wait_for_servers()
            joined = os.path.join(os.path.dirname(__file__), "joined")
            if rank == 0:
                while not os.path.exists(joined):
                    time.sleep(0.05)
                print("end")
                sys.exit(0)
            print(json.dumps(config), flush=True)
            open(joined, "w").close()
            time.sleep(120)
            """)

    def test_a_guest_takes_a_seat_and_ends_with_the_job(self) -> None:
        script, (port,) = self.script_of_both(), free_ports(1)
        seats = "--seats", "3", "--door", f"127.0.0.1:{port}"
        process = self.start("-n", "1", "--ps", "1", *seats, script)
        self.until_it_listens(port)
        guest = self.start("--join", f"127.0.0.1:{port}", script)
        status, out, err = finish(guest)
        self.assertEqual(status, 0, err)
        config = json.loads(next(x for x in out.splitlines() if "{" in x)[4:])
        self.assertEqual(config["task"], {"type": "worker", "index": 1})
        self.assertEqual(len(config["cluster"]["worker"]), 3)
        status, out, err = finish(process)
        self.assertEqual(status, 0, err)
        self.assertIn(f"others join with tf-dgc-run --join 127.0.0.1:{port}", err)
        self.assertIn("[ps0] told to end", out)

    def guest(self) -> tuple[door.Door, Any]:
        """Return the door of a job, and a guest that trains in it."""
        entrance = door.Door("127.0.0.1", 0, [1])
        self.addCleanup(entrance._listener.close)
        entrance.open({"ps": ["127.0.0.1:1"], "worker": ["127.0.0.1:2", "seat-1:1"]})
        script = self.script("""
            signal.signal(signal.SIGTERM, lambda *args: sys.exit(0))
            print("trains", flush=True)
            time.sleep(120)
            """)
        guest = self.start("--join", entrance.address, script)
        self.assertIn("trains", guest.stdout.readline())
        return entrance, guest

    def test_a_guest_of_a_job_that_fails_ends_with_its_status_and_says_so(self) -> None:
        entrance, guest = self.guest()
        entrance.see_off(30.0, 3)
        status, _, err = finish(guest)
        self.assertEqual(status, 3, err)
        self.assertIn(f"the job at {entrance.address} has ended with status 3", err)

    def test_a_guest_whose_job_is_lost_fails_and_says_so(self) -> None:
        entrance, guest = self.guest()
        entrance._guests[1].shutdown(socket.SHUT_RDWR)  # as where the launcher dies
        status, _, err = finish(guest)
        self.assertEqual(status, 1, err)
        self.assertIn(f"the job at {entrance.address} is lost", err)

    def until_it_listens(self, port: int) -> None:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port)).close()
                return
            time.sleep(0.05)
        self.fail("it does not listen")

    def test_who_finds_no_seat_is_told_why(self) -> None:
        script = self.script("pass")
        status, _, err = self.run_to_end(
            "--join", f"127.0.0.1:{free_ports(1)[0]}", script
        )
        self.assertEqual(status, 127)
        self.assertIn("cannot join the job at 127.0.0.1:", err)
        with contextlib.closing(door.Door("127.0.0.1", 0, [2])._listener) as listener:
            port = listener.getsockname()[1]
            how = "--join", f"127.0.0.1:{port}", script
            status, _, err = self.run_to_end(*how)
            self.assertEqual(status, 127)
            self.assertIn("the job has not begun, or has ended", err)


class DoorTest(unittest.TestCase):
    def test_each_guest_has_a_seat_of_its_own_until_it_leaves(self) -> None:
        entrance = door.Door("127.0.0.1", 0, [1, 2])
        entrance.open({"ps": ["a:1"], "worker": ["b:1", "seat-1:1", "seat-2:1"]})
        place = door.read_address(entrance.address, "--join")
        first, second = door.GuestSeat(*place), door.GuestSeat(*place)
        self.assertEqual([first.index, second.index], [1, 2])
        with self.assertRaisesRegex(CannotStart, "all seats of the job are taken"):
            door.GuestSeat(*place)
        workers = json.loads(second.config())["cluster"]["worker"]
        self.assertRegex(workers[2], r"127.0.0.1:\d+")
        first.leave()
        deadline = time.monotonic() + 30
        while 1 in entrance._guests and time.monotonic() < deadline:
            time.sleep(0.01)
        again = door.GuestSeat(*place)
        self.assertEqual(again.index, 1)
        threading.Timer(0.1, lambda: (again.leave(), second.leave())).start()
        entrance.see_off(30.0, 0)
        self.assertEqual(entrance._guests, {})

    def test_what_does_not_go_together_is_refused(self) -> None:
        for words, text in (
            ("-n 1 --seats 3 s.py", "`--seats` needs `--ps`"),
            ("-n 3 --ps 1 --seats 3 --door a:1 s.py", "more seats than workers"),
            ("-n 1 --ps 1 --seats 3 --door a s.py", "`--door` must be HOST:PORT"),
            ("--join a:1 --ps 2 s.py", "leave out --ps"),
            ("--join a s.py", "`--join` must be HOST:PORT"),
        ):
            with (
                self.subTest(words=words),
                contextlib.redirect_stderr(io.StringIO()) as err,
                self.assertRaises(SystemExit),
            ):
                run.main(words.split())
            self.assertIn(text, err.getvalue())


@pytest.mark.processes
class ServersTest(WithServers):
    def test_workers_and_servers_find_each_other(self) -> None:
        script = self.script("""
            print(json.dumps(config), flush=True)
            if kind == "ps":
                serve()
            wait_for_servers()
            """)
        status, out, err = self.run_to_end("-n", "2", "--ps", "3", script)
        self.assertEqual((status, err), (0, ""))
        told = [line.split("] ", 1) for line in out]
        configs = {name[1:]: json.loads(text) for name, text in told if "{" in text}
        self.assertCountEqual(configs, ["0", "1", "ps0", "ps1", "ps2"])
        cluster = configs["0"]["cluster"]
        self.assertEqual([len(cluster["worker"]), len(cluster["ps"])], [2, 3])
        self.assertEqual(len({*cluster["worker"], *cluster["ps"]}), 5)
        for name, config in configs.items():
            self.assertEqual(config["cluster"], cluster)
            kind, index = ("ps", name[2:]) if name[0] == "p" else ("worker", name)
            self.assertEqual(config["task"], {"type": kind, "index": int(index)})

    def test_servers_end_after_the_last_worker(self) -> None:
        script = self.script("""
            if kind == "ps":
                serve()
            wait_for_servers()
            time.sleep(0.4 * rank)
            print("end")
            """)
        process = self.start("-n", "2", "--ps", "1", script)
        status, out, err = finish(process)
        self.assertEqual((status, err), (0, ""))
        self.assertEqual(out.splitlines()[-1], "[ps0] told to end")

    def test_a_worker_that_dies_ends_no_other(self) -> None:
        script = self.script("""
            if kind == "ps":
                serve()
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(2)
            print("end")
            """)
        status, out, err = self.run_to_end("-n", "3", "--ps", "1", script)
        self.assertEqual(status, 0)
        told = "tf-dgc-run: worker 1 ended with status 137; the others go on\n"
        self.assertEqual(err, told)
        self.assertIn("[0] end", out)
        self.assertIn("[2] end", out)

    def test_the_status_is_that_of_the_chief(self) -> None:
        script = self.script("""
            if kind == "ps":
                serve()
            if rank == 0:
                sys.exit(7)
            time.sleep(2)
            print("end")
            """)
        status, out, err = self.run_to_end("-n", "2", "--ps", "1", script)
        self.assertEqual(status, 7)
        self.assertIn("[1] end", out)
        self.assertIn("worker 0 ended with status 7; the others go on", err)

    def test_a_server_that_ends_ends_all(self) -> None:
        for code, expected in ((3, 3), (0, 1)):
            with self.subTest(code=code):
                script = self.script(f"""
                    if kind == "ps" and rank == 1:
                        sys.exit({code})
                    serve()
                    """)
                status, out, err = self.run_to_end("-n", "2", "--ps", "2", script)
                self.assertEqual(status, expected)
                told = f"tf-dgc-run: server 1 ended with status {code}; ending all"
                self.assertIn(told, err)
                self.assertFalse(any(is_alive(pid) for pid in pids_in(out)))

    @pytest.mark.slow
    def test_a_worker_is_started_again_by_itself(self) -> None:
        script = self.script("""
            if kind == "ps":
                serve()
            print("attempt", attempt, flush=True)
            if rank == 1 and attempt < 2:
                sys.exit(9)
            time.sleep(0 if attempt else 6)
            """)
        how = "-n", "2", "--ps", "1", "--restarts", "3"
        status, out, err = self.run_to_end(*how, script)
        self.assertEqual(status, 0, err)
        attempts = [line for line in out if "attempt" in line]
        expected = ["[0] attempt 0", *(f"[1] attempt {i}" for i in range(3))]
        self.assertEqual(attempts, expected)
        again = "tf-dgc-run: worker 1 ended with status 9; starting it again, 2 of 3"
        self.assertIn(again, err)
        self.assertNotIn("others go on", err)

    @pytest.mark.extended
    def test_so_is_the_last_that_runs(self) -> None:
        script = self.script("""
            if kind == "ps":
                serve()
            print("attempt", attempt, flush=True)
            if rank == 0 and attempt < 2:
                sys.exit(9)
            """)
        for workers in ("1", "2"):  # the other ends well at once
            how = "-n", workers, "--ps", "1", "--restarts", "2"
            status, out, err = self.run_to_end(*how, script)
            self.assertEqual(status, 0, err)
            attempts = [line for line in out if "[0] attempt" in line]
            self.assertEqual(attempts, [f"[0] attempt {i}" for i in range(3)])
            self.assertNotIn("tf-dgc-run: starting again", err)  # as a whole
        status, _, err = self.run_to_end("-n", "1", "--ps", "1", script)
        self.assertEqual(status, 9)
        self.assertIn("worker 0 ended with status 9", err)
        self.assertNotIn("the others go on", err)  # there are none

    @pytest.mark.extended
    def test_when_no_restarts_are_left_the_others_go_on(self) -> None:
        script = self.script("""
            if kind == "ps":
                serve()
            if rank == 1:
                sys.exit(9)
            time.sleep(5)
            """)
        how = "-n", "2", "--ps", "1", "--restarts", "1"
        status, _, err = self.run_to_end(*how, script)
        self.assertEqual(status, 0)
        self.assertIn("worker 1 ended with status 9; starting it again, 1 of 1", err)
        self.assertIn("worker 1 ended with status 9; the others go on", err)

    def test_a_job_that_loses_a_server_is_started_again_as_a_whole(self) -> None:
        script = self.script("""
            print("attempt", attempt, flush=True)
            if kind == "ps" and attempt == 0:
                sys.exit(9)
            if kind == "ps":
                serve()
            if attempt == 0:
                time.sleep(60)
            wait_for_servers()
            """)
        how = "-n", "2", "--ps", "1", "--restarts", "1"
        status, out, err = self.run_to_end(*how, script)
        self.assertEqual(status, 0, err)
        self.assertIn("tf-dgc-run: starting again, 1 of 1", err)
        for name in ("0", "1", "ps0"):
            self.assertIn(f"[{name}] attempt 1", out)

    def test_signals_reach_all_and_servers_last(self) -> None:
        for signum in (signal.SIGINT, signal.SIGTERM):
            with self.subTest(signal=signum.name):
                script = self.script("""
                    if kind == "ps":
                        serve()
                    def handle(*_):
                        time.sleep(0.5)
                        tell("saved")
                        sys.exit(0)
                    signal.signal(signal.SIGINT, handle)
                    signal.signal(signal.SIGTERM, handle)
                    tell("ready", os.getpid())
                    time.sleep(120)
                    """)
                process = self.start("-n", "2", "--ps", "2", script)
                lines = [process.stdout.readline() for _ in range(4)]
                process.send_signal(signum)
                status, out, _ = finish(process)
                self.assertEqual(status, 128 + signum)
                told = ["saved"] * 2 + ["told to end"] * 2
                self.assertEqual([x.split("] ")[1] for x in out.splitlines()], told)
                self.assertFalse(any(is_alive(pid) for pid in pids_in(lines)))

    def test_nothing_is_left_when_the_launcher_is_killed(self) -> None:
        process = self.start("-n", "2", "--ps", "2", self.script("serve()"))
        pids = pids_in([process.stdout.readline() for _ in range(4)])
        process.kill()
        finish(process)
        self.assertTrue(all_end(pids))

    def test_arguments_that_make_no_sense(self) -> None:
        (self.folder / "typo.json").write_text('{"fetch": 2}')
        downpour = "--ps", "1", "--strategy", "downpour"
        for arguments, message in (
            (["--ps", "-1"], "`--ps` must be 0 or more. Received: --ps -1"),
            (["--strategy", "downpour"], "needs servers: `--ps 1` or more"),
            (["--ps", "1", "--strategy", "dgc"], "Received: --strategy dgc --ps 1"),
            ([*downpour, "--config", "typo.json"], "unknown keys ['fetch']"),
            ([*downpour, "--sparsity", "0.9"], "unknown keys ['sparsity']"),
        ):
            with self.subTest(arguments=arguments):
                given = ["-n", "1", *arguments, "x.py"]
                status, _, err = in_process(self.folder, given)
                self.assertEqual(status, 2)
                self.assertIn(message, re.sub(r"\s+", " ", err))

    def test_run_local_starts_servers_with_any_command(self) -> None:
        script = self.script("""
            if kind == "ps":
                serve()
            if rank == 1:
                sys.exit(9)
            wait_for_servers()
            """)
        launcher = [sys.executable, ROOT / "scripts" / "run_local.py"]
        command = ["-n", "2", "--ps", "1", "--", sys.executable, script]
        done = subprocess.run(
            [*launcher, *command], capture_output=True, text=True, timeout=60
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("run_local: worker 1 ended with status 9; the", done.stderr)
        self.assertIn("[ps0] told to end", done.stdout)


@pytest.mark.processes
class ServersOnHostsTest(WithServers):
    """Two names of this machine, each reached by a real sshd."""

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        sshd.program()
        folder = cls.enterClassContext(tempfile.TemporaryDirectory())
        cls.sshd = sshd.Sshd(folder)
        process = cls.sshd.start()
        cls.addClassCleanup(process.wait)
        cls.addClassCleanup(process.terminate)

    def on_hosts(self, servers: int, *arguments: str) -> list[str]:
        how = ["--hosts", HOSTS, "--ssh", self.sshd.client]
        return [*how, "--ps", str(servers), *arguments]

    def test_servers_are_on_the_hosts_in_turn_and_end_last(self) -> None:
        script = self.script("""
            own = config["cluster"][kind][rank].split(":")[0]
            print("at", own, json.dumps(config["cluster"]), flush=True)
            if kind == "ps":
                serve()
            wait_for_servers()
            """)
        status, out, err = self.run_to_end(*self.on_hosts(3, script))
        self.assertEqual((status, err), (0, ""))
        told = [line.split(" ", 3) for line in out if "] at " in line]
        places = {line[0]: line[2][-1] for line in told}
        workers = {"[0]": "1", "[1]": "1", "[2]": "2"}
        self.assertEqual(places, workers | {"[ps0]": "1", "[ps1]": "2", "[ps2]": "1"})
        self.assertEqual(len({line[3] for line in told}), 1)
        self.assertEqual(sum("told to end" in line for line in out), 3)

    def test_a_worker_is_started_again_where_it_was(self) -> None:
        script = self.script("""
            if kind == "ps":
                serve()
            print("attempt", attempt, config["cluster"]["worker"][rank], flush=True)
            if rank == 2 and not attempt:
                sys.exit(9)
            time.sleep(0 if attempt else 5)
            """)
        given = self.on_hosts(2, "--restarts", "4", script)
        status, out, err = self.run_to_end(*given)
        self.assertEqual(status, 0, err)
        self.assertEqual(sum("attempt" in line for line in out), 4)
        first, second = [line.split() for line in out if line.startswith("[2]")]
        self.assertEqual((first[2], second[2]), ("0", "1"))
        self.assertEqual(first[3], second[3])
        self.assertIn("worker 2 ended with status 9; starting it again, 1 of 4", err)

    def test_a_lost_host_ends_all_where_it_has_a_server(self) -> None:
        for servers, expected in ((2, 255), (1, 0)):
            with self.subTest(servers=servers):
                script = self.script("""
                    tell("ready", os.getpid())
                    if kind == "ps":
                        serve()
                    time.sleep(5)
                    """)
                process = self.start(*self.on_hosts(servers, script))
                lines = [process.stdout.readline() for _ in range(3 + servers)]
                os.kill(children_of(process.pid)[1], signal.SIGKILL)
                status, _, err = finish(process)
                self.assertEqual(status, expected, err)
                self.assertIn("[127.0.0.2] the connection is lost", err)
                self.assertTrue(all_end(pids_in(lines)))


@pytest.mark.processes
class DownpourTest(Launched):
    @pytest.mark.slow
    def test_a_script_without_a_strategy_survives_the_death_of_a_worker(self) -> None:
        (self.folder / "own.json").write_text('{"liveness": 2.0}')
        script = self.folder / "train.py"
        script.write_text(TRAIN)
        how = "--strategy", "downpour", "--config", "own.json", "--restarts", "1"
        given = "-n", "2", "--ps", "1", *how, str(script)
        environment = {"TF_CPP_MIN_LOG_LEVEL": "2", "TF_DGC_TIMEOUT": "60"}
        process = self.start(*given, **environment)
        status, text, err = finish(process, timeout=240)
        self.assertEqual(status, 0, err[-4000:])
        again = "worker 1 ended with status 137; starting it again, 1 of 1"
        self.assertIn(again, err)
        results = dict(
            line.split(" end ") for line in text.splitlines() if " end " in line
        )
        self.assertCountEqual(results, ["[0]", "[1]"])
        for loss in results.values():
            self.assertLess(float(loss), 0.05)

    @pytest.mark.slow
    def test_a_chief_that_exits_with_a_status_is_taken_in_again(self) -> None:
        script = self.folder / "train.py"
        exits = TRAIN.replace("os.kill(os.getpid(), signal.SIGKILL)", EXIT)
        script.write_text(exits.replace("rank == 1", "rank == 0"))
        own = "--strategy", "downpour", "--restarts", "1", str(script)
        environment = {"TF_CPP_MIN_LOG_LEVEL": "2", "TF_DGC_TIMEOUT": "60"}
        process = self.start("-n", "1", "--ps", "1", *own, **environment)
        status, text, err = finish(process, timeout=240)
        self.assertEqual(status, 0, err[-4000:])
        told = "worker 0 ended with status 3; starting it again, 1 of 1"
        self.assertIn(told, err)
        self.assertIn("[0] end", text)


EXIT = "__import__('sys').exit(3)"

TRAIN = """
import os, signal
import keras
import numpy as np

class Die(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        attempt = os.environ["TF_DGC_ATTEMPT"]
        if self.model.distribute_strategy.rank == 1 and attempt == "0" and batch == 5:
            os.kill(os.getpid(), signal.SIGKILL)

x = np.random.default_rng(1).normal(size=(256, 4)).astype("float32")
y = x @ np.float32([[1.0], [2.0], [-1.0], [0.5]])
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile(keras.optimizers.SGD(0.05), "mse")
model.fit(x, y, batch_size=16, epochs=40, verbose=0, callbacks=[Die()])
model.distribute_strategy.barrier()
print("end", model.evaluate(x, y, verbose=0), flush=True)
"""


if __name__ == "__main__":
    unittest.main()
