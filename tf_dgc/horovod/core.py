"""Core of the Horovod front ends: Horovod itself, and an exchange of means."""

import functools
import gc
import weakref
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_dgc import _host
from tf_dgc.config import DGCConfig
from tf_dgc.exchanges import EachStep, Ledger, Part, Update, nodes
from tf_dgc.exchanges import records as saving
from tf_dgc.exchanges.base import TakenOver
from tf_dgc.horovod.options import Terms
from tf_dgc.transports import handshake
from tf_dgc.transports.base import Transport
from tf_dgc.transports.horovod import HorovodTransport, import_horovod, require_told
from tf_dgc.transports.local import LocalTransport
from tf_dgc.transports.mesh import HierarchicalTransport, Mesh
from tf_dgc.values import mapped
from tf_dgc.version import __version__


@functools.cache
def transport() -> HorovodTransport:
    """Start Horovod, once; return what carries tensors.

    Raises:
        ImportError: Horovod is not installed, or was built against another TensorFlow.
        RuntimeError: Horovod sees one worker where MPI started several.
    """
    _host.tracebacks.install()
    return HorovodTransport()


@functools.cache
def hierarchical() -> HierarchicalTransport:
    """Return what carries tensors between nodes, started once; all workers call this.

    Within a node, where the wire is fast, gradients are summed densely; between nodes
    one message of each is exchanged.
    """
    return HierarchicalTransport(transport())


@functools.cache
def _between(wanted: bool | str, config: DGCConfig | None) -> Transport:
    """Return what `DGCConfig.hierarchical` says; measured once for each config."""
    return nodes.chosen(transport(), wanted, config)


def started(
    wanted: bool | str,
    process_set: Any = None,
    config: DGCConfig | None = None,
    over: Transport | None = None,
) -> Transport:
    """Return what carries tensors, from within a graph, too.

    Args:
        wanted: what `hierarchical` is where that of the config is False.
        process_set: of Horovod; a worker that is not in it is alone.
        config: of the exchange.
        over: a transport other than Horovod's.

    Raises:
        ValueError: exchanges are to be hierarchical within a process set.
    """
    wanted = wanted or getattr(config, "hierarchical", False)
    _wanted.add(wanted)
    everybody = process_set is None or process_set.process_set_id == 0
    if wanted is True and not everybody:
        raise ValueError(
            "`hierarchical` must be False within a process set. Received: "
            f"hierarchical=True, process_set={process_set}"
        )
    with tf.init_scope():
        if over is not None:
            return nodes.chosen(over, wanted, config)
        if not everybody:
            return _within(process_set)
        return _between(wanted, config) if wanted else transport()


_wanted: set[bool | str] = set()  # what `hierarchical` was so far


def is_hierarchical() -> bool:
    """Tell whether an exchange was to be hierarchical, with one worker, too."""
    return True in _wanted


_sets: dict[int, Transport] = {}


