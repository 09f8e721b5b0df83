"""Distribution of datasets: which rows each worker reads, and until when."""

import functools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from tf_dgc import _host
from tf_dgc.strategies import data, level, provenance, split, witness
from tf_dgc.transports import handshake
from tf_dgc.transports.mesh import Mesh

_logger = logging.getLogger("tf_dgc")


class SharedData(NamedTuple):
    """Data of this worker.

    Attributes:
        dataset: of its rows.
        meeting: where workers agree on the end of data, if there is need to.
        marks: of what is read of batches that all read alike.
        pieces: steps in which a batch of the dataset is used up; None if unknown.
    """

    dataset: Any
    meeting: _host.iterators.Meeting | None = None
    marks: _host.iterators.Marks | None = None
    pieces: int | None = 1


class Distribution:
    """Distribution of the datasets of a strategy.

    Attributes:
        witness: of the batch of all workers that was read last.
    """

    def __init__(self, mesh: Mesh) -> None:
        """Begin with no data.

        Args:
            mesh: of the workers.
        """
        self._mesh = mesh
        self.witness = witness.Witness()
        self._told_chance = self._told_work = False
        self._end = _host.iterators.Meeting(
            functools.partial(level.agreed, mesh.everybody)
        )

    def shared(self, dataset: tf.data.Dataset, lockstep: bool) -> SharedData:
        """Return this worker's rows of a dataset.

        Args:
            dataset: of global batches, or of this worker's own data.
            lockstep: whether all workers meet in each step.
        """
        rank, size = self._mesh.everybody.rank, self._mesh.everybody.size
        if size > 1:
            if provenance.decided_by_chance(dataset):
                self._tell_chance()
            self._tell_work(dataset)
        if size > 1 and not data.is_own(dataset):
            self._meeting_of(dataset, False, lockstep)
            share = data.marked_share_of(dataset, rank, size)
            self.witness.begin(share.names)
            return SharedData(share.pairs, marks=self.witness.marks)
        self.witness.begin([])
        own = data.share_of(dataset, rank, size)
        unequal = data.may_be_unequal(dataset)
        meeting = self._meeting_of(own if unequal else dataset, unequal, lockstep)
        pieces = data.pieces_of(dataset, size)
        return SharedData(own, meeting if data.is_own(dataset) else None, None, pieces)

    def own(self, make: Callable[[], tf.data.Dataset], lockstep: bool) -> SharedData:
        """Return data that a worker makes by itself; `make` returns the dataset."""
        self.witness.begin([])
        own = make()
        return SharedData(own, self._meeting_of(own, False, lockstep))

    def _tell_chance(self) -> None:
        if self._told_chance:
            return
        self._told_chance = True
        _logger.warning(
            "A random operation without a seed decides which elements the dataset has "
            "(in Dataset.filter, flat_map or the like): each worker draws its own "
            "numbers, and so has rows of other batches. Give the operation a `seed`"
        )

    def _tell_work(self, dataset: tf.data.Dataset) -> None:
        if self._told_work or data.is_own(dataset):
            return
        if not (work := split.work_for_others(dataset)):
            return
        self._told_work = True
        workers = self._mesh.everybody.size
        _logger.warning(
            f"Each of the {workers} workers does this for all rows of the global "
            f"batches, and keeps its own: {'; '.join(work)}. So input takes as "
            "long as on one worker. Rows are chosen earlier where only such `map`s as "
            "depend on nothing but their element, without a seed or Python code, stand "
            "between the source and `batch`, and after it such as map rows alone. "
            "Or set AutoShardPolicy.FILE, where a dataset reads files, or let each "
            "worker make its own data: `strategy.distribute_datasets_from_function`"
        )

    def _meeting_of(
        self, dataset: tf.data.Dataset, unequal: bool, lockstep: bool
    ) -> _host.iterators.Meeting | None:
        """Let no worker wait for others that have no more batches of their own.

        Args:
            dataset: of this worker's own data.
            unequal: whether workers may have known and different numbers of batches.
            lockstep: whether all workers meet in each step.

        Returns:
            Where they agree on the end of data, if there is need to.

        Raises:
            ValueError: these numbers must not differ, and do.
        """
        if self._mesh.everybody.alone or not lockstep or not tf.executing_eagerly():
            return None
        batches = int(dataset.cardinality())
        names = {-1: "endless", -2: "unknown"}
        record = {"number of batches": names.get(batches, batches)}
        if unequal:
            found = handshake.tell(self._mesh.everybody, "data", record)
            alike = all(each == found[0] for each in found)
        else:
            handshake.agree(self._mesh.everybody, "data", record)
            alike = True
        known = alike and batches != -2
        return None if known or not level.can_end(dataset.element_spec) else self._end
