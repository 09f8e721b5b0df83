"""Elastic training: workers come and go, and what is kept back is shared out anew.

Start the script with `horovodrun --host-discovery-script`. Horovod's callbacks, which
commit a state, are here, too.

Example:
    from tf_dgc import horovod as hvd
    from tf_dgc.horovod import elastic

    state = elastic.State(model, epoch=0)

    @elastic.run
    def train(state):
        ...  # make data, and functions that compute gradients, here
        model.fit(own_data, callbacks=[elastic.CommitStateCallback(state, 100)])

    train(state)

References:
    Horovod: Elastic Horovod, https://horovod.readthedocs.io/en/stable/elastic_include.html
"""

import json
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_dgc.exchanges import records as saving
from tf_dgc.horovod import core
from tf_dgc.transports import Transport, handshake

try:
    from horovod.common.elastic import ObjectState
    from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
    from horovod.tensorflow.elastic import run
    from horovod.tensorflow.keras.elastic import (
        CommitStateCallback,
        UpdateBatchStateCallback,
        UpdateEpochStateCallback,
    )
except ImportError as error:
    raise ImportError(
        "Elastic training needs Horovod, built against the installed TensorFlow: run "
        f"scripts/install_horovod.sh. Importing it failed: {error}"
    ) from error

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "State",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]


class State(ObjectState):
    """Model, optimizer and what is kept back, of workers that come and go.

    `commit` remembers the state, from which training goes on where a worker has died,
    and looks for workers to add or remove. It costs as much as one dense exchange: what
    all workers keep back is summed, so that nothing is lost with the dead one.
    `check_host_updates` only looks.
    """

    def __init__(
        self,
        model: keras.Model,
        optimizer: keras.optimizers.Optimizer | None = None,
        **values: Any,
    ) -> None:
        """Remember the state.

        Args:
            model: built.
            optimizer: by default that of the model; it is built here.
            values: further attributes, the same on all workers: what JSON can hold.

        Raises:
            TypeError: there is no optimizer, or JSON cannot hold a value.
            ValueError: the model is not built, or exchanges are hierarchical.
        """
        optimizer = optimizer or getattr(model, "optimizer", None)
        if not isinstance(optimizer, keras.optimizers.Optimizer):
            raise TypeError(
                "`optimizer` must be one of Keras, or the model be compiled with one. "
                f"Received: optimizer={optimizer!r}"
            )
        if not model.built:
            raise ValueError(
                f"`model` must be built first. Received: model={model.name!r}"
            )
        if core.is_hierarchical():
            raise ValueError(
                "Elastic training cannot be hierarchical. Received: an optimizer or a "
                "tape with hierarchical=True"
            )
        json.dumps(values)
        self.model, self.optimizer = model, optimizer
        if not optimizer.built:
            optimizer.build(model.trainable_variables)
        self._transport = core.transport()
        self._kept: list[list[saving.Record]] | None = None  # sums over the workers
        self._summed = self._transport.size  # how many these were
        self._remember()
        super().__init__(self._values_of_first, core.rank, **values)

    def _variables(self) -> list[keras.Variable]:
        return [*self.model.weights, *self.optimizer.variables]

    def _remember(self) -> None:
        self._values = [np.array(variable) for variable in self._variables()]

    def save(self) -> None:
        """Remember the state of all workers, which all call this."""
        self._keep_sums()  # may fail; then all of the last state stays
        self._remember()
        super().save()

    def _keep_sums(self) -> None:
        own = core.records()
        self._kept = [saving.summed(self._transport, records) for records in own]
        self._summed = self._transport.size

    def restore(self) -> None:
        """Return to the state that was remembered."""
        for variable, value in zip(self._variables(), self._values, strict=True):
            variable.assign(value)
        super().restore()

    def check_host_updates(self) -> None:
        """Look for workers to add or remove.

        Raises:
            HostsUpdatedInterrupt: on all workers; there are some.
        """
        try:
            super().check_host_updates()
        except HostsUpdatedInterrupt:
            self.save()  # with those that leave
            skip_sync = False  # though nobody may have been added
            raise HostsUpdatedInterrupt(skip_sync) from None

    def reset(self) -> None:
        """Meet the workers among whom Horovod was started again."""
        self._transport.restart()
        for name in ("train_function", "test_function", "predict_function"):
            setattr(self.model, name, None)  # they must be traced again

    def sync(self) -> None:
        """Take over the state of the first worker, and an equal share of what is kept.

        Raises:
            HorovodInternalError: a worker died; Horovod begins anew without it.
            ValueError: the workers' models or optimizers differ.
        """
        try:
            self._take_over_variables()
            super().sync()
            self._take_over_kept()
        except tf.errors.UnknownError as error:  # which Horovod's operations raise
            raise HorovodInternalError(error) from error

    def _take_over_variables(self) -> None:
        variables = self._variables()
        forms = {f"{i}": f"{v.dtype} {v.shape}" for i, v in enumerate(variables)}
        handshake.agree(self._transport, "variables of model and optimizer", forms)
        own = [tf.convert_to_tensor(variable) for variable in variables]
        shared = self._transport.broadcast(own, "state")
        for variable, value in zip(variables, shared, strict=True):
            variable.assign(value)
        self._remember()

    def _take_over_kept(self) -> None:
        """Share out what the first worker remembers to be kept back."""
        own = [] if self._kept is None else self._kept
        shapes = [
            [(*r[:2], {k: a.shape for k, a in r.arrays.items()}) for r in records]
            for records in own
        ]
        told = _of_first(self._transport, None if self._kept is None else shapes)
        saving.check_told(told)
        if told is None:  # the first call on all workers, which keep what they have
            self._keep_sums()
            return
        summed = _number_of_first(self._transport, self._summed)
        kept = _kept_of_first(self._transport, told, own)
        self._kept, self._summed = kept, summed
        size = self._transport.size
        core.begin_anew([saving.shares(records, summed, size) for records in kept])

    def _values_of_first(self, own: Any) -> Any:
        """Return what the first worker has: attributes, or times of host updates."""
        values = _of_first(self._transport, own)
        if isinstance(own, dict):
            sound = isinstance(values, dict) and values.keys() == own.keys()
        else:
            sound = isinstance(values, list) and len(values) == len(own)
        if not sound:
            raise ValueError(
                f"The values of the first worker must be like {own!a}, or they "
                f"are damaged. Received: {ascii(values)[:200]}"
            )
        return values


