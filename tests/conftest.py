"""What holds for all tests."""

import gc
import os

import pool
import pytest
import tiers


class _Told:
    """Tells at once what failed: whatever ends the rest, that is known."""

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self._terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            text = f"{report.nodeid}, {report.when}, {report.duration:.0f} s, failed:"
            self._terminal.write_line(f"\n{text}\n{report.longreprtext[-2000:]}")


@pytest.hookimpl(trylast=True)  # the terminal comes first
def pytest_configure(config: pytest.Config) -> None:
    """Tell of failures where the terminal is; let Horovod's workers wait quietly."""
    # By itself Horovod asks all workers for work each millisecond, and takes an eighth
    # of a core for each of them.
    os.environ.setdefault("HOROVOD_CYCLE_TIME", "10")
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal and "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(_Told(terminal))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out of the collection what TensorFlow's TestCase brings along."""
    items[:] = [item for item in items if item.name != "test_session"]
    tiers.sort_out(items)  # before pytest looks at marks
    # Those that take long come first, so that no process of pytest is left with them.
    items.sort(key=lambda item: item.get_closest_marker("processes") is None)
    # What was imported stays; to look through it takes longer than most tests.
    gc.freeze()


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Forget what the tests of a module have left, but for what nobody lets go of.

    TensorFlow keeps graphs; `BackupState` and others look through all that there is.
    """
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def pytest_sessionfinish() -> None:
    """End the workers that have run tests."""
    pool.close()
