"""Tests of the launcher `tf-dgc-run`, with plain Python workers (no TensorFlow)."""

import contextlib
import io
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

import netlab_rights
import pytest
import sshd
from launch import ROOT, finish

from tf_dgc import run

PRELUDE = """
import json, os, signal, sys, time
config = json.loads(os.environ["TF_CONFIG"])
rank = config["task"]["index"]
def tell(*words):  # in one piece, or not at all, whenever a signal comes
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
"""
WAIT = """
def handle(number, frame):
    tell("received", number)
    sys.exit(0)
signal.signal(signal.SIGINT, handle)
signal.signal(signal.SIGTERM, handle)
tell("ready", os.getpid())
time.sleep(120)
"""


def is_alive(pid: int) -> bool:
    """Tell whether the process exists and is no zombie."""
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def all_end(pids: list[int], seconds: float = 20) -> bool:
    """Wait for the end of processes."""
    deadline = time.monotonic() + seconds
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(is_alive, pids))


def children_of(pid: int) -> list[int]:
    text = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]


class Launched(unittest.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

    def script(self, code: str, name: str = "train.py") -> str:
        path = self.folder / name
        path.write_text(PRELUDE + textwrap.dedent(code))
        return str(path)

    def start(self, *arguments: str, **environment: str) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tf_dgc.run", *arguments],
            cwd=self.folder,
            env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # Shells ignore SIGINT in what they start in the background.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        self.addCleanup(process.stdout.close)
        self.addCleanup(process.stderr.close)
        self.addCleanup(process.kill)
        return process

    def run_to_end(self, *arguments: str, **env: str) -> tuple[int, list[str], str]:
        status, out, err = finish(self.start(*arguments, **env))
        return status, sorted(out.splitlines()), err

    def ready(self, process: "subprocess.Popen[str]", workers: int) -> list[int]:
        """Wait for workers that run WAIT; return their ids."""
        lines = [process.stdout.readline() for _ in range(workers)]
        self.assertEqual([line.split()[1:2] for line in lines], [["ready"]] * workers)
        return [int(line.split()[-1]) for line in lines]


class PortsTest(unittest.TestCase):
    def test_no_two_processes_choose_a_port_that_nobody_listens_at_yet(self) -> None:
        code = """
from tf_dgc.launcher import workers
workers._PORTS = range(31_900, 31_960)
print(*workers.free_ports(25), flush=True)
input()
"""
        command = [sys.executable, "-c", code]
        found: list[str] = []
        for _ in range(2):
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            self.addCleanup(process.stdout.close)
            self.addCleanup(process.communicate, "\n")
            found += process.stdout.readline().split()
        self.assertEqual(len(found), 50)
        self.assertEqual(len(set(found)), 50)


class HereTest(Launched):
    def test_it_needs_the_standard_library_only(self) -> None:
        script = self.script("print(rank)")
        code = f"""
import sys
for name in ("tensorflow", "keras", "numpy", "horovod"):
    sys.modules[name] = None  # to import it is an error
from tf_dgc import run
sys.exit(run.main(["-n", "2", {script!r}]))
"""
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=60,
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertCountEqual(done.stdout.splitlines(), ["[0] 0", "[1] 1"])

    def test_a_script_runs_as_python_runs_it(self) -> None:
        script = self.script("print(__name__, sys.argv[1:], sys.path[0], os.getcwd())")
        status, out, err = self.run_to_end("-n", "2", script, "-n", "9", "--", "x")
        place = os.path.realpath(self.folder)
        told = f"__main__ ['-n', '9', '--', 'x'] {place} {place}"
        self.assertEqual((status, err), (0, ""))
        self.assertEqual(out, [f"[0] {told}", f"[1] {told}"])

    @pytest.mark.slow
    def test_files_of_the_current_folder_hide_no_module(self) -> None:
        folder = self.folder / "scripts"
        folder.mkdir()
        script = self.script(
            "import random, tf_dgc; print(sys.path[0])", "scripts/train.py"
        )
        for name in ("random", "tf_dgc"):
            (self.folder / f"{name}.py").write_text("raise ImportError('hidden')")
        for options in ([], ["--strategy", "dgc"]):
            status, out, err = self.run_to_end("-n", "1", *options, script)
            self.assertEqual((status, out), (0, [f"[0] {folder.resolve()}"]), err)

    def test_a_module_and_any_program(self) -> None:
        self.script("print('module', sys.argv[1:])", "own_module.py")
        status, out, _ = self.run_to_end("-n", "1", "-m", "own_module", "a")
        self.assertEqual((status, out), (0, ["[0] module ['a']"]))
        status, out, _ = self.run_to_end("-n", "1", "--no-python", "echo", "a")
        self.assertEqual((status, out), (0, ["[0] a"]))

    def test_workers_find_each_other_by_tf_config(self) -> None:
        script = self.script("print(json.dumps(config))")
        status, out, _ = self.run_to_end("-n", "3", script, TF_CONFIG="{}")
        configs = [json.loads(line.partition("] ")[2]) for line in out]
        self.assertEqual(status, 0)
        self.assertEqual([each["task"]["index"] for each in configs], [0, 1, 2])
        addresses = configs[0]["cluster"]["worker"]
        self.assertEqual(len(set(addresses)), 3)
        self.assertEqual(
            [each["cluster"] for each in configs], [configs[0]["cluster"]] * 3
        )

    def test_variables_for_all_workers(self) -> None:
        script = self.script("print(os.environ['ONE'], os.environ['TWO'])")
        given = ("--env", "ONE=1=x", "--env", "TWO")
        _, out, _ = self.run_to_end("-n", "2", *given, script, TWO="2")
        self.assertEqual(out, ["[0] 1=x 2", "[1] 1=x 2"])

    @pytest.mark.long
    def test_a_job_that_fails_is_started_again_as_a_whole(self) -> None:
        script = self.script("""
            attempt = int(os.environ["TF_DGC_ATTEMPT"])
            print("attempt", attempt, flush=True)
            if attempt < 2 and rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0 if attempt == 2 else 60)
            """)
        status, out, err = self.run_to_end("-n", "2", "--restarts", "3", script)
        self.assertEqual(status, 0, err)
        for rank in (0, 1):
            told = [line for line in out if line.startswith(f"[{rank}]")]
            self.assertIn(f"[{rank}] attempt 2", told)
        self.assertNotIn("[1] attempt 3", out)
        self.assertIn("tf-dgc-run: worker 1 ended with status 137; ending all", err)
        self.assertIn("tf-dgc-run: starting again, 2 of 3", err)

    @pytest.mark.long
    def test_restarts_come_to_an_end(self) -> None:
        script = self.script("print('here'); sys.exit(7)")
        status, out, _ = self.run_to_end("-n", "1", "--restarts", "2", script)
        self.assertEqual((status, out), (7, ["[0] here"] * 3))

    def test_a_signal_is_no_reason_to_start_again(self) -> None:
        process = self.start("-n", "2", "--restarts", "5", self.script(WAIT))
        pids = self.ready(process, 2)
        process.send_signal(signal.SIGTERM)
        status, out, _ = finish(process)
        self.assertEqual(status, 128 + signal.SIGTERM)
        told = ["[0] received 15", "[1] received 15"]
        self.assertEqual(sorted(out.splitlines()), told)
        self.assertFalse(any(map(is_alive, pids)))

    def test_the_time_that_is_out_is_no_reason_to_start_again(self) -> None:
        script = self.script("time.sleep(60)")
        how = "-n", "1", "--timeout", "0.5", "--restarts", "5"
        status, _, err = self.run_to_end(*how, script)
        self.assertEqual(status, 124)
        self.assertIn("tf-dgc-run: no end after 0.5 seconds", err)

    def test_arguments_that_make_no_sense(self) -> None:
        (self.folder / "list.json").write_text("[1]")
        (self.folder / "text.json").write_text("sparsity: 1")
        (self.folder / "typo.json").write_text('{"sparsty": 0.9}')
        for arguments, message in (
            (["x.py"], "`-n` or `--hosts` must say how many workers"),
            (["-n", "0", "x.py"], "`-n` must be at least 1. Received: -n 0"),
            (["-n", "2"], "no script to run"),
            (["--hosts", "a:0", "x.py"], "`--hosts` must be HOST:WORKERS"),
            (["--hosts=-oProxyCommand=x", "x.py"], "`--hosts` must be HOST:WORKERS"),
            (["--hosts", "a b", "x.py"], "`--hosts` must be HOST:WORKERS"),
            (["--hosts", "a,a", "x.py"], "`--hosts` must name each host once"),
            (["--hosts", "a,localhost", "x.py"], "by the name that the others know"),
            (["-n", "3", "--hosts", "a:2", "x.py"], "Received: -n 3, 2 in --hosts a:2"),
            (["-n", "1", "--restarts", "-1", "x.py"], "`--restarts` must be 0 or more"),
            (
                ["-n", "1", "--grace", "nan", "x.py"],
                "`--grace` must be a number",
            ),
            (["-n", "1", "--timeout", "0", "x.py"], "`--timeout` must be a number"),
            (["-n", "1", "--env", "=x", "x.py"], "must name a variable. Received: --e"),
            (["-n", "1", "--ssh", "", "x.py"], "`--ssh` must be a command"),
            (["-n", "1", "--env", "NOT_THERE", "x.py"], "must name a variable that is"),
            (["-n", "1", "--strategy", "x", "x.py"], "invalid choice: 'x'"),
            (["-n", "1", "--sparsity", "0.9", "x.py"], "need `--strategy`"),
            (["-n", "1", "--other", "x.py"], "unrecognized arguments: --other"),
            (["-n", "2", "--check", "--ps", "1"], "`--check` looks at workers"),
            (
                ["-n", "1", "--strategy", "dense", "--sparsity", "0.9", "x.py"],
                "`--strategy dense` has no settings. Received: sparsity",
            ),
            (
                ["-n", "1", "--strategy", "dgc", "--sparsity", "1", "x.py"],
                "`sparsity` must be in [0, 1)",
            ),
            (
                ["-n", "1", "--strategy", "averaging", "--sparsity", "-1", "x.py"],
                "`sparsity` must be in [0, 1)",
            ),
            (
                ["-n", "1", "--strategy", "dgc", "--config", "list.json", "x.py"],
                "`--config` must hold a JSON object",
            ),
            (
                ["-n", "1", "--strategy", "dgc", "--config", "text.json", "x.py"],
                "`--config` must be a JSON file",
            ),
            (
                ["-n", "1", "--strategy", "dgc", "--config", "typo.json", "x.py"],
                "unknown keys ['sparsty']",
            ),
            (
                ["-n", "1", "--strategy", "dgc", "--config", "none.json", "x.py"],
                "`--config` must be a JSON file: none.json",
            ),
            (
                ["-n", "1", "--strategy", "dgc", "--no-python", "x.py"],
                "`--strategy` needs a script of Python",
            ),
        ):
            with self.subTest(arguments=arguments):
                status, _, err = self.error(*arguments)
                self.assertEqual(status, 2)
                self.assertIn(message, re.sub(r"\s+", " ", err))

    def error(self, *arguments: str) -> tuple[int, str, str]:
        """Run the arguments in this process, which is faster."""
        return in_process(self.folder, arguments)

    @pytest.mark.long
    def test_a_check_of_two_workers(self) -> None:
        process = self.start("-n", "2", "--check", "--json", "--backups", "not/there")
        status, out, err = finish(process, 200)
        self.assertEqual(status, 0, err)
        record = json.loads(out)
        self.assertTrue(record["ok"], record)
        self.assertEqual([each["rank"] for each in record["facts"]], [0, 1])
        self.assertEqual(list(record["clocks"]), ["1"])
        for name in ("links", "together"):
            ways = [(each["source"], each["target"]) for each in record[name]]
            self.assertEqual(ways, [(0, 1), (1, 0)])
            self.assertTrue(all(each["bandwidth"] > 0 for each in record[name]))

    def test_a_program_that_is_not_there(self) -> None:
        status, _, err = self.run_to_end("-n", "1", "--no-python", "/does/not/exist")
        self.assertEqual(status, 127)
        self.assertIn("No such file or directory: '/does/not/exist'", err)

    def test_output_goes_to_a_folder(self) -> None:
        file = str(pathlib.Path(__file__))
        status, _, err = self.run_to_end("-n", "1", "--output", file, "train.py")
        self.assertEqual(status, 2)
        self.assertIn("`--output` must be chief, all or a folder", err)


def in_process(folder: pathlib.Path, arguments: list[str]) -> tuple[int, str, str]:
    """Return status and output of arguments that start nothing."""
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.chdir(folder),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            status = run.main(arguments)
        except SystemExit as error:
            status = error.code
    return status, out.getvalue(), err.getvalue()


HOSTS = "127.0.0.1:2,127.0.0.2:1"


@pytest.mark.processes
class HostsTest(Launched):
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

    def on_hosts(self, *arguments: str, hosts: str = HOSTS) -> list[str]:
        return ["--hosts", hosts, "--ssh", self.sshd.client, *arguments]

    def test_workers_of_all_hosts_find_each_other(self) -> None:
        script = self.script("""
            print(json.dumps([config["cluster"]["worker"], sys.argv[1:], os.getcwd()]))
            print("to stderr", file=sys.stderr)
            """)
        status, out, err = self.run_to_end(*self.on_hosts(script, "a b", "$c"))
        self.assertEqual(status, 0, err)
        told = [json.loads(line.partition("] ")[2]) for line in out]
        self.assertEqual([line[:4] for line in out], ["[0] ", "[1] ", "[2] "])
        self.assertEqual(told, [told[0]] * 3)
        addresses, argv, folder = told[0]
        names = [address.partition(":")[0] for address in addresses]
        self.assertEqual(names, ["127.0.0.1", "127.0.0.1", "127.0.0.2"])
        self.assertEqual((argv, folder), (["a b", "$c"], os.path.realpath(self.folder)))
        self.assertEqual(
            sorted(err.splitlines()), [f"[{i}] to stderr" for i in range(3)]
        )

    def test_what_hosts_get_of_the_environment(self) -> None:
        names = "TF_OWN", "KERAS_OWN", "OTHER_OWN", "GIVEN_OWN"
        script = self.script(f"print([os.environ.get(n) for n in {names!r}])")
        given = self.on_hosts("--env", "GIVEN_OWN", script)
        _, out, _ = self.run_to_end(*given, **{name: "x" for name in names})
        self.assertEqual(out, [f"[{i}] ['x', 'x', None, 'x']" for i in range(3)])

    def test_one_that_fails_ends_all(self) -> None:
        script = self.script(f"""
            if rank == 2:
                time.sleep(0.5)
                sys.exit(9)
            {textwrap.indent(WAIT, " " * 12).strip()}
            """)
        status, out, err = self.run_to_end(*self.on_hosts(script))
        self.assertEqual(status, 9, err)
        self.assertIn("tf-dgc-run: worker 2 ended with status 9; ending all", err)
        self.assertEqual(sum("received 15" in line for line in out), 2)

    def test_signals_reach_all_hosts(self) -> None:
        for signum in (signal.SIGINT, signal.SIGTERM):
            with self.subTest(signal=signum.name):
                process = self.start(*self.on_hosts(self.script(WAIT)))
                pids = self.ready(process, 3)
                process.send_signal(signum)
                status, out, _ = finish(process)
                self.assertEqual(status, 128 + signum)
                told = [f"[{rank}] received {int(signum)}" for rank in range(3)]
                self.assertEqual(sorted(out.splitlines()), told)
                self.assertFalse(any(map(is_alive, pids)))

    def test_one_that_ignores_sigterm_is_killed(self) -> None:
        script = self.script("""
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            tell("ready", os.getpid())
            time.sleep(120)
            """)
        process = self.start(*self.on_hosts("--grace", "0.5", script))
        pids = self.ready(process, 3)
        process.send_signal(signal.SIGTERM)
        status, _, _ = finish(process)
        self.assertEqual(status, 128 + signal.SIGTERM)
        self.assertTrue(all_end(pids))

    def test_nothing_is_left_when_a_connection_dies(self) -> None:
        process = self.start(*self.on_hosts(self.script(WAIT)))
        pids = self.ready(process, 3)
        os.kill(children_of(process.pid)[1], signal.SIGKILL)
        status, _, err = finish(process)
        self.assertEqual(status, 255)
        self.assertIn("[127.0.0.2] the connection is lost", err)
        self.assertTrue(all_end(pids))

    def test_nothing_is_left_when_the_launcher_is_killed(self) -> None:
        process = self.start(*self.on_hosts(self.script(WAIT)))
        pids = self.ready(process, 3)
        children = children_of(process.pid)
        process.kill()
        finish(process)
        self.assertTrue(all_end([*pids, *children]))

    def test_hosts_are_started_again_together(self) -> None:
        script = self.script("""
            if os.environ["TF_DGC_ATTEMPT"] == "0" and rank == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0 if os.environ["TF_DGC_ATTEMPT"] == "1" else 60)
            print("end")
            """)
        status, out, _ = self.run_to_end(*self.on_hosts("--restarts", "1", script))
        self.assertEqual((status, out), (0, [f"[{i}] end" for i in range(3)]))

    def test_a_host_that_cannot_be_reached_is_named(self) -> None:
        other = self.sshd.client.replace(str(self.sshd.port), "1")
        how = ["--hosts", HOSTS, "--ssh", other, self.script("")]
        status, _, err = self.run_to_end(*how)
        self.assertEqual(status, 127)
        self.assertRegex(err, r"cannot start workers on 127\.0\.0\.[12]: ssh")
        self.assertIn("Connection refused", err)

    def test_a_key_that_is_not_known_is_an_error_at_once(self) -> None:
        key = self.folder / "other"
        make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key]
        subprocess.run(make, check=True)
        other = self.sshd.client.replace(str(self.sshd.folder / "key"), str(key))
        status, _, err = self.run_to_end("--hosts", HOSTS, "--ssh", other, "x.py")
        self.assertEqual(status, 127)
        self.assertIn("Permission denied", err)


