"""Of many cases of one property a few run by default, the others in tier `extended`."""

import collections
from collections.abc import Iterable

import pytest


def sort_out(items: Iterable[pytest.Item]) -> None:
    """Mark as extended what `@pytest.mark.few(n)` leaves out of the cases of a test.

    It stands below the decorator that makes the cases. The n that stay are as far from
    one another as can be: products of settings have their last factor side by side. The
    next test of a class has others, so that those of a contract meet all there is.
    """
    classes = collections.defaultdict(lambda: collections.defaultdict(list))
    for item in items:
        if item.get_closest_marker("slow"):
            continue
        # Of one function: absl hands its marks on to each of its cases.
        if mark := item.get_closest_marker("few"):
            classes[item.parent][id(mark)].append((mark.args[0], item))
    for tests in classes.values():
        for turn, cases in enumerate(tests.values()):
            for number, (few, item) in enumerate(cases):
                if not stays((number + turn) % len(cases), few, len(cases)):
                    item.add_marker(pytest.mark.extended)


def stays(number: int, few: int, count: int) -> bool:
    """Tell whether a case, numbered from 0, is one of so few of so many."""
    return number * few // count != (number - 1) * few // count
