"""Operations of a graph that would leave a GPU, asked of TensorFlow's registry.

TensorFlow's wheel for Linux carries its GPU kernels on machines without a GPU, too. An
operation that has none is moved to the host without a word, and what it reads and
writes is copied. So are tensors that a GPU's kernel wants in the host's memory, which
is how TensorFlow treats most of int32: it takes it for shapes.
"""

import collections
import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import tensorflow as tf

from tf_dgc import _host
from tf_dgc.values import SELDOM

UNKNOWN = 2**62  # elements of a tensor whose shape is not known
# They hold functions, or nothing: where they are does not matter.
STRUCTURE = frozenset(
    """
    Case Const If NoOp PartitionedCall Placeholder StatefulPartitionedCall
    StatelessCase StatelessIf StatelessWhile While
    """.split()
)
# The host looks at a tensor, to know what is next or how long something is.
_WAITING = frozenset(
    "Case If StatelessCase StatelessIf StatelessWhile Unique Where While".split()
)


# They are where the variable is.
_OF_VARIABLES = frozenset(["ReadVariableOp", "VarHandleOp"])
# They give a tensor another name, type, shape or owner: a GPU has nothing to do.
_FREE = _OF_VARIABLES | frozenset(
    """
    AssignVariableOp Bitcast EnsureShape ExpandDims Identity IdentityN
    PreventGradient Reshape Squeeze StopGradient
    """.split()
)
# Have a GPU kernel, which refuses these types when it runs.
_REFUSED = {"CollectiveReduceV2": (tf.int32.as_datatype_enum,)}


class KernelPlace(NamedTuple):
    """An operation, as far as it decides where it runs."""

    operation: str
    types: str  # its attributes that are types, as "T=int64 Tidx=int32"


class Audit(NamedTuple):
    """Audit of a traced function on a GPU: numbers of operations, by their kind.

    Launches and waits are those of an ordinary step: without branches that are seldom
    taken, to refuse something or to look at it more closely.
    """

    operations: int  # outside of what XLA compiles
    compiled: int  # functions that XLA compiles
    launched: int  # operations and functions for which the host makes the GPU work
    missing: Mapping[KernelPlace, int]  # have no GPU kernel
    copied: Mapping[KernelPlace, int]  # have one that wants large tensors on the host
    pinned: Mapping[KernelPlace, int]  # are on the host as the program says
    carried: Mapping[KernelPlace, int]  # of these, what reads or writes large tensors
    waiting: Mapping[KernelPlace, int]  # what the host waits for, or what makes it


def audit(function: Any, large: int) -> Audit:
    """Look at each operation of a function as it would be placed on a GPU.

    Args:
        function: a concrete tf.function, whose operations are on the GPU but for those
            that the program pins to the host.
        large: elements from which on a tensor should stay on the GPU; so should those
            of unknown shape.
    """
    graph = function.graph.as_graph_def(add_shapes=True)
    found: dict[str, Any] = collections.defaultdict(collections.Counter)
    operations, compiled, launched = 0, 0, 0
    for body in _bodies(graph):
        if body is None:
            compiled += 1
            continue
        for node in body.nodes.values():
            place = KernelPlace(node.op, _types(node))
            operations += node.op not in STRUCTURE
            kind = _kind(body, node, large)
            found[kind][place] += 1
            if kind == "pinned" and any(size >= large for size in body.sizes(node)):
                found["carried"][place] += 1
            waits = node.op in _WAITING and not body.is_decided_on_host(node)
            if waits and not body.seldom:
                found["waiting"][place] += 1
        if not body.seldom:
            launched += sum(map(body.is_launched, body.nodes.values()))
            for node in body.fetched():
                found["waiting"][KernelPlace(node.op, _types(node))] += 1
    counts = operations, compiled, launched
    kinds = Audit._fields[len(counts) :]
    return Audit(*counts, *(dict(found[kind]) for kind in kinds))


def _kind(body: "_Body", node: Any, large: int) -> str:
    if node.op in STRUCTURE:
        return "structure"
    if _is_pinned(node):
        return "pinned"
    kernel = _kernel(node)
    if kernel is None:
        return "missing"
    on_host = body.sizes(node, set(kernel.host_memory_arg))
    return "copied" if any(size >= large for size in on_host) else "placed"


def _bodies(graph: Any) -> Iterator["_Body | None"]:
    """Yield the graph and all functions that it calls, once; None for one of XLA."""
    library = {each.signature.name: each for each in graph.library.function}
    compiled = {n for n, each in library.items() if each.attr["_XlaMustCompile"].b}
    seen: set[str] = set()
    left = [_Body(graph.node, {}, compiled, False)]
    while left:
        # Those of an ordinary step first, as what these call is of it.
        left.sort(key=lambda body: body.seldom)
        body = left.pop(0)
        yield body
        by_node = [
            (name, body.seldom or _is_seldom(node))
            for node in body.nodes.values()
            for name in _called(node)
        ]
        called = {name for name, _ in by_node}
        for name in sorted(called & library.keys() - seen):
            function = library[name]
            if name in compiled:
                yield None
            else:
                seldom = all(each for other, each in by_node if other == name)
                args = dict(_arguments(function))
                left.append(_Body(function.node_def, args, compiled, seldom))
        seen |= called


