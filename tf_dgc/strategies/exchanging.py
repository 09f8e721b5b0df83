"""Exchange of the gradients that an optimizer applies, and the update after it."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_dgc import _host, bands, optimizers, step
from tf_dgc.config import DGCConfig
from tf_dgc.exchanges import Part, Update
from tf_dgc.strategies import outside
from tf_dgc.strategies.core import Core


class Exchanging:
    """Exchange of gradients with the ledger of a strategy."""

    def __init__(self, core: Core) -> None:
        """Take the core of the strategy."""
        self._core = core
        core.ledger.part_of = functools.partial(_part_of_model, core)

    def take_in(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Prepare an optimizer that is being made in the scope."""
        config = self._core.config
        if isinstance(config, DGCConfig) and config.nonfinite == "skip":
            transport = self._core.transport
            optimizers.leave_out_whole_steps(optimizer, transport, self._weighed)

    @contextlib.contextmanager
    def _weighed(
        self, gradients: list[Any], variables: Sequence[Any], optimizer: Any
    ) -> Iterator[Sequence[Any]]:
        """Yield gradients as they count in the step that runs, to be applied."""
        if (share := self._core.share) is None:
            yield gradients
            return
        found = share.applied.applied(gradients, variables, optimizer)
        with share.applied.taken():
            yield found

    def exchanged(self, gradients: Sequence[Any]) -> list[Any]:
        """Return the gradients of all workers; see `BaseStrategy.exchange`."""
        if (share := self._core.share) is None:
            return list(gradients)
        if share.step.model is None:
            raise RuntimeError(
                "`strategy.exchange` must be called in a step of a model, as its "
                "`train_step`, which `fit` runs"
            )
        if isinstance(self._core.in_steps, DGCConfig):
            raise ValueError(
                "`strategy.exchange` must not be called with DGCConfig: workers send a "
                "part of each gradient. DGCConfig(clip_norm=...) clips them"
            )
        return share.early.exchanged(gradients)

    def exchange_and_update(
        self,
        optimizer: keras.optimizers.Optimizer,
        pairs: Sequence[tuple[Any, Any]],
        learning_rate: Any,
        update: Callable[[list[Any], Any], None],
    ) -> None:
        """Exchange (gradient, variable) pairs and update the variables.

        The variables whose momentum the exchange has taken over are updated with the
        optimizer's own momentum suspended.
        """
        core, share = self._core, self._core.share
        if share is not None:
            share.conditions.refuse_undecided()
        for g, variable in pairs:  # some are changed in the exchange itself
            if g is not None:
                outside.refuse_foreign(core.strategy, variable)
        done = share is not None and share.step.is_done([v for _, v in pairs])
        if done and core.of_all:
            self._update_only(optimizer, pairs, learning_rate, update)
            return
        part = self._part(optimizer, pairs, learning_rate)
        whole = 1 if part is None else part.whole
        pairs, own = self._without_parts(optimizer, pairs, whole)
        variables = [v for g, v in pairs if g is not None]
        optimizers.refuse_whole_tensors(optimizer, variables, core.in_steps)
        workers = core.mesh.replicas
        core.warn(optimizers.warnings_about(optimizer, workers, core.in_steps))
        if core.ledger.begins_with(optimizer):
            core.warn(optimizers.lost_momentum(optimizer, variables, core.in_steps))
        args = optimizer, pairs, learning_rate, update
        with core.exchanged():
            step.synchronised(
                core.ledger, *args, part=part, clips=core.clips_sum, own=own
            )

    def _update_only(
        self,
        optimizer: keras.optimizers.Optimizer,
        pairs: Sequence[tuple[Any, Any]],
        learning_rate: Any,
        update: Callable[[list[Any], Any], None],
    ) -> None:
        """Update variables by gradients that were exchanged before."""
        core = self._core
        done = [(g, v) for g, v in pairs if g is not None]
        outcome = Update([g for g, _ in done], [False] * len(done))
        variables = [v for _, v in done]
        with core.exchanged():
            step.apply(
                optimizer, outcome, variables, learning_rate, update, core.clips_sum
            )

    def _part(
        self,
        optimizer: keras.optimizers.Optimizer,
        pairs: Sequence[tuple[Any, Any]],
        learning_rate: Any,
    ) -> Part | None:
        """Return what gradients count, and the witness of the batch they are of."""
        core = self._core
        if core.share is None:
            return None
        variables = [v for _, v in pairs]
        part = core.share.weights.part(optimizer, learning_rate, variables)
        if core.stopping is not None:
            part = part._replace(ballot=core.stopping.ballot)
        witness = core.extended.distribution.witness
        given = [g for g, _ in pairs if g is not None]
        # Nothing else tells TensorFlow that a step which reads its batch itself reads
        # before it compares.
        with tf.control_dependencies(tf.nest.flatten(given, expand_composites=True)):
            with tf.device("CPU:0"):
                numbers = witness.numbers.read_value()
        return part._replace(witness=numbers, components=witness.names)

    def _without_parts(
        self,
        optimizer: keras.optimizers.Optimizer,
        pairs: Sequence[tuple[Any, Any]],
        whole: int,
    ) -> tuple[list[tuple[Any, Any]], step.Own | None]:
        """Tell pairs of gradient and variable of all workers from those of this one.

        Args:
            optimizer: of the user.
            pairs: of both.
            whole: what the gradients of this one's are multiplied by; see `Part`.
        """
        # One worker has all of it, and leaves out of its state what several do.
        split = [(g, v) for g, v in pairs if g is not None and bands.of(v)]
        if not split:
            return list(pairs), None
        core = self._core
        tensors = [tf.convert_to_tensor(g) for g, _ in split]
        gradients = [g * tf.cast(whole, g.dtype) for g in tensors]
        own = step.Own(core.transport, gradients, [v for _, v in split])
        if core.transport.size > 1:
            optimizers.refuse_parts(optimizer, own.variables, core.config)
        if isinstance(core.config, DGCConfig) and core.config.nonfinite == "raise":
            own.refuse_nonfinite()
        return [(g, v) for g, v in pairs if not bands.of(v)], own


def _part_of_model(core: Core, owner: object, variables: Sequence[Any]) -> float:
    """Return what part variables are, in bytes, of what a model's step trains."""
    model = None if core.share is None else core.share.step.model
    if model is None:
        limit = getattr(core.config, "bytes_per_step", None)
        others = [e for e in core.ledger.exchanges() if e.owner() is not owner]
        if limit is not None and others:
            core.warn(
                [
                    "In a loop of your own each optimizer keeps to "
                    f"bytes_per_step={limit} by itself, and all send as many"
                ]
            )
        return 1.0
    trained = list(model.trainable_variables)
    for optimizer in _host.keras.optimizers_of(model):
        built = _host.keras.variables_of(optimizer) if optimizer.built else []
        trained += [v for v in built if v.trainable]
    whole = {id(_host.keras.plain(v)): v for v in trained}
    whole |= {id(v): v for v in variables}
    own, of_all = (
        sum(math.prod(v.shape) * tf.as_dtype(v.dtype).size for v in each)
        for each in (variables, whole.values())
    )
    return own / of_all
