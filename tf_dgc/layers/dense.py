"""A dense layer of whose kernel each worker holds, and trains, a part.

Axes: N workers, M rows of the worker that has most, m of this one, I inputs, U units, W
columns, or rows, of a part.

By columns:

    X* = all-gather(X)              [N, M, I]
    Y_r = X* W_r                    [N, M, W], the units of worker r
    Y = all-to-all(Y_r)             [N, M, W] -> [m, U]; bias and activation follow

By rows:

    X_r = all-to-all(X)             [m, I] -> [N, M, W], the inputs of worker r
    Y = reduce-scatter(X_r W_r)     [N, M, U] -> [m, U]; bias and activation follow

By rows after a layer by columns, X_r is its Y_r with bias and activation: nothing is
sent between them. Backwards, the gradient of W_r is complete where it is, and what goes
to the inputs takes the same ways back. Only activations travel.
"""

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_dgc import _host, bands
from tf_dgc.bands import Band
from tf_dgc.layers import draws, refusals, ways
from tf_dgc.layers.away import Away
from tf_dgc.layers.movement import Movement
from tf_dgc.layers.products import Products
from tf_dgc.transports import Transport

_numbers: weakref.WeakKeyDictionary[Transport, Any] = weakref.WeakKeyDictionary()


@keras.saving.register_keras_serializable(package="tf_dgc")
class SplitDense(keras.layers.Dense):
    """`keras.layers.Dense` whose kernel is split over the workers.

    Each worker holds kernel, gradient and optimizer's slots of U / N of the units, or
    of I / N of the inputs, and computes with these for the rows of all workers. It is
    made in the scope of a `DenseStrategy` or `DGCStrategy`, with the arguments of
    `keras.layers.Dense`; on one worker, and without a strategy, it is
    `keras.layers.Dense`. A step gives what one worker computes of the whole batch.

    All workers call a model with such layers together. `tf_dgc.joined(model)` returns
    an ordinary model to save.

    References:
        Krizhevsky: One weird trick for parallelizing convolutional neural networks,
        2014, https://arxiv.org/abs/1404.5997
        Shoeybi and others: Megatron-LM, 2019, https://arxiv.org/abs/1909.08053
    """

    _strategy: Any = None  # of which it is, if of one
    _band: Band | None = None

    def __init__(self, units: int, *args: Any, by: str = "columns", **kwargs: Any):
        """Take the arguments of `keras.layers.Dense`, and the way to cut the kernel.

        Args:
            units: U.
            *args: of `keras.layers.Dense`.
            by: "columns", where a worker computes some of the units, or "rows", where
                it takes some of the inputs: that sends less where there are fewer
                units than inputs, and nothing at all between a layer by columns and
                one by rows that alone reads its units.
            **kwargs: of `keras.layers.Dense`.

        Raises:
            ValueError: `by` is something else.
        """
        super().__init__(units, *args, **kwargs)
        if by not in ways.WAYS:
            raise ValueError(f'`by` must be "columns" or "rows". Received: by={by!r}')
        self.by = by
        _host.keras.take_any_inputs(self)  # what stayed away

    @property
    def is_split(self) -> bool:
        """Tell whether other workers have other parts of the kernel."""
        return self._band is not None and self._band.is_split

    def get_config(self) -> dict[str, Any]:
        """Return the arguments that the layer was made with."""
        return {**super().get_config(), "by": self.by}

    @tf.autograph.experimental.do_not_convert
    def build(self, input_shape: Any) -> None:
        """Make this worker's part of the kernel, and the bias; all workers call this.

        Raises:
            ValueError: there are several workers, and something cannot be split; names
                it.
        """
        strategy = tf.distribute.get_strategy()
        if not refusals.splits(self, strategy):
            super().build(input_shape)
            return
        over, shape = strategy.transport, (input_shape[-1], self.units)
        axis = ways.WAYS[self.by]
        own = Band(over.rank, over.size, shape[axis], axis)
        number = next(_numbers.setdefault(over, itertools.count()))
        self._strategy, self._band = strategy, own
        self._movement = Movement(strategy.mesh, f"split{number}")
        self._products = Products(self, strategy, own, self._movement)
        self._kernel = _made_kernel(self, strategy, own, shape)
        self._kernel.trainable = self.trainable  # once the layer has it
        regularizer = self.kernel_regularizer
        self._kernel.regularizer = regularizer and self._regularization
        self.bias = None
        if self.use_bias:
            self.bias = self.add_weight(
                name="bias",
                shape=(self.units,),
                initializer=self.bias_initializer,
                regularizer=self.bias_regularizer,
                constraint=self.bias_constraint,
            )
        self.input_spec = keras.layers.InputSpec(min_ndim=2, axes={-1: shape[0]})
        self.built = True

    def call(self, inputs: Any, training: Any = None) -> Any:
        """Compute the units of this worker's rows; all workers call this.

        Args:
            inputs: shape [..., I], dense; rows may be other ones, and as many others,
                on each worker.
            training: is not used.

        Returns:
            shape [..., U].

        Raises:
            TypeError: the inputs are sparse or ragged.
        """
        if not self.is_split:
            if isinstance(inputs, Away):
                inputs = inputs.home()
            return super().call(inputs, training=training)
        refusals.refuse_inputs(self, inputs)
        if self.by == "rows":
            return self._products.by_rows(inputs)
        return self._products.by_columns(tf.convert_to_tensor(inputs))

    def _regularization(self, kernel: Any) -> tf.Tensor:
        """Return the loss of the whole kernel, with the gradient of the own part."""
        own = tf.convert_to_tensor(self.kernel_regularizer(kernel))
        return self._movement.summed(own) if self.is_split else own

    def enable_lora(self, *args: Any, **kwargs: Any) -> None:
        """Raise ValueError where the kernel is split."""
        refusals.refuse_later(self, "LoRA")
        super().enable_lora(*args, **kwargs)

    def quantize(self, *args: Any, **kwargs: Any) -> None:
        """Raise ValueError where the kernel is split."""
        refusals.refuse_later(self, "quantization")
        super().quantize(*args, **kwargs)

    # Files.

    def save_own_variables(self, store: Any) -> None:
        """Save the layer; not a part of it.

        Raises:
            ValueError: there are several workers.
        """
        if bands.are_kept_elsewhere() and self._band is not None:
            if self.bias is not None:
                store["1"] = self.bias
            return
        if self.is_split:
            bands.refuse_to_save([self._kernel], f"The model of {self.name!r}")
        super().save_own_variables(store)

    def load_own_variables(self, store: Any) -> None:
        """Take over the whole kernel of a file, of which this worker cuts its part."""
        own = self._band
        if own is None or not self.built:
            super().load_own_variables(store)
            return
        if self.bias is not None:
            self.bias.assign(store["1"])
        if "0" in store or not bands.are_kept_elsewhere():
            self._kernel.assign(_own_part(store, own, self._kernel.shape, self.name))


