"""Workers of one node have one voice: their gradients become one, densely, there.

What an exchange then keeps, it keeps for the node: each of its workers has the same.

Axes: N workers on M nodes; C numbers that each worker tells, see `parts.row_of`.
"""

import collections
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_dgc import averaging, values
from tf_dgc.compression import arena
from tf_dgc.config import CHOSEN_SPARSITY, PAPER, DGCConfig
from tf_dgc.exchanges import formats
from tf_dgc.exchanges.parts import (
    WEIGHT,
    OfNode,
    Part,
    all_scaled,
    row_of,
    seated,
)
from tf_dgc.exchanges.records import WITHIN, Record, adds_up
from tf_dgc.transports import grid
from tf_dgc.transports.base import Transport
from tf_dgc.transports.mesh import HierarchicalTransport, Sites, hosts_of

_logger = logging.getLogger("tf_dgc")

_TRIAL = 2**20  # weights
_SHARE = 0.9  # of the time of messages of all workers, that hosts must stay below


def chosen(among: Transport, wanted: bool | str, config: DGCConfig | None) -> Transport:
    """Return what carries messages: between hosts, or as it is; all workers call this.

    Args:
        among: between workers.
        wanted: see `DGCConfig.hierarchical`.
        config: of the exchange; None exchanges everything.

    Raises:
        ValueError: the transport has no groups.
    """
    if not wanted or among.alone or isinstance(among, HierarchicalTransport):
        return among
    told = among.rank == 0
    hosts = hosts_of(among)
    several = 1 < len(set(hosts)) < among.size
    elastic = os.environ.get("HOROVOD_ELASTIC") == "1"
    if len(set(hosts)) == among.size or (wanted == "auto" and (elastic or not several)):
        if told:
            why = "Workers come and go" if elastic and several else _layout(hosts)
            _logger.info("%s: each worker sends a message of its own", why)
        return among
    try:
        found = HierarchicalTransport(among, hosts)
    except ValueError:  # there are no groups
        if wanted == "auto":
            return among
        raise
    if wanted == "auto" and not _pays(found, config):
        return among
    if told:
        _logger.info(
            "%s: gradients are summed densely within each host, and one message of "
            "each goes between them",
            _layout(hosts),
        )
        _warn_of_order(found)
    return found


def _layout(hosts: Sequence[str]) -> str:
    counts = collections.Counter(hosts)
    each = ", ".join(f"{count} on {host}" for host, count in counts.items())
    return f"{len(hosts)} workers on {len(counts)} hosts ({each})"


def _warn_of_order(found: HierarchicalTransport) -> None:
    if found.size == 1:
        _logger.warning(
            "hierarchical=True makes a difference on several hosts only. Received: all "
            "%d workers on %s: gradients are summed densely there, and what is left "
            "out of messages saves nothing. 'auto' takes it where there is a gain",
            len(found.members[0]),
            found.hosts[0],
        )
    for host, ranks in zip(found.hosts, found.members, strict=True):
        if ranks != list(range(ranks[0], ranks[-1] + 1)):
            _logger.warning(
                "Workers of one host should have ranks next to one another: what goes "
                "round all workers, as metrics, crosses the network more often else. "
                "Received: ranks %s on %s. Name each host once, with the number of its "
                "workers, as `--hosts a:4,b:4`",
                ranks,
                host,
            )
            return


