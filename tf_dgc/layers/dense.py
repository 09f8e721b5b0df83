"""A dense layer of whose kernel each worker holds, and trains, a part.

Axes: N workers, M rows of the worker that has most, I inputs, U units, W = ceil(U / N)
columns of a part.

    X* = all-gather(X)              [N, M, I]
    Y_r = X* W_r                    [N, M, W], the columns of worker r
    Y = all-to-all(Y_r)             [N, M, W] -> [M, U]; bias and activation follow

Backwards, the gradient of W_r is complete where it is, and what goes to the inputs is
summed over the workers. Only activations travel.
"""

import itertools
import sys
import weakref
from typing import Any

import keras
import tensorflow as tf

from tf_dgc import columns
from tf_dgc.columns import Columns
from tf_dgc.config import AveragingConfig, DownpourConfig
from tf_dgc.layers import draws, logits, trials
from tf_dgc.layers.movement import Movement, product
from tf_dgc.strategies.base import BaseStrategy
from tf_dgc.transports import Transport, handshake
from tf_dgc.transports.horovod import import_horovod

_numbers: weakref.WeakKeyDictionary[Transport, Any] = weakref.WeakKeyDictionary()


@keras.saving.register_keras_serializable(package="tf_dgc")
class SplitDense(keras.layers.Dense):
    """`keras.layers.Dense` whose kernel is split over the workers by columns.

    Each worker holds kernel, gradient and optimizer's slots of U / N of the units, and
    computes these for the rows of all workers. It is made in the scope of a
    `DenseStrategy` or `DGCStrategy`, with the arguments of `keras.layers.Dense`; on one
    worker, and without a strategy, it is `keras.layers.Dense`. A step gives what one
    worker computes of the whole batch.

    All workers call a model with such layers together. `tf_dgc.joined(model)` returns
    an ordinary model to save.

    References:
        Krizhevsky: One weird trick for parallelizing convolutional neural networks,
        2014, https://arxiv.org/abs/1404.5997
    """

    _strategy: Any = None  # of which it is, if of one
    _columns: Columns | None = None

    @property
    def is_split(self) -> bool:
        """Whether other workers have other columns of the kernel."""
        return self._columns is not None and self._columns.workers > 1

    def build(self, input_shape: Any) -> None:
        """Make this worker's part of the kernel, and the bias; all workers call this.

        Raises:
            ValueError: there are several workers, and something cannot be split; names
                it.
        """
        strategy = tf.distribute.get_strategy()
        if isinstance(getattr(strategy, "config", None), DownpourConfig):
            self._refuse(strategy)  # which has a transport of one worker
        if not _splits(strategy):
            _refuse_horovod(self.name)
            super().build(input_shape)
            return
        over = strategy.transport
        if over.size > 1:
            self._refuse(strategy)
        rows, own = input_shape[-1], Columns(over.rank, over.size, self.units)
        if over.size > 1:
            kind = type(self.kernel_initializer).__name__
            form = {"inputs": rows, "units": self.units, "kernel_initializer": kind}
            handshake.agree(over, f"split layer {self.name!r}", form)
        number = next(_numbers.setdefault(over, itertools.count()))
        self._strategy, self._columns = strategy, own
        logits.install()
        self._movement = Movement(over, f"split{number}")

        def draw(shape: Any, dtype: Any = None) -> tf.Tensor:
            columns.note(own)
            return draws.own_columns(self.kernel_initializer, rows, own, dtype, over)

        self._kernel = keras.Variable(
            draw,
            (rows, own.width),
            self.variable_dtype,
            name="kernel",
            synchronization="none",
        )
        self._kernel.constraint = self.kernel_constraint
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
        self.input_spec = keras.layers.InputSpec(min_ndim=2, axes={-1: rows})
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
            return super().call(inputs, training=training)
        if not isinstance(inputs, tf.Tensor | tf.Variable | keras.Variable):
            raise TypeError(
                f"`inputs` of the split layer {self.name!r} must be a dense tensor. "
                f"Received: inputs of type {type(inputs).__name__}"
            )
        x = tf.cast(inputs, self.compute_dtype)
        parts, rows = self._parts_of(tf.reshape(x, [-1, x.shape[-1]]))
        form, units = tf.shape(x)[:-1], self.units
        # Metrics read the outputs when the step has changed the bias.
        bias = None if self.bias is None else tf.identity(self.bias.value)

        def home(parts: tf.Tensor = parts) -> tf.Tensor:
            y = tf.reshape(self._brought(parts, rows), tf.concat([form, [units]], 0))
            y = tf.ensure_shape(y, [*x.shape[:-1], units])
            y = y if bias is None else keras.ops.add(y, bias)
            return y if self.activation is None else self.activation(y)

        if not logits.is_last(self, self._share.model):
            return home()
        place = self._place(rows, form)
        if bias is not None:
            shared = place.moves.shared(tf.cast(bias, parts.dtype), place.own.width)
            parts += shared[:, tf.newaxis]
        return logits.Logits(parts, place, x.shape[:-1].concatenate(units), home)

    def _place(self, rows: tf.Tensor, form: tf.Tensor) -> logits.Where:
        """Return what parts are of, for a loss that does not need them at home."""
        own: Any = self._columns
        softmax = self.activation is keras.activations.softmax
        return logits.Where(self._movement, own, rows, form, softmax)

    def _parts_of(self, x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Return own units of the rows of all, [N, M, W], of [m, I]; and m."""
        moves, share = self._movement, self._share
        rows = tf.shape(x, tf.int64)[0]
        x = tf.pad(x, [[0, moves.most(rows) - rows], [0, 0]])
        kernel = tf.cast(self._kernel.value, x.dtype)
        return product(moves.gathered(x), kernel, share.factors), rows

    def _brought(self, parts: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
        """Return what all workers have computed of this one's rows, [m, U]."""
        home = tf.transpose(self._movement.exchanged(parts, "y"), [1, 0, 2])
        wide = home.shape[1] * home.shape[2]
        return tf.reshape(home, [-1, wide])[:rows, : self.units]

    @property
    def _share(self) -> Any:
        return self._strategy.share

    def _regularization(self, kernel: Any) -> tf.Tensor:
        """Return the loss of the whole kernel, with the gradient of the own part."""
        own = tf.convert_to_tensor(self.kernel_regularizer(kernel))
        if not self.is_split:
            return own
        return self._movement.summed(own, lambda: self._share.whole)

    # What cannot be split.

    def _refuse(self, strategy: BaseStrategy) -> None:
        def refuse(rule: str, received: str) -> None:
            raise ValueError(
                f"The split layer {self.name!r} {rule} Received: {received}. Use "
                "`keras.layers.Dense` there"
            )

        if isinstance(strategy.config, AveragingConfig | DownpourConfig):
            refuse(
                "needs workers that meet in each step: DenseStrategy or DGCStrategy.",
                type(strategy).__name__,
            )
        if self.quantization_mode or self.lora_rank:
            refuse(
                "can have neither quantization nor LoRA.",
                f"quantization_mode={self.quantization_mode!r}, "
                f"lora_rank={self.lora_rank!r}",
            )
        given = self.kernel_constraint
        if given is not None and not trials.keeps_to_columns(given):
            refuse(
                "must have a `kernel_constraint` that looks at single columns.",
                f"kernel_constraint={given!r}",
            )
        given = self.kernel_regularizer
        if given is not None and not trials.sums_over_columns(given):
            refuse(
                "must have a `kernel_regularizer` that is a sum over columns.",
                f"kernel_regularizer={given!r}",
            )

    def enable_lora(self, *args: Any, **kwargs: Any) -> None:
        """Refuse, where the kernel is split.

        Raises:
            ValueError: it is.
        """
        self._refuse_later("LoRA")
        super().enable_lora(*args, **kwargs)

    def quantize(self, *args: Any, **kwargs: Any) -> None:
        """Refuse, where the kernel is split.

        Raises:
            ValueError: it is.
        """
        self._refuse_later("quantization")
        super().quantize(*args, **kwargs)

    def _refuse_later(self, what: str) -> None:
        if self.is_split:
            raise ValueError(
                f"The split layer {self.name!r} can have no {what}. Use "
                "`tf_dgc.joined(model)` first"
            )

    # Files.

    def save_own_variables(self, store: Any) -> None:
        """Save the layer; not a part of it.

        Raises:
            ValueError: there are several workers.
        """
        if columns.are_kept_elsewhere() and self._columns is not None:
            if self.bias is not None:
                store["1"] = self.bias
            return
        if self.is_split:
            columns.refuse_to_save([self._kernel], f"The model of {self.name!r}")
        super().save_own_variables(store)

    def load_own_variables(self, store: Any) -> None:
        """Take over the whole kernel of a file, of which this worker cuts its part."""
        own = self._columns
        if own is None or not self.built:
            super().load_own_variables(store)
            return
        if self.bias is not None:
            self.bias.assign(store["1"])
        if "0" not in store:
            if not columns.are_kept_elsewhere():
                raise ValueError(
                    f"The file has no kernel of the split layer {self.name!r}: it is a "
                    "part of a backup, which `tf_dgc.callbacks.BackupState` reads"
                )
            return
        whole, wanted = store["0"], (self._kernel.shape[0], self.units)
        if tuple(whole.shape) != wanted:
            raise ValueError(
                f"The kernel of the split layer {self.name!r} must be of shape "
                f"{wanted}. Received: {tuple(whole.shape)}"
            )
        self._kernel.assign(own.cut(whole))


def _splits(strategy: Any) -> bool:
    """Tell whether a strategy is one of workers, each of which computes its rows."""
    if not isinstance(strategy, BaseStrategy):
        return False
    size = strategy.transport.size
    alone = size == 1 and isinstance(strategy.config, AveragingConfig)
    return strategy.mesh.replicas == size and not alone


def _refuse_horovod(name: str) -> None:
    """Raise ValueError in a job of Horovod without a strategy."""
    if "horovod.tensorflow" not in sys.modules:
        return
    hvd = import_horovod()
    if hvd.is_initialized() and hvd.size() > 1:
        raise ValueError(
            f"The split layer {name!r} must be made in the scope of a DenseStrategy or "
            "DGCStrategy, where there are several workers; elastic jobs have none. "
            "Received: no strategy"
        )
