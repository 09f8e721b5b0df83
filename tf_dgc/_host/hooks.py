"""What is put around functions of TensorFlow and Keras, for all of this process."""

import contextvars
import functools
import inspect
import operator
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_dgc._host import keras as host
from tf_dgc._host import operations, probe

with probe.imports():
    from keras.src.losses import loss as loss_module
    from keras.src.saving import saving_lib
    from keras.src.trainers.data_adapters import array_data_adapter, py_dataset_adapter
    from keras.src.trainers.epoch_iterator import EpochIterator
    from keras.src.utils import io_utils
    from tensorflow.python.data.ops import batch_op, interleave_op, map_op, readers
    from tensorflow.python.data.util import random_seed as data_random_seed
    from tensorflow.python.framework import random_seed
    from tensorflow.python.ops import cond as cond_module


def wanted() -> list[tuple[Any, str]]:
    """Return the private names, with the object or class that must have each."""
    store = getattr(saving_lib, "H5IOStore", None)
    return [
        (batch_op, "_ParallelBatchDataset"),
        (interleave_op, "_ParallelInterleaveDataset"),
        (map_op, "_ParallelMapDataset"),
        (readers, "ParallelInterleaveDataset"),
        (cond_module, "cond"),
        (data_random_seed, "get_seed"),
        (random_seed, "get_seed"),
        (array_data_adapter, "ArrayDataAdapter"),
        (py_dataset_adapter, "random"),
        (EpochIterator, "_enumerate_iterator"),
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
        (io_utils, "print_msg"),
        (saving_lib, "H5IOStore"),
        (saving_lib, "is_memory_sufficient"),
        (store, "_h5_entry_group"),
        (store, "_h5_entry_initialized"),
        (store, "_h5_entry_path"),
        (store, "_create_h5_group"),
        (keras.Variable, "_initialize_with_initializer"),
    ]


probe.check(wanted())


