"""Tests of what workers draw alike, and what each draws for itself."""

import contextlib
import itertools
import json
import random
from collections.abc import Iterator
from typing import Any
from unittest import mock

import keras
import loopback
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter

from tf_dgc import _host
from tf_dgc.strategies import randomness

ROWS = 12


class Batches(keras.utils.PyDataset):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Any:
        return np.full((1, 1), index), np.full((1, 1), index)


def shuffled() -> tf.data.Dataset:
    return tf.data.Dataset.range(ROWS).shuffle(ROWS)


def sampled() -> tf.data.Dataset:
    choices = [tf.data.Dataset.from_tensors(i).repeat() for i in range(3)]
    return tf.data.Dataset.sample_from_datasets(choices).take(ROWS)


def arrays() -> tf.data.Dataset:
    return ArrayDataAdapter(
        np.arange(ROWS), batch_size=5, shuffle=True
    ).get_tf_dataset()


def batches_of_arrays() -> tf.data.Dataset:
    adapter = ArrayDataAdapter(np.arange(ROWS), batch_size=5, shuffle="batch")
    return adapter.get_tf_dataset()


def py_dataset() -> tf.data.Dataset:
    batches = PyDatasetAdapter(Batches(), shuffle=True).get_tf_dataset()
    return batches.map(lambda x, _: x[:, 0])


def nested() -> tf.data.Dataset:
    return tf.data.Dataset.range(1).flat_map(lambda _: shuffled())


def epochs(dataset: tf.data.Dataset, count: int = 3) -> list[list[int]]:
    return [
        np.hstack([each.numpy() for each in dataset]).tolist() for _ in range(count)
    ]


@contextlib.contextmanager
def replica(rank: int) -> Iterator[None]:
    with mock.patch.object(_host.distribute, "replica_rank", return_value=rank):
        yield


class Unseeded(parameterized.TestCase, tf.test.TestCase):
    def setUp(self) -> None:
        super().setUp()
        seed = _host.tensorflow.global_seed()
        self.addCleanup(tf.random.set_seed, seed)
        tf.random.set_seed(None)


class OrderTest(Unseeded):
    @parameterized.parameters(
        shuffled, sampled, arrays, batches_of_arrays, py_dataset, nested
    )
    @pytest.mark.long
    def test_workers_read_in_the_same_order(self, make: Any) -> None:
        found = []
        for _ in range(2):
            randomness.share(5)
            found.append([epochs(make()) for _ in range(2)])
        self.assertEqual(*found)
        self.assertNotEqual(*found[0])
        randomness.share(6)
        self.assertNotEqual(found[0], [epochs(make()) for _ in range(2)])

    @parameterized.parameters(shuffled, arrays, batches_of_arrays, py_dataset)
    def test_every_epoch_has_an_order_of_its_own(self, make: Any) -> None:
        randomness.share(5)
        orders = epochs(make())
        for one, two in itertools.combinations(orders, 2):
            self.assertNotEqual(one, two)
        for order in orders:
            self.assertEqual(sorted(order), list(range(ROWS)))

    def test_rows_of_a_batch_are_shuffled_within_it(self) -> None:
        randomness.share(5)
        for order in epochs(batches_of_arrays()):
            for start in (0, 5, 10):
                batch = sorted(order[start : start + 5])
                self.assertEqual(batch, list(range(start, min(start + 5, ROWS))))

    @parameterized.parameters(shuffled, arrays, batches_of_arrays, py_dataset)
    @pytest.mark.long
    def test_iterators_that_are_given_up_do_not_part_workers(self, make: Any) -> None:
        found = []
        for taken in (1, 2):
            randomness.share(5)
            dataset = make()
            for _ in itertools.islice(dataset, taken):
                pass
            found.append(epochs(dataset))
        self.assertEqual(*found)

    @parameterized.parameters(True, "batch")
    def test_with_a_seed_arrays_come_as_keras_orders_them(self, shuffle: Any) -> None:
        randomness.share(5)
        found = []
        for get in (
            ArrayDataAdapter.get_tf_dataset,
            ArrayDataAdapter.get_tf_dataset.__wrapped__,
        ):
            tf.random.set_seed(3)
            found.append(
                epochs(get(ArrayDataAdapter(np.arange(ROWS), shuffle=shuffle)))
            )
        self.assertEqual(*found)

    def test_with_a_seed_batches_come_as_python_orders_them(self) -> None:
        randomness.share(5)
        keras.utils.set_random_seed(3)
        dataset = py_dataset()
        random.seed(7)
        expected = list(range(ROWS))
        random.shuffle(expected)
        random.seed(7)
        self.assertEqual(*epochs(dataset, 1), expected)

    def test_a_seed_of_an_operation_is_kept(self) -> None:
        randomness.share(5)
        dataset = tf.data.Dataset.range(ROWS).shuffle(ROWS, seed=1)
        randomness.share(6)
        again = tf.data.Dataset.range(ROWS).shuffle(ROWS, seed=1)
        self.assertEqual(epochs(dataset), epochs(again))

    def test_random_operations_of_a_map_go_on(self) -> None:
        randomness.share(5)
        dataset = tf.data.Dataset.range(ROWS).map(lambda _: tf.random.uniform([]))
        one, two = epochs(dataset, 2)
        self.assertNotEqual(one, two)

    def test_tensors_are_shuffled_as_ever(self) -> None:
        randomness.share(5)
        arrays()
        self.assertCountEqual(tf.random.shuffle(tf.range(ROWS)).numpy(), range(ROWS))
        self.assertEqual(tf.random.shuffle.__name__, "random_shuffle")


