"""Groups of workers that train trials of one search, each another one at a time.

The oracle is in a process that trains nothing. The chief of each group asks it over a
connection, by whose end the oracle knows that the group has ended: the trial that it
was training goes to another group.

A message is a length of 4 bytes, an object of JSON, and the files whose sizes it names.
"""

import contextlib
import hmac
import json
import logging
import os
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tf_dgc.search import chief
from tf_dgc.search.oracles import Book, Files
from tf_dgc.transports import base, handshake
from tf_dgc.transports.waiting import WaitReport

# Groups that may end during one trial; then the trial has failed.
RUNS = 3
_VARIABLE = "TF_DGC_TRIALS"
_LAUNCH = "TF_DGC_LAUNCH"  # which only the processes of this job know
_FIRST_BYTES = 4096  # of a message of who has not said who it is
_IDLE_SECONDS = 2.0  # until a group that waits for others asks again
_LOOK_SECONDS = 0.5
_LEAVE_SECONDS = 10.0
_RETRY_SECONDS = 0.2
_logger = logging.getLogger("tf_dgc")


class GroupPlace(NamedTuple):
    """Place of a process among groups."""

    oracle: str  # address of the process that decides
    group: int | None  # None of that process
    groups: int  # how many there are
    workers: int = 1  # of each group


def place() -> GroupPlace | None:
    """Return the place of this process; None where there are no groups."""
    text = os.environ.get(_VARIABLE)
    return GroupPlace(**json.loads(text)) if text else None


class Hall:
    """Groups that are here, and the oracle of one tuner that they ask."""

    def __init__(self, book: Book, groups: int) -> None:
        """Wait for groups.

        Args:
            book: the oracle.
            groups: how many will come.
        """
        self.book, self._groups = book, groups
        self._changed = threading.Condition(book.lock)
        self._here: dict[int, str] = {}  # of each group, its name for the oracle
        self._came: Counter[int] = Counter()
        self._idle: set[int] = set()
        self._given_back: list[str] = []  # names under which trials wait
        self._runs: Counter[str] = Counter()  # of trials that have ended a group
        self._over = False
        self._failure = ""

    def come(self, group: int) -> str:
        """Take in a group; return its name for the oracle, another one each time."""
        with self._changed:
            if group in self._here:  # its end has not been heard yet
                self.leave(group, self._here[group])
            self._came[group] += 1
            name = f"group{group}.{self._came[group]}"
            self._here[group] = name
            self._changed.notify_all()
            return name

    def leave(self, group: int, name: str) -> None:
        """Take note that a group has ended; what it was training goes to another."""
        with self._changed:
            if self._here.get(group) != name:
                return
            del self._here[group]
            self._idle.discard(group)
            trial = self.book.oracle.ongoing_trials.get(name)
            if trial is not None and not self._over:
                self._give_back(group, name, trial)
            self._changed.notify_all()

    def _give_back(self, group: int, name: str, trial: Any) -> None:
        number = trial.trial_id
        self._runs[number] += 1
        if self._runs[number] < RUNS:
            self._given_back.append(name)
            text = "Group %d has ended during trial %s, which another group takes"
            _logger.warning(text, group, number)
            return
        text = f"{RUNS} groups have ended during trial {number}, which has failed"
        _logger.warning(text)
        trial.status, trial.message = "FAILED", text
        try:
            self.book.end_trial(trial)
        except RuntimeError as error:  # too many have failed
            self._failure = str(error)

    def call(
        self, group: int, name: str, method: str, arguments: Any, since: int
    ) -> dict[str, Any]:
        """Call a method of the oracle in the place of a group."""
        with self._changed:
            if method == "create_trial":
                trial = self._create(group, name)
                return self.book.outcome(trial, self._failure, since)
            outcome = self.book.call(method, arguments, since)
            if method == "end_trial" and outcome["error"]:
                self._failure = outcome["error"]
            self._changed.notify_all()
            return outcome

    def _create(self, group: int, name: str) -> Any:
        """Return a trial for a group; one that is idle where it has to wait."""
        until = time.monotonic() + _IDLE_SECONDS
        ongoing = self.book.oracle.ongoing_trials
        while self._here.get(group) == name:
            if self._given_back and not self._failure:
                ongoing[name] = ongoing.pop(self._given_back.pop(0))
            trial = self.book.create_trial(name)
            if trial.status == "RUNNING":
                self._idle.discard(group)
                return trial
            if (trial.status == "STOPPED" and not ongoing) or self._failure:
                self._over = True
                trial.status = "STOPPED"
                return trial
            trial.status = "IDLE"  # one that others train may be given back
            self._idle.add(group)
            if time.monotonic() > until:
                return trial
            self._changed.wait(max(until - time.monotonic(), 0.01))
        return None

    def serve(self) -> None:
        """Wait until the groups have ended the search.

        Raises:
            RuntimeError: the oracle gives up.
            TimeoutError: no group has been here for TF_DGC_TIMEOUT seconds.
        """
        limit = base.default_timeout()
        alone_since, over_since = time.monotonic(), float("inf")
        waiting = WaitReport(0, [""] * self._groups)
        with self._changed:
            while True:
                if self._failure:
                    raise RuntimeError(self._failure)
                now = time.monotonic()
                if self._here:
                    alone_since = now
                elif now - alone_since > limit:
                    raise TimeoutError(_nobody(limit, self._came, self._groups))
                if self._over:
                    over_since = min(over_since, now)
                    if not self._here or now - over_since > _LEAVE_SECONDS:
                        waiting.over()
                        return
                self._say(waiting)
                self._changed.wait(_LOOK_SECONDS)

    def _say(self, waiting: WaitReport) -> None:
        """Say who is waited for, and by whom."""
        absent = [g for g in range(self._groups) if not self._came[g]]
        ongoing = self.book.oracle.ongoing_trials
        busy = [
            f"group {g} (trial {ongoing[name].trial_id})"
            for g, name in sorted(self._here.items())
            if name in ongoing
        ]
        if absent and not self._here:
            waiting.say(f"waiting for groups {', '.join(map(str, absent))}")
        elif self._idle and busy:
            idle = ", ".join(map(str, sorted(self._idle)))
            who = (
                f"groups {idle} wait" if len(self._idle) > 1 else f"group {idle} waits"
            )
            waiting.say(f"{who} for {', '.join(busy)}")
        elif not self._here:
            waiting.say("waiting for a group to come again")
        else:
            waiting.again()


