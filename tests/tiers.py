"""Of many cases of one property a few run by default, more or all of them by tier."""

import collections
from collections.abc import Iterable

import pytest


def sort_out(items: Iterable[pytest.Item]) -> None:
    """Mark by tier what `@pytest.mark.few(n)` leaves out of the cases of a test.

    It stands below the decorator that makes the cases. The n that stay are as far from
    one another as can be: products of settings have their last factor side by side. The
    next test of a class has others, so that those of a contract meet all there is.
    `few(n, m)` has m in the tier `extended`; the others are slow.
    """
    classes = collections.defaultdict(lambda: collections.defaultdict(list))
    for item in items:
        if item.get_closest_marker("slow"):
            continue
        # Of one function: absl hands its marks on to each of its cases.
        if mark := item.get_closest_marker("few"):
            classes[item.parent][id(mark)].append((mark.args, item))
    for tests in classes.values():
        for turn, cases in enumerate(tests.values()):
            for number, ((few, *more), item) in enumerate(cases):
                turned = (number + turn) % len(cases)
                if stays(turned, few, len(cases)):
                    continue
                extended = more and stays(turned, more[0], len(cases))
                item.add_marker("extended" if extended else "slow")


def stays(number: int, few: int, count: int) -> bool:
    """Tell whether a case, numbered from 0, is one of so few of so many."""
    return number * few // count != (number - 1) * few // count
