"""Tests of tables that live on servers only; here all servers are this process."""

import itertools
import tempfile
from typing import Any
from unittest import mock

import h5py
import keras
import numpy as np
import tensorflow as tf

from tf_dgc._host.shared import Cursor, Piece, SharedVariable, Table, seldom
from tf_dgc.servers import tables

numbers = itertools.count()


def table(rows: int, edges: list[int], width: int = 4, writes: bool = True) -> Table:
    """Return a table in pieces, without values."""
    pieces = [
        Piece("/device:CPU:0", *edge) for edge in itertools.pairwise([0, *edges, rows])
    ]
    name = f"test.{next(numbers)}"
    return Table(
        name,
        "test",
        tf.float32,
        [rows, width],
        pieces,
        Cursor(),
        watched=True,
        strategy=None,
        writes=lambda: writes,
    )


def filled(rows: int, edges: list[int]) -> tuple[Table, np.ndarray]:
    """Return a table, and what is in it."""
    values = np.random.default_rng(rows).normal(size=(rows, 4)).astype(np.float32)
    found = table(rows, edges)
    tables.fill(found, keras.initializers.Zeros, {})
    tables.load(found, values)
    return found, values


class FirstValuesTest(tf.test.TestCase):
    def drawn(self, initializer: Any, edges: list[int]) -> np.ndarray:
        found = table(1000, edges)
        config = initializer.get_config()
        with mock.patch.object(tables, "_CHUNK", 4 * 64):
            tables.fill(found, type(initializer), config)
        return tables.read_rows(found, 0, 1000).numpy()

    def test_they_do_not_depend_on_the_number_of_servers(self) -> None:
        for kind in ("RandomUniform", "RandomNormal", "TruncatedNormal"):
            with self.subTest(kind):
                initializer = getattr(keras.initializers, kind)(seed=7)
                once = self.drawn(initializer, [])
                self.assertAllEqual(once, self.drawn(initializer, [10, 500, 501]))
                # No chunk is like another.
                self.assertGreater(len(np.unique(once)), 0.99 * once.size)
                other = getattr(keras.initializers, kind)(seed=8)
                self.assertNotAllEqual(once, self.drawn(other, []))

    def test_they_have_the_distribution(self) -> None:
        found = self.drawn(keras.initializers.RandomUniform(-1.0, 3.0, seed=1), [300])
        self.assertAllInRange(found, -1.0, 3.0)
        self.assertAllClose(found.mean(), 1.0, atol=0.1)
        self.assertAllEqual(self.drawn(keras.initializers.Zeros(), [9]), 0 * found)
        constant = self.drawn(keras.initializers.Constant(0.5), [9])
        self.assertAllEqual(constant, 0 * found + 0.5)

    def test_what_needs_the_whole_table_is_refused(self) -> None:
        for initializer in (
            keras.initializers.GlorotUniform(),
            keras.initializers.Orthogonal(),
            keras.initializers.Constant(np.ones((4, 4))),
            lambda shape, dtype: tf.zeros(shape, dtype),
        ):
            with self.assertRaisesRegex(ValueError, "must give each element by itself"):
                tables.check_initializer(initializer)


class RowsTest(tf.test.TestCase):
    def test_rows_are_those_of_the_whole(self) -> None:
        found, values = filled(50, [20, 21])
        ids = np.array([[0, 19, 20], [21, 49, 20], [-1, -50, 3]])
        for call in (tables.look_up, tf.function(tables.look_up)):
            self.assertAllEqual(call(found, tf.constant(ids)), values[ids])
        empty = tables.look_up(found, tf.zeros([0, 3], tf.int32))
        self.assertEqual(empty.shape, [0, 3, 4])

    def test_the_gradient_is_that_of_a_gather_and_of_single_rows(self) -> None:
        found, values = filled(50, [20, 21])
        plain = tf.Variable(values)
        ids = tf.constant([[3, 20, 3], [21, 49, 20]])

        def gradients() -> list[Any]:
            results = []
            for variable, read in ((found, tables.look_up), (plain, tf.gather)):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(tf.sin(read(variable, ids)) ** 2)
                results.append(tape.gradient(loss, variable))
            return results

        for step in (gradients, tf.function(gradients)):
            sparse, expected = step()
            self.assertAllEqual(sparse.indices, [3, 20, 21, 49])
            dense = tf.convert_to_tensor(sparse)
            self.assertAllClose(dense, tf.convert_to_tensor(expected), rtol=1e-6)

    def test_an_index_that_there_is_not_is_an_error(self) -> None:
        found, _ = filled(50, [20])
        for index in (50, -51):
            with self.assertRaisesRegex(
                tf.errors.InvalidArgumentError, r"Indices of an Embedding .* \[0, 50\)"
            ):
                tf.function(tables.look_up)(found, tf.constant([index]))

    def test_it_is_not_read_as_a_whole(self) -> None:
        found, _ = filled(50, [20])
        for read in (
            found.numpy,
            found.read_value,
            lambda: tf.convert_to_tensor(found),
            lambda: tf.matmul(tf.ones([1, 50]), found),
        ):
            with self.assertRaisesRegex(ValueError, "must not be read as a whole"):
                read()


