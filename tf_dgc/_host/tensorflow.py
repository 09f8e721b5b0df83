"""Private names of TensorFlow: its runtime, seeds, graphs and datasets."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from typing import Any

import tensorflow as tf

from tf_dgc._host import probe

with probe.imports():
    from tensorflow.python.data.ops import dataset_ops, map_op
    from tensorflow.python.eager import context, record
    from tensorflow.python.framework import kernels, op_def_registry
    from tensorflow.python.ops import control_flow_util

_ANSWER_SECONDS = 5.0  # of TensorFlow's coordination service

_PACKAGE = f"{__name__.partition('.')[0]}."


def wanted() -> list[tuple[Any, str]]:
    """Return the private names, with the object or class that must have each."""
    return [
        (context.context(), "_initialized"),
        (context.context(), "abort_collective_ops"),
        (context.context(), "configure_coordination_service"),
        (context.context(), "get_config_key_value"),
        (context.context(), "invoking_op_callbacks"),
        (context.context(), "report_error_to_cluster"),
        (context.context(), "set_config_key_value"),
        (context, "coordination_config_pb2"),
        (context, "global_seed"),
        (control_flow_util, "GraphOrParentsInXlaContext"),
        (dataset_ops, "UnaryUnchangedStructureDataset"),
        (kernels, "get_registered_kernels_for_op"),
        (map_op, "_MapDataset"),
        (map_op, "_ParallelMapDataset"),
        (op_def_registry, "get"),
        (record, "could_possibly_record"),
        (tf.__internal__, "FuncGraph"),
        (tf.data.Dataset, "_functions"),
        (tf.data.Dataset, "_inputs"),
        (tf.Variable, "_serialize_to_tensors"),
    ]


probe.check(wanted())


def hook_checkpoints(variable: tf.Variable, before: Callable[[], None]) -> None:
    """Let something run before a variable is written to a `tf.train.Checkpoint`.

    tensorflow/python/trackable/base.py: Trackable._serialize_to_tensors.
    """
    original = variable._serialize_to_tensors

    def serialize() -> Any:
        before()
        return original()

    variable._serialize_to_tensors = serialize


def tensorflow_has_started() -> bool:
    """Tell whether this process has run an operation.

    tensorflow/python/eager/context.py: Context._initialized. The public functions
    that refuse a late call change what they set.
    """
    return bool(context.context()._initialized)


def configure_coordination(workers: int, timeout: float) -> None:
    """Bound the time that TensorFlow's coordination service waits for workers.

    tensorflow/python/eager/context.py: Context.configure_coordination_service.
    MultiWorkerMirroredStrategy leaves alone what is already configured, and by itself
    waits for an hour at the start, and for ten seconds for a worker that is stopped.

    A worker tells that it lives each half of the time of heartbeats, for which it also
    waits for an answer: twice the timeout outlasts each stop that is shorter than that,
    so that a `Watchdog` ends a longer one.
    """
    job = context.coordination_config_pb2.CoordinatedJob(
        name="worker", num_tasks=workers
    )
    context.context().configure_coordination_service(
        service_type="standalone",
        service_leader="/job:worker/replica:0/task:0",
        cluster_register_timeout_in_ms=int(timeout * 1000),
        heartbeat_timeout_in_ms=int(2 * timeout * 1000),
        coordinated_jobs=[job],
    )


@contextlib.contextmanager
def kept_sigterm() -> Iterator[None]:
    """Leave alone what SIGTERM does, while TensorFlow's collectives are set up.

    tsl/distributed_runtime/preemption/preemption_notifier.cc catches the signal, to
    tell those who save before they are preempted. There are none here, and a process
    would never end by it. Outside of the main thread nothing can be done.
    """
    handler = signal.getsignal(signal.SIGTERM)
    yield
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


def report_failure(message: str) -> None:
    """Make the collectives of all workers fail with a message.

    tensorflow/python/eager/context.py: Context.report_error_to_cluster.

    Raises:
        tf.errors.OpError: TensorFlow's coordination service is gone, or silent.
    """
    code = tf.errors.AbortedError(None, None, message).error_code
    _answered(lambda: context.context().report_error_to_cluster(code, message))


def publish(key: str, value: str = "1") -> None:
    """Set a key in TensorFlow's coordination service, for all workers to see.

    tensorflow/python/eager/context.py: Context.set_config_key_value.

    Raises:
        tf.errors.OpError: the service is gone, or silent.
    """
    _answered(lambda: context.context().set_config_key_value(key, value))


def _answered(tell: Callable[[], None]) -> None:
    """Tell the service something, and wait for its answer: for a time.

    TensorFlow waits for ever where the process that has the service is stopped.

    Raises:
        tf.errors.OpError: the service is gone, or silent.
    """
    answer: futures.Future[None] = futures.Future()

    def run() -> None:
        try:
            tell()
        except tf.errors.OpError as error:
            answer.set_exception(error)
        else:
            answer.set_result(None)

    threading.Thread(target=run, daemon=True).start()
    try:
        answer.result(_ANSWER_SECONDS)
    except TimeoutError:
        text = f"The service of worker 0 is silent for {_ANSWER_SECONDS:g} s"
        raise tf.errors.DeadlineExceededError(None, None, text) from None


def wait_for_key(key: str, timeout: float) -> str:
    """Wait until some worker has published a key; return its value.

    tensorflow/python/eager/context.py: Context.get_config_key_value.

    Raises:
        tf.errors.OpError: nobody has within `timeout` seconds, or the service is gone.
    """
    return context.context().get_config_key_value(key, max(1, int(timeout * 1000)))


def abort_collectives(message: str) -> None:
    """Make the collective that this process waits in, and all later ones, fail.

    tensorflow/python/eager/context.py: Context.abort_collective_ops, which
    MultiWorkerMirroredStrategy's own health check calls. Safe from any thread.
    """
    context.context().abort_collective_ops(
        tf.errors.DeadlineExceededError(None, None, message).error_code, message
    )


def global_seed() -> int | None:
    """Return what `tf.random.set_seed` was given, if it was called.

    tensorflow/python/eager/context.py: global_seed. Nothing public tells.
    """
    return context.global_seed()


def runs_as_it_is(original: Callable[[Any], bool], function: Any) -> bool:
    """Tell AutoGraph that functions of this package need no conversion."""
    module = getattr(function, "__module__", None) or ""
    return f"{module}.".startswith(_PACKAGE) or original(function)


def outside_of_loops(function: Callable[[], None]) -> Callable[[], None]:
    """Let a function, which takes and returns nothing, run outside of a graph's loops.

    tensorflow/core/kernels/collective_ops.cc, CollectiveKey: the frame of a loop and
    its iteration are in the key by which workers meet, so that a worker inside of a
    loop never meets one outside. A function of its own has no frame.
    """
    return function if tf.executing_eagerly() else not_inlined(function)


def not_inlined(
    function: Callable[..., Any], signature: Sequence[tf.TensorSpec] = ()
) -> Callable[..., Any]:
    """Trace a function that stays one in graphs that call it, names and all.

    The attribute is of tensorflow/python/eager/polymorphic_function/attributes.py:
    NO_INLINE. What is inlined gets other names, its place in them.
    """
    return tf.function(
        function,
        list(signature),
        autograph=False,
        experimental_attributes={"_noinline": True},
    ).get_concrete_function()


def outermost_function_graph() -> Any:
    """Return the graph of the function that is traced, not of a branch within it.

    tensorflow/python/framework/func_graph.py: FuncGraph, which tf.__internal__ exports.
    """
    graph: Any = tf.compat.v1.get_default_graph()
    while type(graph) is not tf.__internal__.FuncGraph:
        graph = graph.outer_graph
    return graph


def is_in_branch() -> bool:
    """Tell whether what is traced may not run in each call: of a branch, or a loop.

    tensorflow/python/framework/func_graph.py: FuncGraph, of which those are subclasses.
    """
    graph = tf.compat.v1.get_default_graph()
    return not tf.executing_eagerly() and type(graph) is not tf.__internal__.FuncGraph


def is_recorded() -> bool:
    """Tell whether a gradient tape follows what is computed now.

    tensorflow/python/eager/record.py: could_possibly_record.
    """
    return bool(record.could_possibly_record())


def compiled_by_xla() -> bool:
    """Tell whether XLA is to compile what is being traced, as `jit_compile` asks.

    tensorflow/python/ops/control_flow_util.py: GraphOrParentsInXlaContext, by which
    tf.function itself knows whether it is called in such a function.
    """
    graph = tf.compat.v1.get_default_graph()
    return bool(control_flow_util.GraphOrParentsInXlaContext(graph))


@contextlib.contextmanager
def without_debugging() -> Iterator[None]:
    """Add nothing of `tf.debugging` to what is traced here: XLA cannot compile it.

    tensorflow/python/framework/op_callbacks.py: should_invoke_op_callbacks.
    """
    own = context.context()
    before, own.invoking_op_callbacks = own.invoking_op_callbacks, True
    try:
        yield
    finally:
        own.invoking_op_callbacks = before


def inputs_of(dataset: tf.data.Dataset) -> Sequence[tf.data.Dataset]:
    """Return what a dataset reads. tensorflow/python/data/ops: Dataset._inputs."""
    return dataset._inputs()


def graphs_of(dataset: tf.data.Dataset) -> list[Any]:
    """Return the graphs of a dataset's functions. Dataset._functions, beside it."""
    return [each.function.graph for each in dataset._functions()]


