#!/usr/bin/env python3
"""Run a job on several hosts that are network namespaces of this machine.

    scripts/netlab.py --hosts 4 --rate 1gbit --launch horovodrun -- python train.py
    scripts/netlab.py --hosts 4 --rate 100mbit --launch tf_config -- python train.py
    scripts/netlab.py --hosts 2 --rate 20mbit --delay 50ms --loss 0.1% ... -- ...
    scripts/netlab.py --hosts 2 --rate 1gbit -- \
        horovodrun -np 2 -H host1:1,host2:1 python train.py

The hosts are called host1, host2 and so on. Each has a name, an address, an /etc/hosts
and an interface eth0 of its own; files, processors and memory are the machine's. The
interfaces are joined by a bridge, and what a host sends and what it receives are each
limited to the rate (tc's token bucket, at both ends of the wire). Nothing else can be
reached from there. With `--delay`, `--jitter` or `--loss` what a host sends is also
late or lost; a packet from one host to another waits for the sender's delay, so that
two hosts of 50ms see a round trip of 100 ms. Values with commas are of host1, host2,
... (scripts/distance.py passes the packets on, so that no kernel module is needed.)
`--launch` says who starts the workers:

    once        COMMAND runs on host1 only, and starts the others itself (the default)
    horovodrun  horovodrun starts COMMAND once on each host
    tf_config   COMMAND is started once on each host, with a TF_CONFIG that names all

At the end each host's bytes are printed to stderr, the exit status is that of the first
process to fail (128 + N for signal N, 124 for a timeout, 125 where there is no
laboratory), and processes and namespaces are gone, also after Ctrl-C, SIGTERM or an
error. Only SIGKILL leaves them behind, for `--sweep` to remove. Needs Linux, root, and
`ip`, `tc` (iproute2) and `unshare` (util-linux).

A launcher reaches the other hosts by `ssh`. There the first in PATH is a stand-in that
runs the command line in the host's namespace, in a fresh environment as sshd does. It
is always used, even where sshd is installed: sshd would need keys, a port and a daemon
in each host, and its traffic, the workers' output, would count as theirs.

From Python:

    with netlab.Laboratory(hosts=4, rate="1gbit", delay="50ms") as lab:
        lab.run(["python", "train.py"], launch="horovodrun", timeout=600)
        print(lab.traffic())
"""

import argparse
import atexit
import contextlib
import itertools
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import BinaryIO, NamedTuple, Self

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from tf_dgc.lab.rates import bits_per_second, probability, seconds
from tf_dgc.launcher import workers

LAUNCHERS = ("once", "horovodrun", "tf_config")
MOST_HOSTS = 200
PORT = 2222  # of each worker in TF_CONFIG
_PREFIX = "netlab"
_SETTINGS = pathlib.Path("/etc/netns")  # what `ip netns exec` puts over /etc
_NAMESPACES = pathlib.Path("/run/netns")
# Of the token bucket. What an idle host may send at once is little beside a message of
# 100 kB, or messages would seem faster than the wire; less than this costs rate where
# timers are late. The queue is that of a cheap switch.
_BURST_SECONDS, _LEAST_BURST_BYTES = 0.0005, 16_384
_QUEUE_SECONDS, _LEAST_QUEUE_BYTES = 0.05, 524_288
_POLL_SECONDS = 0.05
_GRACE_SECONDS = 5.0
_DISTANCE = pathlib.Path(__file__).resolve().with_name("distance.py")
_SWITCH_ADDRESS = "10.177.0.254"
_ETHERNET_HEADER_BYTES = 14
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Runs a command under a host's own name.
_NAMED = 'echo "$0" > /proc/sys/kernel/hostname && exec "$@"'
_SSH = """#!/bin/sh
# Stands in for ssh: runs a command line in a namespace. Options have no meaning here.
host=
while [ $# -gt 0 ]; do
    case $1 in
        -[bcDEeFIiJLlmOopQRSWw]) shift 2 ;;
        -*) shift ;;
        *) [ -z "$host" ] || break; host=${{1##*@}}; shift ;;
    esac
done
if ! [ -e "/run/netns/{prefix}-$host" ]; then
    echo "ssh: could not resolve hostname $host: not a host of this laboratory" >&2
    exit 255
fi
exec ip netns exec "{prefix}-$host" unshare --uts sh -c '{named}' "$host" \\
    env -i HOME="$HOME" USER="$USER" SHELL=/bin/sh PATH="$PATH" sh -c "$*"
"""
_labs = itertools.count(1)