def _nobody(seconds: float, came: Mapping[int, int], groups: int) -> str:
    """Say that there is no group, of those that came so often, for so long."""
    never = [str(g) for g in range(groups) if not came.get(g)]
    lost = [str(g) for g in range(groups) if came.get(g)]
    told = [f"groups {', '.join(never)} have never come"] if never else []
    told += [f"groups {', '.join(lost)} have ended"] if lost else []
    return (
        f"No group of workers has been here for {seconds:g} s: "
        f"{'; '.join(told)}. TF_DGC_TIMEOUT sets the time"
    )


class Service:
    """Listens for groups, in the process of the oracle."""

    def __init__(self, place: GroupPlace) -> None:
        """Listen at the oracle's address."""
        host, _, port = place.oracle.rpartition(":")
        own = host if host.startswith("127.") else ""
        self._listener = socket.create_server((own, int(port)), backlog=place.groups)
        self._groups = place.groups
        self._launch = _launch()
        self._halls: list[Hall] = []
        self._made = threading.Condition()
        threading.Thread(target=self._listen, daemon=True).start()

    def add(self, book: Book) -> Hall:
        """Let groups ask the oracle of the next tuner."""
        with self._made:
            self._halls.append(Hall(book, self._groups))
            self._made.notify_all()
            return self._halls[-1]

    def close(self) -> None:
        """Listen no more."""
        self._listener.close()

    def _listen(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._talk, args=(peer,), daemon=True).start()

    def _talk(self, peer: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError), peer:
            keep_alive(peer)
            peer.settimeout(_LEAVE_SECONDS)
            hello, _ = receive(peer, _FIRST_BYTES)
            peer.settimeout(None)
            if not hmac.compare_digest(str(hello["launch"]), self._launch):
                return
            number, group = int(hello["tuner"]), int(hello["group"])
            with self._made:
                self._made.wait_for(lambda: len(self._halls) > number)
            hall = self._halls[number]
            name = hall.come(group)
            try:
                while True:
                    self._answer(hall, group, name, peer)
            finally:
                hall.leave(group, name)

    def _answer(self, hall: Hall, group: int, name: str, peer: socket.socket) -> None:
        asked, files = receive(peer)
        book, method = hall.book, asked["method"]
        if method == "files":
            with book.lock:
                send(peer, {}, book.files(asked["trial"]))
        elif method == "put":
            with book.lock:
                book.put(asked["trial"], files)
            send(peer, {})
        else:
            given = asked["arguments"], asked["since"]
            send(peer, hall.call(group, name, method, *given))


