"""A worker that averages parameters: local steps of SGD, along gradients of its own."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from ledgers import exchange, only
from loopback import Owner

from tf_dgc.config import AveragingConfig
from tf_dgc.exchanges import Averaging, Companions, Expected, Ledger
from tf_dgc.exchanges.modes import SUM, Combining

SHAPES = ((16, 8), (5,), (40, 3))
RATE, MOMENTUM = 0.1, 0.9


def start() -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.normal(size=shape).astype("float32") for shape in SHAPES]


def gradient_of(weights: Sequence[Any], rank: int, step: int) -> list[np.ndarray]:
    """Return the gradient of a worker's loss: it draws to a place of its own."""
    random = np.random.default_rng([rank, step])
    return [
        (np.asarray(w) - random.normal(size=w.shape)).astype("float32") for w in weights
    ]


class Worker:
    """Trains with momentum SGD, as a process does."""

    def __init__(
        self,
        transport: Any,
        *,
        outer: tuple[float, float] | None = None,
        averaged: int = 0,
        combining: Combining = SUM,
        **settings: Any,
    ) -> None:
        everybody = transport.everybody
        self.rank, self.size = everybody.rank, everybody.size
        self.variables = [tf.Variable(value) for value in start()]
        self.velocities = [tf.Variable(tf.zeros(shape)) for shape in SHAPES]
        self.statistics = [tf.Variable(float(self.rank)) for _ in range(averaged)]
        self.momenta = [tf.Variable(tf.zeros(shape)) for shape in SHAPES]
        companions = Companions(self.statistics, [], [*self.velocities, *self.momenta])

        def step_outer(gradients: list[Any], variables: Sequence[Any]) -> None:
            rate, momentum = outer or (1.0, 0.0)
            everything = zip(gradients, variables, self.momenta, strict=True)
            for gradient, variable, velocity in everything:
                velocity.assign(momentum * velocity + gradient)
                variable.assign_sub(rate * velocity)

        self.averaging = Averaging(AveragingConfig(**settings))
        self.synchronizer = Ledger(transport, self.averaging)
        self.owner = Owner()
        step = step_outer if outer else None
        overlap = settings.get("overlap") or 0
        expected = Expected(companions, step, combining, overlap)
        self.averaging.expect(self.owner, expected)
        self.taken = 0

    def step(self, loss: float = 1.0) -> None:
        self.averaging.loss.assign(loss)
        self.apply(
            gradient_of([v.numpy() for v in self.variables], self.rank, self.taken)
        )
        self.taken += 1

    def apply(self, gradients: Sequence[Any]) -> None:
        # Keras divides the loss, and so the gradient, by the number of workers.
        local = [tf.convert_to_tensor(g) / self.size for g in gradients]
        found = exchange(self.synchronizer, self.owner, local, self.variables)
        steps = zip(found.gradients, self.variables, self.velocities, strict=True)
        for gradient, variable, velocity in steps:
            velocity.assign(MOMENTUM * velocity + gradient)
            variable.assign_sub(RATE * velocity)
        self.synchronizer.parameters(self.owner, self.variables)

    def train(self, steps: int) -> list[np.ndarray]:
        for _ in range(steps):
            self.step()
        return self.values

    @property
    def values(self) -> list[np.ndarray]:
        return [variable.numpy() for variable in self.variables]

    @property
    def period(self) -> Any:
        return only(self.synchronizer)
