"""Functions of TensorFlow and Keras that are replaced, for all of this process.

Each has a name here. `replace` puts something else in its place and `unwrap` puts back
what was there; `strategies/patches.py` is the list of what is replaced.
"""

import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tf_dgc._host import probe

with probe.imports():
    from keras.src.backend.tensorflow.trainer import TFEpochIterator
    from keras.src.losses import loss as loss_module
    from keras.src.saving import saving_lib
    from keras.src.trainers.data_adapters import array_data_adapter, py_dataset_adapter
    from keras.src.trainers.epoch_iterator import EpochIterator
    from keras.src.utils import file_utils, io_utils
    from tensorflow.python.autograph.impl import conversion
    from tensorflow.python.checkpoint import checkpoint, checkpoint_management
    from tensorflow.python.data.ops import batch_op, interleave_op, map_op, readers
    from tensorflow.python.data.util import random_seed as data_random_seed
    from tensorflow.python.framework import ops, random_seed
    from tensorflow.python.ops import cond as cond_module
    from tensorflow.python.ops import (
        gen_stateless_random_ops,
        gen_stateless_random_ops_v2,
        resource_variable_ops,
    )


# tensorflow/python/ops: by which all functions draw that are given a seed.
_DRAWING = {
    gen_stateless_random_ops: (
        "stateless_multinomial stateless_parameterized_truncated_normal "
        "stateless_random_binomial stateless_random_poisson"
    ),
    gen_stateless_random_ops_v2: (
        "stateless_random_gamma_v3 stateless_random_normal_v2 "
        "stateless_random_uniform_full_int_v2 stateless_random_uniform_int_v2 "
        "stateless_random_uniform_v2 stateless_truncated_normal_v2"
    ),
}
DRAWING = {
    name.replace("_", " "): (owner, name)
    for owner, names in _DRAWING.items()
    for name in names.split()
}


def wanted() -> list[tuple[Any, str]]:
    """Return the private names, with the object or class that must have each."""
    return [
        (conversion, "is_unsupported"),
        (checkpoint, "TrackableSaver"),
        (checkpoint_management, "update_checkpoint_state_internal"),
        (checkpoint_management, "_delete_file_if_exists"),
        (checkpoint_management, "get_checkpoint_state"),
        (batch_op, "_ParallelBatchDataset"),
        (interleave_op, "_ParallelInterleaveDataset"),
        (map_op, "_ParallelMapDataset"),
        (readers, "ParallelInterleaveDataset"),
        (cond_module, "cond"),
        (data_random_seed, "get_seed"),
        (random_seed, "get_seed"),
        (ops, "_default_graph_stack"),
        (ops, "_EagerTensorBase"),
        (resource_variable_ops, "ResourceVariable"),
        *DRAWING.values(),
        (array_data_adapter, "ArrayDataAdapter"),
        (py_dataset_adapter, "random"),
        (EpochIterator, "_enumerate_iterator"),
        (TFEpochIterator, "reset"),
        (loss_module, "scale_loss_for_distribution"),
        (loss_module, "unscale_loss_for_distribution"),
        (keras.Model, "_get_metrics_result_or_logs"),
        (keras.Model, "_maybe_symbolic_build"),
        (keras.Model, "make_train_function"),
        (keras.optimizers.Optimizer, "_backend_apply_gradients"),
        (keras.optimizers.Optimizer, "_clip_gradients"),
        (keras.optimizers.Optimizer, "load_own_variables"),
        (keras.optimizers.Optimizer, "save_own_variables"),
        (keras.random.SeedGenerator, "next"),
        (file_utils, "urlretrieve"),
        (io_utils, "print_msg"),
        (saving_lib, "is_memory_sufficient"),
        (keras.Variable, "_initialize_with_initializer"),
    ]


probe.check(wanted())

