"""Leaves out of the collection what TensorFlow's TestCase brings along."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = [item for item in items if item.name != "test_session"]
