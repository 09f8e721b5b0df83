"""Tests of the comparison of settings over all workers."""

from typing import Any

import pytest
import tensorflow as tf
from loopback import Loopback, outcomes, run_workers

from tf_dgc.transports import handshake
from tf_dgc.transports.local import LocalTransport


def agreed(*records: dict[str, Any]) -> list[Any]:
    """Return what each worker's `agree` returned or raised."""

    def work(transport: Loopback) -> None:
        handshake.agree(transport, "settings", records[transport.rank])

    return outcomes(len(records), work)


class AgreeTest(tf.test.TestCase):
    def assert_refused(self, records: list[dict[str, Any]], message: str) -> None:
        for error in agreed(*records):
            self.assertIsInstance(error, ValueError)
            self.assertEqual(str(error), message)

    def test_equal_records_agree(self) -> None:
        for record in ({}, {"a": 1, "b": [0.1, None, "x"], "c": {"d": True}}):
            self.assertEqual(agreed(record, dict(record), dict(record)), [None] * 3)

    def test_the_order_of_fields_does_not_matter(self) -> None:
        self.assertEqual(agreed({"a": 1, "b": 2}, {"b": 2, "a": 1}), [None] * 2)

    def test_one_worker_agrees_with_itself(self) -> None:
        handshake.agree(LocalTransport(), "settings", {"anything": object()})

    @pytest.mark.long
    def test_a_difference_names_the_field_the_ranks_and_the_values(self) -> None:
        self.assert_refused(
            [
                {"sparsity": 0.9, "clip": None},
                {"sparsity": 0.99, "clip": None},
                {"sparsity": 0.9, "clip": None},
            ],
            "All workers must have the same settings. Received: `sparsity` differs: "
            "0.9 on ranks [0, 2]; 0.99 on ranks [1].",
        )

    def test_every_field_that_differs_is_named(self) -> None:
        self.assert_refused(
            [{"a": 1, "b": "x", "c": 0}, {"a": 2, "b": "y", "c": 0}],
            "All workers must have the same settings. Received: `a` differs: 1 on "
            "ranks [0]; 2 on ranks [1]. `b` differs: 'x' on ranks [0]; 'y' on ranks "
            "[1].",
        )

    def test_a_missing_field_differs(self) -> None:
        self.assert_refused(
            [{"a": 1}, {"a": 1, "b": 2}],
            "All workers must have the same settings. Received: `b` differs: None on "
            "ranks [0]; 2 on ranks [1].",
        )

    def test_records_of_any_length_are_compared(self) -> None:
        errors = agreed({"a": "x" * 1000}, {}, {"a": "\u00e9\u6f22" * 100, "b": [1]})
        for error in errors:
            self.assertIsInstance(error, ValueError)
            self.assertIn("`a` differs", str(error))
            self.assertIn("\u00e9\u6f22' on ranks [2]", str(error))

    def test_a_long_list_of_differences_is_cut(self) -> None:
        first = {f"field{i:02}": 0 for i in range(30)}
        for error in agreed(first, dict.fromkeys(first, 1)):
            self.assertEqual(str(error).count("differs"), 10)

    def test_equal_records_cost_one_small_message(self) -> None:
        def work(transport: Loopback) -> list[tuple[str, int]]:
            handshake.agree(transport, "settings", {"a": "x" * 1000})
            return [(sent.name, sent.bytes) for sent in transport.sent]

        self.assertEqual(run_workers(2, work), [[("agree.digest", 16)]] * 2)


if __name__ == "__main__":
    tf.test.main()