@pytest.mark.processes
class LaboratoryTest(Launched):
    """Two hosts with an sshd each."""

    def test_a_host_that_is_cut_off_ends_there_and_here(self) -> None:
        sshd.program()
        netlab = netlab_rights.skip_without_laboratory()
        keys = sshd.Sshd(self.enterContext(tempfile.TemporaryDirectory()))
        lab = self.enterContext(netlab.Laboratory(2, "1gbit"))
        for host in range(2):
            lab.start(host, keys.server)
        own = [sys.executable, "-m", "tf_dgc.run", "--silence", "3"]
        reach = ["--hosts", "host1:1,host2:1", "--ssh", keys.client]
        script = self.script(WAIT)
        time.sleep(1)
        job = lab.start(0, [*own, *reach, script], {"PYTHONPATH": str(ROOT)})
        lines = [job.stdout.readline().decode() for _ in range(2)]
        pids = [int(line.split()[-1]) for line in lines]
        self.assertEqual([line.split()[1] for line in lines], ["ready"] * 2)
        cut = ["ip", "-n", lab.switch, "link", "set", "port2", "down"]
        subprocess.run(cut, check=True)
        self.assertTrue(all_end(pids, 40))
        _, err = job.communicate(timeout=60)
        self.assertEqual(job.returncode, 255, err.decode())
        self.assertIn(b"[host2] the connection is lost", err)


if __name__ == "__main__":
    unittest.main()
