"""The axis of the rows of a batch in what an operation makes of them.

Only operations are known here that leave each row to itself: element by element, along
other axes than that of the rows, or by choosing rows. Anything else may bring values
from one row to another, of which a worker has not all.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import tensorflow as tf

from tf_dgc import _host

Operation = _host.operations.Operation
# Of an input that has rows: their axis; None where shapes do not tell it.
Axes = Mapping[int, int | None]


class Moved(Exception):
    """Raised where values go from row to row, or may."""


BY_ELEMENT = frozenset(
    "Abs Acos Acosh Add AddN AddV2 Asin Asinh AsString Atan Atan2 Atanh BesselI0e "
    "BesselI1e BitwiseAnd BitwiseOr BitwiseXor BroadcastTo Bucketize Cast Ceil "
    "CheckNumerics ClipByValue Complex ComplexAbs Conj Cos Cosh Digamma Div DivNoNan "
    "Elu EnsureShape Equal Erf Erfc Erfinv Exp Expm1 FakeQuantWithMinMaxVars Floor "
    "FloorDiv FloorMod Gelu Greater GreaterEqual HSVToRGB Identity IdentityN Imag "
    "Igamma Igammac Inv InvGrad Invert IsFinite IsInf IsNan LeakyRelu LeftShift Less "
    "LessEqual Lgamma Log Log1p LogicalAnd LogicalNot LogicalOr LookupTableFind "
    "LookupTableFindV2 Maximum Minimum Mod Mul MulNoNan Multinomial Ndtri Neg "
    "NextAfter NotEqual OnesLike PlaceholderWithDefault Pow PreventGradient "
    "QuantizeAndDequantizeV2 QuantizeAndDequantizeV4 RGBToHSV Real RealDiv Reciprocal "
    "Relu Relu6 RightShift Rint Round Rsqrt Select SelectV2 Selu Sigmoid Sign Sin "
    "Sinh Snapshot Softplus Softsign Sqrt Square SquaredDifference StaticRegexReplace "
    "StopGradient StringLength StringLower StringStrip StringToHashBucketFast "
    "StringToNumber StringUpper Sub Tan Tanh TruncateDiv TruncateMod Xdivy Xlog1py "
    "Xlogy ZerosLike Zeta RandomPoissonV2".split()
)
REDUCTIONS = frozenset("Sum Mean Prod Max Min All Any EuclideanNorm".split())
# Along the axes after the first, which counts rows.
_OF_FIRST_AXIS = frozenset(
    "AdjustContrastv2 AdjustHue AdjustSaturation AvgPool AvgPool3D BatchToSpaceND "
    "BiasAdd Conv Conv2D Conv2DBackpropInput Conv3D Conv3DBackpropInputV2 "
    "DepthToSpace DepthwiseConv2dNative DepthwiseConv2dNativeBackpropInput Dilation2D "
    "DrawBoundingBoxesV2 ExtractImagePatches FusedBatchNorm FusedBatchNormV2 "
    "FusedBatchNormV3 _FusedBatchNormEx GRUBlockCell ImageProjectiveTransformV2 "
    "ImageProjectiveTransformV3 InTopK InTopKV2 LRN LSTMBlockCell MaxPool MaxPool3D "
    "MaxPoolV2 MaxPoolWithArgmax ResizeArea ResizeBicubic ResizeBilinear "
    "ResizeNearestNeighbor ScaleAndTranslate SoftmaxCrossEntropyWithLogits "
    "SpaceToBatchND SpaceToDepth SparseSoftmaxCrossEntropyWithLogits".split()
)
# Along the last axis, or the last two, three.
_OF_LAST_AXES = {
    **dict.fromkeys(("Softmax", "LogSoftmax", "FFT", "IFFT", "RFFT", "IRFFT"), 1),
    **dict.fromkeys(("TopK", "TopKV2", "MatrixDiag", "MatrixDiagV3"), 1),
    **dict.fromkeys(("FFT2D", "IFFT2D", "RFFT2D", "IRFFT2D", "Cholesky", "Qr"), 2),
    **dict.fromkeys(("MatrixBandPart", "MatrixInverse", "MatrixDeterminant"), 2),
    **dict.fromkeys(("MatrixDiagPart", "MatrixDiagPartV3", "MatrixSolve", "Svd"), 2),
    **dict.fromkeys(("MatrixTriangularSolve", "SelfAdjointEigV2", "FFT3D"), 2),
    **dict.fromkeys(("MatrixSetDiag", "MatrixSetDiagV3", "LogMatrixDeterminant"), 2),
}
_ALONG = {
    "Cumsum": 1,
    "Cumprod": 1,
    "CumulativeLogsumexp": 1,
    "ReverseV2": 1,
    "Roll": 2,
}
_BEST = {"ArgMax", "ArgMin"}
# What is computed inside is not followed: of functions, loops, ragged and sparse
# tensors, and of gradients of operations that are known themselves.
CALLS = frozenset(
    "PartitionedCall StatefulPartitionedCall If StatelessIf While StatelessWhile Case "
    "StatelessCase XlaLaunch".split()
)
_BY_SHAPE = frozenset(
    "Assign CTCGreedyDecoder CTCLoss CTCLossV2 CropAndResize CudnnRNN CudnnRNNV2 "
    "CudnnRNNV3 DenseToSparseSetOperation DynamicStitch LookupTableSizeV2 "
    "ParallelDynamicStitch RaggedCross RaggedGather RaggedRange "
    "RaggedTensorFromVariant RaggedTensorToSparse RaggedTensorToTensor "
    "RaggedTensorToVariant ReverseSequence RowPartition ScatterNd SegmentSum "
    "SparseConcat SparseCross SparseDenseCwiseMul SparseFillEmptyRows SparseReorder "
    "SparseReshape SparseSegmentMean SparseSegmentSqrtN SparseSegmentSum SparseSlice "
    "SparseTensorDenseMatMul SparseToDense StatelessMultinomial "
    "StatelessRandomGammaV2 StringNGrams StringSplitV2 TensorScatterAdd "
    "TensorScatterMax TensorScatterMin TensorScatterSub TensorScatterUpdate "
    "UnsortedSegmentMax UnsortedSegmentMin UnsortedSegmentProd UnsortedSegmentSum "
    "Where DenseBincount RaggedBincount StatelessRandomBinomial "
    "StatelessRandomPoisson UnicodeDecodeWithOffsets UnicodeTranscode".split()
)
_OPAQUE = ("__", "TensorList", "TensorArray", "OptionalGetValue", "OptionalFromValue")

# Inputs that are axes, dimensions or positions: of them no value is made.
_PLACES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(REDUCTIONS | {"Reshape", "BroadcastTo", "Tile", "Transpose"}, (1,)),
    **dict.fromkeys(("ExpandDims", "Pad", "PadV2", "MirrorPad", *_ALONG), (1,)),
    **dict.fromkeys(("ArgMax", "ArgMin", "TopKV2", "OneHot"), (1,)),
    **dict.fromkeys(("ResizeBilinear", "ResizeNearestNeighbor", "ResizeArea"), (1,)),
    **dict.fromkeys(("ResizeBicubic", "ImageProjectiveTransformV3"), (1, 2)),
    **dict.fromkeys(("Fill", "Empty", "Split", "RaggedTensorToTensor"), (0,)),
    **dict.fromkeys(("Conv2DBackpropInput", "Conv3DBackpropInputV2"), (0,)),
    **dict.fromkeys(("SpaceToBatchND", "BatchToSpaceND", "SplitV", "Slice"), (1, 2)),
    **dict.fromkeys(("StridedSlice", "Roll", "LinSpace"), (1, 2, 3)),
    **dict.fromkeys(("GatherV2", "UnsortedSegmentSum", "ScatterNd"), (2,)),
    "StridedSliceGrad": (0, 1, 2, 3),
    "Range": (0, 1, 2),
}


def places(operation: Operation) -> set[int]:
    """Return the inputs of which an operation makes no value, but takes places."""
    if operation.kind == "ConcatV2":
        return {len(operation.inputs) - 1}
    return set(_PLACES.get(operation.kind, ()))


def is_opaque(kind: str) -> bool:
    """Tell whether only shapes tell what an operation, which is known, makes."""
    gradient = kind.endswith("Grad") or "Backprop" in kind or "GradV" in kind
    opaque = kind.startswith(_OPAQUE) or gradient or kind in _BY_SHAPE
    return opaque or kind in CALLS


class AxisFacts(NamedTuple):
    """Facts about the rows of a step.

    Attributes:
        static: how many, where shapes tell.
        counts: tells whether a tensor is their number.
        picks: tells whether a tensor has positions of rows, in their order.
        copies: returns how many times a tensor has the rows.
        workers: N.
    """

    static: int | None
    counts: Callable[[Any], bool]
    picks: Callable[[Any], bool]
    copies: Callable[[Any], int]
    workers: int = 1


def axis_by_shape(
    facts: AxisFacts, tensor: Any, guess: int | None = None
) -> int | None:
    """Return the axis that may have rows, of one that was not followed."""
    if tensor.shape.rank is None:
        return guess
    sizes = list(enumerate(tensor.shape))
    if facts.static is None:
        axes = [axis for axis, size in sizes if size is None]
    else:
        axes = [a for a, size in sizes if size and size % facts.static == 0]
    if guess in axes:
        return guess
    return axes[0] if len(axes) == 1 else None


def after(
    facts: AxisFacts, operation: Operation, tensor: Any, axes: Axes
) -> int | None:
    """Return the axis of the rows in what an operation makes.

    Raises:
        Moved: it makes one row of several, or is not known here.
    """
    kind = operation.kind
    if kind in BY_ELEMENT:
        return _aligned(facts, operation, tensor, axes)
    if 0 not in axes and kind not in _MADE_OF_SEVERAL and not is_opaque(kind):
        raise Moved("rows meet rows")
    rule = _RULES.get(kind)
    if rule is not None:
        return rule(facts, operation, tensor, axes)
    axis, rank = axes.get(0), tensor.shape.rank
    if kind in _OF_FIRST_AXIS:
        if axis:
            raise Moved("rows meet rows")
        return 0
    if kind in _OF_LAST_AXES:
        source = operation.inputs[0].shape.rank
        if None not in (axis, source) and axis >= source - _OF_LAST_AXES[kind]:
            raise Moved("rows meet rows")
        return axis
    if not is_opaque(kind):
        raise Moved("rows meet rows")
    if rank == 0 and tensor.dtype not in (tf.variant, tf.resource):
        raise Moved("rows meet rows")
    same = kind.endswith("Grad") and axes.get(0) is not None
    return axis_by_shape(facts, tensor, axis if same else None)


def _aligned(
    facts: AxisFacts, operation: Operation, tensor: Any, axes: Axes
) -> int | None:
    """Return the axis of rows that are aligned as `+` does it, from the right."""
    rank, found = tensor.shape.rank, set[int]()
    for i, axis in axes.items():
        own = operation.inputs[i].shape.rank
        if axis is not None and None not in (own, rank):
            first = operation.kind == "Select" and own == 1  # picks rows
            found.add(axis if first else rank - own + axis)
    if len(found) > 1:
        raise Moved("rows meet rows")
    return found.pop() if found else axis_by_shape(facts, tensor)


# Operations along axes.


def _reduced(
    facts: AxisFacts, operation: Operation, tensor: Any, axes: Axes
) -> int | None:
    axis, rank = axes[0], operation.inputs[0].shape.rank
    over = tf.get_static_value(operation.inputs[1])
    if over is None or rank is None or axis is None:
        if axis_by_shape(facts, tensor) is None and not tensor.shape.rank:
            raise Moved("rows meet rows")
        return axis_by_shape(facts, tensor)
    gone = {int(each) % rank for each in over.reshape([-1])}
    if axis in gone:
        raise Moved("rows meet rows")
    if operation.kind not in _BEST and operation.attributes("keep_dims"):
        return axis
    return axis - sum(each < axis for each in gone)


def _along(
    facts: AxisFacts, operation: Operation, tensor: Any, axes: Axes
) -> int | None:
    axis, rank = axes[0], tensor.shape.rank
    along = tf.get_static_value(operation.inputs[_ALONG[operation.kind]])
    lengths = tensor.dtype.is_integer and operation.kind == "Cumsum"  # to splits
    if axis is None or along is None or rank is None or lengths:
        return axis
    if axis in {int(each) % rank for each in along.reshape([-1])}:
        raise Moved("rows meet rows")
    return axis


def _transposed(
    facts: AxisFacts, operation: Operation, tensor: Any, axes: Axes
) -> int | None:
    order = tf.get_static_value(operation.inputs[1])
    if axes[0] is None or order is None:
        return axis_by_shape(facts, tensor)
    return [int(each) for each in order].index(axes[0])


def _expanded(
    facts: AxisFacts, operation: Operation, tensor: Any, axes: Axes
) -> int | None:
    axis, at = axes[0], tf.get_static_value(operation.inputs[1])
    if axis is None or at is None or tensor.shape.rank is None:
        return axis_by_shape(facts, tensor)
    return axis + (int(at.reshape([-1])[0]) % tensor.shape.rank <= axis)


def _squeezed(
    facts: AxisFacts, operation: Operation, tensor: Any, axes: Axes
) -> int | None:
    axis, shape = axes[0], operation.inputs[0].shape
    if axis is None or shape.rank is None:
        return axis_by_shape(facts, tensor)
    gone = operation.attributes("squeeze_dims")
    gone = list(gone) or [i for i, size in enumerate(shape) if size == 1]
    gone = {each % shape.rank for each in gone}
    if axis in gone and facts.static != 1:
        raise Moved("rows meet rows")
    return axis - sum(each < axis for each in gone)


def _reshaped(
    facts: AxisFacts, operation: Operation, tensor: Any, axes: Axes
) -> int | None:
    axis, before, after = axes[0], operation.inputs[0].shape, tensor.shape
    if before.rank is None or after.rank is None or axis is None:
        return axis_by_shape(facts, tensor)
    if axis == 0 and after.rank and _is_of_constant_rows(facts, operation, tensor):
        raise Moved("rows are counted by a constant")
    if facts.static is None:
        begin = axis == 0 and after.rank and after[0] is None
        return axis_by_shape(facts, tensor, 0 if begin else None)
    size = before[:axis].num_elements()
    for i in range(after.rank):
        rows = (after[i] or 0) % facts.static == 0
        if rows and after[:i].num_elements() == size:
            return i
    return axis_by_shape(facts, tensor)


def _is_of_constant_rows(facts: AxisFacts, operation: Operation, tensor: Any) -> bool:
    """Tell whether a constant says how many rows a reshaped tensor has.

    As it does in one process, whose batch has the rows of all workers.
    """
    shape = operation.inputs[1]
    if facts.counts(shape) or _is_counted(facts, shape, 0):
        return False
    given = tf.get_static_value(shape, partial=True)
    first = None if given is None else given[0]
    if first is None or first <= 1:
        return False
    if facts.static is None:
        return operation.inputs[0].shape[0] is None
    if facts.workers == 1 or first % (facts.static * facts.workers):
        return False
    ends, size = [], 1  # axes that become one
    for each in operation.inputs[0].shape:
        size *= each or 0
        ends.append(size)
    return -1 in list(given) or first not in ends


def _packed(
    facts: AxisFacts, operation: Operation, tensor: Any, axes: Axes
) -> int | None:
    axis = _one(facts, axes)
    if axis is None or tensor.shape.rank is None:
        return axis_by_shape(facts, tensor)
    return axis + (operation.attributes("axis") % tensor.shape.rank <= axis)


def _unpacked(
    facts: AxisFacts, operation: Operation, tensor: Any, axes: Axes
) -> int | None:
    axis, rank = axes[0], operation.inputs[0].shape.rank
    if axis is None or rank is None:
        return axis_by_shape(facts, tensor)
    at = operation.attributes("axis") % rank
    if at == axis:
        raise Moved("rows meet rows")
    return axis - (at < axis)


def _joined(
    facts: AxisFacts, operation: Operation, tensor: Any, axes: Axes
) -> int | None:
    return _one(facts, axes)


def _one(facts: AxisFacts, axes: Axes) -> int | None:
    found = {axis for axis in axes.values() if axis is not None}
    if len(found) > 1:
        raise Moved("rows meet rows")
    return found.pop() if found else None


def _tiled(
    facts: AxisFacts, operation: Operation, tensor: Any, axes: Axes
) -> int | None:
    times = tf.get_static_value(operation.inputs[1], partial=True)
    if axes[0] is not None and times is not None and times[axes[0]] is None:
        raise Moved("rows meet rows")
    return axes[0]


def _padded(
    facts: AxisFacts, operation: Operation, tensor: Any, axes: Axes
) -> int | None:
    pads = tf.get_static_value(operation.inputs[1])
    if axes[0] is not None and pads is not None and pads[axes[0]].any():
        raise Moved("rows meet rows")
    return axes[0]


def _one_hot(
    facts: AxisFacts, operation: Operation, tensor: Any, axes: Axes
) -> int | None:
    axis, at = axes[0], operation.attributes("axis")
    last = axis is None or at is None or at < 0
    return axis if last else axis + (at <= axis)


# Parts.


def _strided(
    facts: AxisFacts, operation: Operation, tensor: Any, axes: Axes
) -> int | None:
    axis, rank = axes[0], operation.inputs[0].shape.rank
    size = operation.inputs[1].shape.num_elements()
    if axis is None or rank is None or size is None:
        return axis_by_shape(facts, tensor)
    names = ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
    begins, ends, rest, new, gone = (
        operation.attributes(f"{name}_mask") for name in names
    )
    given = size - bin(new & ~rest).count("1") - bool(rest)
    at = made = 0
    for i in range(size):
        bit = 1 << i
        if rest & bit:
            if at <= axis < at + rank - given:
                return made + axis - at
            at, made = at + rank - given, made + rank - given
        elif new & bit:
            made += 1
        elif at == axis:
            whole = not gone & bit and _is_step(facts, operation.inputs[3], i)
            rows = operation.inputs[0].shape[axis]
            begin = begins & bit or _is_edge(facts, operation.inputs[1], i, rows, True)
            end = ends & bit or _is_edge(facts, operation.inputs[2], i, rows, False)
            if not (whole and begin and end):
                raise Moved("rows meet rows")
            return made
        else:
            at, made = at + 1, made + (not gone & bit)
    return made + axis - at


def _is_step(facts: AxisFacts, strides: Any, i: int) -> bool:
    found = tf.get_static_value(strides, partial=True)
    return found is not None and found[i] == 1


def _is_edge(
    facts: AxisFacts, bounds: Any, i: int, size: int | None, first: bool
) -> bool:
    """Tell whether rows begin, or end, at a bound, as a multiple of all.

    A constant that is as many as this worker has of a batch may be a part of the batch
    of one process. So it is an edge only between rows and rows, as of two views that
    were joined.
    """
    if facts.counts(bounds) or _is_counted(facts, bounds, i):
        return True
    found = tf.get_static_value(bounds, partial=True)
    value, rows = None if found is None else found[i], facts.static
    if first and value == 0:
        return True
    if value is None or not rows or value < 0 or value % rows:
        return False
    several = size is not None and size > rows
    return several and (not first or value < (size or 0))


def _is_counted(facts: AxisFacts, numbers: Any, i: int) -> bool:
    """Tell whether one of some numbers, which were packed, is that of rows."""
    made = _host.operations.of(numbers)
    return made is not None and made.kind == "Pack" and facts.counts(made.inputs[i])


def _sliced(
    facts: AxisFacts, operation: Operation, tensor: Any, axes: Axes
) -> int | None:
    axis = axes[0]
    begin, size = (
        tf.get_static_value(each, partial=True) for each in operation.inputs[1:3]
    )
    if axis is None or begin is None or size is None:
        return axis
    length = None if size[axis] is None else int(size[axis])
    fits = length in (None, -1) or (facts.static and length % facts.static == 0)
    first = begin[axis]
    if not fits or (first is not None and first % (facts.static or 1 << 60)):
        raise Moved("rows meet rows")
    return axis


# Products.


def _multiplied(
    facts: AxisFacts, operation: Operation, tensor: Any, axes: Axes
) -> int | None:
    if operation.kind == "MatMul":
        turned = [operation.attributes(f"transpose_{each}") for each in "ab"]
    else:
        turned = [operation.attributes(f"adj_{each}") for each in "xy"]
    found = set[int]()
    for i, axis in axes.items():
        own = operation.inputs[i].shape.rank
        if axis is None or own is None or tensor.shape.rank is None:
            return axis_by_shape(facts, tensor)
        last = own - 1 - axis  # from the right
        last = 1 - last if turned[i] and last < 2 else last
        if last == i:  # summed over
            raise Moved("rows meet rows")
        found.add(tensor.shape.rank - 1 - last)
    if len(found) != 1:
        raise Moved("rows meet rows")
    return found.pop()


def _of_labels(
    facts: AxisFacts, operation: Operation, tensor: Any, axes: Axes
) -> int | None:
    labels, out = labels_of(operation)
    if any(axis is None for axis in axes.values()):
        return axis_by_shape(facts, tensor)
    found = {labels[i][axis] for i, axis in axes.items() if axis is not None}
    if len(found) != 1 or not found <= set(out):
        raise Moved("rows meet rows")
    return out.index(found.pop())


# Choices.


def _gathered(
    facts: AxisFacts, operation: Operation, tensor: Any, axes: Axes
) -> int | None:
    table, indices = operation.inputs[:2]
    at = tf.get_static_value(operation.inputs[2])
    ranks = table.shape.rank, indices.shape.rank
    batch = operation.attributes("batch_dims")
    known = None not in axes.values() and None not in ranks and at is not None
    if not known:
        return axis_by_shape(facts, tensor)
    at, batch = int(at) % ranks[0], batch + ranks[1] if batch < 0 else batch
    rows, own = axes.get(0), axes.get(1)
    if rows is None:
        if own is None:
            return None
        return own if own < batch else at + own - batch
    if own is None:
        if rows == at:
            raise Moved("rows meet rows")
        return rows if rows < at else rows - 1 + ranks[1] - batch
    if rows == own < batch:
        return rows
    if rows == at and own >= batch and facts.picks(indices):
        return int(at + own - batch)
    raise Moved("rows meet rows")


def _gathered_nd(
    facts: AxisFacts, operation: Operation, tensor: Any, axes: Axes
) -> int | None:
    if 1 not in axes or (0 in axes and not facts.picks(operation.inputs[1])):
        raise Moved("rows meet rows")
    return axes[1]


def _looked_up(
    facts: AxisFacts, operation: Operation, tensor: Any, axes: Axes
) -> int | None:
    return axes.get(1)


def _split(
    facts: AxisFacts, operation: Operation, tensor: Any, axes: Axes
) -> int | None:
    i, at = (1, 0) if operation.kind == "Split" else (0, 2)
    axis, rank = axes[i], tensor.shape.rank
    along = tf.get_static_value(operation.inputs[at])
    if axis is not None and along is not None and int(along) % rank == axis:
        if facts.copies(operation.inputs[i]) % operation.attributes("num_split"):
            raise Moved("rows meet rows")
    return axis


def labels_of(operation: Operation) -> tuple[list[str], str]:
    """Return the labels of the axes of what an Einsum takes, and of what it makes."""
    equation = operation.attributes("equation")
    equation = equation.decode() if isinstance(equation, bytes) else equation
    left, _, out = equation.partition("->")
    terms, widest = left.split(","), 0
    for term, tensor in zip(terms, operation.inputs, strict=True):
        if "..." in term:
            widest = max(widest, (tensor.shape.rank or 0) - len(term) + 3)
    digits = "0123456789"[:widest]
    labels = []
    for term, tensor in zip(terms, operation.inputs, strict=True):
        width = (tensor.shape.rank or 0) - len(term) + 3
        labels.append(term.replace("...", digits[widest - width :] if width else ""))
    return labels, out.replace("...", digits)


_RULES: dict[str, Callable[..., int | None]] = {
    **dict.fromkeys(REDUCTIONS | _BEST, _reduced),
    **dict.fromkeys(_ALONG, _along),
    **dict.fromkeys(("MatMul", "BatchMatMulV2", "BatchMatMulV3"), _multiplied),
    **dict.fromkeys(("Pad", "PadV2", "MirrorPad"), _padded),
    **dict.fromkeys(("ResourceGather", "ResourceGatherNd"), _looked_up),
    **dict.fromkeys(("Split", "SplitV"), _split),
    "BatchMatMul": _multiplied,
    "ConcatV2": _joined,
    "Einsum": _of_labels,
    "ExpandDims": _expanded,
    "GatherNd": _gathered_nd,
    "GatherV2": _gathered,
    "OneHot": _one_hot,
    "Pack": _packed,
    "Reshape": _reshaped,
    "Slice": _sliced,
    "Squeeze": _squeezed,
    "StridedSlice": _strided,
    "Tile": _tiled,
    "Transpose": _transposed,
    "Unpack": _unpacked,
    "Where": lambda facts, operation, tensor, axes: 0,
}
_MADE_OF_SEVERAL = frozenset(
    "MatMul BatchMatMul BatchMatMulV2 BatchMatMulV3 Einsum ConcatV2 Pack GatherV2 "
    "GatherNd ResourceGather ResourceGatherNd Split SplitV BiasAdd "
    "Conv2DBackpropInput Conv3DBackpropInputV2 SparseSoftmaxCrossEntropyWithLogits "
    "SoftmaxCrossEntropyWithLogits".split()
)