class LabError(RuntimeError):
    """There can be no laboratory here; the message says what is missing."""


class Traffic(NamedTuple):
    """What passed a host's interface, in bytes, headers of Ethernet included."""

    sent: int
    received: int


def check_rights() -> None:
    """Checks that this machine and this user can have a laboratory.

    Raises:
        LabError: they cannot.
    """
    if not sys.platform.startswith("linux"):
        raise LabError(f"network namespaces are of Linux; this is {sys.platform}")
    if os.geteuid():
        raise LabError("network namespaces need root; run this as root")
    packages = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux"}
    for tool, package in packages.items():
        if not shutil.which(tool):
            raise LabError(f"`{tool}` is not in PATH; install {package}")


class Lateness(NamedTuple):
    """What the process that delays packets did.

    Attributes:
        passed: packets passed on.
        dropped: packets lost, as wanted.
        late_99: 99 of 100 packets were at most so many seconds later than wanted.
        late_most: seconds that the last of them was late.
    """

    passed: int
    dropped: int
    late_99: float
    late_most: float


class Laboratory:
    """Hosts on a network of limited rate; use it as a context manager.

    Attributes:
        hosts: how many there are.
        rate: of each host's link, each way, such as "1gbit".
        far: whether packets are delayed or lost on the way.
        names: "host1", "host2", ...
        addresses: the IPv4 address of each.
        switch: the namespace of the bridge; port1 there is the link of host1.
    """

    def __init__(
        self,
        hosts: int,
        rate: str,
        *,
        delay: str = "0ms",
        jitter: str = "0ms",
        loss: str = "0%",
        seed: int = 0,
    ) -> None:
        """Check the arguments; the namespaces are made on entry.

        Args:
            hosts: their number.
            rate: of each host's link, each way.
            delay: how long what a host sends is on its way, such as "50ms"; one for
                all hosts, or one for each, with commas.
            jitter: each packet takes up to so much longer or shorter; in order.
            loss: share of packets that are lost, such as "0.1%".
            seed: of what is drawn for these.

        Raises:
            ValueError: an argument is out of its range.
        """
        if not 1 <= hosts <= MOST_HOSTS:
            raise ValueError(
                f"`hosts` must be in [1, {MOST_HOSTS}]. Received: hosts={hosts}"
            )
        self.hosts, self.rate, self._bits = hosts, rate, bits_per_second(rate)
        self._distances = list(
            zip(
                _of_each(hosts, "delay", delay, seconds),
                _of_each(hosts, "jitter", jitter, seconds),
                _of_each(hosts, "loss", loss, probability),
                range(seed, seed + hosts),
                strict=True,
            )
        )
        if any(jitter > delay for delay, jitter, _, _ in self._distances):
            raise ValueError(
                "`jitter` must not be above `delay`. Received: "
                f"delay={delay!r}, jitter={jitter!r}"
            )
        self.far = any(any(distance[:3]) for distance in self._distances)
        self.names = [f"host{i + 1}" for i in range(hosts)]
        self.addresses = [f"10.177.0.{i + 1}" for i in range(hosts)]
        # The number of the process makes names that no other laboratory has.
        self._prefix = f"{_PREFIX}-{os.getpid()}-{next(_labs)}"
        self.switch = f"{self._prefix}-switch"
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._processes: list[subprocess.Popen[bytes]] = []
        self._relay: subprocess.Popen[str] | None = None

    def namespace(self, host: int) -> str:
        """Returns the name of a host's namespace; hosts count from 0."""
        return f"{self._prefix}-{self.names[host]}"

    def __enter__(self) -> Self:
        """Builds the network.

        Raises:
            LabError: rights or tools are missing.
        """
        check_rights()
        atexit.register(self.close)
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Ends all processes and removes the network."""
        self.close()

    def _build(self) -> None:
        with _uncut():
            self._folder = tempfile.TemporaryDirectory(prefix=f"{self._prefix}-ssh-")
        ssh = pathlib.Path(self._folder.name) / "ssh"
        ssh.write_text(_SSH.format(prefix=self._prefix, named=_NAMED))
        ssh.chmod(0o755)
        known = ["127.0.0.1 localhost"]
        known += [" ".join(p) for p in zip(self.addresses, self.names, strict=True)]
        _tool("ip", "netns", "add", self.switch)
        switch = ("ip", "-n", self.switch, "link")
        _tool(*switch, "add", "bridge", "type", "bridge", "mcast_snooping", "0")
        _tool(*switch, "set", "bridge", "up")
        for i, address in enumerate(self.addresses):
            name, port = self.namespace(i), f"port{i + 1}"
            (_SETTINGS / name).mkdir(parents=True)
            (_SETTINGS / name / "hosts").write_text("\n".join(known) + "\n")
            _tool("ip", "netns", "add", name)
            peer = ("peer", "name", "eth0", "netns", name)
            _tool(*switch, "add", port, "type", "veth", *peer)
            _tool("ip", "-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            for namespace, interface in ((self.switch, port), (name, "eth0")):
                self._limit(namespace, interface)
            _tool(*switch, "set", port, "master", "bridge", "up")
            for interface in ("lo", "eth0"):
                _tool("ip", "-n", name, "link", "set", interface, "up")
        if self.far:
            self._remove_to_a_distance()

    def _remove_to_a_distance(self) -> None:
        """Let what hosts send pass through a process; they receive as before."""
        # Packets come by another interface than answers leave by.
        loose = "for f in /proc/sys/net/ipv4/conf/*/rp_filter; do echo 0 > $f; done"
        address = ("address", "add", f"{_SWITCH_ADDRESS}/24", "dev", "bridge")
        _tool("ip", "-n", self.switch, *address)
        for i in range(self.hosts):
            for namespace, name in (
                (self.namespace(i), "out"),
                (self.switch, f"in{i + 1}"),
            ):
                where = ("ip", "-n", namespace)
                _tool(*where, "tuntap", "add", "dev", name, "mode", "tun")
                _tool(*where, "link", "set", name, "up")
            host = ("ip", "-n", self.namespace(i))
            self._limit(self.namespace(i), "out")
            own = ("address", "add", f"{self.addresses[i]}/32", "dev", "eth0")
            _tool(*host, "address", "flush", "dev", "eth0")
            _tool(*host, *own)
            ways = ("10.177.0.0/24", "dev", "out", "src", self.addresses[i])
            _tool(*host, "route", "add", *ways)
            _tool("ip", "netns", "exec", self.namespace(i), "sh", "-c", loose)
        forward = "echo 1 > /proc/sys/net/ipv4/ip_forward"
        inside = ("ip", "netns", "exec", self.switch, "sh", "-c")
        _tool(*inside, f"{loose}; {forward}")
        names = ("delay", "jitter", "loss", "seed")
        paths = [
            {
                "namespace": self.namespace(i),
                "switch": self.switch,
                "port": i + 1,
                **dict(zip(names, distance, strict=True)),
            }
            for i, distance in enumerate(self._distances)
        ]
        with _uncut():
            self._relay = subprocess.Popen(
                [sys.executable, "-S", str(_DISTANCE), json.dumps(paths)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        assert self._relay.stdout and self._relay.stderr
        if self._relay.stdout.readline() != "ready\n":
            lines = self._relay.stderr.read().strip().splitlines()
            raise LabError(f"packets cannot be delayed here: {(lines or ['?'])[-1]}")

    def end_distance(self) -> Lateness | None:
        """Stop passing packets on; return how that went, or None where none is far.

        After it no host reaches another.
        """
        if self._relay is None:
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):
            out, _ = self._relay.communicate(timeout=_GRACE_SECONDS)
            self._relay = None
            return Lateness(**json.loads(out)) if out.strip() else None
        self._relay.kill()
        self._relay.communicate()
        self._relay = None
        return None

    def _limit(self, namespace: str, interface: str) -> None:
        octets = self._bits / 8
        burst = max(_LEAST_BURST_BYTES, round(octets * _BURST_SECONDS))
        queue = max(_LEAST_QUEUE_BYTES, round(octets * _QUEUE_SECONDS))
        bucket = ("rate", f"{self._bits:.0f}bit", "burst", f"{burst}b")
        where = ("tc", "-n", namespace, "qdisc", "add", "dev", interface, "root")
        _tool(*where, "tbf", *bucket, "limit", f"{queue}b")

    def traffic(self) -> list[Traffic]:
        """Returns what each host has sent and received since it exists.

        A TCP packet that is longer than the wire's but fits into the token bucket is
        counted uncut, with one header of 66 bytes for several.
        """
        links = json.loads(_tool("ip", "-n", self.switch, "-s", "-j", "link"))
        counted = {link["ifname"]: link["stats64"] for link in links}
        ports = [counted[f"port{i + 1}"] for i in range(self.hosts)]
        sent = [port["rx"]["bytes"] for port in ports]
        if self.far:
            sent = [self._sent_far(i) for i in range(self.hosts)]
        received = [port["tx"]["bytes"] for port in ports]
        return [Traffic(*both) for both in zip(sent, received, strict=True)]

    def _sent_far(self, host: int) -> int:
        """Return the bytes that a host sent, lost ones and Ethernet's headers too."""
        where = ("ip", "-n", self.namespace(host), "-s", "-j", "link", "show", "out")
        (link,) = json.loads(_tool(*where))
        sent = link["stats64"]["tx"]
        return int(sent["bytes"] + _ETHERNET_HEADER_BYTES * sent["packets"])

    def start(
        self,
        host: int,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
    ) -> "subprocess.Popen[bytes]":
        """Starts a process on a host, with pipes for its output.

        Args:
            host: its number, from 0.
            command: program and arguments.
            environment: added to that of this process.

        Raises:
            LabError: the laboratory is not open.
        """
        if self._folder is None:
            raise LabError("the laboratory is not open; use it in a `with` statement")
        inside = ("ip", "netns", "exec", self.namespace(host))
        named = ("unshare", "--uts", "sh", "-c", _NAMED, self.names[host])
        paths = os.pathsep.join((self._folder.name, os.environ.get("PATH", "")))
        process = subprocess.Popen(
            [*inside, *named, *command],
            env=os.environ
            | {"PYTHONUNBUFFERED": "1", "PATH": paths}
            | dict(environment or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # a process group of its own, to signal as one
        )
        self._processes.append(process)
        return process

    def run(
        self,
        command: Sequence[str],
        *,
        launch: str = "once",
        timeout: float = 600.0,
        environment: Mapping[str, str] | None = None,
        stdout: BinaryIO | None = None,
        stderr: BinaryIO | None = None,
    ) -> int:
        """Runs a job to its end, or ends it at the timeout or when a worker fails.

        Args:
            command: program and arguments.
            launch: one of LAUNCHERS, see above.
            timeout: seconds.
            environment: added to that of this process.
            stdout: where output goes to; by default this process's own.
            stderr: the same for errors.

        Returns:
            The exit status, as said above.

        Raises:
            ValueError: there is no such launcher.
        """
        out = sys.stdout.buffer if stdout is None else stdout
        err = sys.stderr.buffer if stderr is None else stderr
        deadline = time.monotonic() + timeout
        processes, readers = [], []
        for i, (line, added) in enumerate(self.lines(command, launch)):
            process = self.start(i, line, {**(environment or {}), **added})
            prefix = f"[{i}] ".encode() if launch == "tf_config" else b""
            for source, target in ((process.stdout, out), (process.stderr, err)):
                arguments = (source, target, prefix)
                reader = threading.Thread(
                    target=workers.forward, args=arguments, daemon=True
                )
                reader.start()
                readers.append(reader)
            processes.append(process)
        codes = [process.poll() for process in processes]
        while None in codes and not any(codes) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            codes = [process.poll() for process in processes]
        self._end_processes()
        for reader in readers:
            reader.join(timeout=2)
        if failed := [code for code in codes if code]:
            return failed[0] if failed[0] > 0 else 128 - failed[0]
        return 124 if None in codes else 0

    def lines(
        self, command: Sequence[str], launch: str
    ) -> list[tuple[list[str], dict[str, str]]]:
        """Returns what `run` starts: a command and its environment, by host.

        Raises:
            ValueError: there is no such launcher.
        """
        if launch == "once":
            return [([*command], {})]
        if launch == "horovodrun":
            hosts = ",".join(f"{name}:1" for name in self.names)
            # Saves it a search; what it remembers may be of another laboratory.
            own = ["--network-interfaces", "eth0", "--disable-cache"]
            own += ["-np", str(self.hosts), "-H", hosts]
            return [(["horovodrun", *own, *command], {})]
        if launch == "tf_config":
            cluster = {"worker": [f"{address}:{PORT}" for address in self.addresses]}
            tasks = [{"type": "worker", "index": i} for i in range(self.hosts)]
            configs = [json.dumps({"cluster": cluster, "task": task}) for task in tasks]
            return [([*command], {"TF_CONFIG": config}) for config in configs]
        raise ValueError(
            f"`launch` must be one of {LAUNCHERS}. Received: launch={launch!r}"
        )

    def _end_processes(self) -> None:
        """Ends all processes on all hosts: asks what was started here, then kills."""
        for process in self._processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)
        namespaces = [self.namespace(i) for i in range(self.hosts)]
        _end_all_in(namespaces, _GRACE_SECONDS)
        for process in self._processes:
            process.wait()

    def close(self) -> None:
        """Ends all processes and removes the network; may be called again.

        Signals that come meanwhile are ignored, where this is the main thread.
        """
        with _undisturbed():
            self._end_processes()
            self.end_distance()
            for process in self._processes:
                for pipe in (process.stdout, process.stderr):
                    if pipe:
                        pipe.close()
            for name in (*(self.namespace(i) for i in range(self.hosts)), self.switch):
                _remove(name)
            if self._folder:
                self._folder.cleanup()
                self._folder = None
        atexit.unregister(self.close)


