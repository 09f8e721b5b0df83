"""Workers on several hosts, which are reached by ssh."""

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, NamedTuple

from tf_dgc.launcher import agent, output, screen
from tf_dgc.launcher.workers import (
    POLL_SECONDS,
    CannotStart,
    Command,
    NotThere,
    Tasks,
    of_module,
)

# Of this process's environment, what workers elsewhere get.
PASSED_ON = ("TF_", "KERAS_", "PYTHON", "OMP_")
# Longer than sshd lets its users wait who have no key.
_START_SECONDS = 60.0
_NOTICE_SECONDS = 5.0  # until it is said who is waited for
_CLOSE_SECONDS = 10.0
_BEAT_SECONDS = 0.5
_LOST = 255  # as ssh ends where there is no connection
_HOST = re.compile(r"(?:[A-Za-z0-9_.-]+@)?([A-Za-z0-9_.-]+)(?::([0-9]+))?")


class Host(NamedTuple):
    """Host on which workers run."""

    name: str  # as ssh takes it, maybe with a user
    address: str  # under which the other hosts reach it
    slots: int  # number of workers


class Ssh(NamedTuple):
    """Settings of ssh: how to reach hosts, and how long to wait for them."""

    command: str = "ssh"
    grace: float = 5.0  # seconds from a signal that ends workers to SIGKILL
    silence: float = 30.0  # seconds until one that says nothing is lost


def read_hosts(text: str) -> list[Host]:
    """Read "a:2,user@b:1".

    Raises:
        ValueError: it is something else, or names a host twice.
    """
    hosts = []
    for part in text.split(","):
        match = _HOST.fullmatch(part.strip())
        if not match or match[2] == "0" or part.strip().startswith("-"):
            raise ValueError(
                "`--hosts` must be HOST:WORKERS, separated by commas. "
                f"Received: {part.strip()!r} in --hosts {text!r}"
            )
        name = part.strip().partition(":")[0]
        hosts.append(Host(name, match[1], int(match[2] or 1)))
    addresses = [host.address for host in hosts]
    if len(set(addresses)) < len(addresses):
        raise ValueError(
            "`--hosts` must name each host once, with the number of its workers. "
            f"Received: --hosts {text!r}"
        )
    return hosts


