"""What others send instead of gradients, for parity.py: low rank, and signs.

Each keeps its error for the next step (error feedback), and leaves momentum to the
optimizer, after the sum. Tensors of rank 0 and 1 go densely.

References:
    Vogels, Karimireddy, Jaggi: PowerSGD, NeurIPS 2019, https://arxiv.org/abs/1905.13727
    Karimireddy, Rebjock, Stich, Jaggi: Error Feedback Fixes SignSGD and other Gradient
    Compression Schemes, ICML 2019, https://arxiv.org/abs/1901.09847
"""

import contextlib
import math
from collections.abc import Iterator
from typing import Any
from unittest import mock

import tensorflow as tf

from tf_dgc import simulate
from tf_dgc.exchanges import Exchange, Place, Update
from tf_dgc.exchanges.inplace import own_variable
from tf_dgc.transports import sums

NAMES = ("powersgd", "signsgd")


@contextlib.contextmanager
def exchanged(peer: str, rank: int) -> Iterator[None]:
    """Lets a SimulatedStrategy that is made here exchange as others do.

    Args:
        peer: one of NAMES.
        rank: of PowerSGD's matrices.
    """

    class Make:
        lockstep = True

        def __call__(self, place: Place, taken_over: Any) -> Exchange:
            return LowRank(place, rank) if peer == "powersgd" else Signs(place)

    if peer not in NAMES:
        raise ValueError(f"`peer` must be one of {NAMES}. Received: peer={peer!r}")
    with mock.patch.object(simulate, "each_simulated_step", lambda config: Make()):
        yield


class Peer(Exchange):
    """Sums small tensors, and what becomes of the large ones and their errors.

    Gradients and errors are of all N simulated workers, shape [N, rows, columns].
    """

    def __init__(self, place: Place) -> None:
        """Makes the errors, all zero."""
        super().__init__(place)
        shapes = [v.shape.as_list() for v in self.variables]
        self.large = [i for i, shape in enumerate(shapes) if len(shape) > 1]
        self.forms_of = {
            i: [math.prod(shapes[i][:-1]), shapes[i][-1]] for i in self.large
        }
        size = self.transport.size
        with tf.init_scope():
            self.errors = {
                i: own_variable(tf.zeros([size, *form]), "peer_error")
                for i, form in self.forms_of.items()
            }

    def gradients(
        self, local: list[Any], taken_over: Any = None, part: Any = None
    ) -> Update:
        """Sums what is sent; keeps the rest."""
        dense = [tf.convert_to_tensor(g) for g in local]
        small = [g for i, g in enumerate(dense) if i not in self.large]
        told = sums.dense(self.transport, small, self.name)
        rest, found, size = iter(told.gradients), [], 0
        for i, gradient in enumerate(dense):
            if i not in self.large:
                found.append(next(rest))
                continue
            rows = tf.reshape(gradient, self.errors[i].shape) + self.errors[i]
            total, used, sent = self.coded(i, rows)
            self.errors[i].assign(rows - used)
            found.append(tf.reshape(total, self.variables[i].shape))
            size += sent
        sent = told.sent + tf.constant([size, 0], tf.int64)
        return Update(found, [False] * len(found), None, sent)

    def coded(self, i: int, rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, int]:
        """Returns the sum, what was used of each worker, and bytes of a worker."""
        raise NotImplementedError


class LowRank(Peer):
    """Two factors of few columns, by one step of power iteration."""

    def __init__(self, place: Place, rank: int) -> None:
        """Draws the right factors."""
        super().__init__(place)
        with tf.init_scope():
            self.right = {
                i: own_variable(
                    tf.random.stateless_normal([m, min(rank, n, m)], [7, i]),
                    "peer_right",
                )
                for i, (n, m) in self.forms_of.items()
            }

    def coded(self, i: int, rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, int]:
        """Sums both factors over the workers, one after the other."""
        name, right = f"{self.name}.{i}", self.right[i]
        (left,) = self.transport.all_reduce([rows @ right], f"{name}.left")
        left, _ = tf.linalg.qr(left)
        own = tf.matmul(rows, left[tf.newaxis], transpose_a=True)
        (summed,) = self.transport.all_reduce([own], f"{name}.right")
        right.assign(summed)
        total = tf.matmul(left, summed, transpose_b=True)
        used = total[tf.newaxis] / self.transport.size
        return total, used, 4 * (left.shape[0] + summed.shape[0]) * left.shape[1]


class Signs(Peer):
    """One bit of each element, and the mean magnitude."""

    def coded(self, i: int, rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, int]:
        """Sums signs, each worker's times its scale."""
        scale = tf.reduce_mean(tf.abs(rows), axis=[1, 2], keepdims=True)
        used = scale * tf.where(rows < 0, -1.0, 1.0)
        size = -(-math.prod(rows.shape[1:]) // 8) + 4
        return tf.reduce_sum(used, axis=0), used, size