def _of_each(
    hosts: int, name: str, text: str, read: Callable[[str, str], float]
) -> list[float]:
    """Returns an argument of each host, of one text for all or of one with commas.

    Raises:
        ValueError: there are others than one or `hosts`, or one cannot be read.
    """
    found = [read(each.strip(), name) for each in text.split(",")]
    if len(found) not in (1, hosts):
        raise ValueError(
            f"`{name}` must be one value or {hosts}, one for each host. Received: "
            f"{name}={text!r}"
        )
    return found * hosts if len(found) == 1 else found


def sweep() -> list[str]:
    """Removes the laboratories of processes that are gone; returns what it removed."""
    check_rights()
    pattern = re.compile(rf"{_PREFIX}-([0-9]+)-[0-9]+-(switch|host[0-9]+|ssh-\w+)")
    folders = (_NAMESPACES, _SETTINGS, pathlib.Path(tempfile.gettempdir()))
    names = {path.name for folder in folders for path in folder.glob(f"{_PREFIX}-*")}
    found = [(name, pattern.fullmatch(name)) for name in sorted(names)]
    dead = [n for n, m in found if m and not pathlib.Path(f"/proc/{m[1]}").exists()]
    _end_all_in(dead, 0)
    for name in dead:
        _remove(name)
    return dead


