"""Each worker's share of a dataset of global batches. Pure tf.data."""

from typing import Any

import tensorflow as tf

from tf_dgc.transports.base import Transport

_Policy = tf.data.experimental.AutoShardPolicy


class FirstTargets:
    """Tells whether workers read the same batches, by the targets of the first.

    Only targets are looked at: random augmentation may make the inputs of each worker
    other ones.

    Attributes:
        mark: shape [], int64, of the first targets; 0 before there were any.
        compared: shape [], bool, whether the workers have compared their marks.
    """

    def __init__(self) -> None:
        """Create the variables, outside of any graph."""
        own = tf.VariableSynchronization.NONE  # each worker's
        with tf.init_scope(), tf.device("CPU:0"):
            self.mark = tf.Variable(
                tf.zeros([], tf.int64), trainable=False, synchronization=own
            )
            self.compared = tf.Variable(False, trainable=False, synchronization=own)

    def take(self, element: tuple[Any, ...]) -> None:
        """Look at a batch; `element` is (inputs, targets, ...), or has no targets."""
        if len(element) < 2:
            return
        flat = tf.nest.flatten(element[1], expand_composites=True)
        parts = [part for part in flat if part is not None]

        def note() -> None:
            texts = [tf.io.serialize_tensor(part) for part in parts]
            hashes = tf.strings.to_hash_bucket_fast(tf.stack(texts), 2**31 - 1)
            weights = tf.range(1, 2 * len(parts), 2, tf.int64)
            self.mark.assign(1 + tf.reduce_sum(hashes * weights))

        if parts:
            tf.cond(self.mark == 0, note, lambda: None)

    def compare(self, transport: Transport) -> None:
        """Compare what was read before the first step with that of other workers.

        Raises:
            tf.errors.InvalidArgumentError: it differs; on all workers.
        """

        def gather() -> None:
            found = transport.all_gather(self.mark.read_value(), "first_targets")
            self.compared.assign(True)
            tf.debugging.Assert(
                tf.reduce_all(found == found[0]),
                [
                    "The workers read different data; all stop before the first step. "
                    "All must read the same batches, of which each takes its rows: "
                    "shuffle with a seed (keras.utils.set_random_seed), or, where "
                    "data are each worker's own, say so by AutoShardPolicy.OFF. "
                    "Checksums of the first targets, by rank:",
                    found,
                ],
                summarize=-1,
            )

        tf.cond(self.compared, lambda: None, gather)


def share_of(
    dataset: tf.data.Dataset, rank: int, size: int, first: FirstTargets | None = None
) -> tf.data.Dataset:
    """Split every global batch over the workers, in the order of rank.

    All workers read the same batches and take their own rows of each, so all take the
    same number of steps whatever the length of the dataset. A batch of n rows gives
    worker r the rows r*n//N to (r+1)*n//N.

    A last batch of fewer rows than workers is repeated over them, so that nobody trains
    on nothing; where elements have one component, as in `predict`, some workers get
    an empty batch instead.

    With `AutoShardPolicy.OFF` the dataset is taken to be this worker's own, and each
    of its batches is used up in N steps.

    Args:
        dataset: of batches: tensors, ragged or sparse tensors in any structure, rows
            along the first axis.
        rank: of this worker.
        size: N.
        first: takes the first batch, where all workers read the same.

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

    def own_rows(*element: Any) -> Any:
        if first is not None:
            first.take(element)
        return rows_of(spec, element, rank, size)

    def all_rows(*element: Any) -> tf.data.Dataset:
        ranks = tf.data.Dataset.range(size)
        return ranks.map(lambda r: rows_of(spec, element, r, size))

    if policy == _Policy.OFF:
        return dataset.flat_map(all_rows).prefetch(1)
    return dataset.map(own_rows).prefetch(1)


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
        next(_row_count(part) for part in flat if part is not None), "int64"
    )
    rank = tf.cast(rank, count.dtype)
    start = rank * count // size
    stop = (rank + 1) * count // size
    if isinstance(spec, tuple) and len(spec) > 1:
        stop = tf.maximum(stop, start + 1)
    rows = [_slice(part, start, stop, size) for part in flat]
    return tf.nest.pack_sequence_as(spec, rows)


def at_least_one_row(structure: Any) -> tuple[Any, tf.Tensor]:
    """Add a row of zeros to tensors that have none, as some layers refuse those.

    Args:
        structure: tensors with rows along the first axis; ragged and sparse ones are
            left as they are.

    Returns:
        The structure, and how many rows it had: shape [], int32.
    """
    flat = tf.nest.flatten(structure)
    first = next(part for part in flat if part is not None)
    count = tf.cast(_row_count(first), tf.int32)

    def padded(part: Any) -> Any:
        if not isinstance(part, tf.Tensor):
            return part
        row = tf.concat([[tf.cast(count == 0, tf.int32)], tf.shape(part)[1:]], axis=0)
        joined = tf.concat([part, tf.zeros(row, part.dtype)], axis=0)
        joined.set_shape([part.shape[0] or None, *part.shape[1:]])
        return joined

    return tf.nest.pack_sequence_as(structure, [padded(p) for p in flat]), count


def _row_count(part: Any) -> Any:
    if isinstance(part, tf.RaggedTensor):
        return part.nrows()
    return (part.dense_shape if isinstance(part, tf.SparseTensor) else tf.shape(part))[
        0
    ]


def _slice(part: Any, start: tf.Tensor, stop: tf.Tensor, size: int) -> Any:
    if part is None:
        return None
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
