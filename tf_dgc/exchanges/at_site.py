"""Exchange of gradients at one site, in each step, beside rounds between sites."""

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tf_dgc import values
from tf_dgc.config import AveragingConfig, DGCConfig
from tf_dgc.exchanges.base import Apply, Exchange, Place, TakenOver, Update
from tf_dgc.exchanges.compressed import Compressed
from tf_dgc.exchanges.dense import Dense
from tf_dgc.exchanges.figures import TensorStats
from tf_dgc.exchanges.parts import Part
from tf_dgc.exchanges.records import WITHIN
from tf_dgc.transports.mesh import Sites

_FIRST, _STEPS = f"{WITHIN} ", f"{WITHIN} steps"


class AtSite:
    """Exchange between the workers of a site: dense, or of the largest elements."""

    def __init__(
        self,
        place: Place,
        config: AveragingConfig,
        taken_over: TakenOver | None,
        earlier: Sequence["AtSite | None"],
    ) -> None:
        """Create the variables, outside of any graph.

        Args:
            place: of rounds; where a worker trains alone, it has no exchange.
            config: the settings.
            taken_over: what the optimizer leaves to the exchange.
            earlier: of the same owner.
        """
        self._sites: Any = place.transport
        self._exchange: Exchange | None = None
        self._variables, self._name = place.variables, place.name
        if not isinstance(self._sites, Sites):
            return
        siblings = [each._exchange for each in earlier if each is not None]
        own = place._replace(transport=self._sites.within, siblings=siblings)
        if isinstance(config.within, DGCConfig):
            self._exchange = Compressed(own, taken_over, config.within)
        else:
            self._exchange = Dense(own)

    def __bool__(self) -> bool:
        """Tell whether steps are those of a site."""
        return self._exchange is not None

    def gradients(
        self, local: list[Any], taken_over: TakenOver | None, part: Part | None
    ) -> Update:
        """Return the gradients of a step of this worker's site, and their weight."""
        exchange: Any = self._exchange
        exchange.replicas.compare(self._variables, 1)
        found: Update
        if part is not None:  # votes on the end of training travel in headers
            part = part._replace(ballot=None)
            found = exchange.gradients(local, taken_over, part)
            return found
        size = exchange.transport.size
        whole = self._sites.everybody.size / size
        found = exchange.gradients([values.scaled(g, whole) for g in local], taken_over)
        return found._replace(weight=tf.fill([], float(size)))

    @property
    def state(self) -> Mapping[str, tf.Variable]:
        """State of this worker that is saved, by name."""
        if not isinstance(self._exchange, Compressed):
            return {}
        own = self._exchange
        found = {f"{_FIRST}{name}": v for name, v in own.state.items()}
        return found | {_STEPS: own.residual.step}

    def load(self, arrays: Mapping[str, Any]) -> None:
        """Take over what was saved: all of `state`."""
        if isinstance(self._exchange, Compressed):
            own = {k.removeprefix(_FIRST): v for k, v in arrays.items() if k != _STEPS}
            self._exchange.load(own, int(arrays[_STEPS]))

    def flush(self, variables: Sequence[Any], apply: Apply) -> None:
        """Apply what the site keeps back; all sites have the mean then."""
        own = self._exchange
        if not isinstance(own, Compressed):
            return
        if not any(own.residual.arenas.owned_among(variables)):
            return
        own.flush(variables, apply)
        size = self._sites.size
        parts = [values.widened(v) / size for v in self._variables]
        means = self._sites.all_reduce(parts, f"{self._name}.flushed")
        for variable, mean in zip(self._variables, means, strict=True):
            variable.assign(tf.cast(mean, variable.dtype))

    def kept(self) -> list[tf.Tensor]:
        """Return what is kept back."""
        return self._exchange.kept() if self._exchange else []

    def tensor_stats(self, reset: bool) -> list[TensorStats]:
        """Return this worker's figures of each compressed tensor, eagerly."""
        return self._exchange.tensor_stats(reset) if self._exchange else []


def is_of_site(name: str) -> bool:
    """Tell whether an array is of the state of an exchange at a site."""
    return name.startswith(_FIRST)