def _within(process_set: Any) -> Transport:
    number = process_set.process_set_id
    if number is None:
        raise ValueError(
            "`process_set` must have been given to hvd.init or hvd.add_process_set. "
            f"Received: process_set={process_set}"
        )
    if number not in _sets:
        inside = process_set.included()
        _sets[number] = transport().within(process_set) if inside else LocalTransport()
    return _sets[number]


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Start Horovod, and claim the GPU of this worker.

    Args:
        comm: as that of Horovod, before its first start.
        process_sets: as that of Horovod, before its first start.
    """
    options = {"comm": comm, "process_sets": process_sets}
    given = {name: value for name, value in options.items() if value is not None}
    if given and not is_initialized():
        require_told()
        import_horovod().init(**given)
    transport()
    if not import_horovod().is_initialized():  # after `shutdown`
        transport().start_again()


def shutdown() -> None:
    """End Horovod on all workers; `init` starts it anew."""
    if is_initialized():
        transport().shutdown()


def is_initialized() -> bool:
    """Tell whether Horovod runs, without starting it."""
    return bool(import_horovod().is_initialized())


def rank() -> int:
    """Return the number of this worker, in [0, size)."""
    return transport().rank


def size() -> int:
    """Return the number of workers, N."""
    return transport().size


def local_rank() -> int:
    """Return the number of this worker among those of its machine."""
    return running().local_rank()


def local_size() -> int:
    """Return the number of workers on this machine."""
    return running().local_size()


def cross_rank() -> int:
    """Return the number of this machine among those with such a local rank."""
    return running().cross_rank()


def cross_size() -> int:
    """Return the number of machines with such a local rank."""
    return running().cross_size()


def running() -> Any:
    """Return `horovod.tensorflow`, started."""
    transport()
    return import_horovod()


_all: weakref.WeakSet["Means"] = weakref.WeakSet()


def has_exchanged(among: Transport) -> bool:
    """Tell whether this worker has exchanged gradients with some of a transport."""
    own = getattr(among, "_turnstile", among)  # the same in process sets
    found = [getattr(e.everybody, "_turnstile", e.everybody) for e in _all if e._agreed]
    return any(each is own for each in found)


class Means:
    """A ledger for gradients that are not divided by the number of workers.

    What is asked of the other workers waits for the first gradients: until then, those
    that join an elastic job do what the others did long ago.
    """

    def __init__(
        self, found: Transport, config: DGCConfig | None, terms: Terms | None = None
    ) -> None:
        if config is not None and not isinstance(config, DGCConfig):
            raise TypeError(
                f"`config` must be a DGCConfig or None. Received: config={config!r}"
            )
        self.mesh = Mesh.of(found)
        self._terms = terms or Terms()
        self.compressed = config is not None
        self.ledger = Ledger(self.mesh.voices, EachStep(config))
        self._record = {"tf_dgc": __version__, "compressed": self.compressed}
        self._record |= {"transport": found.name} | self._terms.record()
        self._record |= config.get_config() if config else {}
        self._agreed = False
        _all.add(self)
        if isinstance(self.everybody, HorovodTransport):
            _made.append(weakref.ref(self))
            if _waiting:
                self.begin_anew(_waiting.pop(0))

    @property
    def everybody(self) -> Transport:
        """Transport between all workers."""
        return self.mesh.everybody

    def begin_anew(self, records: Sequence[saving.Record]) -> None:
        """Go on among other workers, with these records."""
        self._agreed = False
        self.ledger.begin_anew(records)

    def gradients(
        self,
        owner: object,
        local: Sequence[Any],
        variables: Sequence[Any],
        taken_over: TakenOver | None = None,
        part: Part | None = None,
    ) -> Update:
        """Return the means over the workers, or the sums where `Terms` say so.

        Arguments are those of `Ledger.gradients`.

        Raises:
            ValueError: the workers' settings or variables differ, or XLA is to compile
                this.
        """
        self._refuse_xla()
        if not self._agreed:
            with tf.init_scope():
                subject = "versions and settings"
                handshake.agree(self.everybody, subject, self._record)
            self._agreed = True
        shares = [self._share(gradient) for gradient in local]
        shares, contexts = self._terms.compress(shares)
        found = self.ledger.gradients(owner, shares, variables, taken_over, part)
        if contexts is None:
            return found
        whole = self._terms.decompress(found.gradients, contexts)
        return found._replace(gradients=whole)

    def parameters(self, owner: object, variables: Sequence[Any]) -> None:
        """Do what follows a step; see `Ledger.parameters`."""
        self.ledger.parameters(owner, variables)

    def _refuse_xla(self) -> None:
        exchanges = self.compressed or self.everybody.name != "local"
        if exchanges and _host.tensorflow.compiled_by_xla():
            raise ValueError(
                "`jit_compile` must be False: XLA cannot compile the exchange. "
                "Received: jit_compile=True, from tf.function or model.compile, where "
                'it is also what "auto" means on a machine with a GPU. Use '
                "`model.compile(..., jit_compile=False)`, or give `fit` the callback "
                "hvd.callbacks.BroadcastVariables, which switches it off."
            )

    def added_up(self, gradient: Any) -> Any:
        """Return the sum of a gradient over the passes it is the mean of."""
        passes = self._terms.passes
        if passes == 1:
            return gradient
        return mapped(lambda values: values * passes, gradient)

    def _share(self, gradient: Any) -> Any:
        """Return what is summed over the workers."""
        terms = self._terms
        by = 1 if terms.total else self.mesh.replicas
        gradient = self.added_up(gradient)
        if terms.sparse_as_dense:
            gradient = tf.convert_to_tensor(gradient)
        return mapped(lambda values: values / by, gradient)


class Owner:
    """Owns the state of what has no optimizer."""


_made: list[weakref.ref[Means]] = []  # in this order on all workers
_of_tapes: dict[tuple[DGCConfig | None, Transport, Terms], tuple[Owner, Means]] = {}
_waiting: list[list[saving.Record]] = []  # each for an exchange to come


def exchange_of_tapes(
    config: DGCConfig | None, found: Transport, terms: Terms
) -> tuple[Owner, Means]:
    """Return what all tapes of a config share, and its owner."""
    key = config, found, terms
    if key not in _of_tapes:
        with tf.init_scope():
            _of_tapes[key] = Owner(), Means(found, config, terms)
    return _of_tapes[key]


def exchanges() -> list[Means]:
    """Return the exchanges over Horovod that are in use, those of tapes last."""
    gc.collect()  # those that are gone, on all workers alike
    found = [exchange for made in _made if (exchange := made())]
    tapes = [exchange for _, exchange in _of_tapes.values() if exchange in found]
    return [*[each for each in found if each not in tapes], *tapes]


def records() -> list[list[saving.Record]]:
    """Return what this worker keeps, by exchange."""
    return [*[each.ledger.records() for each in exchanges()], *_waiting]


def begin_anew(kept: list[list[saving.Record]]) -> None:
    """Let the exchanges in use, and then those to come, go on from `records`."""
    _of_tapes.clear()  # made in the steps, which other workers have yet to trace
    for exchange in (found := exchanges()):
        exchange.begin_anew(kept.pop(0) if kept else [])
    _made[:] = map(weakref.ref, found)
    _waiting[:] = kept