# Each name with the object or class that has a function, and the function's name. KB is
# keras/src/backend. What stands without a comment is public.
PLACES: dict[str, tuple[Any, str]] = {
    **DRAWING,
    # tensorflow/python/autograph/impl/conversion.py: is_unsupported(function), of which
    # AutoGraph runs functions as they are.
    "conversion": (conversion, "is_unsupported"),
    # tensorflow/python/data/ops: constructors, with `deterministic`, or `sloppy`.
    "interleave": (interleave_op._ParallelInterleaveDataset, "__init__"),
    "map": (map_op._ParallelMapDataset, "__init__"),
    "batch": (batch_op._ParallelBatchDataset, "__init__"),
    "parallel interleave": (readers.ParallelInterleaveDataset, "__init__"),
    # tensorflow/python/framework/random_seed.py: get_seed(op_seed), which all
    # operations that draw ask while they are made.
    "seeds": (random_seed, "get_seed"),
    # tensorflow/python/data/util/random_seed.py: get_seed(seed), which `shuffle`,
    # `random` and so on ask while a dataset is made.
    "data seeds": (data_random_seed, "get_seed"),
    "generator": (keras.random.SeedGenerator, "next"),
    # keras/src/trainers/data_adapters/array_data_adapter.py: ArrayDataAdapter
    # .get_tf_dataset, which calls tf.random.shuffle.
    "arrays": (array_data_adapter.ArrayDataAdapter, "get_tf_dataset"),
    "fit": (keras.Model, "fit"),
    "evaluate": (keras.Model, "evaluate"),
    "predict": (keras.Model, "predict"),
    "predict on batch": (keras.Model, "predict_on_batch"),
    "train on batch": (keras.Model, "train_on_batch"),
    # KB/tensorflow/trainer.py: _maybe_symbolic_build(iterator, data_batch), in which
    # `fit`, `evaluate` and their kin read a batch to build the model, whatever scope
    # that is of.
    "build": (keras.Model, "_maybe_symbolic_build"),
    "compile": (keras.Model, "compile"),
    # KB/tensorflow/trainer.py: make_train_function, which `fit` and `train_on_batch`
    # call before the first step.
    "train function": (keras.Model, "make_train_function"),
    # keras/src/optimizers/base_optimizer.py: _backend_apply_gradients, to which local
    # gradients come first.
    "apply": (keras.optimizers.Optimizer, "_backend_apply_gradients"),
    "apply scaled": (keras.optimizers.LossScaleOptimizer, "apply"),
    # KB/tensorflow/core.py: Variable._initialize_with_initializer, which makes the
    # variable of TensorFlow.
    "initialize": (keras.Variable, "_initialize_with_initializer"),
    "assign": (keras.Variable, "assign"),
    "build embedding": (keras.layers.Embedding, "build"),
    "look up": (keras.layers.Embedding, "call"),
    "save embedding": (keras.layers.Embedding, "save_own_variables"),
    "load embedding": (keras.layers.Embedding, "load_own_variables"),
    "save optimizer": (keras.optimizers.Optimizer, "save_own_variables"),
    "load optimizer": (keras.optimizers.Optimizer, "load_own_variables"),
    # keras/src/saving/saving_lib.py: is_memory_sufficient(model), which tells whether
    # a file may be put together in memory.
    "memory": (saving_lib, "is_memory_sufficient"),
    # Beside "apply": _clip_gradients, before the reduction.
    "clip": (keras.optimizers.Optimizer, "_clip_gradients"),
    # KB/tensorflow/optimizer.py: _distributed_tf_update_step, to which reduced
    # gradients come with their variables.
    "update step": (keras.optimizers.Optimizer, "_distributed_tf_update_step"),
    # keras/src/trainers/trainer.py: _get_metrics_result_or_logs, which takes the logs
    # of a worker's last step where names of metrics do not fit.
    "logs": (keras.Model, "_get_metrics_result_or_logs"),
    "batch end": (keras.callbacks.CallbackList, "on_train_batch_end"),
    "epoch end": (keras.callbacks.CallbackList, "on_epoch_end"),
    "test begin": (keras.callbacks.CallbackList, "on_test_begin"),
    "test batch end": (keras.callbacks.CallbackList, "on_test_batch_end"),
    "predict begin": (keras.callbacks.CallbackList, "on_predict_begin"),
    "predict batch end": (keras.callbacks.CallbackList, "on_predict_batch_end"),
    # keras/src/trainers/epoch_iterator.py: _enumerate_iterator, which yields the steps
    # of an epoch and the iterator that they are read from.
    "steps": (EpochIterator, "_enumerate_iterator"),
    # KB/tensorflow/trainer.py: TFEpochIterator; its __init__ and reset, which take the
    # number of steps from what the script has handed over.
    "epochs": (TFEpochIterator, "__init__"),
    "next epoch": (TFEpochIterator, "reset"),
    # keras/src/losses/loss.py: scale_loss_for_distribution and
    # unscale_loss_for_distribution.
    "loss division": (loss_module, "scale_loss_for_distribution"),
    "loss scale": (loss_module, "unscale_loss_for_distribution"),
    "loss call": (keras.losses.Loss, "__call__"),
    "mean": (keras.metrics.Mean, "update_state"),
    "sum": (keras.metrics.Sum, "update_state"),
    "gradient": (tf.GradientTape, "gradient"),
    # keras/src/layers/normalization/batch_normalization.py: _moments(inputs, mask),
    # which returns mean and variance of a batch.
    "moments": (keras.layers.BatchNormalization, "_moments"),
    "clip by global norm": (tf, "clip_by_global_norm"),
    "clip by norm": (tf, "clip_by_norm"),
    "clip by value": (tf, "clip_by_value"),
    "global norm": (tf.linalg, "global_norm"),
    # tensorflow/python/ops/cond.py: cond, which AutoGraph calls as well.
    "condition": (cond_module, "cond"),
    # tensorflow/python/framework/ops.py: what Python asks of a tensor in an `if`.
    "truth": (ops._EagerTensorBase, "__bool__"),
    "write": (resource_variable_ops.ResourceVariable, "assign"),
    "write sum": (resource_variable_ops.ResourceVariable, "assign_add"),
    "write difference": (resource_variable_ops.ResourceVariable, "assign_sub"),
    # keras/src/utils/io_utils.py: print_msg(message, line_break), by which Keras
    # prints its progress bar and what `verbose` asks for.
    "print": (io_utils, "print_msg"),
    "set strategy": (tf.distribute, "experimental_set_strategy"),
    # keras/src/utils/file_utils.py: by which `get_file` downloads.
    "download": (file_utils, "urlretrieve"),
    "cache": (tf.data.Dataset, "cache"),
    "save folder": (tf.saved_model, "save"),
    # tensorflow/python/checkpoint: TrackableSaver.save(file_prefix), by which all
    # checkpoints are written; what records the latest one in a file of the folder,
    # reads that, and deletes files of old ones by a pattern.
    "save checkpoint": (checkpoint.TrackableSaver, "save"),
    "record checkpoint": (
        checkpoint_management,
        "update_checkpoint_state_internal",
    ),
    "delete checkpoint": (checkpoint_management, "_delete_file_if_exists"),
    "checkpoint state": (checkpoint_management, "get_checkpoint_state"),
    "checkpoint state, too": (tf.train, "get_checkpoint_state"),
    "load weights": (keras.Model, "load_weights"),
    "save": (keras.Model, "save"),
    "save weights": (keras.Model, "save_weights"),
    "export": (keras.Model, "export"),
    "save model": (keras.models, "save_model"),
    "save model, too": (keras.saving, "save_model"),
    "load model": (keras.models, "load_model"),
    "load model, too": (keras.saving, "load_model"),
    "list of callbacks": (keras.callbacks.CallbackList, "set_model"),
    # keras/src/trainers/data_adapters/py_dataset_adapter.py: its module `random`.
    "order of PyDatasets": (py_dataset_adapter, "random"),
    # tensorflow/python/framework/ops.py: methods that make the default graph of a
    # thread when it is first asked for.
    "default graph": (type(ops._default_graph_stack), "get_default"),
    "global default graph": (
        type(ops._default_graph_stack),
        "_GetGlobalDefaultGraph",
    ),
}


