"""Drawings show what the logs say."""

import sys
from unittest import mock

import features
import keras
import matplotlib as mpl
import pytest
import tensorflow as tf

import tf_dgc
from tf_dgc import callbacks
from tf_dgc.lab import plots

mpl.use("Agg")


def trained() -> keras.callbacks.History:
    config = tf_dgc.DGCConfig(sparsity=0.9, min_elements=1)
    strategy = tf_dgc.DGCStrategy(config, transport="local")
    with strategy.scope():
        model = features.mlp()
        model.compile(keras.optimizers.SGD(0.05), "mse")
    stats = callbacks.CompressionStats(by_tensor=True)
    return model.fit(features.batches(), epochs=3, verbose=0, callbacks=[stats])


@pytest.mark.long
class PlotsTest(tf.test.TestCase):
    def tearDown(self) -> None:
        super().tearDown()
        from matplotlib import pyplot

        pyplot.close("all")

    @pytest.mark.extended
    def test_loss_and_compression_over_steps(self) -> None:
        history = trained()
        for given, steps in ((history, 4), (history.history, 1)):
            figure = plots.loss_and_compression(given)
            left, right = figure.axes
            (loss,), (ratio,) = left.get_lines(), right.get_lines()
            self.assertAllEqual(loss.get_ydata(), history.history["loss"])
            self.assertAllEqual(ratio.get_ydata(), history.history["compression"])
            for line in (loss, ratio):
                self.assertAllEqual(line.get_xdata(), [steps, 2 * steps, 3 * steps])
            self.assertEqual(left.get_xlabel(), "step" if steps > 1 else "epoch")

    @pytest.mark.extended
    def test_a_fit_that_was_resumed_goes_on_where_it_was(self) -> None:
        history = trained()
        history.epoch = [5, 6, 7]
        (loss,) = plots.loss_and_compression(history).axes[0].get_lines()
        self.assertAllEqual(loss.get_xdata(), [24, 28, 32])

    @pytest.mark.extended
    def test_steps_of_an_epoch_can_be_given(self) -> None:
        figure = plots.loss_and_compression(trained().history, steps_per_epoch=7)
        (loss,) = figure.axes[0].get_lines()
        self.assertAllEqual(loss.get_xdata(), [7, 14, 21])

    def test_compression_is_labelled_by_plain_numbers(self) -> None:
        for ratios, label in (([14.0, 70.0], "20"), ([3.0, 900.0], "100")):
            record = {"loss": [2.0, 1.0], "compression": ratios}
            figure = plots.loss_and_compression(record)
            figure.canvas.draw()
            _, right = figure.axes
            labels = [text.get_text() for text in right.get_yticklabels(which="both")]
            self.assertIn(label, labels)
            self.assertNotIn("$", "".join(labels))

    def test_sparsity_by_layer(self) -> None:
        history = trained()
        figure = plots.sparsity_by_layer(history, epoch=1)
        (axis,) = figure.axes
        widths = {
            label.get_text(): bar.get_width()
            for label, bar in zip(axis.get_yticklabels(), axis.patches, strict=True)
        }
        logs = history.history
        names = [name for name in logs if name.startswith("density/")]
        expected = {name[len("density/") :]: 1 - logs[name][1] for name in names}
        self.assertEqual(widths, expected)

    def test_what_is_no_history_is_refused(self) -> None:
        for draw, log in (
            (plots.loss_and_compression, "compression"),
            (plots.sparsity_by_layer, "density/"),
        ):
            with self.assertRaisesRegex(TypeError, "`history` must be a History or"):
                draw([1.0, 2.0])
            with self.assertRaisesRegex(ValueError, f"must have the log '{log}'"):
                draw({"loss": [1.0]})

    def test_without_matplotlib_the_extra_is_named(self) -> None:
        with (
            mock.patch.dict(sys.modules, {"matplotlib": None}),
            self.assertRaisesRegex(ImportError, r"pip install 'tf_dgc\[plots\]'"),
        ):
            plots.loss_and_compression({"loss": [1.0], "compression": [1.0]})


if __name__ == "__main__":
    tf.test.main()
