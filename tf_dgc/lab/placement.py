"""Tell what of training steps would leave a GPU, on a machine without one.

    python -m tf_dgc.lab.placement            # all steps
    python -m tf_dgc.lab.placement dense dgc  # some

Steps of each strategy, and of Horovod's front end, are traced as one of several workers
with a GPU would, over TensorFlow's collectives; nothing of them runs. Every operation
must have a GPU kernel that leaves tensors of the size of a message or more where they
are. What XLA compiles is lowered for GPUs, and must change variables in place.

Last are printed how often the host makes the GPU work in an ordinary step, and how
often it waits for it: where a step of compression is taken by single operations, as on
processors, and where XLA compiles it as a whole, as on GPUs. The model's own operations
are in both; they alone are the step "plain".
"""

import argparse
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tf_dgc.config import AveragingConfig, DGCConfig
from tf_dgc.exchanges import fused, inplace
from tf_dgc.horovod.optimizer import DistributedOptimizer
from tf_dgc.horovod.tape import DistributedGradientTape
from tf_dgc.lab.kernels import Audit, KernelPlace, audit
from tf_dgc.layers import split_dense
from tf_dgc.strategies import (
    BaseStrategy,
    DenseStrategy,
    DGCStrategy,
    ParameterAveragingStrategy,
)
from tf_dgc.transports import base, gathering
from tf_dgc.transports.mesh import HierarchicalTransport

GPU = "/device:GPU:0"
# Elements. Headers, figures and flags have fewer, messages of these models more.
LARGE = 64
_ROWS, _INPUTS, _WORDS = 16, 64, 50

# What may be on the host with tensors that are not small, and why.
_TOLD = "what an error says, made only where it is raised"
_ROW_NUMBERS = (
    "numbers of rows: Keras makes them int32, TensorFlow has that on the host"
)
_ORDER = "rows of several workers add up in one order, which they do not on GPUs"
# Pinned there by the program.
CARRIED: Mapping[str, str] = {
    **dict.fromkeys(("Assert", "StridedSlice", "Where"), _TOLD),
    "PyFunc": "a warning, where weights differ by rounding",
}
# In steps with embeddings; pinned by the program or not.
OF_EMBEDDINGS: Mapping[str, str] = {
    **dict.fromkeys(("AddV2", "GreaterEqual", "Identity", "Less"), _ROW_NUMBERS),
    **dict.fromkeys(("All", "LogicalAnd", "Reshape"), _ROW_NUMBERS),
    **dict.fromkeys(("Shape", "Size", "Unique", "UnsortedSegmentSum"), _ORDER),
}


