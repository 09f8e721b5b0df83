"""Pure functions that change variables in place: what is compiled, and how often."""

import gc
import weakref
from typing import Any
from unittest import mock

import tensorflow as tf

from tf_dgc.exchanges import inplace

CPU = "/device:CPU:0"
_traced: list[tuple[int, ...]] = []


def moved(values: list[Any], by: tf.Tensor, times: int) -> list[Any]:
    """Change a structure of values, with None in it."""
    _traced.append(tuple(by.shape))
    return [None if value is None else value + times * by for value in values]


def doubled(values: Any) -> Any:
    return 2.0 * values


class InPlaceTest(tf.test.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.enter_context(mock.patch.dict(inplace._compiled, clear=True))
        _traced.clear()

    def variable(self, size: int = 3) -> tf.Variable:
        with tf.device(CPU):
            return tf.Variable(tf.zeros([size]))

    def move(self, variable: tf.Variable, times: int = 1) -> None:
        by = tf.ones(variable.shape)
        inplace.update(CPU, moved, [None, variable], by, times)

    def test_variables_take_their_new_values(self) -> None:
        one, two = self.variable(), self.variable()
        inplace.update(CPU, moved, [one, None, two], tf.constant([1.0, 2.0, 3.0]), 2)
        for variable in (one, two):
            self.assertAllEqual(variable, [2.0, 4.0, 6.0])
            self.assertAllEqual(inplace.call(CPU, doubled, variable), [4.0, 8.0, 12.0])

    def test_all_of_the_same_shapes_share_what_is_compiled(self) -> None:
        for _ in range(3):
            self.move(self.variable())
        self.assertEqual(_traced, [(3,)])
        self.move(self.variable(4))
        self.move(self.variable(), times=2)
        self.assertEqual(_traced, [(3,), (4,), (3,)])

    def test_in_a_graph_and_where_functions_run_eagerly(self) -> None:
        variable = self.variable()
        function = tf.function(lambda: self.move(variable))
        function()
        function()
        tf.config.run_functions_eagerly(True)
        try:
            self.move(variable)
        finally:
            tf.config.run_functions_eagerly(False)
        self.assertAllEqual(variable, [3.0] * 3)
        self.assertLen(_traced, 1)

    def test_where_numbers_are_checked(self) -> None:
        tf.debugging.enable_check_numerics()
        self.addCleanup(tf.debugging.disable_check_numerics)
        variable = self.variable()
        self.move(variable)
        tf.function(lambda: self.move(variable))()
        self.assertAllEqual(variable, [2.0, 2.0, 2.0])

    def test_what_is_compiled_outlives_variables_and_does_not_hold_them(self) -> None:
        def trained() -> weakref.ref[tf.Variable]:
            variable = self.variable()
            tf.function(lambda: self.move(variable))()
            self.assertAllEqual(variable, [1.0] * 3)
            return weakref.ref(variable)

        for reference in (trained(), trained()):
            gc.collect()
            self.assertIsNone(reference())
        self.assertLen(_traced, 1)

    def test_the_oldest_is_forgotten_where_there_are_too_many(self) -> None:
        with mock.patch.object(inplace, "_MOST_COMPILED", 2):
            for size in (1, 2, 3, 1):
                self.move(self.variable(size))
            self.assertLen(inplace._compiled, 2)
        self.assertEqual(_traced, [(1,), (2,), (3,), (1,)])


if __name__ == "__main__":
    tf.test.main()