def end_on_signals() -> None:
    """Lets SIGINT, SIGTERM and SIGHUP end this process by way of SystemExit.

    So that laboratories are left as they are after an error; for scripts to call.
    """

    def end(number: int, _: object) -> None:
        sys.exit(128 + number)

    for number in _SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, end)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Ignores signals for a while; what is started meanwhile ignores them too."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _uncut() -> Iterator[None]:
    """Lets signals wait: what one cuts off while it is started or made is left over."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _tool(*command: str) -> str:
    """Returns what `ip` or `tc` prints.

    Raises:
        LabError: it fails.
    """
    with _uncut():
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LabError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout


def _end_all_in(namespaces: Sequence[str], grace: float) -> None:
    """Waits until no process is left in the namespaces; kills after `grace` seconds."""
    last = time.monotonic() + grace
    while pids := [pid for name in namespaces for pid in _pids(name)]:
        if (late := time.monotonic() - last) > 0:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        if late > _GRACE_SECONDS:
            return  # they cannot be killed now, and end with what holds them
        time.sleep(_POLL_SECONDS)


def _pids(namespace: str) -> list[int]:
    """Returns the processes in a namespace; all come from those that were started."""
    if not (_NAMESPACES / namespace).exists():
        return []
    with contextlib.suppress(LabError):
        listed = _tool("ip", "netns", "pids", namespace)
        # A zombie holds nothing; the parent that has to wait for it may be this one.
        return [int(pid) for pid in listed.split() if not _is_zombie(pid)]
    return []


def _is_zombie(pid: str) -> bool:
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    return stat.rpartition(")")[2].split()[0] in "ZX"


def _remove(namespace: str) -> None:
    """Removes a namespace with its interfaces, and folders of that name."""
    if (_NAMESPACES / namespace).exists():
        with contextlib.suppress(LabError):
            _tool("ip", "netns", "delete", namespace)
    for folder in (_SETTINGS, pathlib.Path(tempfile.gettempdir())):
        shutil.rmtree(folder / namespace, ignore_errors=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the arguments and runs the job; returns the exit status."""
    parser = argparse.ArgumentParser(
        usage="%(prog)s --hosts N --rate RATE [options] -- COMMAND [ARGUMENT ...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--hosts", type=int, default=2, help="how many (2)")
    parser.add_argument("--rate", default="1gbit", help="of each link (1gbit)")
    parser.add_argument(
        "--delay", default="0ms", help="of what a host sends, such as 50ms"
    )
    parser.add_argument("--jitter", default="0ms", help="around it, such as 5ms")
    parser.add_argument("--loss", default="0%", help="of packets, such as 0.1%%")
    parser.add_argument("--launch", choices=LAUNCHERS, default="once")
    parser.add_argument(
        "--timeout", type=float, default=600.0, help="end all after so many seconds"
    )
    parser.add_argument(
        "--sweep", action="store_true", help="remove what killed ones left; then end"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(argv)
    command = options.command[options.command[:1] == ["--"] :]
    if not options.sweep and not command:
        parser.error("no command to run; write it behind `--`")
    if not 0 < options.timeout < float("inf"):
        parser.error(
            f"`--timeout` must be a positive number. Received: {options.timeout}"
        )
    try:
        lab = Laboratory(
            options.hosts,
            options.rate,
            delay=options.delay,
            jitter=options.jitter,
            loss=options.loss,
        )
    except ValueError as error:
        parser.error(str(error))
    end_on_signals()
    try:
        if options.sweep:
            for name in sweep():
                _say(f"removed {name}")
            return 0
        with lab:
            status = lab.run(command, launch=options.launch, timeout=options.timeout)
            traffic = lab.traffic()
            lateness = lab.end_distance()
    except LabError as error:
        _say(str(error))
        return 125
    for name, (sent, received) in zip(lab.names, traffic, strict=True):
        _say(f"{name} sent {sent:,} bytes and received {received:,}")
    if lateness:
        _say(
            f"{lateness.passed:,} packets were delayed and {lateness.dropped:,} lost; "
            f"99 of 100 were at most {1000 * lateness.late_99:g} ms later than wanted, "
            f"the last {1000 * lateness.late_most:g} ms"
        )
    if status == 124:
        _say(f"no end after {options.timeout:g} seconds")
    return status


def _say(text: str) -> None:
    print(f"netlab: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