class PlacedWire(base.Transport):
    """One of two workers on GPUs; in graphs the collectives of TensorFlow.

    Such graphs are looked at, not run. Eagerly the other worker has the same tensors.
    """

    name = "loopback"
    rank, size, device = 0, 2, GPU

    def all_reduce(self, tensors: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        """Sum each tensor over the workers."""
        with tf.device(self.device):
            return base.fuse(tensors, self._reduce)

    def all_gather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Gather a tensor from each worker."""
        if tf.executing_eagerly():
            return tf.stack([tensor] * self.size)
        with tf.device(self.device):
            bits, restore = gathering.unmoved(tensor)
            gathered = tf.raw_ops.CollectiveGatherV2(
                input=tf.reshape(bits, [-1]), **self._keys()
            )
            shape = tf.concat([[self.size], tf.shape(tensor)], axis=0)
            result = restore(tf.reshape(gathered, shape))
        result.set_shape([self.size, *tensor.shape])
        return result

    def broadcast(self, tensors: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        """Give all workers what this one has."""
        if tf.executing_eagerly():
            return [tf.identity(tensor) for tensor in tensors]
        return super().broadcast(tensors, name)

    def all_to_all(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Send each worker a row of a tensor."""
        if tf.executing_eagerly():
            return tf.identity(tensor)
        with tf.device(self.device):
            bits, restore = gathering.unmoved(tensor)
            rows = tf.reshape(bits, [self.size, -1])
            received = tf.raw_ops.CollectiveAllToAllV2(input=rows, **self._keys())
            result = restore(tf.reshape(received, tf.shape(tensor)))
        result.set_shape(tensor.shape)
        return result

    def _reduce(self, vector: tf.Tensor) -> tf.Tensor:
        if tf.executing_eagerly():
            return tf.cast(self.size, vector.dtype) * vector
        return tf.raw_ops.CollectiveReduceV2(
            input=vector, merge_op="Add", final_op="Id", **self._keys()
        )

    def _keys(self) -> dict[str, Any]:
        keys = {"group_size": self.size, "group_key": 1, "instance_key": 1}
        return {**keys, "ordering_token": []}


class Nodes(HierarchicalTransport):
    """Two nodes of two such workers each, seen by the first of them."""

    def __init__(self, wire: PlacedWire) -> None:
        """Let all that a worker may do be done over the same wire."""
        self._everybody = self._within = self._between = wire
        self.rank, self.size, self.device = wire.rank, wire.size, wire.device
        self.members, self.speaks = [[0], [1]], True
        with tf.device(self.device):
            self._zero = tf.Variable(tf.zeros([], tf.int64), trainable=False)


Run = Callable[[tf.Tensor, tf.Tensor], Any]


class PlacedStep(NamedTuple):
    """A training step: of which front end, with which optimizer."""

    # Makes what trains a model: make(wire, build) -> the step.
    make: Callable[[PlacedWire, Callable[[], keras.Model]], Run]
    optimizer: Callable[[], keras.optimizers.Optimizer]
    embedding: bool = False  # whether gradients are those of rows
    split: bool = False  # whether dense layers are


def _by(strategy_on: Callable[[PlacedWire], BaseStrategy]) -> Callable[..., Run]:
    def make(wire: PlacedWire, build: Callable[[], keras.Model]) -> Run:
        strategy = strategy_on(wire)
        with strategy.scope():
            model = build()
        return lambda x, y: strategy.run(model.train_step, ((x, y),))

    return make


def _alone(_: PlacedWire, build: Callable[[], keras.Model]) -> Run:
    model = build()
    return lambda x, y: model.train_step((x, y))


def _by_optimizer(wire: PlacedWire, build: Callable[[], keras.Model]) -> Run:
    model = build()
    DistributedOptimizer(model.optimizer, _COMPRESSION, over=wire)
    return lambda x, y: model.train_step((x, y))


def _by_tape(wire: base.Transport, build: Callable[[], keras.Model]) -> Run:
    model = build()

    def run(x: tf.Tensor, y: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
        tape = DistributedGradientTape(tape, _COMPRESSION, over=wire)
        weights = model.trainable_variables
        model.optimizer.apply(tape.gradient(loss, weights), weights)

    return run


def _dgc(**settings: Any) -> Callable[..., Run]:
    wanted = {"sparsity": 0.99, "min_elements": 1, "warmup_steps": 0}
    config = DGCConfig(**(wanted | settings))
    return _by(lambda wire: DGCStrategy(config, transport=wire))


def _averaging(**settings: Any) -> Callable[..., Run]:
    config = AveragingConfig(**({"period": 4} | settings))
    return _by(lambda wire: ParameterAveragingStrategy(config, transport=wire))


_COMPRESSION = DGCConfig(sparsity=0.99, min_elements=1, warmup_steps=0)
_sgd = functools.partial(keras.optimizers.SGD, 0.1, momentum=0.9)
_adam = keras.optimizers.Adam
_dense = _by(lambda wire: DenseStrategy(transport=wire))


def _scaled() -> keras.optimizers.Optimizer:
    return keras.optimizers.LossScaleOptimizer(_sgd())


STEPS: Mapping[str, PlacedStep] = {
    "plain": PlacedStep(_alone, _sgd),
    "dense": PlacedStep(_dense, _adam),
    "dense_embedding": PlacedStep(_dense, _sgd, True),
    "dense_scaled": PlacedStep(_dense, _scaled),
    "dense_split": PlacedStep(_dense, _adam, split=True),
    "dgc": PlacedStep(_dgc(clip_norm=1.0), _sgd),
    "dgc_nesterov": PlacedStep(
        _dgc(momentum_masking=False), functools.partial(_sgd, nesterov=True)
    ),
    "dgc_adam": PlacedStep(_dgc(nonfinite="skip"), _adam),
    "dgc_gradients": PlacedStep(_dgc(momentum_correction=False), _adam),
    "dgc_embedding": PlacedStep(_dgc(), _sgd, True),
    # The last is exchanged densely, and longer positions go with fewer elements.
    "dgc_warmup": PlacedStep(
        _dgc(warmup_steps=4, warmup_stages=(0.25, 0.9), sparsity=0.9999), _sgd
    ),
    "dgc_float16": PlacedStep(_dgc(value_dtype="float16"), _sgd),
    "dgc_bfloat16": PlacedStep(_dgc(value_dtype="bfloat16"), _sgd),
    "dgc_sign": PlacedStep(_dgc(value_dtype="sign"), _sgd),
    "dgc_log4": PlacedStep(_dgc(value_dtype="log4"), _adam),
    "averaging": PlacedStep(_averaging(synchronous_steps=2), _adam),
    "averaging_adaptive": PlacedStep(_averaging(period="adaptive"), _sgd),
    "averaging_outer": PlacedStep(
        _averaging(outer_optimizer=functools.partial(_sgd, nesterov=True)), _adam
    ),
    "averaging_compressed": PlacedStep(_averaging(compression=_COMPRESSION), _adam),
    "horovod": PlacedStep(_by_optimizer, _sgd),
    "horovod_tape": PlacedStep(_by_tape, _adam),
    "horovod_nodes": PlacedStep(lambda wire, build: _by_tape(Nodes(wire), build), _sgd),
}


def trace(step: PlacedStep) -> Any:
    """Return a training step of a small model as a concrete function, not run."""

    def build() -> keras.Model:
        layers: list[Any] = [keras.Input((_INPUTS,)), keras.layers.Dense(256, "relu")]
        if step.embedding:
            layers = [keras.Input((8,)), keras.layers.Embedding(_WORDS, 32)]
            layers.append(keras.layers.Flatten())
        model = keras.Sequential([*layers, keras.layers.Dense(10)])
        if step.split:
            model = split_dense(model, 1)
        model.compile(step.optimizer(), "mse", jit_compile=False)
        model.optimizer.build(model.trainable_variables)
        return model

    own = step.make(PlacedWire(), build)
    columns, dtype = (8, tf.int64) if step.embedding else (_INPUTS, tf.float32)

    @tf.function(autograph=False)
    def run(x: tf.Tensor, y: tf.Tensor) -> Any:
        with tf.device(GPU):
            return own(x, y)

    specs = [tf.TensorSpec([_ROWS, columns], dtype), tf.TensorSpec([_ROWS, 10])]
    return run.get_concrete_function(*specs)


def unwanted(found: Audit, embedding: bool = False) -> list[str]:
    """Return what leaves the GPU without being on a list; empty where all is well.

    Args:
        found: of a step.
        embedding: whether it is one with embeddings.
    """
    rows = OF_EMBEDDINGS if embedding else {}
    lists: Sequence[tuple[str, Mapping[KernelPlace, int], Mapping[str, str]]] = (
        ("has no GPU kernel", found.missing, {}),
        ("takes or leaves large tensors on the host", found.copied, rows),
        (
            "is pinned to the host with large tensors",
            found.carried,
            {**CARRIED, **rows},
        ),
    )
    return [
        f"{place.operation} {place.types} {what} ({count})"
        for what, places, known in lists
        for place, count in places.items()
        if place.operation not in known
    ]


def lowered(compiled: inplace.Compiled) -> list[str]:
    """Lower a function of `inplace` for GPUs; return what is wrong with it.

    Whether variables are changed in place XLA says where there is a device: of the
    same function, lowered for the CPU.
    """
    pure = tf.function(compiled.pure, autograph=False, jit_compile=True)
    # Where stages share a function, any number of elements will do.
    forms = [
        form._replace(shape=[_ROWS if size is None else size for size in form.shape])
        for form in compiled.tensors
    ]
    specs = [tf.TensorSpec(form.shape, form.dtype) for form in forms]
    try:
        pure.experimental_get_compiler_ir(*specs)(stage="hlo", platform_name="GPU")
    except (ValueError, tf.errors.OpError) as error:
        return [f"{compiled.name} is not lowered for GPUs: {error}"]
    if not compiled.changes:
        return []
    whole = tf.function(compiled.run, autograph=False, jit_compile=True)
    with tf.device("CPU:0"):
        zeros = [tf.zeros(form.shape, form.dtype) for form in forms]
        own = [
            tf.Variable(zero) if form.is_variable else zero
            for form, zero in zip(forms, zeros, strict=True)
        ]
        args = [each.handle if isinstance(each, tf.Variable) else each for each in own]
        text = whole.experimental_get_compiler_ir(*args)(stage="hlo")
    kept = text.partition("\n")[0].count("-alias)")
    wanted = sum(form.is_variable for form in compiled.tensors)
    if kept == wanted:
        return []
    return [f"{compiled.name} copies {wanted - kept} of {wanted} variables"]


def table(found: Mapping[str, Audit]) -> str:
    """Return as lines of text how many operations of which kind each step has."""
    heads = ("operations", "XLA", *Audit._fields[2:])
    lines = [f"{'step':22}" + "".join(f"{head:>11}" for head in heads)]
    for name, each in found.items():
        counts = [*each[:3], *(sum(places.values()) for places in each[3:])]
        lines.append(f"{name:22}" + "".join(f"{count:11}" for count in counts))
    return "\n".join(lines)


def comparison(singly: Mapping[str, Audit], whole: Mapping[str, Audit]) -> str:
    """Return as lines of text what is launched and waited for, both ways."""
    heads = ("launched", "waits", "as a whole", "waits")
    lines = [f"{'step':22}" + "".join(f"{head:>11}" for head in heads)]
    for name, each in singly.items():
        counts = [
            number
            for one in (each, whole[name])
            for number in (one.launched, sum(one.waiting.values()))
        ]
        lines.append(f"{name:22}" + "".join(f"{count:11}" for count in counts))
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Trace, look and print; return the exit status: 1 where something leaves a GPU."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("steps", nargs="*", metavar="STEP", help=", ".join(STEPS))
    names = parser.parse_args(argv).steps or list(STEPS)
    for name in names:
        if name not in STEPS:
            parser.error(f"STEP must be one of {', '.join(STEPS)}. Received: {name}")
    found = {name: audit(trace(STEPS[name]), LARGE) for name in names}
    with fused.forced(False):
        singly = {name: audit(trace(STEPS[name]), LARGE) for name in names}
    wrong = [
        f"{name}: {text}"
        for name, each in found.items()
        for text in unwanted(each, STEPS[name].embedding)
    ]
    compiled = inplace.compiled()
    wrong += [text for each in compiled for text in lowered(each)]
    sys.stdout.write(f"{table(found)}\n{len(compiled)} functions lowered for GPUs\n")
    sys.stdout.write(f"{comparison(singly, found)}\n")
    sys.stdout.write("".join(f"WRONG {text}\n" for text in wrong))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
