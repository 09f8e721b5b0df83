"""Horovod's operations on tensors, by the names that its scripts have for them.

They take variables of Keras, too, and start Horovod where the script has not. What is
not here and not in `BORROWED` is refused by a message of its own.
"""

from collections.abc import Sequence
from typing import Any, NoReturn

import tensorflow as tf

from tf_dgc.horovod import core
from tf_dgc.horovod.core import running
from tf_dgc.transports import base, handshake
from tf_dgc.transports.base import Transport

# Names of `horovod.tensorflow` that are taken from there when they are asked for.
BORROWED = (
    "Adasum",
    "Average",
    "Compression",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather_object",
    "broadcast_object",
    "ccl_built",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "gpu_available",
    "is_homogeneous",
    "local_rank_op",
    "local_size_op",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank_op",
    "remove_process_set",
    "rocm_built",
    "size_op",
    "start_timeline",
    "stop_timeline",
)


def allreduce(tensor: Any, average: Any = None, **options: Any) -> Any:
    """Return the mean of a tensor, variable or number over the workers, as a tensor.

    Args:
        tensor: of the same shape on every worker.
        average: Horovod's old form of `op`; or its name, which stands here in
            `horovod.tensorflow.keras`.
        options: others of Horovod, such as `op` and `compression`.
    """
    if isinstance(average, str):
        options, average = {"name": average} | options, None
    return running().allreduce(_tensor(tensor), average, **options)


def grouped_allreduce(tensors: Sequence[Any], *args: Any, **options: Any) -> list[Any]:
    """Return the means of tensors over the workers; see Horovod's."""
    own = [_tensor(tensor) for tensor in tensors]
    return running().grouped_allreduce(own, *args, **options)


def allgather(tensor: Any, *args: Any, **options: Any) -> Any:
    """Join tensors of all workers along their first axis; see Horovod's."""
    return running().allgather(_tensor(tensor), *args, **options)


def grouped_allgather(tensors: Sequence[Any], *args: Any, **options: Any) -> list[Any]:
    """Join each tensor along its first axis; see Horovod's."""
    own = [_tensor(tensor) for tensor in tensors]
    return running().grouped_allgather(own, *args, **options)


def broadcast(tensor: Any, root_rank: int, *args: Any, **options: Any) -> Any:
    """Return a tensor as one worker has it; see Horovod's."""
    return running().broadcast(_tensor(tensor), root_rank, *args, **options)


def alltoall(tensor: Any, *args: Any, **options: Any) -> Any:
    """Send parts of a tensor to all workers; see Horovod's."""
    return running().alltoall(_tensor(tensor), *args, **options)


def reducescatter(tensor: Any, *args: Any, **options: Any) -> Any:
    """Return this worker's part of the mean of a tensor; see Horovod's."""
    return running().reducescatter(_tensor(tensor), *args, **options)


def _tensor(value: Any) -> Any:
    sparse = isinstance(value, tf.IndexedSlices)
    return value if sparse else tf.convert_to_tensor(value)


@tf.autograph.experimental.do_not_convert
def broadcast_variables(
    variables: Any,
    root_rank: int = 0,
    *,
    inplace: bool = False,
    over: Transport | None = None,
) -> None:
    """Let variables have the values of one worker, eagerly or in a graph.

    Args:
        variables: of Keras or TensorFlow, as many and of the same shapes on every
            worker: `model.weights`, `optimizer.variables`.
        root_rank: of the worker.
        inplace: taken for Horovod's sake.
        over: a transport other than Horovod's.

    Raises:
        ValueError: the workers' variables differ, or there is no such worker.
    """
    with tf.init_scope():
        found = over or core.transport()
    check_root(found, root_rank)
    variables = list(variables)
    values = [tf.convert_to_tensor(variable) for variable in variables]
    forms = {f"variable {i}": f"{v.dtype} {v.shape}" for i, v in enumerate(values)}
    with tf.init_scope():
        handshake.agree(found, "variables to broadcast", forms)
    shared = _from_root(found, values, root_rank)
    for variable, value in zip(variables, shared, strict=True):
        variable.assign(value)


def check_root(found: Transport, root_rank: int) -> None:
    """Raise ValueError where there is no such worker."""
    if not 0 <= root_rank < found.size:
        raise ValueError(
            f"`root_rank` must be in [0, {found.size}). Received: root_rank={root_rank}"
        )


def _from_root(found: Transport, values: list[Any], root: int) -> list[Any]:
    """Broadcast tensors from any worker, which `Transport.broadcast` does from 0."""
    if root == 0 or not values:
        return found.broadcast(values, "variables")
    words = [base.to_words(value) for value in values]
    if found.rank != root:
        words = [tf.zeros_like(word) for word in words]
    summed = found.all_reduce(words, "variables")
    return [base.from_words(*pair) for pair in zip(summed, values, strict=True)]


def barrier() -> None:
    """Wait until every worker has come here."""
    core.transport().barrier()


def broadcast_global_variables(root_rank: int) -> NoReturn:
    """Refuse what TensorFlow 2 has no meaning for.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(
        "`broadcast_global_variables` needs global variables as in TensorFlow 1, which "
        "Keras 3 has none of. Use hvd.broadcast_variables(model.weights, "
        f"root_rank={root_rank}), and the same of optimizer.variables"
    )


def join() -> NoReturn:
    """Refuse to let workers end before the others.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(
        "`join` cannot be had: Horovod's lets workers end only where nothing but "
        "all-reduce is used, and a mean would go on counting those that are gone. Give "
        "all workers as many batches, with `steps_per_epoch` or Dataset.take"
    )
