"""Interface of exchanges with servers: what a worker pushes, and what it fetches."""

import abc
from collections.abc import Callable, Iterable

import tensorflow as tf

from tf_dgc.exchanges.base import Exchange
from tf_dgc.exchanges.rates import Rate
from tf_dgc.servers.clocks import Clocks
from tf_dgc.servers.turns import Turns


class Served(Exchange):
    """Exchange whose parameters are on servers.

    Attributes:
        rate: the learning rate that the workers share.
        clocks: the bound of staleness, if there is one.
    """

    lockstep = False
    rate: Rate
    clocks: Clocks | None

    @property
    @abc.abstractmethod
    def turns(self) -> Turns | None:
        """Turns of steps that all workers take together; None of others."""

    @property
    @abc.abstractmethod
    def pushes_now(self) -> tf.Tensor:
        """Tell whether the step that has begun ends with a push: shape [], bool."""

    @abc.abstractmethod
    def push(self, update: Callable[..., None]) -> None:
        """Push what `gradients` was given.

        Args:
            update: takes what its learning rate is to be multiplied by, shape [], and
                the means of all workers, where they are taken.
        """

    @abc.abstractmethod
    def settle(self, always: bool = False) -> None:
        """Fetch what the servers have, eagerly.

        Args:
            always: also where nothing was trained since.
        """


def served(exchanges: Iterable[Exchange]) -> list[Served]:
    """Return the exchanges that are with servers."""
    return [exchange for exchange in exchanges if isinstance(exchange, Served)]