def wrap(name: str, hook: Callable[..., Any]) -> None:
    """Let `hook(original, *args, **kwargs)` run in the place of a function.

    Once for each hook, however often this is called.

    Args:
        name: one of
            "interleave", "map", "batch", "parallel interleave": the constructors of
            tensorflow/python/data/ops: interleave_op._ParallelInterleaveDataset,
            map_op._ParallelMapDataset, batch_op._ParallelBatchDataset and
            readers.ParallelInterleaveDataset, with `deterministic`, or `sloppy`;
            "seeds": tensorflow/python/framework/random_seed.py: get_seed(op_seed),
            which all operations that draw ask while they are made;
            "data seeds": tensorflow/python/data/util/random_seed.py: get_seed(seed),
            which `shuffle`, `random` and so on ask while a dataset is made;
            "generator": keras.random.SeedGenerator.next, which is public;
            "arrays": keras/src/trainers/data_adapters/array_data_adapter.py:
            ArrayDataAdapter.get_tf_dataset, which calls tf.random.shuffle;
            "fit", "evaluate", "predict", "predict on batch": of keras.Model, which are
            public;
            "build": KB/tensorflow/trainer.py: _maybe_symbolic_build(iterator,
            data_batch), in which `fit`, `evaluate` and their kin read a batch to build
            the model, whatever scope that is of;
            "compile": keras.Model.compile, which is public;
            "train function": KB/tensorflow/trainer.py: make_train_function, which
            `fit` and `train_on_batch` call before the first step;
            "apply": keras/src/optimizers/base_optimizer.py: _backend_apply_gradients,
            to which local gradients come first;
            "apply scaled": keras.optimizers.LossScaleOptimizer.apply, which is public;
            "clip": _clip_gradients beside it, before the reduction;
            "update step": KB/tensorflow/optimizer.py: _distributed_tf_update_step, to
            which reduced gradients come with their variables;
            "initialize": KB/tensorflow/core.py: Variable._initialize_with_initializer,
            which makes the variable of TensorFlow;
            "assign": keras.Variable.assign(value), which is public;
            "build embedding", "look up": keras.layers.Embedding.build and call, which
            are public;
            "save embedding", "load embedding", "save optimizer", "load optimizer":
            save_own_variables(store) and load_own_variables(store), which are public;
            "memory": keras/src/saving/saving_lib.py: is_memory_sufficient(model), which
            tells whether a file may be put together in memory;
            "logs": keras/src/trainers/trainer.py: _get_metrics_result_or_logs, which
            takes the logs of a worker's last step where names of metrics do not fit;
            "batch end", "epoch end", "test begin", "test batch end", "predict begin",
            "predict batch end": keras.callbacks.CallbackList.on_train_batch_end,
            on_epoch_end, on_test_begin and so on, which are public;
            "steps": keras/src/trainers/epoch_iterator.py: _enumerate_iterator, which
            yields the steps of an epoch and the iterator that they are read from;
            "loss division", "loss scale": keras/src/losses/loss.py:
            scale_loss_for_distribution and unscale_loss_for_distribution;
            "loss call": keras.losses.Loss.__call__(y_true, y_pred, sample_weight),
            which is public;
            "mean": keras.metrics.Mean.update_state(values, sample_weight), which is
            public;
            "gradient": tf.GradientTape.gradient, which is public;
            "moments": keras/src/layers/normalization/batch_normalization.py:
            _moments(inputs, mask), which returns mean and variance of a batch;
            "clip by global norm", "clip by norm", "clip by value", "global norm":
            tf.clip_by_global_norm, tf.clip_by_norm, tf.clip_by_value and
            tf.linalg.global_norm, which are public;
            "print": keras/src/utils/io_utils.py: print_msg(message, line_break), by
            which Keras prints its progress bar and what `verbose` asks for;
            "set strategy": tf.distribute.experimental_set_strategy(strategy), which is
            public;
            "cache": tf.data.Dataset.cache(filename), which is public;
            "save folder": tf.saved_model.save(obj, export_dir, signatures, options),
            which is public, and which `model.export` calls;
            "load weights": keras.Model.load_weights(filepath), which is public.
        hook: gets the function that was there before, and its arguments.
    """
    owner, attribute = {
        "interleave": (interleave_op._ParallelInterleaveDataset, "__init__"),
        "map": (map_op._ParallelMapDataset, "__init__"),
        "batch": (batch_op._ParallelBatchDataset, "__init__"),
        "parallel interleave": (readers.ParallelInterleaveDataset, "__init__"),
        "seeds": (random_seed, "get_seed"),
        "data seeds": (data_random_seed, "get_seed"),
        "generator": (keras.random.SeedGenerator, "next"),
        "arrays": (array_data_adapter.ArrayDataAdapter, "get_tf_dataset"),
        "fit": (keras.Model, "fit"),
        "evaluate": (keras.Model, "evaluate"),
        "predict": (keras.Model, "predict"),
        "predict on batch": (keras.Model, "predict_on_batch"),
        "build": (keras.Model, "_maybe_symbolic_build"),
        "compile": (keras.Model, "compile"),
        "train function": (keras.Model, "make_train_function"),
        "apply": (keras.optimizers.Optimizer, "_backend_apply_gradients"),
        "apply scaled": (keras.optimizers.LossScaleOptimizer, "apply"),
        "initialize": (keras.Variable, "_initialize_with_initializer"),
        "assign": (keras.Variable, "assign"),
        "build embedding": (keras.layers.Embedding, "build"),
        "look up": (keras.layers.Embedding, "call"),
        "save embedding": (keras.layers.Embedding, "save_own_variables"),
        "load embedding": (keras.layers.Embedding, "load_own_variables"),
        "save optimizer": (keras.optimizers.Optimizer, "save_own_variables"),
        "load optimizer": (keras.optimizers.Optimizer, "load_own_variables"),
        "memory": (saving_lib, "is_memory_sufficient"),
        "clip": (keras.optimizers.Optimizer, "_clip_gradients"),
        "update step": (keras.optimizers.Optimizer, "_distributed_tf_update_step"),
        "logs": (keras.Model, "_get_metrics_result_or_logs"),
        "batch end": (keras.callbacks.CallbackList, "on_train_batch_end"),
        "epoch end": (keras.callbacks.CallbackList, "on_epoch_end"),
        "test begin": (keras.callbacks.CallbackList, "on_test_begin"),
        "test batch end": (keras.callbacks.CallbackList, "on_test_batch_end"),
        "predict begin": (keras.callbacks.CallbackList, "on_predict_begin"),
        "predict batch end": (keras.callbacks.CallbackList, "on_predict_batch_end"),
        "steps": (EpochIterator, "_enumerate_iterator"),
        "loss division": (loss_module, "scale_loss_for_distribution"),
        "loss scale": (loss_module, "unscale_loss_for_distribution"),
        "loss call": (keras.losses.Loss, "__call__"),
        "mean": (keras.metrics.Mean, "update_state"),
        "gradient": (tf.GradientTape, "gradient"),
        "moments": (keras.layers.BatchNormalization, "_moments"),
        "clip by global norm": (tf, "clip_by_global_norm"),
        "clip by norm": (tf, "clip_by_norm"),
        "clip by value": (tf, "clip_by_value"),
        "global norm": (tf.linalg, "global_norm"),
        "condition": (cond_module, "cond"),
        "print": (io_utils, "print_msg"),
        "set strategy": (tf.distribute, "experimental_set_strategy"),
        "cache": (tf.data.Dataset, "cache"),
        "save folder": (tf.saved_model, "save"),
        "load weights": (keras.Model, "load_weights"),
    }[name]
    if inspect.isclass(owner):
        owner = next(each for each in owner.__mro__ if attribute in vars(each))
    with _wrapping:
        if (name, hook) in _wrapped:
            return
        original = getattr(owner, attribute)
        _wrapped[name, hook] = original

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return hook(original, *args, **kwargs)

        setattr(owner, attribute, wrapped)


