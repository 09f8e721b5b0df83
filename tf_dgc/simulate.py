"""N logical workers in one process: to try a cluster before there is one.

They share the model and take turns with its forward and backward pass; what is one
tensor on a worker, here has a first axis of N workers. All else is the code that runs
on real workers: the step, the messages, the optimizer's part.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import keras
import tensorflow as tf

from tf_dgc import _host
from tf_dgc.config import DGCConfig
from tf_dgc.exchanges import EachStep
from tf_dgc.strategies import slicing
from tf_dgc.strategies.base import BaseStrategy
from tf_dgc.strategies.elements import ElementLayout
from tf_dgc.strategies.inner import Inner
from tf_dgc.strategies.one_by_one import Seat, ShareInTurn
from tf_dgc.transports.base import Transport, default_device
from tf_dgc.transports.local import LocalTransport
from tf_dgc.transports.mesh import Mesh
from tf_dgc.transports.sums import Workers


class Stacked(Transport):
    """Takes the tensors of all N workers, stacked, from the one process they are.

    It is rank 0 among them, and alone.
    """

    name = "loopback"
    alone = True

    def __init__(self, workers: int) -> None:
        self.rank = 0
        self.size = workers
        self.device = default_device()

    def all_reduce(self, tensors: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        """Sum tensors of shape [N, *S] over N, in the order of rank."""
        return [tf.add_n(tf.unstack(tensor, self.size)) for tensor in tensors]

    def all_gather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Return the tensor, of shape [N, *S]: everybody has everything."""
        return tf.identity(tensor)

    def all_to_all(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Return the tensor, of shape [N, N, *S], from the receivers' side."""
        return tf.transpose(tensor, [1, 0, *range(2, tensor.shape.rank)])


class _OneProcess(LocalTransport):
    """Transport of metrics and the like: there is nobody else.

    Attributes:
        busy: whether a single worker is being computed.
    """

    busy = False

    def all_reduce(self, tensors: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        """Return the tensors; refuse where a worker asks for those of others."""
        if self.busy:
            raise ValueError(
                "A simulated worker cannot reduce over the others within its forward "
                "and backward pass, as BatchNormalization(synchronized=True) does"
            )
        return super().all_reduce(tensors, name)


def for_each_worker(fn: Callable[[Any], Any], workers: int) -> Any:
    """Call `fn` with each rank in turn; stack what it returns, as [N, ...].

    Args:
        fn: takes a rank, an integer or a tensor of shape [], int32, and returns a
            structure of tensors of the same shapes for each.
        workers: N. The graph holds `fn` twice, whatever N is.
    """
    first = tf.nest.map_structure(tf.convert_to_tensor, fn(0))
    if workers == 1:
        return tf.nest.map_structure(lambda one: one[tf.newaxis], first)
    rest = tf.map_fn(
        tf.autograph.experimental.do_not_convert(fn),  # graphs already
        tf.range(1, workers),
        fn_output_signature=tf.nest.map_structure(tf.TensorSpec.from_tensor, first),
        parallel_iterations=1,
    )
    return tf.nest.map_structure(
        lambda one, more: tf.concat([one[tf.newaxis], more], axis=0), first, rest
    )


def all_workers(
    transport: Transport, factors: Callable[[], tf.Tensor | None] = lambda: None
) -> Workers:
    """Return what a process is that is all N workers, one after the other.

    Args:
        transport: whose tensors are stacked.
        factors: of each worker's gradient in the sum, shape [N]; None is 1.
    """
    size = transport.size

    def each(fn: Callable[..., Any], *args: Any) -> Any:
        results: list[Any] = []

        def own(rank: Any) -> list[tf.Tensor]:
            parts = tf.nest.map_structure(
                lambda part: None if part is None else part[rank], args
            )
            results[:] = [fn(*parts)]
            return [part for part in tf.nest.flatten(results) if part is not None]

        stacked = iter(for_each_worker(own, size))
        return tf.nest.map_structure(
            lambda part: None if part is None else next(stacked), results[0]
        )

    return Workers(range(size), each, [size], factors)


def each_simulated_step(config: DGCConfig | None, **options: Any) -> EachStep:
    """Return what makes exchanges of the gradients of all workers, [N, ...]."""
    return EachStep(config, functools.partial(all_workers, **options))


class SimulatedInner(Inner):
    """Inside of a strategy of workers that one process computes."""

    def exchange_and_update(self, optimizer: Any, *args: Any) -> None:
        """Exchange and update, once all workers have a gradient.

        Raises:
            ValueError: a single worker asks for it.
        """
        if cast(_OneProcess, self.core.transport).busy:
            raise ValueError(
                "A training step must apply the gradients of `model.optimizer`, to be "
                f"simulated. Received: those of {optimizer.name!r}"
            )
        super().exchange_and_update(optimizer, *args)


class SimulatedStrategy(BaseStrategy):
    """Trains as N workers would, in one process: for a model's `fit`.

    Every training step splits its batch as N workers would, computes a gradient for
    each share, and exchanges them as they would. The losses and metrics are those of
    all workers. `stats()` tells about one of them, rank 0. A step takes as long as that
    of one worker on the whole batch, and the exchange of N; twice as long where the
    loss needs sums over the rows of all, as a mean by masks does. Memory holds one
    model and N times a worker's velocity, residual and gradient.

    On real workers batch normalization keeps statistics of each worker's own share;
    here all shares count. Layers with random numbers draw others. Sparse gradients, of
    embeddings, are made dense: they count as such in the traffic of dense training.

    Example:
        strategy = tf_dgc.simulate.SimulatedStrategy(64, tf_dgc.DGCConfig())
        with strategy.scope():
            model = ...
            model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
        model.fit(dataset_of_global_batches)
    """

    _inner_class = SimulatedInner

    def __init__(self, workers: int, config: DGCConfig | None = None) -> None:
        """Create the logical workers.

        Args:
            workers: N, 1 or more.
            config: of Deep Gradient Compression; None exchanges everything, as
                `DenseStrategy` does.

        Raises:
            TypeError: an argument is of the wrong type.
            ValueError: `workers` is less than 1, or settings are of several hosts.
        """
        _check(workers, config)
        self._workers = workers
        self._process = _OneProcess()
        mesh = Mesh(self._process, Stacked(workers), workers)
        self._seat = Seat(workers)
        # Of each worker's gradient in the sum, shape [N], while it is applied.
        self._factors: tf.Tensor | None = None
        make = each_simulated_step(config, factors=lambda: self._factors)
        super().__init__(mesh, config, make)
        self._turns = ShareInTurn(self._seat, whole=config is None)

    def run(
        self, fn: Any, args: Any = (), kwargs: Any = None, options: Any = None
    ) -> Any:
        """Run a model's training step once for every worker, anything else once.

        Raises:
            ValueError: the model's optimizer does what only real workers can, or its
                step is a `tf.function`.
        """
        model = _host.keras.model_of(fn)
        if model is None or _host.keras.step_named(model, fn) != "train_step":
            return super().run(fn, args, kwargs, options)
        if not isinstance(getattr(fn, "__self__", None), keras.Model):
            raise ValueError(
                "A training step under `tf.function` cannot be simulated, as workers "
                "take turns within it. Leave the decorator out: Keras traces the step "
                f"in any case. Received: the step of {model.name!r}"
            )
        optimizer = model.optimizer
        _refuse(optimizer)
        rows, variables = slicing.row_count(args), list[Any]()
        layout = ElementLayout(args[0], self._workers)

        def worker(rank: Any) -> tuple[Any, ...]:
            """Return logs, factor and gradients of a worker, and its part of a sum."""
            self._seat.take(rank)
            shares = (layout.rows_of(args[0], rank),)
            with self._turns.captured(optimizer) as applied:
                logs = super(SimulatedStrategy, self).run(fn, shares, kwargs, options)
            if len(applied) != 1:
                raise ValueError(
                    "A training step must apply its optimizer's gradients once, to be "
                    f"simulated. Received: {len(applied)} times"
                )
            factor, pairs = applied[0]
            variables[:] = [v for _, v in pairs]
            # Metrics may give their variables, which are read in a worker only.
            logs = tf.nest.map_structure(_host.keras.component_of, logs)
            return logs, factor, [g for g, _ in pairs], self._seat.asked

        with self._in_turns(rows):
            logs, factors, gradients = self._taken(model, worker)
            logs = self._turns.of_all(model, logs)
        self._factors = None if self.config is None else factors
        try:
            super().run(lambda: optimizer.apply(gradients, variables))
        finally:
            self._factors = None
        return logs

    def _taken(
        self, model: keras.Model, worker: Callable[[Any], tuple[Any, ...]]
    ) -> tuple[Any, ...]:
        """Let all workers take a step, again until they know all sums."""
        kept = _host.keras.changed_by_steps(model) + _host.keras.random_states(model)
        before = [variable.read_value() for variable in kept]
        while True:
            *found, asked = for_each_worker(worker, self._workers)
            if not asked:
                return tuple(found)
            self._seat.learn(asked)
            for variable, value in zip(kept, before, strict=True):
                variable.assign(value)

    @contextlib.contextmanager
    def _in_turns(self, rows: Any) -> Iterator[None]:
        """Let single workers be computed, of a batch of so many rows in all."""
        self._seat.begin(rows)
        self._process.busy, self._core.share = True, self._turns
        try:
            yield
        finally:
            self._process.busy, self._core.share = False, None


def _check(workers: Any, config: Any) -> None:
    """Refuse arguments of the wrong type, or out of their range."""
    if isinstance(workers, bool) or not isinstance(workers, int):
        raise TypeError(f"`workers` must be an integer. Received: workers={workers!r}")
    if workers < 1:
        raise ValueError(f"`workers` must be 1 or more. Received: workers={workers}")
    if config is not None and not isinstance(config, DGCConfig):
        raise TypeError(
            f"`config` must be a DGCConfig or None. Received: config={config!r}"
        )
    if config is not None and config.hierarchical:
        raise ValueError(
            "Simulated workers share no hosts: simulate as many workers as there "
            "are hosts, with hierarchical=False. Received: "
            f"hierarchical={config.hierarchical!r}"
        )


def _refuse(optimizer: keras.optimizers.Optimizer) -> None:
    """Raise ValueError where the optimizer works on single workers' gradients."""
    names = ("clipnorm", "global_clipnorm", "clipvalue", "gradient_accumulation_steps")
    found = [name for name in names if getattr(optimizer, name, None) is not None]
    if len(_host.keras.inner_optimizers(optimizer)) > 1:
        found.append("loss scaling")
    if found:
        raise ValueError(
            "A simulated optimizer must leave the gradients of single workers alone: "
            f"DGCConfig(clip_norm=...) clips them. Received: {', '.join(found)}"
        )