def _arguments(function: Any) -> Iterator[tuple[str, list[int]]]:
    """Yield each argument of a function with its elements; a variable has none."""
    for i, arg in enumerate(function.signature.input_arg):
        nothing = 0 if tf.as_dtype(arg.type) == tf.resource else UNKNOWN
        yield arg.name, _elements(function.arg_attr[i]) or [nothing]


class _Body:
    """The nodes of a graph or of a function, and the sizes of their tensors.

    Attributes:
        nodes: by name.
        seldom: whether an ordinary step does not come here.
    """

    def __init__(
        self,
        nodes: Any,
        args: Mapping[str, list[int]],
        compiled: set[str],
        seldom: bool,
    ) -> None:
        self.nodes = {node.name: node for node in nodes}
        self._args, self._compiled, self.seldom = args, compiled, seldom

    def is_launched(self, node: Any) -> bool:
        """Tell whether the host makes a GPU work by a node."""
        if self._is_compiled(node):
            return True
        return node.op not in _FREE and not _is_on_host(node)

    def _is_compiled(self, node: Any) -> bool:
        return not self._compiled.isdisjoint(_called(node))

    def sizes(self, node: Any, names: set[str] | None = None) -> Iterator[int]:
        """Yield the elements of what a node reads and writes, of all or some names."""
        form = _host.tensorflow.op_def(node.op)
        outputs = _elements(node)
        for name, where in _spans(form.output_arg, node):
            if names is None or name in names:
                yield from outputs[where]
        for name, where in _spans(form.input_arg, node):
            if names is None or name in names:
                yield from map(self._size, node.input[where])

    def is_decided_on_host(self, node: Any) -> bool:
        """Tell whether what a node waits for is on the host, or known beforehand."""
        if node.op in ("While", "StatelessWhile"):
            return False  # its condition is a function of its own
        if _is_pinned(node):
            return True
        source = self.nodes.get(_source(node.input[0]))
        return source is not None and (_is_pinned(source) or source.op == "Const")

    def fetched(self) -> Iterator[Any]:
        """Yield for each tensor that the host reads from the GPU the node it is of."""
        seen: set[str] = set()
        for node in self.nodes.values():
            if not _is_pinned(node) or node.op in STRUCTURE:
                continue
            for tensor in set(node.input) - seen:
                source = self.nodes.get(_source(tensor))
                if source is None:
                    continue
                if self._is_compiled(source) or not _is_on_host(source):
                    seen.add(tensor)
                    yield source

    def _size(self, tensor: str) -> int:
        """Return the elements of "node", "node:3" or "node:output:3"."""
        name, *rest = tensor.split(":")
        index = int(rest[-1]) if rest else 0
        if name not in self.nodes:
            return self._args[name][index]
        node = self.nodes[name]
        if len(rest) == 2:
            form = _host.tensorflow.op_def(node.op)
            index += dict(_spans(form.output_arg, node))[rest[0]].start
        return _elements(node)[index]


def _source(tensor: str) -> str:
    return tensor.split(":")[0]


def _is_seldom(node: Any) -> bool:
    return node.name.rpartition("/")[2].startswith(SELDOM)


def _called(node: Any) -> Iterator[str]:
    for value in node.attr.values():
        if value.HasField("func"):
            yield value.func.name
        yield from (each.name for each in value.list.func)


def _is_pinned(node: Any) -> bool:
    return node.device.upper().endswith("CPU:0")


def _is_on_host(node: Any) -> bool:
    """Tell whether what a node returns is in the host's memory, or nobody's."""
    if _is_pinned(node) or node.op in STRUCTURE or node.op in _OF_VARIABLES:
        return True
    kernel = _kernel(node)
    results = {each.name for each in _host.tensorflow.op_def(node.op).output_arg}
    return kernel is None or results <= set(kernel.host_memory_arg)


def _types(node: Any) -> str:
    found = {k: v.type for k, v in node.attr.items() if v.WhichOneof("value") == "type"}
    return " ".join(f"{k}={tf.as_dtype(v).name}" for k, v in sorted(found.items()))


@functools.cache
def _gpu_kernels(operation: str) -> list[Any]:
    """Return what a GPU can run; what is of GPUs goes before what is of any device."""
    kernels = _host.tensorflow.kernels_of(operation)
    wanted = [k for k in kernels if k.device_type in ("GPU", "DEFAULT")]
    return sorted(wanted, key=lambda kernel: kernel.device_type, reverse=True)


def _kernel(node: Any) -> Any | None:
    """Return the kernel that a GPU takes; None where there is none."""
    if node.attr["T"].type in _REFUSED.get(node.op, ()):
        return None
    for kernel in _gpu_kernels(node.op):
        if all(
            node.attr[each.name].type in each.allowed_values.list.type
            for each in kernel.constraint
            if each.name in node.attr
        ):
            return kernel
    return None


def _elements(holder: Any) -> list[int]:
    """Return the elements of each tensor that a node writes, or that an argument is."""
    shapes = [tf.TensorShape(each) for each in holder.attr["_output_shapes"].list.shape]
    return [
        math.prod(shape.as_list()) if shape.is_fully_defined() else UNKNOWN
        for shape in shapes
    ]


def _spans(args: Any, node: Any) -> Iterator[tuple[str, slice]]:
    """Yield the name of each argument, and which of the node's tensors it has."""
    start = 0
    for arg in args:
        count = 1
        if arg.number_attr:
            count = node.attr[arg.number_attr].i
        elif arg.type_list_attr:
            count = len(node.attr[arg.type_list_attr].list.type)
        yield arg.name, slice(start, start + count)
        start += count