def _of_first(transport: Transport, value: Any) -> Any:
    """Return what the first worker holds, as JSON: it is read as data."""
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    what = "The state of the first worker"
    (length,) = transport.broadcast([tf.constant(len(text))], "length")
    handshake.check_length(int(length), what)
    own = text if transport.rank == 0 else np.zeros(int(length), np.uint8)
    (shared,) = transport.broadcast([tf.constant(own)], "json")
    return handshake.read_json(shared.numpy().tobytes(), what)


def _number_of_first(transport: Transport, own: int) -> int:
    """Return how many workers the first worker's sums are of."""
    summed = _of_first(transport, own)
    if type(summed) is not int or summed < 1:
        raise ValueError(
            "The number of workers that the first worker tells must be positive, "
            f"or it is damaged. Received: {ascii(summed)[:200]}"
        )
    return summed


def _kept_of_first(
    transport: Transport, told: Any, own: list[list[saving.Record]]
) -> list[list[saving.Record]]:
    """Return what the first worker remembers to be kept back.

    Args:
        transport: between the workers.
        told: names, steps and shapes of its records.
        own: records of this worker, which are those of the first on that.
    """
    kept: list[list[saving.Record]] = []
    for i, records in enumerate(told):
        kept.append([])
        for j, (variables, step, arrays) in enumerate(records):
            held = own[i][j].arrays if transport.rank == 0 else {}
            tensors = [
                tf.constant(held.get(name, np.zeros(shape)), tf.float32)
                for name, shape in arrays.items()
            ]
            tensors = transport.broadcast(tensors, "kept")
            sums = [tensor.numpy() for tensor in tensors]
            found = dict(zip(arrays, sums, strict=True))
            kept[-1].append(saving.Record(variables, step, found))
    return kept


KerasState = State  # Horovod's name
