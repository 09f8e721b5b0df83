"""Selection of what a worker pushes to the servers, and its residual.

The step of dgc.py, of one worker by itself: N is 1 there, and what it sends goes to
the servers. Tensors that are not compressed have their velocity here as well, and go
whole in each push, so that no momentum is left to the servers.

Axis: P arena elements.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tf_dgc._host.shared import Table
from tf_dgc.compression import arena, dgc
from tf_dgc.config import DGCConfig
from tf_dgc.exchanges.arenas import Arenas
from tf_dgc.exchanges.base import take_velocity
from tf_dgc.exchanges.inplace import own_variable
from tf_dgc.exchanges.residual import RATES, Residual
from tf_dgc.exchanges.selecting import Selecting
from tf_dgc.exchanges.server_arena import ServerArena
from tf_dgc.exchanges.stage_selection import Chosen
from tf_dgc.servers.shared import Servers, Twins
from tf_dgc.servers.stamped_part import Pushers


class Pushed:
    """The velocity and the residual of a worker's tensors, and their way to servers.

    Attributes:
        layout: of the arena of compressed tensors.
        residual: what this worker has not pushed yet of them.
        dense: the velocity of the other tensors.
        select: selects what is to be pushed; see `Selecting.select`.
    """

    def __init__(
        self,
        variables: Sequence[Any],
        momentum: dgc.Momentum | None,
        config: DGCConfig,
        device: str,
        always: bool,
        earlier: Sequence["Pushed"] = (),
    ) -> None:
        """Create the variables, all zero, outside of any graph.

        Args:
            variables: that are trained.
            momentum: of the optimizer.
            config: the settings.
            device: of this worker, where its state is.
            always: whether all of it changes on the servers in each push.
            earlier: of the same optimizer, opened before.
        """
        self.variables, self._always = list(variables), always
        groups = _grouped(variables, config.min_elements)
        self._large, self._small, self._tables = groups
        self.layout, dense_layout = (
            arena.build(
                [(variables[i].name, variables[i].shape.as_list()) for i in own]
            )
            for own in (self._large, self._small)
        )
        # u and v are then steps of SGD, not gradients.
        corrects = config.momentum_correction and momentum is not None
        self.residual: Residual = Residual(
            self.layout,
            [variables[i] for i in self._large],
            config,
            device,
            momentum=momentum if corrects else None,
            unit="steps" if corrects else "gradients",
            earlier=[other.residual for other in earlier],
        )
        with tf.init_scope(), tf.device(device):
            velocity = None
            if self.residual.u is not None:
                velocity = own_variable(tf.zeros([dense_layout.size]), "dgc_velocity")
            self._begun: list[Any] = [None, None]
            if momentum is not None and corrects:
                owns = self._large, self._small
                self._begun = [take_velocity(momentum, own) for own in owns]
        small = [variables[i] for i in self._small]
        lenders = [other.dense for other in earlier]
        self.dense: Arenas = Arenas(dense_layout, small, [velocity], device, lenders)
        self._selecting = Selecting(self.variables, groups, self.residual, self.dense)
        self.select = self._selecting.select
        self._on_servers: ServerArena | None = None  # none where nothing is compressed

    # On the servers.

    def open(self, name: str, servers: Servers, workers: Pushers, twins: Twins) -> None:
        """Make handles of what is on the servers."""
        if mirrors := [self.variables[i] for i in self._large]:
            args = name, servers, workers, twins, self.layout, mirrors, self._always
            self._on_servers = ServerArena(*args)

    def begin(self) -> None:
        """Give first values to what is on the servers; the chief does.

        It is the chief who goes on with the momentum of a model that was loaded.
        """
        if self._on_servers is not None:
            self._on_servers.begin()
        velocities = self.residual.u, self.dense.variables[0]
        layouts = self.layout, self.dense.layout
        for velocity, layout, begun in zip(
            velocities, layouts, self._begun, strict=True
        ):
            if velocity is not None and begun is not None:
                velocity.assign(arena.flatten(layout, begun))

    # Up.

    def cost(self, chosen: Chosen) -> tf.Tensor:
        """Return the bytes and elements of a push of the arena: shape [2], int64."""
        if self._on_servers is None:
            return tf.zeros([2], tf.int64)
        return self._on_servers.cost(chosen)

    def push(self, chosen: Chosen, factor: tf.Tensor) -> None:
        """Push what was selected.

        Args:
            chosen: of `select`.
            factor: what the learning rate is multiplied by, shape [], float32.
        """
        if self._on_servers is not None:
            slots = self._selecting.selection.slots
            self._on_servers.push(chosen, factor * chosen.scale, slots)

    # Down.

    def pull(self) -> tf.Tensor:
        """Fetch what has changed since the last time; return bytes, shape [], int64."""
        if self._on_servers is None:
            return tf.zeros([], tf.int64)
        return self._on_servers.pull()

    @property
    def whole(self) -> list[Any]:
        """The variables that are fetched whole."""
        return [self.variables[i] for i in sorted(self._small + self._tables)]

    # What is kept back.

    @property
    def state(self) -> Mapping[str, tf.Variable]:
        """The residual and, where momentum is corrected, velocities."""
        found = {RATES: self.residual.arenas.rates, **self.residual.state}
        if (velocity := self.dense.variables[0]) is not None:
            found["velocity of what goes whole"] = velocity
        return found

    def loaded(self, steps: int) -> None:
        """Go on, eagerly, from a state that was loaded, after so many pushes."""
        self.residual.loaded(steps)
        self.dense.give_back()

    def flush(self, variables: Sequence[Any]) -> bool:
        """Push, eagerly, all that is kept back of variables; tell whether there is."""
        wanted = self.residual.arenas.owned_among(variables)
        if self._on_servers is None or not any(wanted):
            return False
        mask, own = arena.mask(self.layout, wanted), self.residual.read()
        if self.residual.unit == "gradients":
            own *= arena.spread(self.layout, self.residual.arenas.rates)
        self._on_servers.push_all(tf.where(mask, own, tf.zeros_like(own)))
        self.residual.clear(mask)
        return True


def _grouped(
    variables: Sequence[Any], min_elements: int
) -> tuple[list[int], list[int], list[int]]:
    """Return the indices of what is compressed, of what goes whole, and of tables."""
    tables = [i for i, v in enumerate(variables) if isinstance(v, Table)]
    large = [
        i
        for i, v in enumerate(variables)
        if i not in tables
        and v.dtype == tf.float32
        and arena.is_compressed(v.shape.as_list(), v.dtype, min_elements)
    ]
    others = [i for i in range(len(variables)) if i not in tables + large]
    return large, others, tables
