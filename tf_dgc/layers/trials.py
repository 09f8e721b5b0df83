"""Trials that show what treats each column, or row, of a matrix by itself."""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

_SHAPE = 4, 6


def sums_over(regularizer: Callable[[Any], Any], axis: int) -> bool:
    """Tell whether a regularizer of a matrix is the sum of those of its bands.

    Args:
        regularizer: takes a matrix.
        axis: along which it is cut; see `Band`.
    """

    def holds(matrix: np.ndarray) -> bool:
        one, two = (float(_tried(regularizer, h)) for h in np.split(matrix, 2, axis))
        return bool(np.isclose(float(_tried(regularizer, matrix)), one + two, 1e-4))

    return _holds(holds)


def keeps_to(constraint: Callable[[Any], Any], axis: int) -> bool:
    """Tell whether a constraint changes a band by what is in it alone.

    Args:
        constraint: takes a matrix.
        axis: along which it is cut; see `Band`.
    """

    def holds(matrix: np.ndarray) -> bool:
        halves = [np.asarray(_tried(constraint, h)) for h in np.split(matrix, 2, axis)]
        whole = np.asarray(_tried(constraint, matrix))
        return bool(np.allclose(whole, np.concatenate(halves, axis), 1e-4))

    return _holds(holds)


def _holds(law: Callable[[np.ndarray], bool]) -> bool:
    random = np.random.default_rng(0)
    matrices = [
        (size * random.normal(size=_SHAPE)).astype(np.float32)
        for size in (0.1, 1.0, 10.0)
    ]
    try:
        with tf.init_scope():
            return all(map(law, matrices))
    except Exception:  # whatever a function of the user's own raises
        return False


def _tried(function: Callable[[Any], Any], matrix: np.ndarray) -> Any:
    return tf.convert_to_tensor(function(tf.constant(matrix)))