_wrapping = threading.Lock()
_wrapped: dict[tuple[str, Callable[..., Any]], Any] = {}  # and what was there before


def dataset_in(store: Any, key: str, like: Any = None) -> Any:
    """Return a dataset of a file in which Keras saves, to be read or written in parts.

    keras/src/saving/saving_lib.py: H5IOStore._h5_entry_group, _create_h5_group.

    Args:
        store: of `save_own_variables`, or `load_own_variables`.
        key: of the dataset.
        like: of a new one: a variable.

    Raises:
        ValueError: the file is of another kind.
    """
    if type(store) is not saving_lib.H5IOStore:
        raise ValueError(
            "A table that lives on the servers only is saved to, and loaded from, one "
            f"HDF5 file (`.keras` or `.weights.h5`). Received: {type(store).__name__}"
        )
    if like is None:
        # Older versions of Keras have no reading that refuses links to other files.
        read = getattr(saving_lib, "safe_get_h5_dataset", operator.getitem)
        return read(store._h5_entry_group, key)
    if not store._h5_entry_initialized:
        store._create_h5_group(store._h5_entry_path)
    return store._h5_entry_group.create_dataset(
        key, tuple(like.shape), np.dtype(like.dtype.name)
    )


def replace_random(make: Callable[[Any], Any]) -> None:
    """Let PyDatasets be read in the order of `make(random)` instead of `random`.

    keras/src/trainers/data_adapters/py_dataset_adapter.py: its module `random`.
    """
    with _wrapping:
        if ("PyDataset", make) not in _wrapped:
            _wrapped["PyDataset", make] = py_dataset_adapter.random
            py_dataset_adapter.random = make(py_dataset_adapter.random)


def hook_share() -> None:
    """Let Keras ask the `share` of a strategy of ours, where it has one; once."""
    wrap("apply", _apply_own_gradients)
    wrap("clip", _leave_to_the_exchange)
    wrap("logs", _agree_on_logs)
    wrap("evaluate", _note_evaluation)
    wrap("loss division", _leave_undivided)
    wrap("loss scale", _keep_undivided)
    wrap("gradient", _weigh_losses)
    wrap("moments", _note_moments)
    wrap("mean", _weigh_scalar)
    wrap("clip by global norm", _clip_those_of_all)
    wrap("clip by norm", _clip_that_of_all)
    wrap("clip by value", _clip_that_of_all)
    wrap("global norm", _clip_those_of_all)
    wrap("condition", _decide_together)


# They clip what was exchanged, without a strategy.
_clip_sums: weakref.WeakSet[Any] = weakref.WeakSet()


def clip_sums(optimizer: keras.optimizers.Optimizer) -> None:
    """Let Keras leave gradients of an optimizer to `clipped`."""
    wrap("clip", _leave_to_the_exchange)
    _clip_sums.add(optimizer)


def clipped(optimizer: keras.optimizers.Optimizer, gradients: list[Any]) -> list[Any]:
    """Return gradients as Keras clips them for an optimizer."""
    clip = _wrapped.get(("clip", _leave_to_the_exchange))
    return gradients if clip is None else list(clip(optimizer, gradients))


# Their gradients are the same on all workers, not those of this one's rows.
_as_they_are: weakref.WeakSet[Any] = weakref.WeakSet()


