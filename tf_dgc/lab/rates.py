"""Rates, delays and losses of networks, as tc writes them.

Needs the standard library only.

scripts/netlab.py runs this file by itself, so that it need not start TensorFlow.
"""

import re

_UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_DELAY = re.compile(r"([0-9]+(?:\.[0-9]+)?)(us|ms|s)")
_SHARE = re.compile(r"([0-9]+(?:\.[0-9]+)?)%")
_RATE = re.compile(r"([0-9]+(?:\.[0-9]+)?)(kbit|mbit|gbit)")


def bits_per_second(rate: str, name: str = "rate") -> float:
    """Return a rate such as "100mbit" in bits per second.

    Args:
        rate: a number and its unit.
        name: of the argument, for the error.

    Raises:
        ValueError: it is no positive number of kbit, mbit or gbit.
    """
    found = _RATE.fullmatch(rate)
    if not found or not float(found[1]):
        raise ValueError(
            f"`{name}` must be a positive number with kbit, mbit or gbit, per second, "
            f'such as "100mbit". Received: {name}={rate!r}'
        )
    return float(found[1]) * _UNITS[found[2]]


def seconds(delay: str, name: str = "delay") -> float:
    """Return a time such as "50ms" in seconds.

    Args:
        delay: a number and its unit.
        name: of the argument, for the error.

    Raises:
        ValueError: it is no number of us, ms or s.
    """
    found = _DELAY.fullmatch(delay)
    if not found:
        raise ValueError(
            f'`{name}` must be a number with us, ms or s, such as "50ms". Received: '
            f"{name}={delay!r}"
        )
    return float(found[1]) * _SECONDS[found[2]]


def probability(share: str, name: str = "loss") -> float:
    """Return a share such as "0.1%" as a probability, below 1.

    Args:
        share: a number of percent.
        name: of the argument, for the error.

    Raises:
        ValueError: it is no number of percent from 0 to below 100.
    """
    found = _SHARE.fullmatch(share)
    if not found or not float(found[1]) < 100:
        raise ValueError(
            f'`{name}` must be a number of percent below 100, such as "0.1%". '
            f"Received: {name}={share!r}"
        )
    return float(found[1]) / 100