def _made_kernel(
    layer: SplitDense, strategy: Any, own: Band, shape: tuple[int, int]
) -> Any:
    """Make this worker's part of the kernel of a layer.

    Args:
        layer: that is being built.
        strategy: of it.
        own: place of the part in the kernel.
        shape: of the whole kernel.

    Raises:
        ValueError: there are several workers, and something cannot be split.
    """
    over = strategy.transport
    with tf.init_scope(), strategy.scope():  # now, even if a function is traced
        if over.size > 1:
            refusals.refuse(layer, strategy)
            refusals.compare(layer, over, shape)
        kernel = draws.variable(
            layer.kernel_initializer, shape, own, layer.variable_dtype, over
        )
    kernel.constraint = layer.kernel_constraint
    return kernel


def _own_part(store: Any, own: Band, shape: Sequence[int], name: str) -> np.ndarray:
    """Return this worker's part of the kernel of a file.

    Args:
        store: of a layer in the file.
        own: place of the part in the kernel.
        shape: of the part.
        name: of the layer.

    Raises:
        ValueError: the file has no kernel, or one of another shape.
    """
    if "0" not in store:
        raise ValueError(
            f"The file has no kernel of the split layer {name!r}: it is a "
            "part of a backup, which `tf_dgc.callbacks.BackupState` reads"
        )
    whole, wanted = store["0"], own.shape(shape)
    if tuple(whole.shape) != wanted:
        raise ValueError(
            f"The kernel of the split layer {name!r} must be of shape "
            f"{wanted}. Received: {tuple(whole.shape)}"
        )
    return own.cut(whole)
