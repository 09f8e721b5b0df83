"""End of this process, for what runs at its exit."""

import builtins
import sys
import threading
from typing import Any


class _Noted:
    """The status that the main thread gave to `sys.exit`."""

    status: Any = None


class _Exit(SystemExit):
    """An exit whose end is seen: it is no failure where the script catches it."""

    def __del__(self) -> None:
        # At the end of the process nothing of Python runs any more, but this.
        if sys._getframe().f_back is not None:
            _Noted.status = None


def watch() -> None:
    """Note from now on how this process ends by `sys.exit`."""
    if getattr(sys.exit, "__module__", "") != __name__:
        sys.exit = leave
        for name in ("exit", "quit"):  # of `site`, for what is typed, and for scripts
            if hasattr(builtins, name):
                setattr(builtins, name, leave)


def leave(status: Any = None, /) -> Any:
    """Stand for `sys.exit`."""
    if threading.current_thread() is threading.main_thread():
        _Noted.status = status
    raise _Exit(status)


def failure() -> BaseException | None:
    """Return what this process fails by, at its end; None where it ends well."""
    error = getattr(sys, "last_value", None)
    if isinstance(error, BaseException):
        return error
    status = _Noted.status
    if status is None or (isinstance(status, int) and status == 0):
        return None
    return SystemExit(status)
