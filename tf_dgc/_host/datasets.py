"""Private names of tf.data: how a dataset was made. DATA is tensorflow/python/data."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_dgc._host import probe

with probe.imports():
    from tensorflow.python.data.experimental.ops import distribute
    from tensorflow.python.data.ops import (
        batch_op,
        cache_op,
        dataset_ops,
        map_op,
        prefetch_op,
        repeat_op,
        shard_op,
        shuffle_op,
        skip_op,
        take_op,
    )
    from tensorflow.python.data.util import structure


def wanted() -> list[tuple[Any, str]]:
    """Return the private names, with the object or class that must have each."""
    return [
        (batch_op, "_BatchDataset"),
        (batch_op, "_ParallelBatchDataset"),
        (cache_op, "CacheDataset"),
        (dataset_ops, "UnaryUnchangedStructureDataset"),
        (dataset_ops, "_OptionsDataset"),
        (distribute, "_AutoShardDataset"),
        (distribute, "batch_sizes_for_worker"),
        (distribute, "compute_batch_size"),
        (map_op, "_ParallelMapDataset"),
        (prefetch_op, "_PrefetchDataset"),
        (repeat_op, "_RepeatDataset"),
        (shard_op, "_ShardDataset"),
        (shuffle_op, "_ShuffleDataset"),
        (skip_op, "_SkipDataset"),
        (structure, "from_compatible_tensor_list"),
        (structure, "to_tensor_list"),
        (take_op, "_TakeDataset"),
        (tf.data.Dataset, "_flat_structure"),
        (tf.data.Dataset, "_functions"),
        (tf.data.Dataset, "_inputs"),
        (tf.data.Dataset, "_variant_tensor"),
        *(
            (getattr(owner, name, None), attribute)
            for owner, name, *attributes in _KEPT
            for attribute in attributes
        ),
    ]


# What classes keep of their arguments.
_KEPT = (
    (batch_op, "_BatchDataset", "_batch_size", "_drop_remainder"),
    (batch_op, "_ParallelBatchDataset", "_batch_size", "_drop_remainder"),
    (batch_op, "_ParallelBatchDataset", "_num_parallel_calls"),
    (map_op, "_ParallelMapDataset", "_num_parallel_calls"),
    (prefetch_op, "_PrefetchDataset", "_buffer_size"),
    (repeat_op, "_RepeatDataset", "_count"),
    (shard_op, "_ShardDataset", "_index", "_num_shards"),
    (shuffle_op, "_ShuffleDataset", "_buffer_size", "_seed", "_seed2"),
    (shuffle_op, "_ShuffleDataset", "_reshuffle_each_iteration"),
    (skip_op, "_SkipDataset", "_count"),
    (take_op, "_TakeDataset", "_count"),
)

probe.check(wanted())


def call(dataset: tf.data.Dataset, element: Any) -> Any:
    """Call the function of a `Dataset.map` in a graph, as it was traced.

    DATA/util/structure.py: how elements are passed to it.
    """
    (source,) = dataset._inputs()
    (wrapped,) = dataset._functions()
    tensors = structure.to_tensor_list(source.element_spec, element)
    found = wrapped.function(*tensors)
    return structure.from_compatible_tensor_list(dataset.element_spec, found)


def parallel_calls(dataset: tf.data.Dataset) -> int | None:
    """Return `num_parallel_calls` of a map or batch; None where there are none."""
    return _kept(dataset, "_num_parallel_calls")


def batch_of(dataset: tf.data.Dataset) -> tuple[int, bool] | None:
    """Return the size of `Dataset.batch`, and whether it drops what is left over.

    DATA/ops/batch_op.py. None of any other dataset, or where that is not known.
    """
    if not isinstance(dataset, _BATCH):
        return None
    size, drops = _kept(dataset, "_batch_size"), _kept(dataset, "_drop_remainder")
    return None if size is None or drops is None else (size, drops)


def shuffles(dataset: tf.data.Dataset) -> bool:
    """Tell whether this is `Dataset.shuffle`. DATA/ops/shuffle_op.py."""
    return isinstance(dataset, shuffle_op._ShuffleDataset | _Shuffled)


def is_hinted(dataset: tf.data.Dataset) -> bool:
    """Tell whether this is `shard` by SHARD_HINT. DATA/ops/shard_op.py."""
    is_shard = isinstance(dataset, shard_op._ShardDataset)
    return is_shard and (
        _kept(dataset, "_num_shards") == tf.data.experimental.SHARD_HINT
    )


def caches(dataset: tf.data.Dataset) -> bool:
    """Tell whether this is `Dataset.cache`. DATA/ops/cache_op.py."""
    return isinstance(dataset, cache_op.CacheDataset)


def rearranges(dataset: tf.data.Dataset) -> bool:
    """Tell whether `rearranged` knows what a dataset does."""
    return isinstance(dataset, tuple(_AGAIN))


def rearranged(dataset: tf.data.Dataset, source: tf.data.Dataset) -> tf.data.Dataset:
    """Let another source be repeated, shortened, shuffled or prefetched likewise.

    DATA/ops: the classes of what public functions return. Options are left out, for
    whoever rearranges to set at the end.
    """
    return _AGAIN[type(dataset)](dataset, source)


class _Shuffled(dataset_ops.UnaryUnchangedStructureDataset):
    """Shuffles as another dataset does."""


def _shuffled(dataset: Any, source: tf.data.Dataset) -> tf.data.Dataset:
    """Shuffle by the same seeds; the public function would draw others."""
    variant = tf.raw_ops.ShuffleDatasetV3(
        input_dataset=source._variant_tensor,
        buffer_size=dataset._buffer_size,
        seed=dataset._seed,
        seed2=dataset._seed2,
        seed_generator=tf.raw_ops.DummySeedGenerator(),
        reshuffle_each_iteration=dataset._reshuffle_each_iteration,
        **source._flat_structure,
    )
    return _Shuffled(source, variant)


def auto_sharded(
    dataset: tf.data.Dataset, workers: int, rank: int, divide: bool = True
) -> tuple[tf.data.Dataset, bool]:
    """Let TensorFlow shard a dataset by its policy, and give batches their shares.

    DATA/experimental/ops/distribute.py, which shards the graph of a dataset: files
    where they are read, or where SHARD_HINT stands. A worker's own batches, as large as
    those of all workers, are divided so that N workers have so many rows in a step.

    Args:
        dataset: of batches.
        workers: N.
        rank: of this worker.
        divide: whether batches are to be divided, where their size is known.

    Returns:
        The worker's dataset, and whether its batches are divided.

    Raises:
        tf.errors.OpError: there is nothing in it that could be sharded.
    """
    own = distribute._AutoShardDataset(dataset, workers, rank, workers)
    size = int(distribute.compute_batch_size(dataset)) if divide else -1
    if size < 0:
        return own, False
    sizes = distribute.batch_sizes_for_worker(size, workers, 1, rank)
    return own.rebatch(sizes), True


def _kept(dataset: tf.data.Dataset, name: str) -> Any:
    """Return the value of a scalar that a dataset keeps; None where it has none."""
    kept = getattr(dataset, name, None)
    value = None if kept is None else tf.get_static_value(kept)
    return None if value is None else value.item()


_BATCH = batch_op._BatchDataset, batch_op._ParallelBatchDataset
_AGAIN: dict[type, Callable[[Any, tf.data.Dataset], tf.data.Dataset]] = {
    dataset_ops._OptionsDataset: lambda _, source: source,
    prefetch_op._PrefetchDataset: lambda old, source: source.prefetch(
        _kept(old, "_buffer_size")
    ),
    repeat_op._RepeatDataset: lambda old, source: source.repeat(old._count),
    shard_op._ShardDataset: lambda old, source: source.shard(
        old._num_shards, old._index
    ),
    shuffle_op._ShuffleDataset: _shuffled,
    skip_op._SkipDataset: lambda old, source: source.skip(old._count),
    take_op._TakeDataset: lambda old, source: source.take(old._count),
}
