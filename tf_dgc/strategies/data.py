"""Each worker's share of a dataset of global batches. Pure tf.data."""

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tf_dgc import _host
from tf_dgc.strategies import provenance, split
from tf_dgc.strategies.elements import Layout, batch_size_of
from tf_dgc.strategies.slicing import is_nothing
from tf_dgc.strategies.split import Note
from tf_dgc.transports.base import Transport
from tf_dgc.values import require

_logger = logging.getLogger("tf_dgc")
_Policy = tf.data.experimental.AutoShardPolicy
# All workers read the same.
_ALIKE = (_Policy.AUTO, _Policy.DATA)


class FirstTargets:
    """Tells whether workers read the same batches, by the targets of the first.

    Only targets are looked at, and of these only what does not depend on random
    operations: augmentation may give each worker other ones.

    Each dataset that is split begins anew: what was found about one is not held
    against another.

    Attributes:
        mark: shape [], int64, of the first targets; 0 before there were any.
        compared: shape [], bool, whether the workers have compared their marks.
    """

    def __init__(self) -> None:
        """Create the variables, outside of any graph."""
        own = tf.VariableSynchronization.NONE  # each worker's
        self._count = 0
        with tf.init_scope(), tf.device("CPU:0"):
            self.mark, self._current = (
                tf.Variable(
                    tf.zeros([], tf.int64), trainable=False, synchronization=own
                )
                for _ in range(2)
            )
            self.compared = tf.Variable(False, trainable=False, synchronization=own)

    def begin(self) -> Note:
        """Begin anew, with a dataset.

        Returns:
            What looks at its batches, by a function that returns tensors of one.
        """
        self._count += 1
        number = self._count
        self._current.assign(number)
        self.mark.assign(0)
        self.compared.assign(False)

        def look(read: Callable[[], list[tf.Tensor]]) -> None:
            # An iterator of another dataset may still read ahead.
            new = (self._current == number) & (self.mark == 0)
            tf.cond(new, lambda: self._take(read()), lambda: None)

        return look

    def _take(self, parts: list[tf.Tensor]) -> None:
        if parts:
            texts = [tf.io.serialize_tensor(part) for part in parts]
            hashes = tf.strings.to_hash_bucket_fast(tf.stack(texts), 2**31 - 1)
            weights = tf.range(1, 2 * len(parts), 2, tf.int64)
            self.mark.assign(1 + tf.reduce_sum(hashes * weights))

    def compare(self, transport: Transport, of: Sequence[tf.Tensor]) -> None:
        """Compare what was read before the first step with that of other workers.

        Args:
            transport: of the strategy.
            of: what was computed of the first batch. Nothing else tells TensorFlow
                that a step which reads its batch itself reads before it compares.

        Raises:
            tf.errors.InvalidArgumentError: it differs; on all workers.
        """

        def gather() -> None:
            found = transport.all_gather(self.mark.read_value(), "first_targets")
            self.compared.assign(True)
            text = (
                "The workers read different data; all stop before the first step. All "
                "must read the same batches, of which each takes its rows: shuffle "
                "with a seed (keras.utils.set_random_seed) what NumPy or Python "
                "shuffle, or, where data are each worker's own, say so by "
                "AutoShardPolicy.OFF. Checksums of the first targets, by rank:"
            )
            alike = tf.reduce_all(found == found[0])
            require(alike, lambda: [text, found], summarize=-1)

        with tf.control_dependencies(of):
            with tf.device("CPU:0"):
                compared = self.compared.read_value()
            tf.cond(compared, lambda: None, gather)


def _known(targets: Any, random: Any) -> list[tf.Tensor]:
    """Return the tensors of targets that are there and do not depend on chance."""
    pairs = zip(tf.nest.flatten(targets), tf.nest.flatten(random), strict=True)
    known = [part for part, drawn in pairs if not (drawn or is_nothing(part))]
    return list(tf.nest.flatten(known, expand_composites=True))


def share_of(
    dataset: tf.data.Dataset, rank: int, size: int, first: FirstTargets | None = None
) -> tf.data.Dataset:
    """Split every global batch over the workers, in the order of rank.

    All workers read the same batches and take their own rows of each, so all take the
    same number of steps whatever the length of the dataset. Where N does not divide a
    batch, the first ranks get a row more; of fewer rows than workers the last ranks get
    none.

    With `AutoShardPolicy.OFF` the dataset is taken to be this worker's own, and each
    of its batches is used up in N steps. With FILE and HINT TensorFlow makes it this
    worker's own: by files, or where SHARD_HINT stands.

    Args:
        dataset: of batches: tensors, ragged or sparse tensors in any structure, rows
            along the first axis.
        rank: of this worker.
        size: N.
        first: looks at the first batch, where all workers read the same.

    Raises:
        ValueError: the dataset is not batched, or cannot be sharded as it asks.
    """
    if size == 1:
        return dataset
    layout = Layout(dataset.element_spec, size, batch_size_of(dataset))
    if layout.shared and rank == 0:
        _tell_shared(layout.shared)
    policy = _policy_of(dataset)
    note = first.begin() if first is not None and policy in _ALIKE else None
    if policy in _ALIKE:
        share = split.share_of(dataset, rank, size, note)
        if share is None:
            share = _own_rows(dataset, layout, rank, note)
    elif policy == _Policy.OFF:
        share = _all_rows(dataset, layout, size)
    else:
        share = _sharded(dataset, layout, rank, size)
    # Where Keras reads by threads of its own, what is read ahead is lost to an epoch.
    reads_ahead = dataset.options().autotune.enabled is not False
    return share.prefetch(1) if reads_ahead else share


