"""Replicas are compared from time to time: workers that drift apart stop.

Where they differ by rounding alone, as after weights were moved and moved back, all
take over what rank 0 has.

Axes: N workers, T variables.
"""

import functools
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import tensorflow as tf

from tf_dgc import _host
from tf_dgc.exchanges import inplace
from tf_dgc.exchanges.inplace import own_variable
from tf_dgc.transports import base
from tf_dgc.transports.base import Transport
from tf_dgc.values import first_true, require, unless

_logger = logging.getLogger("tf_dgc")

DEFAULT_INTERVAL: Final = 100
_UNITS = 32  # in the last place of a tensor's largest element: rounding
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
    return [_of_form(_sums, 1, *_form(tensor))(tensor) for tensor in tensors]


def _form(tensor: tf.Tensor) -> tuple[tuple[int, ...], tf.DType]:
    return tuple(tensor.shape.as_list()), tensor.dtype


@functools.cache
def _of_form(
    function: Callable[..., Any], count: int, shape: tuple[int, ...], dtype: tf.DType
) -> Callable[..., Any]:
    """Return a function of tensors, which graphs hold once for all of this form.

    TensorFlow optimizes what graphs hold, and networks have many tensors of few forms.
    """
    with tf.init_scope():
        specs = [tf.TensorSpec(shape, dtype)] * count
        found: Callable[..., Any] = _host.tensorflow.not_inlined(function, specs)
        return found


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
        self._told = False
        with tf.init_scope(), tf.device("CPU:0"):
            zero = tf.zeros([], tf.int64)
            self._steps = own_variable(zero, "replica_steps")  # taken
            self._compared = own_variable(zero, "replica_compared")  # so many steps ago

    def compare(self, variables: Sequence[Any], steps: Any, now: bool = False) -> None:
        """Compare variables, where it is time, or now.

        Args:
            variables: T that should have the same bits on all workers; what only
                describes a tensor is left out.
            steps: taken since the last call, the same on all workers.
            now: whether it is time in any case, unless it never is.

        Raises:
            tf.errors.InvalidArgumentError: they differ by more than rounding; on all
                workers.
        """
        variables = [v for v in variables if hasattr(v, "assign")]
        if self._transport.alone or not self._interval or not variables:
            return
        with tf.device("CPU:0"):
            passed = self._steps.assign_add(tf.cast(steps, tf.int64))
            early = (passed - self._compared < self._interval) & (not now)

        def gather() -> None:
            own = checksums([tf.convert_to_tensor(variable) for variable in variables])
            found = self._transport.all_gather(own, f"{self._name}.weights")
            self._compared.assign(passed)
            alike = tf.reduce_all(found == found[0])
            unless(alike, lambda: self._mend(variables, passed))

        unless(early, gather)

    def _mend(self, variables: Sequence[Any], step: tf.Tensor) -> None:
        """Take over rank 0's variables, where all are close to them."""
        own = [tf.convert_to_tensor(variable) for variable in variables]
        first = self._of_first(own)
        far = [
            _of_form(_is_far, 2, *_form(pair[0]))(*pair)
            for pair in zip(own, first, strict=True)
        ]
        far = tf.stack(far)
        told = self._transport.all_gather(tf.cast(far, tf.int32), f"{self._name}.far")
        close = _refuse(told, step, [variable.name for variable in variables])
        with tf.control_dependencies([close]):
            for variable, value in zip(variables, first, strict=True):
                variable.assign(value)
        with tf.device("CPU:0"):
            tf.numpy_function(self._tell, [], tf.bool, stateful=True)

    def _of_first(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return rank 0's tensors, of each type in one."""
        found = list(tensors)
        by_type: dict[tf.DType, list[int]] = {}
        for i, tensor in enumerate(tensors):
            by_type.setdefault(tensor.dtype, []).append(i)
        flat = [
            tf.concat([tf.reshape(tensors[i], [-1]) for i in places], axis=0)
            for places in by_type.values()
        ]
        name = f"{self._name}.of_first"
        joined = self._transport.broadcast(flat, name)
        for places, whole in zip(by_type.values(), joined, strict=True):
            sizes = [tensors[i].shape.num_elements() for i in places]
            for i, part in zip(places, base.parts(whole, sizes), strict=True):
                found[i] = tf.reshape(part, tensors[i].shape)
        return found

    def _tell(self) -> np.bool_:
        if not self._told and self._transport.rank == 0:
            _logger.warning(
                "Weights differ between the workers by rounding, as where a step moves "
                "them and moves them back: all take over what rank 0 has, from time to "
                "time"
            )
        self._told = True
        return np.bool_(True)


def _is_far(own: tf.Tensor, first: tf.Tensor) -> tf.Tensor:
    """Tell whether two tensors differ by more than rounding: shape [], bool."""
    if not own.dtype.is_floating:
        return tf.reduce_any(own != first)
    wide = tf.float64 if own.dtype == tf.float64 else tf.float32
    difference = tf.abs(tf.cast(own, wide) - tf.cast(first, wide))
    scale = tf.reduce_max(tf.abs(tf.cast(first, wide)))
    bits = {tf.float16: 10, tf.bfloat16: 7, tf.float64: 52}.get(own.dtype, 23)
    units = tf.constant(_UNITS * 2.0**-bits, wide)
    # What is not a number is not close. Said so: graphs turn ~(a <= b) into a > b.
    strange = tf.reduce_any(~tf.math.is_finite(difference))
    return strange | (tf.reduce_max(difference) > units * scale)


def _refuse(found: tf.Tensor, step: tf.Tensor, names: list[str]) -> tf.Tensor:
    """Raise InvalidArgumentError where numbers [N, T] differ between workers."""
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

    return require(~tf.reduce_any(differs), told, summarize=-1)
