"""What must hold of tensors, eagerly and in graphs."""

from typing import Any

import tensorflow as tf
from absl.testing import parameterized

from tf_dgc import values


def checked(limit: tf.Tensor) -> tf.Tensor:
    def told() -> list[Any]:
        word = tf.gather(tf.constant(["none", "some", "many"]), tf.minimum(limit, 2))
        return ["Too few:", word, limit * tf.ones([5], tf.int32)]

    with tf.control_dependencies([values.require(limit > 3, told, summarize=-1)]):
        return limit + 1


class RequireTest(parameterized.TestCase, tf.test.TestCase):
    @parameterized.parameters(False, True)
    def test_raises_with_what_is_told(self, graph: bool) -> None:
        function = tf.function(checked) if graph else checked
        self.assertAllEqual(function(tf.constant(4)), 5)
        with self.assertRaisesRegex(
            tf.errors.InvalidArgumentError,
            r"Too few:(?s:.*)many(?s:.*)3,? 3,? 3,? 3,? 3",
        ):
            function(tf.constant(3))

    def test_texts_are_made_on_the_host_and_where_they_are_raised(self) -> None:
        function = tf.function(checked).get_concrete_function(
            tf.TensorSpec([], tf.int32)
        )
        graph = function.graph.as_graph_def()
        self.assertNotIn("GatherV2", [node.op for node in graph.node])
        devices = {
            node.device
            for each in graph.library.function
            for node in each.node_def
            if node.op in ("Assert", "GatherV2")
        }
        self.assertEqual({device.upper()[-5:] for device in devices}, {"CPU:0"})


class UnlessTest(tf.test.TestCase):
    def test_what_is_seldom_needed_is_a_function_of_its_own(self) -> None:
        def halved(number: tf.Tensor) -> tf.Tensor:
            return values.unless(number > 0, lambda: number / 2, lambda: number)

        function = tf.function(halved)
        for number, expected in ((3.0, 3.0), (-3.0, -1.5)):
            self.assertAllEqual(function(tf.constant(number)), expected)
            self.assertAllEqual(halved(tf.constant(number)), expected)
        graph = function.get_concrete_function(tf.TensorSpec([])).graph.as_graph_def()
        apart = [f for f in graph.library.function if f.attr["_noinline"].b]
        self.assertLen(apart, 1)
        self.assertIn("RealDiv", [node.op for node in apart[0].node_def])


class FirstTrueTest(tf.test.TestCase):
    def test_finds_the_first(self) -> None:
        masks = tf.constant([[False, True, True], [True, False, True], [False] * 3])
        self.assertAllEqual(values.first_true(masks, axis=1), [1, 0, 0])
        self.assertAllEqual(values.first_true(masks), [1, 0, 0])


if __name__ == "__main__":
    tf.test.main()