@functools.cache
def _tell_shared(names: tuple[str, ...]) -> None:
    _logger.warning(
        "All workers get these tensors of a batch whole, as they have another number "
        f"of rows: {', '.join(names)}. Places of rows of the others, if they hold any, "
        "are not those that a worker has"
    )


def may_be_unequal(dataset: tf.data.Dataset) -> bool:
    """Tell whether TensorFlow shards a dataset, into shards of any lengths."""
    return _policy_of(dataset) in (_Policy.FILE, _Policy.HINT)


def is_own(dataset: tf.data.Dataset) -> bool:
    """Tell whether a dataset, or its shard, is of its worker alone."""
    return _policy_of(dataset) not in _ALIKE


def _policy_of(dataset: tf.data.Dataset) -> Any:
    return dataset.options().experimental_distribute.auto_shard_policy


def _own_rows(
    dataset: tf.data.Dataset,
    layout: Layout,
    rank: int,
    note: Note | None,
) -> tf.data.Dataset:
    """Take rows of whole batches."""
    spec, memory = dataset.element_spec, layout.memory()
    random = tf.nest.pack_sequence_as(spec, provenance.random_parts(dataset))

    @tf.autograph.experimental.do_not_convert
    def own_rows(*element: Any) -> Any:
        if note is not None and len(element) > 1:
            note(lambda: _known(element[1], random[1]))
        return layout.rows_of(element, rank, memory)

    return dataset.map(own_rows)


def _all_rows(dataset: tf.data.Dataset, layout: Layout, size: int) -> tf.data.Dataset:
    """Use up each batch in N steps."""
    memory = layout.memory()

    @tf.autograph.experimental.do_not_convert
    def all_rows(*element: Any) -> tf.data.Dataset:
        ranks = tf.data.Dataset.range(size)
        return ranks.map(lambda r: layout.rows_of(element, r, memory))

    return dataset.flat_map(all_rows)


def _sharded(
    dataset: tf.data.Dataset, layout: Layout, rank: int, size: int
) -> tf.data.Dataset:
    """Let TensorFlow shard a dataset, and divide its batches."""
    policy = _policy_of(dataset)
    hinted = any(map(_host.datasets.is_hinted, _upstream(dataset)))
    if policy == _Policy.HINT and not hinted:
        raise ValueError(
            "`AutoShardPolicy.HINT` needs `dataset.shard(SHARD_HINT, SHARD_HINT)`, of "
            "tf.data.experimental.SHARD_HINT, where the data of workers part. "
            "Received: a dataset without it, of which all workers would read all"
        )
    try:
        own, divided = _host.datasets.auto_sharded(
            dataset, size, rank, divide=layout.divides_all
        )
    except tf.errors.OpError as error:
        told = error.message.rpartition("}} ")[2].partition("input:")[0]
        told = " ".join(told.replace("goo.gle/debugstr", "").split())
        raise ValueError(
            f"`AutoShardPolicy.{_Policy(policy).name}` needs files that are read by "
            "TFRecordDataset, TextLineDataset or the like, or by `interleave` of such. "
            "Where `map` reads them, leave AUTO. Received: "
            f"{told[:300]}"
        ) from error
    files = min(_lengths_of_lists(dataset), default=size)
    if policy == _Policy.FILE and files < size:
        raise ValueError(
            "`AutoShardPolicy.FILE` needs at least as many files as workers. Received: "
            f"{files} files, {size} workers. Write the data to more files, or leave "
            "AUTO, by which each worker takes its rows of every batch"
        )
    return own if divided else _all_rows(own, layout, size)


def _upstream(dataset: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
    yield dataset
    for each in _host.tensorflow.inputs_of(dataset):
        yield from _upstream(each)


def _is_list(dataset: tf.data.Dataset) -> bool:
    """Tell whether elements are those of a source, in any order."""
    sources = _host.tensorflow.inputs_of(dataset)
    rearranges = _host.datasets.rearranges(dataset)
    return not sources or (rearranges and all(map(_is_list, sources)))


def _lengths_of_lists(dataset: tf.data.Dataset) -> list[int]:
    """Return how many files are read, as far as that is known of lists of files."""
    if _is_list(dataset):
        found = [int(each.cardinality()) for each in _upstream(dataset)]
        return [count for count in found if count >= 0]
    sources = _host.tensorflow.inputs_of(dataset)
    return [count for each in sources for count in _lengths_of_lists(each)]
