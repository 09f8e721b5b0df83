"""The published compression ratios, on the shapes of the published networks."""

import math
from collections.abc import Sequence

import keras
import pytest
import tensorflow as tf
from absl.testing import parameterized

from tf_dgc.compression import arena as layout_lib
from tf_dgc.config import DGCConfig
from tf_dgc.exchanges.formats import message_format

Shapes = Sequence[tuple[int, ...]]

# Krizhevsky, Sutskever, Hinton: ImageNet Classification with Deep Convolutional Neural
# Networks, 2012: convolutions 2, 4 and 5 in two groups.
ALEXNET = [
    *((11, 11, 3, 96), (96,)),
    *((5, 5, 48, 256), (256,)),
    *((3, 3, 256, 384), (384,)),
    *((3, 3, 192, 384), (384,)),
    *((3, 3, 192, 256), (256,)),
    *((9216, 4096), (4096,)),
    *((4096, 4096), (4096,)),
    *((4096, 1000), (1000,)),
]


def resnet_50() -> list[tuple[int, ...]]:
    """Return the shapes of Keras's ResNet-50."""
    model = keras.applications.ResNet50(weights=None)
    return [tuple(variable.shape) for variable in model.trainable_variables]


def without_biases_of_convolutions(shapes: Shapes) -> list[tuple[int, ...]]:
    """Leave out what Keras has before batch normalization, and the paper has not."""
    return [
        shape
        for i, shape in enumerate(shapes)
        if not (i and len(shape) == 1 and len(shapes[i - 1]) == 4)
    ]


def sent_bytes(shapes: Shapes, config: DGCConfig) -> tuple[int, int]:
    """Return the bytes of a message, and of the densely reduced tensors."""
    compressed = [
        shape
        for shape in shapes
        if layout_lib.is_compressed(shape, tf.float32, config.min_elements)
    ]
    layout = layout_lib.build([("w", shape) for shape in compressed])
    form = message_format(layout, config.sparsity, config, workers=4)
    return form.bytes, 4 * (elements(shapes) - elements(compressed))


def elements(shapes: Shapes) -> int:
    return sum(math.prod(shape) for shape in shapes)


def ratio(shapes: Shapes, value_dtype: str) -> float:
    sent = sum(sent_bytes(shapes, DGCConfig(value_dtype=value_dtype)))
    return 4 * elements(shapes) / sent


@pytest.mark.long
class RatioTest(parameterized.TestCase):
    def test_the_networks_have_the_published_sizes(self) -> None:
        self.assertEqual(elements(ALEXNET), 60_965_224)
        self.assertEqual(elements(resnet_50()), 25_583_592)
        bare = without_biases_of_convolutions(resnet_50())
        self.assertEqual(elements(bare), 25_557_032)

    def test_alexnet_is_compressed_more_than_597_times(self) -> None:
        self.assertGreater(ratio(ALEXNET, "float32"), 597)
        self.assertGreater(ratio(ALEXNET, "float16"), 900)

    def test_the_papers_resnet_50_is_compressed_more_than_277_times(self) -> None:
        shapes = without_biases_of_convolutions(resnet_50())
        self.assertGreater(ratio(shapes, "float32"), 277)
        self.assertGreater(ratio(shapes, "float16"), 325)

    def test_what_is_compressed_is_compressed_700_times(self) -> None:
        # Keras's ResNet-50 has 26,560 biases more, and all rank-1 tensors go dense.
        for shapes in (ALEXNET, resnet_50()):
            for value_dtype, least in (("float32", 700), ("float16", 1100)):
                config = DGCConfig(value_dtype=value_dtype)
                message, dense = sent_bytes(shapes, config)
                self.assertGreater((4 * elements(shapes) - dense) / message, least)
        self.assertGreater(ratio(resnet_50(), "float32"), 219)