def _pays(found: HierarchicalTransport, config: DGCConfig | None) -> bool:
    """Measure what an exchange takes, both ways; rank 0 decides.

    Of a gradient of `_TRIAL` elements: messages round all workers; or its sum within
    each host, and messages round the hosts.
    """
    everybody = found.everybody

    def send(transport: Transport) -> tf.Tensor:
        if config is None:
            return transport.all_reduce([tf.zeros([_TRIAL])], "hosts.trial")[0]
        size = _message_bytes(config, transport.size)
        return transport.all_gather(tf.zeros([size // 4]), "hosts.trial")

    def by_hosts() -> tf.Tensor:
        (summed,) = found.reduce([tf.zeros([_TRIAL])], "hosts.trial")
        with tf.control_dependencies([summed]):
            return send(found)

    with tf.device(found.device):
        flat, nodes = grid.seconds(lambda: send(everybody)), grid.seconds(by_hosts)
    faster = tf.constant(nodes < _SHARE * flat)
    pays = bool(everybody.broadcast([faster], "hosts.faster")[0])
    if everybody.rank == 0:
        _logger.info(
            "An exchange of a million weights takes %.1f ms between %d workers, and "
            "%.1f ms where %d hosts sum their gradients first: %s",
            1e3 * flat,
            everybody.size,
            1e3 * nodes,
            found.size,
            "they do" if pays else "each worker sends a message of its own",
        )
    return pays


def _message_bytes(config: DGCConfig, workers: int) -> int:
    """Return the bytes of each of N messages, so that as many pass a worker."""
    sparsity = config.sparsity
    if sparsity is None:  # a budget, of which the model is not known yet
        sparsity = CHOSEN_SPARSITY.get(config.value_dtype, PAPER["sparsity"])
        config = config.without_budget(sparsity)
    layout = arena.build([("weights", [_TRIAL // 1024, 1024])])
    return formats.cost(layout, sparsity, config, workers).passed // workers


def gradients(
    transport: Transport, local: list[Any], name: str, part: Part | None
) -> tuple[list[Any], Part | None]:
    """Return gradients of this worker's node, and what they count among nodes.

    With weights w, and W where each gradient is divided by N already, a node has

        w' = M / N * (sum of w)
        g' = (sum of w g) / w'               and W is M, where it was N
        g' = (sum of w g) / (sum of w)       where it was 1

    of its own workers, so that the sum over nodes is that over workers.

    Args:
        transport: between nodes; between workers, nothing is done.
        local: of this worker, of static shapes.
        name: prefix of the names of the collectives.
        part: what they count; None where those of all count alike.
    """
    if not isinstance(transport, HierarchicalTransport) or isinstance(transport, Sites):
        return local, part  # sites have an exchange of their own within
    everybody, ranks = transport.everybody, transport.members[transport.rank]
    workers, ratio = everybody.size, transport.size / everybody.size
    if part is None:
        part = Part(tf.zeros([]), tf.ones([]), workers)
    divided = part.whole == workers
    own = row_of(
        values.first_nonfinite(local), part._replace(weight=ratio * part.weight)
    )
    rows = seated(own, tf.one_hot(everybody.rank, workers))
    dense = [tf.convert_to_tensor(gradient) for gradient in local]
    weighed = all_scaled(dense, part.weight)
    *summed, rows = transport.reduce([*weighed, rows], name)
    with tf.device("CPU:0"):
        weight = tf.reduce_sum(rows[:, WEIGHT])
        scale = tf.math.divide_no_nan(1.0 if divided else ratio, weight)
    part = part._replace(
        weight=weight,
        whole=transport.size if divided else 1,
        witness=None,
        of_node=OfNode(rows, ranks[0]),
    )
    return all_scaled(summed, scale), part


def told_of_site(
    transport: Transport, header: averaging.RoundHeader
) -> averaging.RoundHeader:
    """Return what the workers of a site tell other sites, which all of them have then.

    Args:
        transport: between sites; elsewhere a worker tells its own.
        header: of this worker.
    """
    if not isinstance(transport, Sites):
        return header
    own = [header.unsettled > 0, header.loss, header.stops]
    own = [tf.cast(each, tf.float64) for each in own]
    with tf.device("CPU:0"):
        unsettled, loss, stops = transport.reduce(own, "told")
    workers = len(transport.members[transport.rank])
    return header._replace(
        unsettled=unsettled,  # how many workers, and not steps
        loss=loss / workers,
        stops=tf.cast(stops > 0, tf.float64),
    )


def of_site(transport: Transport, parts: list[tf.Tensor]) -> list[tf.Tensor]:
    """Return the sums over a site of parts of a mean; elsewhere a worker's own."""
    if not isinstance(transport, Sites):
        return parts
    return transport.reduce(parts, "statistics")


def own_records(transport: Transport, found: Sequence[Record]) -> list[Record]:
    """Return what is saved of this worker, so that the sum over all is that of nodes.

    Args:
        transport: as above.
        found: of the node, which all its workers have.
    """
    if not isinstance(transport, HierarchicalTransport) or transport.speaks:
        return list(found)

    def left(name: str, array: np.ndarray) -> np.ndarray:
        of_node = adds_up(name) and name.split()[0] != WITHIN
        return np.zeros_like(array) if of_node else array

    return [_changed(record, left) for record in found]


def joined(transport: Transport, found: Sequence[Record]) -> list[Record]:
    """Return what a node takes over of its workers' records; all workers call this.

    The sum of what adds up over the workers, and the mean of what does not; at a site,
    where each worker has more of its own, that stays.
    """
    if not isinstance(transport, HierarchicalTransport):
        return list(found)
    count = len(transport.members[transport.rank])
    own = isinstance(transport, Sites)

    def together(name: str, array: np.ndarray) -> np.ndarray:
        if own and (name.split()[0] == WITHIN or not adds_up(name)):
            return array
        # In float64 the mean of what is the same is the same again.
        (total,) = transport.reduce([tf.constant(array, tf.float64)], "records")
        whole = total.numpy() / (1 if adds_up(name) else count)
        return whole.astype(array.dtype)

    return [_changed(record, together) for record in found]


def _changed(record: Record, change: Callable[[str, np.ndarray], np.ndarray]) -> Record:
    arrays = {name: change(name, array) for name, array in record.arrays.items()}
    return record._replace(arrays=arrays)