class Hosts:
    """The tasks of one run: workers in the order of their hosts, then servers."""

    def __init__(
        self,
        command: Command,
        hosts: Sequence[Host],
        environment: Mapping[str, str],
        ssh: Ssh,
        give_up: Callable[[], object],
        tasks: Tasks,
        view: screen.View | None = None,
    ) -> None:
        """Start them.

        Args:
            command: of all workers; its program must be in the same place on all hosts.
            hosts: where.
            environment: what all workers have beside that of their host.
            ssh: how.
            give_up: whether to wait no longer for the hosts.
            tasks: of all hosts; each server on the next one, from the first on.
            view: shows their output; by default all of it.

        Raises:
            CannotStart: a host cannot be reached, or has no tf_dgc; `NotThere` where
                it has no such script.
        """
        self._agents: list[_Agent] = []
        self._view = screen.All() if view is None else view
        self._over = threading.Event()
        threading.Thread(target=self._beat, daemon=True).start()
        extra = [len(range(i, tasks.others, len(hosts))) for i in range(len(hosts))]
        # Of each task, its host and its number there.
        self._places = [(i, k) for i, h in enumerate(hosts) for k in range(h.slots)]
        for j in range(tasks.others):
            i = j % len(hosts)
            self._places.append((i, hosts[i].slots + j // len(hosts)))
        try:
            for host, count in zip(hosts, extra, strict=True):
                self._agents.append(_Agent(host, environment, ssh, count, self._view))
            self._wait(lambda agent: bool(agent.ports), give_up)
            self._order(command, environment, ssh, tasks)
            self._wait(lambda agent: agent.started, give_up)
        except BaseException:
            self.kill(give_up)
            raise

    def _order(
        self,
        command: Command,
        environment: Mapping[str, str],
        ssh: Ssh,
        tasks: Tasks,
    ) -> None:
        """Let the agents start the tasks."""
        addresses = [
            f"{self._agents[i].host.address}:{self._agents[i].ports[k]}"
            for i, k in self._places
        ]
        self.names, own = tasks.names(), tasks.environments(addresses)
        for i, agent_there in enumerate(self._agents):
            there = [t for t, (host, _) in enumerate(self._places) if host == i]
            agent_there.order(
                command=command,
                environments=[{**environment, **own[task]} for task in there],
                names=[self.names[task] for task in there],
                terminal=self._view.terminal,
                chief=self._view.chief,
                grace=ssh.grace,
                silence=ssh.silence,
            )

    def _wait(
        self, there: "Callable[[_Agent], bool]", give_up: Callable[[], object]
    ) -> None:
        """Wait for an answer of all agents."""
        began = time.monotonic()
        deadline, notice = began + _START_SECONDS, _NOTICE_SECONDS
        while not all(map(there, self._agents)):
            if (seconds := time.monotonic() - began) > notice:
                names = [each.host.name for each in self._agents if not there(each)]
                self._view.note(f"waiting for {', '.join(names)}, {notice:.0f} s")
                notice = 2 * seconds
            for each in self._agents:
                if each.refused is not None:
                    text, final = each.refused
                    kind = NotThere if final else CannotStart
                    raise kind(f"{text}, on {each.host.name}")
                late = time.monotonic() > deadline
                if not there(each) and (each.lost or late):
                    raise CannotStart(
                        f"cannot start workers on {each.host.name}: {each.obstacle()}"
                    )
            if give_up():
                raise CannotStart("ended before all hosts were there")
            time.sleep(POLL_SECONDS)

    def _beat(self) -> None:
        while not self._over.wait(_BEAT_SECONDS):
            for each in list(self._agents):
                each.say(b"\n")

    def exit_codes(self) -> list[int | None]:
        """Return the exit code of each task, None where it still runs."""
        codes = [each.exit_codes() for each in self._agents]
        return [codes[i][k] for i, k in self._places]

    def signal(self, signum: int, tasks: Sequence[int]) -> None:
        """Send `signum` to tasks that still run."""
        for i, each in enumerate(self._agents):
            own = [self._places[task] for task in tasks]
            numbers = [k for host, k in own if host == i]
            each.order(signal=int(signum), tasks=numbers)

    def again(self, task: int, environment: Mapping[str, str]) -> bool:
        """Start a task again that has ended, unless its host is lost."""
        i, k = self._places[task]
        return self._agents[i].again(k, environment)

    def kill(self, give_up: Callable[[], object]) -> None:
        """End what is left of every worker and of what was started to reach it."""
        for each in self._agents:
            each.order(kill=True)
        deadline = time.monotonic() + _CLOSE_SECONDS
        for each in self._agents:
            each.close(deadline, give_up)
        self._over.set()


class _Ends:
    """Ends of the tasks of a host, as far as its agent has told them."""

    def __init__(self, count: int) -> None:
        """Begin with tasks that run."""
        self.codes: list[int | None] = [None] * count
        self._starts, self._lock = [0] * count, threading.Lock()

    def begin_again(self, task: int) -> None:
        """Note that a task runs again."""
        with self._lock:
            self._starts[task] += 1
            self.codes[task] = None

    def take(self, ends: Sequence[tuple[int, int | None]]) -> None:
        """Note how tasks ended, as far as that was their last start."""
        with self._lock:
            for task, (starts, code) in enumerate(ends):
                if starts == self._starts[task]:
                    self.codes[task] = code


class _Agent:
    """A connection to the agent of a host."""

    def __init__(
        self,
        host: Host,
        environment: Mapping[str, str],
        ssh: Ssh,
        servers: int,
        view: screen.View,
    ) -> None:
        self.host, self._view = host, view
        self.ports: list[int] = []
        self.started = False
        self.refused: tuple[str, bool] | None = None  # why, and whether for good
        count = host.slots + servers
        self._ends = _Ends(count)
        self._done = self._closing = False
        self._ordering = threading.Lock()
        self._process = subprocess.Popen(
            _line(host, environment, ssh),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is this launcher's to pass on
        )
        prefix = f"[{host.name}] ".encode()
        self._writing = False
        self._sinks: dict[str, output.Sink] = {}
        self._readers = [
            threading.Thread(target=self._read, args=(prefix,), daemon=True),
            threading.Thread(
                target=output.forward,
                args=(self._process.stderr, output.ERR, prefix),
                daemon=True,
            ),
        ]
        for reader in self._readers:
            reader.start()
        self.order(count=count)

    @property
    def lost(self) -> bool:
        """Tell whether nothing will come from there any more."""
        return self._done

    def obstacle(self) -> str:
        """Say why there is nothing from there."""
        status = self._process.poll()
        if status is None:
            return f"no answer within {_START_SECONDS:g} s"
        return (
            f"ssh ended with status {status}. It needs a key without a password, and "
            f"{sys.executable} with tf_dgc on that host"
        )

    def order(self, **content: Any) -> None:
        """Tell the agent what to do."""
        self.say(json.dumps(content).encode() + b"\n")

    def say(self, data: bytes) -> None:
        """Write to the agent, if it is there."""
        stream = self._process.stdin
        with self._ordering, contextlib.suppress(OSError, ValueError):
            if stream is not None:
                stream.write(data)
                stream.flush()

    def exit_codes(self) -> list[int | None]:
        """Return what is known of the workers; those of a lost host have failed."""
        if not self._done:
            return list(self._ends.codes)
        return [_LOST if code is None else code for code in self._ends.codes]

    def again(self, task: int, environment: Mapping[str, str]) -> bool:
        """Start a task again that has ended; tell whether there is anybody to do so."""
        if self._done:
            return False
        self._ends.begin_again(task)
        self.order(again=task, environment=dict(environment))
        return True

    def close(self, deadline: float, give_up: Callable[[], object]) -> None:
        """Wait for the agent's end, then end the connection.

        Args:
            deadline: for the agent; what it sends may take longer to write.
            give_up: whether to wait no longer for that, either.
        """
        self._closing = True
        while self._process.poll() is None or self._readers[0].is_alive():
            late = time.monotonic() > deadline and not self._writing
            if late or (give_up() and time.monotonic() > deadline):
                break
            time.sleep(POLL_SECONDS)
        self._process.kill()
        self._process.wait()
        for reader in self._readers:
            reader.join(timeout=2)
        with self._ordering, contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()

    def _read(self, prefix: bytes) -> None:
        stream = self._process.stdout
        try:
            if stream is not None:
                self._read_frames(stream, prefix)
        except (ValueError, OSError) as error:
            output.ERR.write(prefix + f"{error}\n".encode())
        finally:
            for sink in self._sinks.values():  # of a host that is lost
                sink.close()
            if self.started and None in self._ends.codes and not self._closing:
                output.ERR.write(prefix + b"the connection is lost\n")
            self._done = True

    def _read_frames(self, stream: IO[bytes], prefix: bytes) -> None:
        while (line := stream.readline()) and line != agent.HELLO:
            output.ERR.write(prefix + line)
        while line := stream.readline():
            kind, _, length = line.decode().partition(" ")
            content = stream.read(int(length))
            if ":" in kind:
                self._writing = True
                self._show(kind, content)
                self._writing = False
            elif kind == "ports":
                self.ports = json.loads(content)
            elif kind == "started":
                self.started = True
            elif kind == "refused":
                text, final = json.loads(content)
                self.refused = str(text), bool(final)
            elif kind == "codes":
                self._ends.take(json.loads(content))

    def _show(self, kind: str, content: bytes) -> None:
        """Hand on what a worker has printed; nothing is the end of that."""
        name, _, worker = kind.partition(":")
        if kind not in self._sinks:
            self._sinks[kind] = self._view.sink(worker, name, self.host.name)
        if content:
            self._sinks[kind].write(content)
        else:
            self._sinks.pop(kind).close()


def _line(host: Host, environment: Mapping[str, str], ssh: Ssh) -> list[str]:
    """Return the command that starts the agent of a host."""
    path = environment.get("PYTHONPATH", "")
    python = of_module(agent.__name__)
    there = ["env", f"PYTHONPATH={path}", *python] if path else python
    folder = shlex.quote(os.getcwd())
    beat = max(1, int(ssh.silence / 3))
    options = {
        "BatchMode": "yes",
        "ConnectTimeout": "30",
        "ServerAliveInterval": str(beat),
        "ServerAliveCountMax": "2",
    }
    own = [part for key, value in options.items() for part in ("-o", f"{key}={value}")]
    return [
        *shlex.split(ssh.command),
        "-T",
        *own,
        host.name,
        f"cd {folder} && exec {shlex.join(there)}",
    ]


def passed_on(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what workers on other hosts get of an environment."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(PASSED_ON) and name != "TF_CONFIG"
    }
