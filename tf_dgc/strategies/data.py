"""Each worker's share of a dataset of global batches. Pure tf.data."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_dgc.strategies import provenance
from tf_dgc.transports.base import Transport
from tf_dgc.values import require

_Policy = tf.data.experimental.AutoShardPolicy
_TENSORS = (tf.Tensor, tf.RaggedTensor, tf.SparseTensor)


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

    def of(self, dataset: tf.data.Dataset) -> Callable[[tuple[Any, ...]], None]:
        """Begin anew, with a dataset.

        Returns:
            What looks at its batches: (inputs, targets, ...), or without targets.
        """
        random = tf.nest.pack_sequence_as(
            dataset.element_spec, provenance.random_parts(dataset)
        )
        self._count += 1
        number = self._count
        self._current.assign(number)
        self.mark.assign(0)
        self.compared.assign(False)

        def take(element: tuple[Any, ...]) -> None:
            if len(element) > 1:
                # An iterator of another dataset may still read ahead.
                new = (self._current == number) & (self.mark == 0)
                self._take(new, _known(element[1], random[1]))

        return take

    def _take(self, new: tf.Tensor, parts: list[tf.Tensor]) -> None:
        def note() -> None:
            texts = [tf.io.serialize_tensor(part) for part in parts]
            hashes = tf.strings.to_hash_bucket_fast(tf.stack(texts), 2**31 - 1)
            weights = tf.range(1, 2 * len(parts), 2, tf.int64)
            self.mark.assign(1 + tf.reduce_sum(hashes * weights))

        if parts:
            tf.cond(new, note, lambda: None)

    def compare(self, transport: Transport) -> None:
        """Compare what was read before the first step with that of other workers.

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

        tf.cond(self.compared, lambda: None, gather)


