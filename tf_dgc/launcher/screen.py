"""Screen of a job: whose output is shown, where and when.

`All` shows everything, in whole lines. `Chief` shows what a single process would: the
chief's output as it comes, and of other workers what they warn of.
"""

import contextlib
import os
import pathlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from tf_dgc.launcher import output
from tf_dgc.launcher.terminals import ScreenCursor, Terminal
from tf_dgc.launcher.transcript import NOISE, Transcript, first_to_fail
from tf_dgc.launcher.warned import Warnings

CHIEF = "0"
# For so long the end of a worker is waited for after a traceback.
_END_SECONDS = 10.0


class View(Protocol):
    """Rules of what is shown of a job."""

    terminal: Terminal | None  # for the chief
    chief: str  # name of the task whose output is that of the job

    def sink(self, worker: str, stream: str, host: str = "") -> output.Sink:
        """Return the destination of a worker's "out" or "err"."""

    def note(self, text: str) -> None:
        """Show a line of the launcher."""

    def ending(self, reason: str) -> None:
        """Say why all workers are being ended."""

    def ended(self, worker: str) -> None:
        """Say what was wrong, when all is copied; `worker` is the first that ended."""

    def tick(self) -> None:
        """Show what has waited long enough; called now and then."""


class All:
    """Shows whole lines of all workers, each behind the worker's name.

    Attributes:
        terminal: none.
        chief: name of the task whose output is that of the job.
    """

    terminal: Terminal | None = None

    def __init__(self, quiet: bool = False, chief: str = CHIEF) -> None:
        """Take whether TensorFlow's first lines are left out, and the chief."""
        self._quiet, self.chief = quiet, chief

    def sink(self, worker: str, stream: str, host: str = "") -> output.Sink:
        """Return the destination of a worker's output."""
        writer = output.OUT if stream == "out" else output.ERR
        prefix = f"[{worker}] ".encode()
        return _Lines(_writing(writer, prefix, self._quiet))

    def note(self, text: str) -> None:
        """Show a line of the launcher."""
        output.ERR.note(text)

    def ending(self, reason: str) -> None:
        """Say why all workers are being ended."""
        self.note(f"{reason}; ending all workers")

    def ended(self, worker: str) -> None:
        """Say nothing: all has been shown."""

    def tick(self) -> None:
        """Do nothing: all is shown at once."""


