"""Each worker's share of a dataset of global batches. Pure tf.data."""

import functools
import logging
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tf_dgc import _host
from tf_dgc.strategies import data_graphs, provenance, split, witness
from tf_dgc.strategies.elements import ElementLayout, batch_size_of
from tf_dgc.strategies.split import MarkedRows

_logger = logging.getLogger("tf_dgc")
_Policy = tf.data.experimental.AutoShardPolicy
# All workers read the same.
_ALIKE = (_Policy.AUTO, _Policy.DATA)
_TENSORS = tf.TensorSpec, tf.RaggedTensorSpec, tf.SparseTensorSpec


def share_of(dataset: tf.data.Dataset, rank: int, size: int) -> tf.data.Dataset:
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

    Raises:
        ValueError: the dataset is not batched, or cannot be sharded as it asks.
    """
    if size == 1:
        return dataset
    if is_own(dataset):
        return _read_ahead(_own_batches(dataset, rank, size), dataset)
    return _read_ahead(_alike(dataset, rank, size).rows(), dataset)


def marked_share_of(dataset: tf.data.Dataset, rank: int, size: int) -> MarkedRows:
    """Return `share_of` a dataset that is not a worker's own, with marks of batches.

    Args:
        dataset: see `share_of`.
        rank: of this worker.
        size: N, 2 or more.
    """
    share = _alike(dataset, rank, size)
    return share._replace(pairs=_read_ahead(share.pairs, dataset))


def _layout(dataset: tf.data.Dataset, rank: int, size: int) -> ElementLayout:
    """Return which components have rows; the chief tells which have not."""
    layout = ElementLayout(dataset.element_spec, size, batch_size_of(dataset))
    if layout.shared and rank == 0:
        _tell_shared(layout.shared)
    return layout


def _alike(dataset: tf.data.Dataset, rank: int, size: int) -> MarkedRows:
    """Take a worker's rows of batches that all read alike, so in one order."""
    if dataset.options().deterministic is False:
        in_order = tf.data.Options()
        in_order.deterministic = True
        dataset = dataset.with_options(in_order)
    layout = _layout(dataset, rank, size)
    share = split.share_of(dataset, rank, size)
    return own_rows(dataset, layout, rank) if share is None else share


def _own_batches(dataset: tf.data.Dataset, rank: int, size: int) -> tf.data.Dataset:
    """Divide batches that this worker reads alone."""
    layout = _layout(dataset, rank, size)
    if _policy_of(dataset) == _Policy.OFF:
        return _all_rows(dataset, layout, size)
    return _sharded(dataset, layout, rank, size)


def _read_ahead(share: tf.data.Dataset, of: tf.data.Dataset) -> tf.data.Dataset:
    # Where Keras reads by threads of its own, what is read ahead is lost to an epoch.
    return share.prefetch(1) if of.options().autotune.enabled is not False else share


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


def pieces_of(dataset: tf.data.Dataset, size: int) -> int | None:
    """Return in how many steps each batch of a dataset is used up; None if unknown."""
    if size == 1 or not is_own(dataset):
        return 1
    return size if _policy_of(dataset) == _Policy.OFF else None


def _policy_of(dataset: tf.data.Dataset) -> Any:
    return dataset.options().experimental_distribute.auto_shard_policy


def own_rows(dataset: tf.data.Dataset, layout: ElementLayout, rank: int) -> MarkedRows:
    """Take rows of whole batches, which all workers make."""
    spec, memory = dataset.element_spec, layout.memory()
    known, targets = _known(dataset)

    def taken(*element: Any) -> Any:
        flat = tf.nest.flatten(element)
        mark = witness.of_rows([flat[i] for i in known], targets)
        return layout.rows_of(element, rank, memory), mark

    names = witness.names_of(spec)
    return MarkedRows(dataset.map(taken), [names[i] for i in known])


def _known(dataset: tf.data.Dataset) -> tuple[list[int], int]:
    """Return which parts of batches no worker draws for itself; see `split`.

    And how many of these, the first, are targets.
    """
    spec = dataset.element_spec
    random = provenance.random_parts(dataset)
    parts = tf.nest.flatten(spec)
    known = [
        i
        for i, (part, drawn) in enumerate(zip(parts, random, strict=True))
        if not drawn and isinstance(part, _TENSORS)
    ]
    targets: list[int] = []
    if isinstance(spec, tuple) and len(spec) > 1:
        begin, count = (len(tf.nest.flatten(each)) for each in spec[:2])
        targets = [i for i in known if begin <= i < begin + count]
    if targets and data_graphs.has_node(dataset, data_graphs.is_of_python):
        known = targets
    chosen = sorted(known, key=lambda i: i not in targets)[: witness.COUNT]
    return chosen, len({*targets}.intersection(chosen))


def _all_rows(
    dataset: tf.data.Dataset, layout: ElementLayout, size: int
) -> tf.data.Dataset:
    """Use up each batch in N steps."""
    memory = layout.memory()

    def all_rows(*element: Any) -> tf.data.Dataset:
        ranks = tf.data.Dataset.range(size)
        return ranks.map(lambda r: layout.rows_of(element, r, memory))

    return dataset.flat_map(all_rows)


def _sharded(
    dataset: tf.data.Dataset, layout: ElementLayout, rank: int, size: int
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