def apply_as_they_are(optimizer: keras.optimizers.Optimizer) -> None:
    """Let an optimizer apply gradients without asking for their sum over replicas.

    KB/tensorflow/optimizer.py: TFOptimizer._backend_update_step, which reduces and then
    calls _distributed_tf_update_step in the cross-replica context.
    """

    def update_step(
        gradients: Sequence[Any], variables: Sequence[Any], learning_rate: Any
    ) -> None:
        plain = [v.value if isinstance(v, keras.Variable) else v for v in variables]
        pairs = list(zip(gradients, plain, strict=True))
        tf.distribute.get_replica_context().merge_call(
            optimizer._distributed_tf_update_step, args=(pairs, learning_rate)
        )

    host.set_update_step(optimizer, update_step)
    _as_they_are.add(optimizer)


def _share_of(strategy: Any) -> Any:
    return getattr(strategy, "share", None)


def _apply_own_gradients(
    original: Callable[..., Any], optimizer: Any, grads: Any, variables: Any
) -> Any:
    share = _share_of(host.strategy_of(optimizer))
    if share is not None and optimizer not in _as_they_are:
        grads = share.own_gradients(grads, variables)
    return original(optimizer, grads, variables)


def _leave_to_the_exchange(
    original: Callable[..., Any], optimizer: Any, grads: Any
) -> Any:
    share = _share_of(host.strategy_of(optimizer))
    later = share is not None and share.clips_sum and optimizer not in _as_they_are
    if later or optimizer in _clip_sums:
        return grads
    return original(optimizer, grads)


_evaluates = contextvars.ContextVar("tf_dgc_evaluates", default=False)


def _note_evaluation(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    token = _evaluates.set(True)
    try:
        return original(*args, **kwargs)
    finally:
        _evaluates.reset(token)


def _agree_on_logs(original: Callable[..., Any], model: Any, logs: Any) -> Any:
    found = original(model, logs)
    share = _share_of(model.distribute_strategy)
    if share is None or found is not logs or not isinstance(logs, dict):
        return found
    return share.agree_on_logs(logs, model, _evaluates.get())


def _leave_undivided(original: Callable[..., Any], value: Any) -> Any:
    share = _share_of(tf.distribute.get_strategy())
    if share is None:
        return original(value)
    if share.leaves_undivided:
        return value
    divided = original(value)
    share.note_divided(divided)
    return divided


def _keep_undivided(original: Callable[..., Any], value: Any) -> Any:
    share = _share_of(tf.distribute.get_strategy())
    undivided = share is not None and share.leaves_undivided
    return value if undivided else original(value)


def _weigh_losses(
    original: Callable[..., Any],
    tape: tf.GradientTape,
    target: Any,
    sources: Any,
    output_gradients: Any = None,
    unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
) -> Any:
    share = _share_of(tf.distribute.get_strategy())
    args = tape, target, sources, output_gradients, unconnected_gradients
    return original(*args) if share is None else share.gradient(original, *args)


def _note_moments(original: Callable[..., Any], layer: Any, *args: Any) -> Any:
    moments = original(layer, *args)
    share = _share_of(tf.distribute.get_strategy())
    if share is not None:
        share.note_moments(moments)
    return moments


def _clip_those_of_all(
    original: Callable[..., Any], t_list: Any, *args: Any, **kwargs: Any
) -> Any:
    share = _share_of(tf.distribute.get_strategy())
    if share is not None and isinstance(t_list, list | tuple):
        t_list = share.clipping(t_list)
    return original(t_list, *args, **kwargs)


def _decide_together(
    original: Callable[..., Any], pred: Any, *args: Any, **kw: Any
) -> Any:
    share = _share_of(tf.distribute.get_strategy())
    if share is None or not operations.is_of_user():
        return original(pred, *args, **kw)
    with share.decided(pred) as whole:
        return original(whole, *args, **kw)


def _clip_that_of_all(
    original: Callable[..., Any], t: Any, *args: Any, **kwargs: Any
) -> Any:
    share = _share_of(tf.distribute.get_strategy())
    if share is not None:
        (t,) = share.clipping([t])
    return original(t, *args, **kwargs)


def _weigh_scalar(
    original: Callable[..., Any], metric: Any, values: Any, sample_weight: Any = None
) -> Any:
    share = _share_of(tf.distribute.get_strategy())
    ranks = [
        tf.TensorShape(getattr(v, "shape", ())).rank for v in (values, sample_weight)
    ]
    if share is None or ranks != [0, 0]:
        return original(metric, values, sample_weight)
    if sample_weight is None and host.is_function_of_user(metric):
        share.tell_batchwise(metric.name)
    return original(metric, *share.weighed_mean(values, sample_weight))
