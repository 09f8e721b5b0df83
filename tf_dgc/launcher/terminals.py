"""The chief's terminal: it prints there what a single process would print."""

import contextlib
import fcntl
import os
import pty
import struct
import termios
from typing import NamedTuple

from tf_dgc.launcher import output
from tf_dgc.launcher.transcript import NOISE, may_be_noise, plain


class Terminal(NamedTuple):
    """Terminal in which the launcher was started.

    Attributes:
        rows: its height.
        columns: its width, in characters.
        kind: the value of TERM.
        errors: whether stderr is written there, too.
    """

    rows: int
    columns: int
    kind: str
    errors: bool

    def open(self) -> tuple[int, int]:
        """Return both ends of a new terminal of this size, which changes no byte."""
        master, slave = pty.openpty()
        modes = termios.tcgetattr(slave)
        modes[1] &= ~termios.OPOST  # the real one makes CR LF of LF
        modes[3] &= ~termios.ECHO
        termios.tcsetattr(slave, termios.TCSANOW, modes)
        size = struct.pack("HHHH", self.rows, self.columns, 0, 0)
        fcntl.ioctl(slave, termios.TIOCSWINSZ, size)
        return master, slave


def of_this_process() -> Terminal | None:
    """Return the terminal that stdout is; None where it is something else."""
    with contextlib.suppress(OSError):
        if os.isatty(1):
            size = os.get_terminal_size(1)
            kind = os.environ.get("TERM", "")
            rows, columns = size.lines or 24, size.columns or 80
            return Terminal(rows, columns, kind, os.isatty(2))
    return None


class ScreenCursor:
    """The terminal, on which the chief may be in the middle of a line."""

    def __init__(
        self, out: output.Stream, terminal: Terminal | None, quiet: bool
    ) -> None:
        self._out = out
        self._columns = terminal.columns if terminal else 80
        self._dumb = terminal is None or terminal.kind in ("", "dumb")
        self._quiet = quiet
        self._line = self._held = b""

    def write(self, chunk: bytes) -> None:
        """Write what the chief has printed, as it is."""
        if self._quiet:
            chunk = self._without_noise(chunk)
        if chunk:
            self._out.write(chunk)
            line = (self._line + chunk).rpartition(b"\n")[2]
            start = line.rstrip(b"\r\b").rfind(b"\r") + 1  # of what stands there now
            self._line = line[start:][-output.LONGEST :]

    def _without_noise(self, chunk: bytes) -> bytes:
        """Leave out lines of noise; keep back one whose end has not come."""
        if self._line:
            first, end, chunk = chunk.partition(b"\n")
            return first + end + (self._cleared(chunk) if chunk else b"")
        return self._cleared(chunk)

    def _cleared(self, chunk: bytes) -> bytes:
        pieces = (self._held + chunk).splitlines(keepends=True)
        self._held = b""
        if pieces and may_be_noise(pieces[-1]):
            self._held = pieces.pop()
        return b"".join(piece for piece in pieces if not NOISE.match(piece))

    def close(self) -> None:
        """Write what was kept back, if it was none: no more will come."""
        held, self._held = self._held, b""
        if not NOISE.match(held):
            self._out.write(held)

    def end_line(self) -> None:
        """Begin a new line, where the chief has left one without an end."""
        if self._line:
            self._out.write(b"\n")
            self._line = b""

    def insert(self, lines: bytes) -> None:
        """Write whole lines above the line in which the chief is."""
        if not self._line:
            self._out.write(lines)
            return
        text = plain(self._line).rstrip(b"\r\b").decode(errors="replace")
        erase = b"\n" if self._dumb or len(text) >= self._columns else b"\r\x1b[K"
        self._out.write(erase + lines + self._line)