Hook = Callable[..., Any]
Place = str | tuple[Any, str]  # a name of `PLACES`, or an owner and an attribute


class _Replaced:
    """Replacement of what was in a place.

    Attributes:
        owner: of the attribute.
        attribute: its name.
        original: what was there before, as its owner has it.
        on: whether the hook is asked: somebody else may have put more around it.
    """

    def __init__(self, owner: Any, attribute: str) -> None:
        self.owner, self.attribute = owner, attribute
        self.original = vars(owner).get(attribute, getattr(owner, attribute))
        self.on = True
        self._now: Any = None

    def put(self, value: Any) -> None:
        """Put a value there."""
        self._now = value
        setattr(self.owner, self.attribute, value)

    def put_back(self) -> None:
        """Put back what was there, unless somebody else has replaced this since."""
        self.on = False
        if vars(self.owner).get(self.attribute) is self._now:
            setattr(self.owner, self.attribute, self.original)


_lock = threading.Lock()
_replaced: dict[tuple[int, str, Hook], _Replaced] = {}  # in the order of time


def target(place: Place) -> tuple[Any, str]:
    """Return the object that has what is replaced in a place, and its name there."""
    owner, attribute = PLACES[place] if isinstance(place, str) else place
    if inspect.isclass(owner):
        owner = next(kind for kind in owner.__mro__ if attribute in vars(kind))
    return owner, attribute


def wrap(place: Place, hook: Hook) -> None:
    """Let `hook(original, *args, **kwargs)` run in the place of a function.

    Once for each hook, however often this is called.

    Args:
        place: of the function.
        hook: gets the function that was there before, and its arguments.
    """
    owner, attribute = target(place)
    with _lock:
        if (id(owner), attribute, hook) in _replaced:
            return
        replaced = _Replaced(owner, attribute)
        _replaced[id(owner), attribute, hook] = replaced
        original = getattr(owner, attribute)

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if not replaced.on:
                return original(*args, **kwargs)
            return hook(original, *args, **kwargs)

        replaced.put(wrapped)


def replace(place: Place, make: Hook) -> None:
    """Put `make(original)` in a place, once."""
    owner, attribute = target(place)
    with _lock:
        if (id(owner), attribute, make) not in _replaced:
            replaced = _Replaced(owner, attribute)
            _replaced[id(owner), attribute, make] = replaced
            replaced.put(make(replaced.original))


def unwrap(place: Place, hook: Hook) -> None:
    """Take off what `wrap` or `replace` has put in a place; the last one first."""
    owner, attribute = target(place)
    with _lock:
        replaced = _replaced.pop((id(owner), attribute, hook), None)
        if replaced is not None:
            replaced.put_back()


def original(place: Place) -> Any | None:
    """Return what was in a place before all hooks; None where there are none."""
    owner, attribute = target(place)
    with _lock:
        for (key, name, _), replaced in _replaced.items():
            if (key, name) == (id(owner), attribute):
                return replaced.original
    return None
