"""Compressed changes of workers, which meet as messages on a server.

Of a worker, with c its change of the parameters since it has fetched:

    v <- decay * v + c      what was not sent, and the change
    s <- the largest elements of v, as signs or whatever `value_dtype` says
    v <- v - s              once s was in a round; else v stays as it was before

A message is as that of `compression/message.py`. Messages are decoded where they are,
so that a worker sends no more than its own; and each that was in a round may fetch the
messages of it in the place of parameters.

Axes: W workers, P arena elements, K message slots.
"""

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tf_dgc.compression import arena, dgc, message, selection
from tf_dgc.compression.arena import Layout
from tf_dgc.config import DGCConfig
from tf_dgc.exchanges.inplace import own_variable
from tf_dgc.exchanges.modes import Combining
from tf_dgc.servers.arrivals import Arrived
from tf_dgc.servers.members import Members
from tf_dgc.servers.shared import Servers

_KEPT = 2  # rounds whose messages are there: the last one, and that to come


def form_of(layout: Layout, config: DGCConfig) -> message.Format:
    """Return the form of all messages."""
    slots = sum(selection.slots_per_segment(layout, config.sparsity))
    begins = [segment.offset for segment in layout.segments]
    return message.make_format(slots, layout.size, config.value_dtype, begins)


def read(form: message.Format, messages: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Return positions and values, each of shape [W, K]; P and 0 in unused slots."""
    contents = message.unpack(form, messages)
    return contents.positions, message.numbers(form, contents)


def combined(
    form: message.Format, messages: tf.Tensor, weights: tf.Tensor, combining: Combining
) -> tf.Tensor:
    """Return the sum of what messages say, weighted: the same bits everywhere.

    Args:
        form: of the messages.
        messages: shape [W, words], int32.
        weights: shape [W], float32; 0 of those that do not count.
        combining: by senders an element counts as if all had sent the mean of those
            that did; see `selection.average`.

    Returns:
        shape [P], float32; 0 where nobody sent.
    """
    positions, values = read(form, messages)
    nothing, by = tf.zeros([form.size + 1]), weights[:, tf.newaxis]  # P: unused slots
    total = selection.densify(nothing, positions, by * values)[: form.size]
    if not combining.senders:
        return total
    ones = by * tf.ones_like(values)
    senders = selection.densify(nothing, positions, ones)[: form.size]
    scale = tf.math.divide_no_nan(tf.reduce_sum(weights), senders)
    return tf.minimum(scale, selection.FARTHEST) * total


class Message(NamedTuple):
    """Message of a change, and what is left of it."""

    words: tf.Tensor  # shape [words], int32
    left: tf.Tensor  # shape [P], float32: v, once the message was in a round


class UnsentChanges:
    """Residual of a worker: changes that it has not sent.

    Attributes:
        v: shape [P], float32.
        sent: shape [], int64: messages that were in a round.
    """

    def __init__(
        self, layout: Layout, config: DGCConfig, decay: float, device: str
    ) -> None:
        """Create the variables, zero, outside of any graph."""
        self._layout, self._config, self._decay = layout, config, decay
        self.form = form_of(layout, config)
        with tf.init_scope(), tf.device(device):
            self.v = own_variable(tf.zeros([layout.size]), "round_residual")
        with tf.init_scope(), tf.device("CPU:0"):
            self.sent = own_variable(tf.zeros([], tf.int64), "rounds_sent")

    def message(self, changes: Sequence[tf.Tensor]) -> Message:
        """Select what is to be sent; nothing changes until `commit`."""
        v = self._decay * self.v + arena.flatten(self._layout, changes)
        words = dgc.send(
            v,
            selection.peaks(v),
            form=self.form,
            layout=self._layout,
            sparsities=[self._config.sparsity],
            config=self._config,
            step=self.sent.read_value(),
        )
        words = tf.ensure_shape(words, [self.form.words])
        positions, values = read(self.form, words[tf.newaxis])
        nothing = tf.zeros([self.form.size + 1])
        sent = selection.densify(nothing, positions, values)[: self.form.size]
        return Message(words, v - sent)

    def commit(self, left: tf.Tensor) -> None:
        """Keep what is left of a message that was in a round."""
        self.v.assign(left)
        self.sent.assign_add(1)


class ServedMessages:
    """The messages of all workers, on server 0."""

    def __init__(
        self,
        name: str,
        servers: Servers,
        members: Members,
        form: message.Format,
        combining: Combining,
    ) -> None:
        """Make the variables."""
        self._members, self._form, self._combining = members, form, combining
        workers = members.workers
        rows = [_KEPT * workers]
        self._words = servers.variable(
            f"{name}.messages", tf.int32, [*rows, form.words]
        )
        # Of each worker in the mean; 0 of those that were not in the round.
        self._weights = servers.variable(f"{name}.message_weights", tf.float32, rows)

    def begin(self) -> None:
        """Give first values."""
        for variable in (self._words, self._weights):
            variable.assign(tf.zeros(variable.shape, variable.dtype))

    def _rows(self, step: tf.Tensor) -> tf.Tensor:
        """Return where a round's messages are: shape [W], int64."""
        workers = self._members.workers
        return step % _KEPT * workers + tf.range(workers, dtype=tf.int64)

    def give(self, words: tf.Tensor, step: tf.Tensor) -> None:
        """Put this worker's message there.

        Args:
            words: of the message.
            step: number of the round, shape [], int64.
        """
        row = self._rows(step)[self._members.index]
        self._words.scatter_update(tf.IndexedSlices(words[tf.newaxis], row[tf.newaxis]))

    def mean(self, arrived: Arrived, step: tf.Tensor) -> tf.Tensor:
        """Return the mean of those that have come: shape [P], float32, on server 0."""
        with tf.device(self._words.device):
            rows, workers = self._rows(tf.identity(step)), self._members.workers
            where = tf.identity(arrived.workers)[:, tf.newaxis]
            shape = tf.constant([workers], tf.int64)
            weights = tf.scatter_nd(where, tf.identity(arrived.weights), shape)
            self._weights.scatter_update(tf.IndexedSlices(weights, rows))
            words = self._words.sparse_read(rows)
            words = tf.ensure_shape(words, [workers, self._form.words])
            return combined(self._form, words, weights, self._combining)

    def fetch(self, step: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the mean of a round, computed here, and the bytes of its messages.

        Args:
            step: number of the round, shape [], int64.
        """
        workers = self._members.workers
        with tf.device(self._words.device):
            rows = self._rows(tf.identity(step))
            weights = self._weights.sparse_read(rows)
            came = tf.where(weights > 0)[:, 0]
            words = self._words.sparse_read(tf.gather(rows, came))
        with tf.device("CPU:0"):
            came, words = tf.identity(came), tf.identity(words)
            weights = tf.ensure_shape(tf.identity(weights), [workers])
            shape = tf.constant([workers, self._form.words], tf.int64)
            rows = tf.scatter_nd(came[:, tf.newaxis], words, shape)
            rows = tf.ensure_shape(rows, [workers, self._form.words])
            mean = combined(self._form, rows, weights, self._combining)
            return mean, 4 * tf.size(words, tf.int64)
