"""Checksums of weights; what is done with them, see test_misuse."""

import unittest
from typing import Any
from unittest import mock

import loopback
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized
from hypothesis import given, settings
from hypothesis import strategies as st

from tf_dgc.exchanges import replicas

DTYPES = (tf.float32, tf.float16, tf.bfloat16, tf.float64, tf.int32, tf.int8, tf.bool)


def flipped(tensor: tf.Tensor, bits: list[int]) -> tf.Tensor:
    """Return a tensor with some of its bits, counted from its first byte, flipped."""
    octets = np.frombuffer(tensor.numpy().tobytes(), np.uint8).copy()
    for bit in bits:
        octets[bit // 8] ^= 1 << bit % 8
    array = np.frombuffer(octets.tobytes(), tensor.dtype.as_numpy_dtype)
    return tf.constant(array.reshape(tensor.shape))


class ChecksumsTest(parameterized.TestCase, tf.test.TestCase):
    @parameterized.parameters(*DTYPES)
    def test_equal_bits_have_equal_checksums(self, dtype: tf.DType) -> None:
        x = tf.cast(tf.random.stateless_normal([5, 7], [1, 2]) * 9, dtype)
        once, again = replicas.checksums([x]), replicas.checksums([tf.identity(x)])
        self.assertAllEqual(once, again)

    @parameterized.parameters(*(d for d in DTYPES if d != tf.bool))
    @pytest.mark.long
    def test_every_single_bit_counts(self, dtype: tf.DType) -> None:
        x = tf.cast(tf.random.stateless_normal([3, 2], [1, 2]) * 9, dtype)
        (sum_of_x,) = replicas.checksums([x]).numpy()
        for bit in range(6 * dtype.size * 8):
            (other,) = replicas.checksums([flipped(x, [bit])]).numpy()
            self.assertNotEqual(other, sum_of_x, f"bit {bit}")

    @settings(deadline=None)
    @given(st.data())
    @pytest.mark.long
    def test_two_signs_or_two_neighbours_do_not_cancel_out(
        self, data: st.DataObject
    ) -> None:
        x = tf.random.stateless_normal([64], [3, 4])
        places = st.lists(st.integers(0, 63), min_size=2, max_size=2, unique=True)
        i, j = data.draw(places)
        (sum_of_x,) = replicas.checksums([x]).numpy()
        (signs,) = replicas.checksums([flipped(x, [32 * i + 31, 32 * j + 31])]).numpy()
        self.assertNotEqual(signs, sum_of_x)
        y = x.numpy()
        y[i] = np.nextafter(y[i], np.float32(9))
        y[j] = np.nextafter(y[j], np.float32(-9))
        (neighbours,) = replicas.checksums([tf.constant(y)]).numpy()
        self.assertNotEqual(neighbours, sum_of_x)

    def test_there_is_one_of_each(self) -> None:
        x = tf.ones([40])
        found = replicas.checksums([x, 2 * x, x]).numpy()
        self.assertEqual(found[0], found[2])
        self.assertNotEqual(found[0], found[1])

    def test_of_a_scalar_and_of_nothing(self) -> None:
        found = replicas.checksums([tf.constant(1.5), tf.zeros([0, 3])]).numpy()
        self.assertNotEqual(found[0], 0)
        self.assertEqual(found[1], 0)


class RoundingTest(parameterized.TestCase, tf.test.TestCase):
    """Two workers whose variables differ a little, or more."""

    def compared(self, *values: Any) -> list[Any]:
        """Return what two workers have afterwards, who begin with these values."""
        before = [
            [tf.Variable(v) for v in worker] for worker in zip(*values, strict=True)
        ]

        def work(transport: loopback.Loopback) -> Any:
            own = before[transport.rank]
            found = replicas.Replicas(transport, 1, "test")
            for _ in range(2):
                found.compare(own, 1)
            return [variable.numpy() for variable in own]

        return loopback.run_workers(2, work)

    @parameterized.parameters(tf.float32, tf.float64, tf.float16, tf.bfloat16)
    @pytest.mark.long
    def test_what_differs_by_rounding_is_that_of_rank_0(self, dtype: tf.DType) -> None:
        x = tf.cast(tf.random.stateless_normal([5, 7], [1, 2]), dtype)
        unit = {tf.float16: 2**-9, tf.bfloat16: 2**-6, tf.float64: 2**-50}
        other = x * tf.constant(1 + unit.get(dtype, 2**-21), dtype)
        self.assertNotAllEqual(x, other)
        with self.assertLogs("tf_dgc", "WARNING") as logs:
            found = self.compared((x, other), (3, 3), (tf.ones([2]), tf.ones([2])))
        for rank in range(2):
            self.assertAllEqual(found[rank][0], x)
            self.assertAllEqual(found[rank][2], tf.ones([2]))
        (told,) = logs.output
        self.assertIn("differ between the workers by rounding", told)

    @parameterized.parameters(
        (1.0, 1.001), (1.0, float("nan")), (3, 4), (0.0, 1e-6), (True, False)
    )
    @pytest.mark.long
    def test_what_differs_by_more_stops_all(self, one: Any, other: Any) -> None:
        with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "drifted apart"):
            self.compared((tf.ones([3]), tf.ones([3])), (one, other))


class IntervalTest(parameterized.TestCase, unittest.TestCase):
    @parameterized.parameters(("", 100), ("0", 0), ("7", 7))
    def test_is_what_the_environment_says(self, text: str, expected: int) -> None:
        with mock.patch.dict("os.environ", TF_DGC_CHECK_STEPS=text):
            self.assertEqual(replicas.default_interval(), expected)

    @parameterized.parameters("-1", "1.5", "often", "²")
    def test_is_refused_where_it_is_no_number(self, text: str) -> None:
        with (
            mock.patch.dict("os.environ", TF_DGC_CHECK_STEPS=text),
            self.assertRaisesRegex(ValueError, "must be a number of steps"),
        ):
            replicas.default_interval()


if __name__ == "__main__":
    tf.test.main()
