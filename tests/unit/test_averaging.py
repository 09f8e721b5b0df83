"""Tests of what happens in a round: pure functions."""

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tf_dgc import averaging


def header(**fields: float) -> averaging.RoundHeader:
    start = averaging.RoundHeader(0, 0, 0, 0, 0, 0, np.nan)
    return start._replace(**fields)


class HeaderTest(tf.test.TestCase):
    def test_what_is_written_is_read(self) -> None:
        large = 2**50 + 1  # float32 would not hold it
        sent = [
            header(round=large, moved=3, unsettled=4, done=True, loss=0.125),
            header(round=large, moved=0, nonfinite=7),
        ]
        read = averaging.read(tf.stack([averaging.write(each) for each in sent]))
        for i, each in enumerate(sent):
            for field, value in zip(read, each, strict=True):
                self.assertEqual(field.dtype, tf.float64)
                np.testing.assert_array_equal(field[i], np.float64(value))


class MeanTest(parameterized.TestCase, tf.test.TestCase):
    @parameterized.parameters(
        ([1, 1, 1],), ([16, 3, 9],), ([0, 2, 0],), ([0, 0, 0],), ([5],)
    )
    def test_shares_sum_to_the_mean_of_those_that_moved(self, moved: list[int]) -> None:
        random = np.random.default_rng(0)
        values = [random.normal(size=(4, 3)).astype("float32") for _ in moved]
        divisor = averaging.count(tf.constant(moved, tf.float64))
        total = sum(
            averaging.shares([tf.constant(value)], tf.constant(steps), divisor)[0]
            for value, steps in zip(values, moved, strict=True)
        )
        chosen = [v for v, steps in zip(values, moved, strict=True) if steps]
        expected = np.mean(chosen, axis=0) if chosen else np.zeros((4, 3))
        self.assertAllClose(total, expected, 1e-6, 1e-6)

    def test_a_worker_that_has_not_moved_adds_nothing_not_even_nan(self) -> None:
        (share,) = averaging.shares(
            [tf.constant([np.nan, 1.0])], tf.constant(0), tf.constant(1.0, tf.float64)
        )
        self.assertAllEqual(share, [0.0, 0.0])

    def test_shares_have_at_least_32_bits(self) -> None:
        for dtype in (tf.float16, tf.bfloat16, tf.float32, tf.float64):
            (share,) = averaging.shares(
                [tf.ones([2], dtype)], tf.constant(1), tf.constant(2.0, tf.float64)
            )
            self.assertEqual(share.dtype, tf.float32 if dtype.size < 4 else dtype)
            self.assertAllEqual(tf.cast(share, tf.float32), [0.5, 0.5])

    def test_distance_is_the_norm_over_all_tensors(self) -> None:
        own = [tf.constant([3.0, 0.0]), tf.constant([[4.0]], tf.float16)]
        agreed = [tf.zeros([2]), tf.zeros([1, 1], tf.float16)]
        self.assertAllClose(averaging.distance(own, agreed), 5.0)
        self.assertAllEqual(averaging.distance(own, own), 0.0)
        self.assertAllEqual(averaging.distance([], []), 0.0)


class PeriodTest(parameterized.TestCase, tf.test.TestCase):
    @parameterized.parameters(
        (2.0, 2.0, 64),  # as high as at first
        (0.5, 2.0, 32),
        (0.45, 2.0, 31),  # rounded up
        (8.0, 2.0, 64),  # the ceiling
        (1e-6, 2.0, 4),  # the floor
        (-1.0, 2.0, 4),
        # It stays where a loss says nothing.
        (np.nan, 2.0, 7),
        (2.0, np.nan, 7),
        (np.inf, 2.0, 7),
        (1.0, 0.0, 7),
    )
    def test_it_follows_the_root_of_the_loss(
        self, loss: float, first: float, expected: int
    ) -> None:
        losses = tf.constant([loss, first], tf.float64)
        now = tf.constant(7, tf.int64)
        found = averaging.next_period(now, losses[0], losses[1], 4, 64)
        self.assertEqual(found.dtype, tf.int64)
        self.assertEqual(int(found), expected)

    def test_the_loss_is_that_of_workers_that_moved(self) -> None:
        headers = averaging.read(
            tf.stack(
                [
                    averaging.write(header(moved=2, loss=1.0)),
                    averaging.write(header(moved=0, loss=np.nan)),
                    averaging.write(header(moved=1, loss=2.0)),
                ]
            )
        )
        self.assertAllClose(averaging.mean_loss(headers), 1.5)


if __name__ == "__main__":
    tf.test.main()