def maps(dataset: tf.data.Dataset) -> bool:
    """Tell whether this is `Dataset.map`. tensorflow/python/data/ops/map_op.py."""
    return isinstance(dataset, (map_op._MapDataset, map_op._ParallelMapDataset))


def maps_in_order(dataset: tf.data.Dataset) -> bool:
    """Tell whether this is `Dataset.map` of one element at a time."""
    return isinstance(dataset, map_op._MapDataset)


def chooses(dataset: tf.data.Dataset) -> bool:
    """Tell whether a dataset only orders or drops elements.

    tensorflow/python/data/ops/dataset_ops.py: UnaryUnchangedStructureDataset.
    """
    return isinstance(dataset, dataset_ops.UnaryUnchangedStructureDataset)


def is_stateful(operation: str) -> bool:
    """Tell whether a kind of operation reads or draws more than its inputs.

    tensorflow/python/framework/op_def_registry.py: get.
    """
    found = op_def_registry.get(operation)
    return found is not None and found.is_stateful


def kernels_of(operation: str) -> Sequence[Any]:
    """Return the KernelDefs of a type of operation, of all devices.

    tensorflow/python/framework/kernels.py. Nothing public tells which there are.
    """
    return kernels.get_registered_kernels_for_op(operation).kernel


def op_def(operation: str) -> Any:
    """Return the OpDef of a type of operation, with the names of its arguments.

    tensorflow/python/framework/op_def_registry.py: get. Public is that of an operation
    in a graph (tf.Operation.op_def), not of a node in the definition of a function.
    """
    return op_def_registry.get(operation)
