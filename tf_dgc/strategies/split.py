"""Chooses a worker's rows before the maps that read, decode and augment them.

    source -> maps -> batch(B)    gives the same rows as
    source -> batch(B) -> this worker's rows -> maps -> batch(its share of B)

where each map depends on nothing but its element. What shuffles, repeats or shortens
data between maps is moved before them. Maps of batches may follow that map each row for
itself. Anything else is left as it is.
"""

import weakref
from typing import Any, NamedTuple

import tensorflow as tf

from tf_dgc import _host
from tf_dgc.strategies import data_graphs, provenance, rowwise, slicing, witness

# Beginnings of the names of operations that take long, of most images and sounds.
_COSTLY = ("Decode", "EagerPyFunc", "PyFunc", "ReadFile", "Resize")
_CHEAP = ("DecodeBase64", "DecodeRaw")
_PARSERS = ("DecodeProto", "ParseExample", "ParseSequence", "ParseSingle")
# Each goes on drawing orders where it was left when it is asked for again.
_shuffled: weakref.WeakKeyDictionary[tf.data.Dataset, tf.data.Dataset] = (
    weakref.WeakKeyDictionary()
)


class _Plan(NamedTuple):
    """Plan of how global batches are made.

    Attributes:
        source: what is read.
        maps: what its elements go through, the first first.
        origins: for each part of an element the parts of the source's that it depends
            on, flat.
        batches: the dataset that makes batches of them.
        batch: their size, and whether what is left over is dropped.
        above: what rearranges batches or maps their rows, the last first.
    """

    source: tf.data.Dataset
    maps: tuple[tf.data.Dataset, ...]
    origins: list[frozenset[int]]
    batches: tf.data.Dataset
    batch: tuple[int, bool]
    above: list[tf.data.Dataset]


class MarkedRows(NamedTuple):
    """A worker's rows of batches, and of which parts the marks are.

    Attributes:
        pairs: of a worker's rows, and what `witness.of_rows` gives of the global batch.
        names: of the components; none where no part is known to be alike.
    """

    pairs: tf.data.Dataset
    names: list[str]

    def rows(self) -> tf.data.Dataset:
        """Return the rows alone."""
        return self.pairs.map(_without_mark)


def _without_mark(rows: Any, mark: tf.Tensor) -> Any:
    return rows


def share_of(dataset: tf.data.Dataset, rank: int, size: int) -> MarkedRows | None:
    """Return a worker's rows of global batches, without making those of others.

    Args:
        dataset: of global batches.
        rank: of this worker.
        size: N.

    Returns:
        The rows that `slicing.rows_of` takes of each batch, with marks; None where that
        cannot be proved, or would save nothing.
    """
    plan = _plan(dataset)
    if plan is None:
        return None
    batch, drops = plan.batch
    evidence, targets = _evidence(plan, dataset.element_spec)
    parses = any(data_graphs.has_node(each, _parses) for each in plan.maps)

    def choose(*parts: Any) -> Any:
        flat = tf.nest.flatten(parts)
        seen = [_as_parsed(flat[i]) if parses else flat[i] for i in evidence]
        mark = witness.of_rows(seen, targets)
        count = tf.shape(flat[0], tf.int64)[0]
        start, stop = slicing.bounds(count, rank, size)
        # Where there is none, one takes its place until they are batches again.
        first = tf.minimum(start, count - 1)
        last = tf.maximum(stop, first + 1)
        kept = tf.fill([last - first], stop > start)
        marks = tf.repeat(mark[tf.newaxis], last - first, axis=0)
        rows = [part[first:last] for part in flat]
        return (kept, marks), tf.nest.pack_sequence_as(plan.source.element_spec, rows)

    own = plan.source.batch(batch, drops).map(choose).unbatch()
    for each in plan.maps:
        own = _mapped(own, each)
    start, stop = slicing.bounds(tf.constant(batch, tf.int64), rank, size)
    even = drops and batch % size == 0
    calls = _host.datasets.parallel_calls(plan.batches)
    in_order = None if calls is None else True
    own = own.batch(max(1, int(stop - start)), even, calls, in_order).map(_kept_rows)
    for each in reversed(plan.above):
        if _host.tensorflow.maps(each):
            own = _mapped_rows(own, each)
        else:
            own = _host.datasets.rearranged(each, own)
    if (count := dataset.cardinality()) >= 0:
        own = own.apply(tf.data.experimental.assert_cardinality(count))
    names = witness.names_of(plan.source.element_spec)
    told = [f"{names[i]} before `Dataset.map`" for i in evidence]
    return MarkedRows(own.with_options(dataset.options()), told)