class Client:
    """The oracle of another process, as the chief of a group asks it."""

    def __init__(self, place: GroupPlace, tuner: int) -> None:
        """Connect to it.

        Args:
            place: of this process.
            tuner: number of the tuner among those that the script makes.

        Raises:
            TimeoutError: it has not come within TF_DGC_TIMEOUT seconds.
        """
        host, _, port = place.oracle.rpartition(":")
        self._timeout = base.default_timeout()
        until, waiting = time.monotonic() + self._timeout, WaitReport(0, [""])
        while True:
            with contextlib.suppress(OSError):
                self._peer = socket.create_connection((host, int(port)), _LEAVE_SECONDS)
                break
            if time.monotonic() > until:
                raise TimeoutError(
                    f"The process of the oracle, {place.oracle}, has not come within "
                    f"{self._timeout:g} s. TF_DGC_TIMEOUT sets the time"
                )
            waiting.say(f"waiting for the oracle ({place.oracle})")
            time.sleep(_RETRY_SECONDS)
        waiting.over()
        keep_alive(self._peer)
        self._peer.settimeout(self._timeout)
        hello = {"launch": _launch(), "group": place.group, "tuner": tuner}
        send(self._peer, hello)

    def call(
        self, name: str, arguments: Mapping[str, Any], since: int
    ) -> dict[str, Any]:
        """Call a method of the oracle; see `oracles.Decider`."""
        asked = {"method": name, "arguments": arguments, "since": since}
        return self._ask(asked)[0]

    def files(self, trial_id: str) -> Files:
        """Return what a trial has left in its folder."""
        return self._ask({"method": "files", "trial": trial_id})[1]

    def put(self, trial_id: str, files: Files) -> None:
        """Hand over what a trial has left in its folder."""
        self._ask({"method": "put", "trial": trial_id}, files)

    def close(self) -> None:
        """Leave the search."""
        self._peer.close()

    def _ask(
        self, asked: Mapping[str, Any], files: Files | None = None
    ) -> tuple[dict[str, Any], Files]:
        try:
            send(self._peer, asked, files)
            return receive(self._peer)
        except OSError as error:
            raise ConnectionError(
                "The process of the oracle, which decides what this group trains, has "
                f"ended, or is silent: {error}"
            ) from error


def _launch() -> str:
    return os.environ.get(_LAUNCH, "")


def keep_alive(peer: socket.socket) -> None:
    """Let a connection end where the other machine is gone, within half a minute."""
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("IDLE", 10), ("INTVL", 5), ("CNT", 4)):
        if (option := getattr(socket, f"TCP_KEEP{name}", None)) is not None:
            peer.setsockopt(socket.IPPROTO_TCP, option, value)


def send(
    peer: socket.socket, record: Mapping[str, Any], files: Files | None = None
) -> None:
    """Send a message."""
    found = files or {}
    sizes = [[name, len(data)] for name, data in found.items()]
    text = chief.dumped({**record, "sizes": sizes})
    peer.sendall(struct.pack(">I", len(text)) + text)
    for data in found.values():
        peer.sendall(data)


def receive(
    peer: socket.socket, limit: int = handshake.MAX_BYTES
) -> tuple[dict[str, Any], Files]:
    """Receive a message.

    Raises:
        ConnectionError: the connection has ended.
        ValueError: it is no message.
    """
    (length,) = struct.unpack(">I", _exactly(peer, 4))
    if length > limit:
        raise ValueError(f"A message of {length} bytes is too long, or damaged")
    record = handshake.read_object(_exactly(peer, length), "A message")
    sizes: Sequence[tuple[str, int]] = record.pop("sizes", ())
    return record, {str(name): _exactly(peer, int(size)) for name, size in sizes}


def _exactly(peer: socket.socket, count: int) -> bytes:
    chunks = bytearray()
    while len(chunks) < count:
        chunk = peer.recv(min(count - len(chunks), 1 << 20))
        if not chunk:
            raise ConnectionError("the connection has ended")
        chunks += chunk
    return bytes(chunks)
