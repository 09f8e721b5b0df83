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
from typing import Any

import keras
import tensorflow as tf

from tf_dgc import _host, bands
from tf_dgc.bands import Band
from tf_dgc.layers import draws, logits, refusals, ways
from tf_dgc.layers.away import Away, Where
from tf_dgc.layers.movement import Movement, product
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
        self._movement = Movement(over, f"split{number}")
        with tf.init_scope(), strategy.scope():  # now, even if a function is traced
            if over.size > 1:
                refusals.refuse(self, strategy)
                refusals.compare(self, over, shape)
            self._kernel = draws.variable(
                self.kernel_initializer, shape, own, self.variable_dtype, over
            )
        self._kernel.trainable = self.trainable
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
            return self._by_rows(inputs)
        return self._by_columns(tf.convert_to_tensor(inputs))

    def _by_rows(self, inputs: Any) -> tf.Tensor:
        own: Any = self._band
        if isinstance(inputs, Away) and inputs.place.own.width == own.width:
            parts = tf.cast(inputs.parts, self.compute_dtype)
            _, _, rows, form = inputs.place
        else:
            x = tf.cast(tf.convert_to_tensor(inputs), self.compute_dtype)
            flat, rows, form = self._padded(x)
            beyond = own.workers * own.width - own.length
            flat = tf.pad(flat, [[0, 0], [0, beyond]])
            flat = tf.reshape(flat, [-1, own.workers, own.width])
            parts = self._movement.exchanged(tf.transpose(flat, [1, 0, 2]), "x")
        sums = self._movement.scattered(self._product(parts), "y")[:rows]
        return self._finished(sums, form, inputs.shape[:-1], self._bias())

    def _by_columns(self, inputs: tf.Tensor) -> Any:
        own: Any = self._band
        x = tf.cast(inputs, self.compute_dtype)
        flat, rows, form = self._padded(x)
        parts = self._product(self._movement.gathered(flat, "x"))
        bias = self._bias()

        def home() -> tf.Tensor:
            found = tf.transpose(self._movement.exchanged(parts, "y"), [1, 0, 2])
            found = tf.reshape(found, [-1, own.workers * own.width])
            own_rows = found[:rows, : self.units]
            return self._finished(own_rows, form, x.shape[:-1], bias)

        model = self._share.model
        ends = logits.is_last(self, model)
        if not ends and not ways.feeds_rows(self, model):
            return home()
        place = Where(self._movement, own, rows, form)
        away = parts
        if bias is not None:
            shared = self._movement.shared(tf.cast(bias, parts.dtype), own.width)
            away += shared[:, tf.newaxis]
        shape = x.shape[:-1].concatenate(self.units)
        if not ends:
            away = away if self.activation is None else self.activation(away)
            # Where there are no units, none of an activation, either.
            beyond = [[0, 0], [0, 0], [0, own.width - own.used]]
            away = tf.pad(away[:, :, : own.used], beyond)
            return Away(away, place, shape, home)
        found = logits.Logits(away, place, shape, home)
        found.probabilities = self.activation is keras.activations.softmax
        return found

    def _padded(self, x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Return the rows of [..., I] as [M, I], how many there are, and their form."""
        flat = tf.reshape(x, [-1, x.shape[-1]])
        rows = tf.shape(flat, tf.int64)[0]
        flat = tf.pad(flat, [[0, self._movement.most(rows) - rows], [0, 0]])
        return flat, rows, tf.shape(x)[:-1]

    def _product(self, parts: tf.Tensor) -> tf.Tensor:
        kernel = tf.cast(self._kernel.value, parts.dtype)
        return product(parts, kernel, self._share.weights.factors)

    def _bias(self) -> tf.Tensor | None:
        # Metrics read the outputs when the step has changed the bias.
        return None if self.bias is None else tf.identity(self.bias.value)

    def _finished(
        self, flat: tf.Tensor, form: tf.Tensor, shape: Any, bias: tf.Tensor | None
    ) -> tf.Tensor:
        """Return outputs, [..., U], of sums of this worker's rows, [m, U]."""
        y = tf.reshape(flat, tf.concat([form, [self.units]], 0))
        y = tf.ensure_shape(y, [*shape, self.units])
        if self._share is not None:
            self._share.step.note_rows(y)
        y = y if bias is None else keras.ops.add(y, bias)
        return y if self.activation is None else self.activation(y)

    @property
    def _share(self) -> Any:
        return self._strategy.inner.share

    def _regularization(self, kernel: Any) -> tf.Tensor:
        """Return the loss of the whole kernel, with the gradient of the own part."""
        own = tf.convert_to_tensor(self.kernel_regularizer(kernel))
        return self._movement.summed(own) if self.is_split else own

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
        if "0" not in store:
            if not bands.are_kept_elsewhere():
                raise ValueError(
                    f"The file has no kernel of the split layer {self.name!r}: it is a "
                    "part of a backup, which `tf_dgc.callbacks.BackupState` reads"
                )
            return
        whole, wanted = store["0"], own.shape(self._kernel.shape)
        if tuple(whole.shape) != wanted:
            raise ValueError(
                f"The kernel of the split layer {self.name!r} must be of shape "
                f"{wanted}. Received: {tuple(whole.shape)}"
            )
        self._kernel.assign(own.cut(whole))