def work_for_others(dataset: tf.data.Dataset) -> list[str]:
    """Tell what takes long, and is done for rows of others where they are split.

    Args:
        dataset: of global batches.

    Returns:
        Kinds of datasets, with those of operations.
    """
    plan = _plan(dataset)
    found = []
    read = dataset if plan is None else plan.source
    for node in data_graphs.upstream(read, through_caches=False):
        graphs = _host.tensorflow.graphs_of(node)
        kinds = {each.op for graph in graphs for each in data_graphs.nodes(graph)}
        costs = sorted(
            kind for kind in kinds if kind.startswith(_COSTLY) and kind not in _CHEAP
        )
        if costs:
            name = type(node).__name__.strip("_").removesuffix("Dataset")
            found.append(f"{name} ({', '.join(costs)})")
    return found


def _plan(dataset: tf.data.Dataset) -> _Plan | None:
    above = []
    node = dataset
    while (batch := _host.datasets.batch_of(node)) is None:
        # Orders of whole batches would be drawn anew by each `fit`.
        rearranges = _host.datasets.rearranges(node) and not (
            _host.datasets.shuffles(node)
        )
        if not (rearranges or _maps_rows(node)):
            return None
        above.append(node)
        (node,) = _host.tensorflow.inputs_of(node)
    source, maps, origins = _chain(*_host.tensorflow.inputs_of(node))
    flat = tf.nest.flatten(source.element_spec)
    sound = all(
        isinstance(each, tf.TensorSpec) and each.shape.is_fully_defined()
        for each in flat
    )
    if not maps or not sound:
        return None
    for each in filter(_host.tensorflow.maps, reversed(above)):
        (graph,) = _host.tensorflow.graphs_of(each)
        origins = _origins(graph, origins)
    return _Plan(source, maps, origins, node, batch, above)


def _maps_rows(dataset: tf.data.Dataset) -> bool:
    if not _host.tensorflow.maps(dataset):
        return False
    (graph,) = _host.tensorflow.graphs_of(dataset)
    (batches,) = _host.tensorflow.inputs_of(dataset)
    flat = tf.nest.flatten(batches.element_spec)
    dense = all(isinstance(each, tf.TensorSpec) for each in flat)
    return dense and rowwise.maps_rows(graph, len(flat))


def _chain(dataset: tf.data.Dataset) -> tuple[tf.data.Dataset, Any, Any]:
    """Return the source, the maps and the origins of a dataset; see `_Plan`."""
    if _is_elementwise(dataset):
        source, maps, before = _chain(*_host.tensorflow.inputs_of(dataset))
        (graph,) = _host.tensorflow.graphs_of(dataset)
        return source, (*maps, dataset), _origins(graph, before)
    if _host.datasets.rearranges(dataset):
        source, maps, origins = _chain(*_host.tensorflow.inputs_of(dataset))
        if maps:
            return _moved(dataset, source), maps, origins
    count = len(tf.nest.flatten(dataset.element_spec))
    return dataset, (), [frozenset([i]) for i in range(count)]


def _moved(dataset: tf.data.Dataset, source: tf.data.Dataset) -> tf.data.Dataset:
    if _host.datasets.shuffles(source):
        # TensorFlow makes one dataset of a shuffle and a repeat that follow each other,
        # which draws other orders.
        source = source.prefetch(1)
    if not _host.datasets.shuffles(dataset):
        return _host.datasets.rearranged(dataset, source)
    if dataset not in _shuffled:
        _shuffled[dataset] = _host.datasets.rearranged(dataset, source)
    return _shuffled[dataset]


def _mapped(rows: tf.data.Dataset, by: tf.data.Dataset) -> tf.data.Dataset:
    """Map rows, each with what `_kept_rows` is to know, as a dataset maps its own."""
    calls = _host.datasets.parallel_calls(by)
    return rows.map(
        lambda kept, element: (kept, _host.datasets.call(by, element)),
        num_parallel_calls=calls,
        # In any order they would be rows of other batches.
        deterministic=None if calls is None else True,
    )


