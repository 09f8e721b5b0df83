"""What holds for all tests."""

import gc

import pool
import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out of the collection what TensorFlow's TestCase brings along."""
    items[:] = [item for item in items if item.name != "test_session"]
    # Those that take long come first, so that no process of pytest is left with them.
    items.sort(key=lambda item: item.get_closest_marker("processes") is None)
    # What was imported stays; to look through it takes longer than most tests.
    gc.freeze()


def pytest_sessionfinish() -> None:
    """End the workers that have run tests."""
    pool.close()