class FilesTest(tf.test.TestCase):
    def test_what_is_written_in_parts_is_the_whole(self) -> None:
        found, values = filled(50, [20])
        folder = self.enterContext(tempfile.TemporaryDirectory())
        with mock.patch.object(tables, "_COPIED", 4 * 7):
            with h5py.File(f"{folder}/x.h5", "w") as file:
                tables.write(found, file.create_dataset("0", (50, 4), np.float32))
            again = table(50, [7, 31])
            tables.fill(again, keras.initializers.Ones, {})
            with h5py.File(f"{folder}/x.h5") as file:
                self.assertAllEqual(file["0"], values)
                tables.load(again, file["0"])
        self.assertAllEqual(tables.read_rows(again, 0, 50), values)

    def test_another_shape_is_refused(self) -> None:
        found, values = filled(50, [20])
        with self.assertRaisesRegex(ValueError, r"one of its shape.*\(49, 4\)"):
            tables.load(found, values[1:])

    def test_only_the_chief_assigns(self) -> None:
        found = table(50, [20], writes=False)
        tables.load(found, np.zeros((50, 4)))
        found.assign(np.zeros((50, 4), np.float32))
        self.assertFalse(found.initialized)


if __name__ == "__main__":
    tf.test.main()


class SeldomTest(tf.test.TestCase):
    def shared(self) -> SharedVariable:
        pieces = [Piece("/device:CPU:0", 0, 3)]
        args = "test", tf.float32, [3], pieces
        found = SharedVariable(f"test.{next(numbers)}", *args)
        found.assign([1.0, 2.0, 3.0])
        return found

    def drawn(self, seed: int, conditional: Any) -> list[Any]:
        """Return what six steps of a drawn program compute."""
        draws = np.random.default_rng(seed)
        acts, period = draws.integers(0, 6, size=8), int(draws.integers(1, 4))
        one, other, own = self.shared(), self.shared(), tf.Variable(1.0)
        often, count = tf.Variable(2), tf.Variable(0)

        def act(kind: int) -> None:
            if kind == 0:
                one.assign_add(own * other.read_value())
            elif kind == 1:
                other.assign(0.5 * one.read_value())
            elif kind == 2:
                own.assign(0.5 * own + tf.reduce_sum(other.read_value()))
            elif kind == 3:
                own.assign_sub(0.25 * one.read_value()[0])
            elif kind == 4:
                tf.cond(own > 2.0, lambda: act(0), lambda: act(1))
            else:
                where = tf.IndexedSlices(own * tf.ones([1]), tf.constant([1]))
                one.scatter_add(where)

        def first() -> None:
            for kind in acts[:4]:
                act(kind)
            conditional(often.read_value() % 2 == 0, lambda: act(acts[4]))
            act(acts[5])

        def step() -> tf.Tensor:
            due = count.assign_add(1, read_value=True) % period == 0
            conditional(due, first)
            own.assign_add(1.0)
            often.assign_add(1)
            conditional(~due, lambda: act(acts[6]))
            own.assign_add(0.5)
            return own.read_value()

        function = tf.function(step, autograph=False)
        told = [float(function()) for _ in range(6)]
        return [*told, one.numpy().tolist(), other.numpy().tolist()]

    def test_drawn_programs_compute_what_they_do_by_a_plain_condition(self) -> None:
        def plain(due: tf.Tensor, do: Any) -> None:
            tf.cond(due, do, lambda: None)

        for seed in range(25):
            with self.subTest(seed):
                self.assertEqual(self.drawn(seed, seldom), self.drawn(seed, plain))

    def test_a_step_is_given_no_handle_of_what_is_seldom_used(self) -> None:
        shared, own = self.shared(), tf.Variable(0)

        def add() -> None:
            shared.assign_add(tf.ones([3]))

        def step() -> tf.Tensor:
            due = own.assign_add(1, read_value=True) % 2 == 0
            with tf.control_dependencies([seldom(due, add)]):
                return own.read_value()

        function = tf.function(step, autograph=False).get_concrete_function()
        given = [id(each) for each in function.captured_inputs]
        self.assertNotIn(id(shared.handle), given)
        self.assertIn(id(own.handle), given)
        for _ in range(4):
            function()
        self.assertAllEqual(shared, [3.0, 4.0, 5.0])

    def test_eagerly_it_is_a_condition(self) -> None:
        shared = self.shared()

        def add() -> None:
            shared.assign_add(tf.ones([3]))

        for due in (False, True):
            self.assertEqual(bool(seldom(tf.constant(due), add)), due)
        self.assertAllEqual(shared, [2.0, 3.0, 4.0])
