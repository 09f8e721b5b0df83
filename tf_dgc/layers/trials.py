"""What treats each column of a matrix by itself: found by trying it out."""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

_ROWS, _COLUMNS = 3, 4


def sums_over_columns(regularizer: Callable[[Any], Any]) -> bool:
    """Tell whether a regularizer of a matrix is the sum of those of its columns."""

    def holds(matrix: np.ndarray) -> bool:
        one, two = (float(_tried(regularizer, half)) for half in _halves(matrix))
        return bool(np.isclose(float(_tried(regularizer, matrix)), one + two, 1e-4))

    return _holds(holds)


def keeps_to_columns(constraint: Callable[[Any], Any]) -> bool:
    """Tell whether a constraint changes a column by what is in it alone."""

    def holds(matrix: np.ndarray) -> bool:
        halves = [np.asarray(_tried(constraint, half)) for half in _halves(matrix)]
        whole = np.asarray(_tried(constraint, matrix))
        return bool(np.allclose(whole, np.concatenate(halves, axis=1), 1e-4))

    return _holds(holds)


def _halves(matrix: np.ndarray) -> list[np.ndarray]:
    return [matrix[:, : _COLUMNS // 2], matrix[:, _COLUMNS // 2 :]]


def _holds(law: Callable[[np.ndarray], bool]) -> bool:
    random = np.random.default_rng(0)
    matrices = [
        (size * random.normal(size=(_ROWS, _COLUMNS))).astype(np.float32)
        for size in (0.1, 1.0, 10.0)
    ]
    try:
        with tf.init_scope():
            return all(map(law, matrices))
    except Exception:  # whatever a function of the user's own raises
        return False


def _tried(function: Callable[[Any], Any], matrix: np.ndarray) -> Any:
    return tf.convert_to_tensor(function(tf.constant(matrix)))