class WorkerFiles:
    """Files of the output of each worker.

    Attributes:
        folder: of the files.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        """Make the folder.

        Raises:
            ValueError: it cannot be made.
        """
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                "`--output` must be chief, all or a folder for a file of each worker: "
                f"{error.strerror}. Received: --output {folder}"
            ) from error
        self._files: dict[str, output.Stream] = {}

    def of(self, worker: str) -> output.Stream:
        """Return the file of a worker, which is made."""
        if worker not in self._files:
            name = f"worker-{worker}" if worker.isdecimal() else worker
            path = self.folder / f"{name}.log"
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            self._files[worker] = output.Stream(descriptor, str(path))
        return self._files[worker]


class Chief:
    """Shows the chief's output as it comes, and what other workers warn of.

    Attributes:
        terminal: the chief's, if the launcher has one.
        chief: name of the task whose output is that of the job.
    """

    def __init__(
        self,
        terminal: Terminal | None,
        folder: pathlib.Path | None = None,
        quiet: bool = False,
        bare: bool = False,
        out: output.Stream | None = None,
        chief: str = CHIEF,
    ) -> None:
        """Show all on this terminal, or in whole lines.

        Args:
            terminal: of the launcher, or None.
            folder: that gets a file for each worker; it is made.
            quiet: whether TensorFlow's first lines are left out.
            bare: whether the chief tells all itself, in lines without its name.
            out: shows all as it comes, in the place of stdout and stderr.
            chief: name of the task whose output is that of the job.

        Raises:
            OSError: the folder cannot be made.
        """
        self.terminal, self._bare, self.chief = terminal, bare, chief
        self._quiet = quiet
        self._files = None if folder is None else WorkerFiles(folder)
        self._lock = threading.RLock()
        # Whether the chief is seen as it prints; stdout and stderr in one place.
        self._raw = terminal is not None or out is not None
        self._one = out is not None or (terminal is not None and terminal.errors)
        self._out = out or output.OUT
        self._cursor = ScreenCursor(self._out, terminal, quiet)
        self._transcripts: dict[str, Transcript] = {}
        self._warnings = Warnings()
        self._reason = ""

    def sink(self, worker: str, stream: str, host: str = "") -> output.Sink:
        """Return the destination of a worker's output."""
        with self._lock:
            transcript = self._transcripts.setdefault(worker, Transcript(worker, host))
            if stream == "out":
                transcript.begin()
            own = self._raw and worker == self.chief
            both = own and self._one
            errors = stream == "err" or both
            file = None if self._files is None else self._files.of(worker)
        prefix = b"" if self._bare else f"[{worker}] ".encode()
        writer = output.OUT if stream == "out" else output.ERR
        shown = _writing(writer, prefix, self._quiet)

        def take(chunk: bytes, lines: Sequence[bytes]) -> None:
            with self._lock:
                if file is not None and lines:
                    file.write(b"".join(lines))
                others = transcript.take(lines, errors)
                if own and (both or stream == "out"):
                    self._cursor.write(chunk) if chunk else self._cursor.close()
                elif worker == self.chief:
                    shown(chunk, lines)
                elif stream == "err":
                    self._warnings.hear(transcript.label, others)
                if worker == self.chief:
                    self._warnings.remember(lines)

        return _Lines(take)

    def note(self, text: str) -> None:
        """Show a line of the launcher."""
        if not self._one:
            output.ERR.note(text)
            return
        with self._screen(output.NOTE_SECONDS) as there:
            if there:
                self._show([f"{output.NAME[0]}: {text}\n".encode()])

    def ending(self, reason: str) -> None:
        """Keep the reason until it is known what was wrong."""
        self._reason = reason

    def ended(self, worker: str) -> None:
        """Show what the worker failed by that failed first, where that is not seen."""
        with self._screen(output.NOTE_SECONDS) as there:
            if not there:
                return
            reason, self._reason = self._reason, ""
            if not worker or (self._bare and worker == self.chief):
                self._release(now=float("inf"))
                return
            failed = first_to_fail(self._transcripts, worker, self.chief)
            text = [] if failed.name == self.chief else failed.last_words
            self._warnings.leave_out(text)
            self._release(now=float("inf"))
            self._cursor.end_line()
            if failed.name == self.chief:
                reason = "" if self.terminal and failed.failure else reason
            elif failed.name != worker:
                reason = f"{reason}; worker {failed.label} failed first"
            self._end(reason, [f"[{failed.label}] ".encode() + line for line in text])

    def _end(self, reason: str, lines: list[bytes]) -> None:
        told = [reason] if reason else []
        if self._files is not None:
            told.append(f"the output of each worker is in {self._files.folder}")
        if told:
            self.note("; ".join(told))
        self._show(lines)

    def tick(self) -> None:
        """Show warnings that have waited for others, and what was survived."""
        with self._screen(0.0) as there:
            if there:
                self._release(time.monotonic())

    @contextlib.contextmanager
    def _screen(self, seconds: float) -> Iterator[bool]:
        """Tell whether the screen can be written on within so many seconds."""
        writer = self._out if self._raw else output.ERR
        if not self._lock.acquire(timeout=seconds):
            yield False
            return
        try:
            yield writer.takes(seconds)
        finally:
            self._lock.release()

    def _release(self, now: float) -> None:
        for transcript in self._transcripts.values():
            late = transcript.since + _END_SECONDS < now < float("inf")
            if late and transcript.failure and not transcript.shown:
                transcript.shown = True
                transcript.close()
                if transcript.name != self.chief:
                    self._warnings.take(transcript.label, transcript.traceback)
        self._show(self._warnings.due(now))

    def _show(self, lines: Sequence[bytes]) -> None:
        if not lines:
            return
        if self._one:
            self._cursor.insert(b"".join(lines))
        else:
            output.ERR.write(b"".join(lines))


class _Lines:
    """Cuts what comes into lines, and hands on both."""

    def __init__(self, take: Callable[[bytes, Sequence[bytes]], None]) -> None:
        self._take, self._lines = take, output.WholeLines()

    def write(self, data: bytes) -> None:
        self._take(data, self._lines.take(data))

    def close(self) -> None:
        self._take(b"", self._lines.rest())


def _writing(
    writer: output.Stream, prefix: bytes, quiet: bool
) -> Callable[[bytes, Sequence[bytes]], None]:
    """Return what writes whole lines behind a prefix."""

    def write(chunk: bytes, lines: Sequence[bytes]) -> None:
        shown = [line for line in lines if not (quiet and NOISE.match(line))]
        if shown:
            writer.write(b"".join(prefix + line for line in shown))

    return write


def of_option(
    text: str | None, quiet: bool, terminal: Terminal | None, chief: str = CHIEF
) -> View:
    """Return what `--output` asks for.

    Args:
        text: "chief", "all" or a folder; by default "chief" on a terminal, else "all".
        quiet: whether TensorFlow's first lines are left out.
        terminal: of this process.
        chief: name of the task whose output is that of the job.

    Raises:
        OSError: the folder cannot be made.
    """
    if text is None:
        text = "chief" if terminal else "all"
    if text == "all":
        return All(quiet, chief)
    folder = None if text == "chief" else pathlib.Path(text).absolute()
    return Chief(terminal, folder, quiet, chief=chief)