def _known(targets: Any, random: Any) -> list[tf.Tensor]:
    """Return the tensors of targets that are there and do not depend on chance."""
    pairs = zip(tf.nest.flatten(targets), tf.nest.flatten(random), strict=True)
    known = [part for part, drawn in pairs if not (drawn or _is_nothing(part))]
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
    of its batches is used up in N steps.

    Args:
        dataset: of batches: tensors, ragged or sparse tensors in any structure, rows
            along the first axis.
        rank: of this worker.
        size: N.
        first: looks at the first batch, where all workers read the same.

    Raises:
        ValueError: the dataset is not batched, or asks to be sharded by file.
    """
    if size == 1:
        return dataset
    for spec in tf.nest.flatten(dataset.element_spec):
        if getattr(spec, "shape", None) is not None and spec.shape.rank == 0:
            raise ValueError(
                f"The dataset must be batched, to be split over {size} workers: call "
                "`dataset.batch(global_batch_size)`. Received: elements "
                f"{dataset.element_spec}"
            )
    policy = dataset.options().experimental_distribute.auto_shard_policy
    if policy in (_Policy.FILE, _Policy.HINT):
        raise ValueError(
            "`auto_shard_policy` must be AUTO, DATA or OFF. Received: "
            f"{_Policy(policy).name}. "
            "To read different files on each worker, shard the list of files yourself, "
            "`files.shard(strategy.num_replicas_in_sync, strategy.rank)`, and set OFF."
        )

    spec = dataset.element_spec
    alike = policy != _Policy.OFF
    take = first.of(dataset) if first is not None and alike else None

    def own_rows(*element: Any) -> Any:
        if take is not None:
            take(element)
        return rows_of(spec, element, rank, size)

    def all_rows(*element: Any) -> tf.data.Dataset:
        ranks = tf.data.Dataset.range(size)
        return ranks.map(lambda r: rows_of(spec, element, r, size))

    share = dataset.map(own_rows) if alike else dataset.flat_map(all_rows)
    # Where Keras reads by threads of its own, what is read ahead is lost to an epoch.
    reads_ahead = dataset.options().autotune.enabled is not False
    return share.prefetch(1) if reads_ahead else share


def rows_of(spec: Any, element: tuple[Any, ...], rank: Any, size: int) -> Any:
    """Return one worker's rows of a global batch, in the structure of `spec`.

    Args:
        spec: any structure of `element`'s parts.
        element: of tensors, None among them.
        rank: an integer, or a tensor of shape [] and any integer type.
        size: N.
    """
    flat = tf.nest.flatten(element)
    count = tf.cast(
        next(_row_count(part) for part in flat if not _is_nothing(part)), "int64"
    )
    rank = tf.cast(rank, count.dtype)
    each, more = count // size, count % size
    start = rank * each + tf.minimum(rank, more)
    stop = start + each + tf.cast(rank < more, count.dtype)
    rows = [_slice(part, start, stop, size) for part in flat]
    return tf.nest.pack_sequence_as(spec, rows)


def row_count(structure: Any) -> Any:
    """Return how many rows the tensors of a structure have.

    Returns:
        An integer where that is known of tensors of a graph, a tensor of shape [] where
        it is not; None where they have no rows, or not as many.
    """
    flat = [part for part in tf.nest.flatten(structure) if isinstance(part, _TENSORS)]
    if not flat or any(part.shape.rank in (None, 0) for part in flat):
        return None
    known = {part.shape[0] for part in flat} - {None}
    if len(known) > 1:
        return None
    return known.pop() if known else tf.cast(_row_count(flat[0]), tf.int32)


def at_least_one_row(structure: Any) -> tuple[Any, tf.Tensor]:
    """Add a row of zeros to what has none, as some layers refuse that.

    Args:
        structure: tensors with rows along the first axis, ragged and sparse ones too,
            and anything that is no tensor.

    Returns:
        The structure, and how many rows it had: shape [], int32.
    """
    flat = tf.nest.flatten(structure)
    first = next(part for part in flat if isinstance(part, _TENSORS))
    count = tf.cast(_row_count(first), tf.int32)
    filled = [
        _filled(part, count == 0) if isinstance(part, _TENSORS) else part
        for part in flat
    ]
    return tf.nest.pack_sequence_as(structure, filled), count


def _filled(part: Any, empty: tf.Tensor) -> Any:
    """Return a tensor with a row of zeros more, where it is empty."""
    if isinstance(part, tf.SparseTensor):
        shape = part.dense_shape
        more = tf.cast(empty, shape.dtype)
        shape = tf.concat([shape[:1] + more, shape[1:]], axis=0)
        return tf.SparseTensor(part.indices, part.values, shape)
    if isinstance(part, tf.RaggedTensor):
        inner = part.flat_values.shape[1:]
        row = tf.zeros([1] * (1 + part.ragged_rank) + inner, part.dtype)
        more = tf.RaggedTensor.from_tensor(
            row, ragged_rank=part.ragged_rank, row_splits_dtype=part.row_splits.dtype
        )
        return tf.concat([part, more[: tf.cast(empty, tf.int32)]], axis=0)

    def with_row() -> tf.Tensor:
        row = tf.zeros(tf.concat([[1], tf.shape(part)[1:]], axis=0), part.dtype)
        return tf.concat([part, row], axis=0)

    filled = tf.cond(empty, with_row, lambda: tf.identity(part))
    filled.set_shape([part.shape[0] or None, *part.shape[1:]])
    return filled


def first_of(dataset: tf.data.Dataset) -> Any:
    """Return the first element, with None where Keras put something else for it."""
    element = next(iter(dataset))
    return tf.nest.map_structure(
        lambda part: None if _is_nothing(part) else part, element
    )


def _is_nothing(part: Any) -> bool:
    """Tell whether this is None, or what Keras puts for it into a dataset."""
    return part is None or isinstance(part, tf.experimental.Optional)


def _row_count(part: Any) -> Any:
    if isinstance(part, tf.RaggedTensor):
        return part.nrows()
    return (part.dense_shape if isinstance(part, tf.SparseTensor) else tf.shape(part))[
        0
    ]


def _slice(part: Any, start: tf.Tensor, stop: tf.Tensor, size: int) -> Any:
    if _is_nothing(part):
        return part
    if isinstance(part, tf.SparseTensor):
        rest = part.dense_shape[1:]
        begin = tf.concat([[start], tf.zeros_like(rest)], axis=0)
        return tf.sparse.slice(part, begin, tf.concat([[stop - start], rest], axis=0))
    rows = part[start:stop]
    if not isinstance(rows, tf.Tensor) or rows.shape.rank is None:
        return rows
    whole = part.shape[0]
    even = whole is not None and whole > 0 and whole % size == 0
    # Some layers refuse a batch that is known to be empty, not one that is empty.
    length = whole // size if even else None
    return tf.compat.v1.placeholder_with_default(rows, [length, *part.shape[1:]])
