"""Replicas are compared from time to time: workers that drift apart stop.

Axes: N workers, T variables.
"""

import functools
import os
from collections.abc import Sequence
from typing import Any, Final

import tensorflow as tf

from tf_dgc.exchanges import inplace
from tf_dgc.exchanges.inplace import own_variable
from tf_dgc.transports.base import Transport
from tf_dgc.values import first_true, require

DEFAULT_INTERVAL: Final = 100
LANES = 16  # sums are taken side by side, in the registers of a processor


def default_interval() -> int:
    """Return the steps in TF_DGC_CHECK_STEPS, or DEFAULT_INTERVAL; 0 is never.

    Raises:
        ValueError: the variable does not hold a number of steps.
    """
    text = os.environ.get("TF_DGC_CHECK_STEPS", "")
    if text and not (text.isascii() and text.isdecimal()):
        raise ValueError(
            "The environment variable TF_DGC_CHECK_STEPS must be a number of steps, 0 "
            f"or more. Received: TF_DGC_CHECK_STEPS={text!r}"
        )
    return int(text) if text else DEFAULT_INTERVAL


def checksums(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Return a checksum of the bits of each tensor, in one pass over them.

    Args:
        tensors: T of any static shape, of integer or float types, or bool.

    Returns:
        shape [T], int32.
    """
    weights = 2 * tf.range(LANES, dtype=tf.int64) + 1
    found = inplace.call("", _partial_sums, list(tensors))
    lanes = [tf.reduce_sum(sums, axis=0) for sums in found]
    sums = tf.stack([tf.reduce_sum(own * weights) for own in lanes])
    return tf.cast(sums, tf.int32)  # its last 32 bits


def _partial_sums(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
    return [_sums(tensor) for tensor in tensors]


def _sums(tensor: tf.Tensor) -> tf.Tensor:
    if tensor.dtype == tf.bool:
        tensor = tf.cast(tensor, tf.uint8)
    kinds = {1: tf.uint8, 2: tf.uint16}
    bits = tf.bitcast(tensor, kinds.get(tensor.dtype.size, tf.int32))
    bits = tf.reshape(tf.cast(bits, tf.int32), [-1])
    bits = tf.pad(bits, [[0, -bits.shape[0] % (8 * LANES)]])
    # A change of the sign counts twice; squares, so that changes do not cancel out.
    bits = tf.bitwise.bitwise_xor(bits, tf.bitwise.right_shift(bits, 16))
    rows = tf.unstack(tf.reshape(bits * bits + bits, [-1, 8, LANES]), axis=1)
    # XLA makes vector instructions of it, other than of a reduction.
    # Sums of int32 would leave a GPU, for the host.
    return tf.cast(functools.reduce(tf.add, rows), tf.int64)


class Replicas:
    """Compares one owner's variables with those of the other workers."""

    def __init__(self, transport: Transport, interval: int, name: str) -> None:
        """Create the counters, zero, outside of any graph.

        Args:
            transport: to the others.
            interval: steps from one comparison to the next; 0 is never.
            name: prefix of the names of the collectives.
        """
        self._transport, self._interval, self._name = transport, interval, name
        with tf.init_scope(), tf.device("CPU:0"):
            zero = tf.zeros([], tf.int64)
            self._steps = own_variable(zero, "replica_steps")  # taken
            self._compared = own_variable(zero, "replica_compared")  # so many steps ago

    def compare(self, variables: Sequence[Any], steps: Any) -> None:
        """Compare variables, where it is time.

        Args:
            variables: T that should have the same bits on all workers; what only
                describes a tensor is left out.
            steps: taken since the last call, the same on all workers.

        Raises:
            tf.errors.InvalidArgumentError: they differ; on all workers.
        """
        variables = [v for v in variables if hasattr(v, "assign")]
        if self._transport.alone or not self._interval or not variables:
            return
        with tf.device("CPU:0"):
            passed = self._steps.assign_add(tf.cast(steps, tf.int64))
            due = passed - self._compared >= self._interval

        def gather() -> None:
            own = checksums([tf.convert_to_tensor(variable) for variable in variables])
            found = self._transport.all_gather(own, f"{self._name}.weights")
            self._compared.assign(passed)
            _refuse(found, passed, [variable.name for variable in variables])

        tf.cond(due, gather, lambda: None)


def _refuse(found: tf.Tensor, step: tf.Tensor, names: list[str]) -> None:
    """Raise InvalidArgumentError where checksums [N, T] differ between workers."""
    differs = found != found[0]

    def told() -> list[Any]:
        first = first_true(tf.reduce_any(differs, axis=0))
        return [
            "The workers' weights have drifted apart; all stop. Steps taken in this "
            "run, the first variable that differs, and the ranks on which it differs "
            "from that of rank 0:",
            step,
            tf.gather(tf.constant(names), first),
            tf.where(differs[:, first])[:, 0],
        ]

    require(~tf.reduce_any(differs), told, summarize=-1)
