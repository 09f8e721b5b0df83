"""Rates of networks, as tc writes them. Needs the standard library only.

scripts/netlab.py runs this file by itself, so that it need not start TensorFlow.
"""

import re

_UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
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