def _mapped_rows(pairs: tf.data.Dataset, by: tf.data.Dataset) -> tf.data.Dataset:
    """Map the rows of batches, each with its mark, as a dataset maps whole ones."""
    calls = _host.datasets.parallel_calls(by)
    return pairs.map(
        lambda rows, mark: (_host.datasets.call(by, rows), mark),
        num_parallel_calls=calls,
        deterministic=None if calls is None else True,
    )


def _kept_rows(of_rows: tuple[tf.Tensor, tf.Tensor], batch: Any) -> Any:
    """Return the rows of a batch, which are all kept, or none, and its mark."""
    kept, marks = of_rows
    count = tf.math.count_nonzero(kept)
    rows = [slicing.sliced(part, 0, count, 1) for part in tf.nest.flatten(batch)]
    return tf.nest.pack_sequence_as(batch, rows), marks[0]


def _is_elementwise(dataset: tf.data.Dataset) -> bool:
    """Tell whether this is a map whose results depend on their elements alone.

    Or on what a worker draws for itself, without a seed: such are independent, be it of
    all rows or of its own. Variables and tables may be read where nothing that makes
    the elements can write them: a batch is read before the first of its maps runs.
    """
    if not _host.tensorflow.maps(dataset):
        return False
    (graph,) = _host.tensorflow.graphs_of(dataset)
    nodes = list(data_graphs.nodes(graph))
    if not all(map(_is_harmless, nodes)):
        return False
    readers = {*data_graphs.READERS} - {"Assert"}
    sources = _host.tensorflow.inputs_of(dataset)
    return not any(node.op in readers for node in nodes) or not any(
        data_graphs.has_node(source, _may_write) for source in sources
    )


def _parses(node: Any) -> bool:
    """Tell whether an operation reads protocol buffers."""
    return bool(node.op.startswith(_PARSERS))


def _as_parsed(part: tf.Tensor) -> tf.Tensor:
    records = part.dtype == tf.string and part.shape.rank == 1
    return witness.of_records(part) if records else part


def assigns(dataset: tf.data.Dataset) -> bool:
    """Tell whether a function of a dataset, or of those it reads, sets variables."""
    return data_graphs.has_node(dataset, data_graphs.writes)


def _may_write(node: Any) -> bool:
    if not _host.tensorflow.is_stateful(node.op) or node.op in data_graphs.READERS:
        return False
    if any(attribute.func.name for attribute in node.attr.values()):
        return False  # a call; the nodes of the function are looked at, too
    return not (data_graphs.draws(node) or "Dataset" in node.op)


def _is_harmless(node: Any) -> bool:
    if not _host.tensorflow.is_stateful(node.op) or node.op in data_graphs.READERS:
        return True
    if any(each.func.name or each.list.func for each in node.attr.values()):
        return True  # a call; what it calls is looked at, too
    return "seed" in node.attr and not data_graphs.has_seed(node)


def _origins(graph: Any, before: list[frozenset[int]]) -> list[frozenset[int]]:
    """Follow parts of a source through a function; see `_Plan.origins`."""

    def judge(operation: Any, inputs: list[frozenset[int] | None]) -> frozenset[int]:
        return frozenset[int]().union(*(each or () for each in inputs))

    found = data_graphs.followed(graph, before, judge)
    return [each or frozenset() for each in found]


def _evidence(plan: _Plan, spec: Any) -> tuple[list[int], int]:
    """Return which parts of the source's elements no worker draws for itself.

    And how many of these, the first, targets are made of. At most `witness.COUNT`. What
    Python code makes may have noise of each worker's own; of that only targets count,
    if there are any.

    Args:
        plan: how batches are made.
        spec: of batches.
    """
    targets: frozenset[int] = frozenset()
    if isinstance(spec, tuple) and len(spec) > 1:
        begin, count = (
            sum(not data_graphs.is_none(part) for part in tf.nest.flatten(each))
            for each in spec[:2]
        )
        targets = frozenset().union(*plan.origins[begin : begin + count])
    random = provenance.random_parts(plan.source)
    known = [i for i, drawn in enumerate(random) if not drawn]
    if targets and data_graphs.has_node(plan.source, data_graphs.is_of_python):
        known = [i for i in known if i in targets]
    chosen = sorted(known, key=lambda i: i not in targets)[: witness.COUNT]
    return chosen, len(targets.intersection(chosen))