class StatesTest(tf.test.TestCase):
    """What scripts draw by `random` and NumPy is what the chief draws."""

    def setUp(self) -> None:
        super().setUp()
        states = randomness.encoded_states()
        self.addCleanup(randomness.restore_states, *states)

    def drawn(self) -> list[float]:
        return [random.random(), random.gauss(0, 1), *np.random.normal(size=3)]

    def test_what_was_encoded_goes_on(self) -> None:
        for draws in range(3):  # of which some keep a second number for later
            random.gauss(0, 1), np.random.normal(size=draws)
            states = randomness.encoded_states()
            # tf.debugging.enable_check_numerics lets nothing else through.
            self.assertAllInRange(states[1], -9.0, 9.0)
            expected = self.drawn()
            random.seed(), np.random.seed()
            randomness.restore_states(*states)
            self.assertEqual(self.drawn(), expected)

    def test_workers_that_do_not_meet_are_told(self) -> None:
        chief = json.loads(json.dumps(randomness.told()))
        expected = self.drawn()
        random.seed(), np.random.seed()
        self.assertEqual(randomness.take_over_told(chief), [])
        self.assertEqual(self.drawn(), expected)
        chief["hash"] += 1
        (warning,) = randomness.take_over_told(chief)
        self.assertIn("PYTHONHASHSEED", warning)

    def test_workers_go_on_from_the_state_of_the_chief(self) -> None:
        found: dict[int, Any] = {}

        class Chief(loopback.Loopback):
            """Gives others what the first one has, one after another."""

            def broadcast(self, tensors: Any, name: str) -> Any:
                return found.setdefault(name, [tf.identity(t) for t in tensors])

            def holds_on_all(self, own: tf.Tensor, name: str) -> tf.Tensor:
                return own

        results = []
        for rank in range(3):
            random.seed(rank), np.random.seed(rank)
            transport = Chief(loopback.Hub(1), 0)
            self.assertTrue(randomness.take_over(transport))
            results.append(self.drawn())
        random.seed(0), np.random.seed(0)
        self.assertEqual(results, [self.drawn()] * 3)


def normal() -> tf.Tensor:
    return tf.random.normal([4])


def normal_with_a_seed() -> tf.Tensor:
    return tf.random.normal([4], seed=3)


def keras_normal() -> tf.Tensor:
    return keras.random.normal([4])


class NoiseTest(Unseeded):
    def setUp(self) -> None:
        super().setUp()
        randomness.share(5)

    @parameterized.product(
        draw=(normal, normal_with_a_seed, keras_normal),
        eager=(False, True),
        seeded=(False, True),
    )
    def test_each_replica_has_its_own(
        self, draw: Any, eager: bool, seeded: bool
    ) -> None:
        found = []
        for rank in range(3):
            if seeded:
                keras.utils.set_random_seed(2)
            with replica(rank):
                function = draw if eager else tf.function(draw)
                found.append(np.stack([function(), function()]))
        for one, two in itertools.combinations(np.concatenate(found), 2):
            self.assertNotAllClose(one, two)

    @parameterized.product(draw=(normal, keras_normal), eager=(False, True))
    def test_rank_0_has_that_of_one_process(self, draw: Any, eager: bool) -> None:
        found = []
        for inside in (contextlib.nullcontext(), replica(0)):
            keras.utils.clear_session()  # the oldest Keras keeps its generator else
            keras.utils.set_random_seed(2)
            with inside:
                function = draw if eager else tf.function(draw)
                found.append(np.stack([function(), function()]))
        self.assertAllEqual(*found)

    def test_generators_are_in_the_same_state_on_all_workers(self) -> None:
        states = []
        for rank in range(2):
            generator = keras.random.SeedGenerator(5)
            with replica(rank):
                keras.random.normal([2], seed=generator)
            states.append(generator.state.numpy().tolist())
        self.assertEqual(states, [[5, 1], [5, 1]])


if __name__ == "__main__":
    tf.test.main()
