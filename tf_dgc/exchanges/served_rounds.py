"""Local steps, and rounds on servers in which the changes of workers meet.

Of a worker k, which has fetched a from the servers and taken n_k local steps to w_k:

    g <- K/W sum n_k (a_k - w_k) / sum n_k   of the K of W that have come to the round
    w <- the outer optimizer's step by g, on the servers
    a_k, w_k <- w                            of those; others go on with a_k and w_k

Where changes are compressed, messages meet: see `served_messages`. If the outer step is
that of plain SGD, those who have a fetch the messages of the round, not w.

A round is held when a quorum has come, or a time after the first: see `servers/turns`.
Who comes later is in the next one, with all its steps; who dies is missing; who joins
fetches w. W are those that train, as far as is known. So each change counts once, and
as much as where all meet: two rounds, of half of the workers each, are as one of all.

Axes: T variables, W workers.

References:
    Douillard et al.: DiLoCo, 2023, https://arxiv.org/abs/2311.08105. Decoupled DiLoCo,
    https://arxiv.org/abs/2604.21428 (quorum and grace).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tf_dgc import _host
from tf_dgc.exchanges.base import Exchange, Place, TakenOver, Update
from tf_dgc.exchanges.downpour import Downpouring
from tf_dgc.exchanges.inplace import own_variable
from tf_dgc.exchanges.local_counts import CommonCount, LocalOptimizer
from tf_dgc.exchanges.moved import Trained
from tf_dgc.exchanges.outer_on_servers import Compressing, OuterOnServers
from tf_dgc.exchanges.own_changes import OwnChanges
from tf_dgc.exchanges.parts import Part
from tf_dgc.exchanges.served import Served
from tf_dgc.transports import sums


class RoundsOnServers(Downpouring):
    """Makes the exchanges of local steps, and of outer optimizers.

    Attributes:
        compressing: of the changes of the next optimizer; None sends all of them.
    """

    _local: LocalOptimizer | None = None
    compressing: Compressing | None = None

    def expect_local(self, local: LocalOptimizer) -> None:
        """Tell what the next exchange is to know: it is one of local steps."""
        self._local = local

    def __call__(self, place: Place, taken_over: TakenOver | None) -> Any:
        """Make an exchange: of an outer optimizer, or of local steps."""
        local, self._local = self._local, None
        if local is not None:
            return LocalRounds(place, self, local)
        return super().__call__(place, taken_over)

    def _opened(
        self, place: Place, trained: Trained, taken_over: TakenOver | None
    ) -> Served:
        return OuterOnServers(place, self, trained, self.compressing)


class LocalRounds(Exchange):
    """Local steps of an optimizer, and when the change goes to the servers.

    Attributes:
        position: shape [], int64; local steps since this worker has fetched.
        outer: exchange of the outer optimizer.
    """

    lockstep = False

    def __init__(
        self, place: Place, make: RoundsOnServers, local: LocalOptimizer
    ) -> None:
        """Create the variables, outside of any graph.

        Raises:
            ValueError: the chief's optimizer has other settings.
            TimeoutError: the chief did not come.
        """
        super().__init__(place)
        self.outer, self._step = local.outer, local.step
        self._members, self._twins = make.members, make.twins
        self._period = int(make.settings.local_steps or 1)
        self._changes = OwnChanges(self.variables, self.outer, self.transport.device)
        with tf.init_scope(), tf.device("CPU:0"):
            self.position = own_variable(tf.zeros([], tf.int64), "round_position")
        with tf.init_scope():
            self._common = CommonCount(self.name, make, local)
            once, number = _host.shared.traced_once, tf.TensorSpec([], tf.int64)
            self._hold = once(self._hold_round, number)
            self._fetch, self._begin = once(self.outer.fetch), once(self._begin_again)
            self._join()

    def _join(self) -> None:
        """Begin, where others have begun as they are, eagerly."""
        handover, turns = self._common.handover, self.outer.turns
        self.outer.then = handover.answer
        if turns is not None and (missed := self._common.missed):
            handover.take(missed, turns.attendance, self._members.timeout)
            self._fetch()
        self._begin_period()

    # A step.

    def gradients(
        self,
        local: list[Any],
        taken_over: TakenOver | None = None,
        part: Part | None = None,
    ) -> Update:
        """Return the gradients of a local step: this worker's own."""
        return Update(local, [False] * len(local), None, sums.no_traffic())

    def begin_step(self) -> None:
        """Begin anew where this worker's parameters were assigned, as by a script.

        Those of the chief go to the servers. Others go on from theirs until the next
        round: the servers may still have what there was before, as the chief assigns
        the same a moment later.
        """
        _host.shared.seldom(self._twins.changed.read_value(), self._begin_anew)

    def _begin_anew(self) -> None:
        if self._members.is_chief:
            counts = self._members.succession.counts_now.read_value()
            tf.cond(counts, self.outer.give, self.outer.fetch)
        self._twins.changed.assign(False)
        self._begin_again()

    def parameters(self) -> None:
        """Count a local step, and hold a round where it is time."""
        with tf.device("CPU:0"):
            due = self.position.assign_add(1, read_value=True) >= self._period
        # The optimizer itself counts this step later.
        _host.shared.seldom(due, lambda: self._hold(tf.ones([], tf.int64)))

    def _hold_round(self, uncounted: tf.Tensor) -> None:
        """Bring the change to the servers; fetch what has become of it.

        Args:
            uncounted: steps that the optimizer has not counted yet, shape [], int64.
        """
        offer = self._changes.offer(self.position, self._common.rate.tell())
        self.outer.offer = offer
        self._step(offer.changes)

        def begin() -> None:
            self._changes.commit(offer)
            self._common.heed(self.position.read_value(), uncounted)
            # Not before: who begins its period late would count a later round's steps.
            self._common.tell(uncounted)
            self._begin_period(uncounted)

        tf.cond(self.outer.landed.read_value(), begin, lambda: None)

    def _begin_again(self) -> None:
        self._common.heed(self.position.read_value())
        self._begin_period()

    def _begin_period(self, uncounted: Any = 0) -> None:
        """Begin at what was fetched; count steps from those of all."""
        self._changes.begin()
        self.position.assign(0)
        self._common.take(uncounted)

    # Outside of steps.

    def settle(self, always: bool = False) -> None:
        """Hold a round, eagerly, of steps since the last one; or fetch, if `always`.

        A change that comes too late for a round goes to the next one.
        """
        while int(self.position):
            self._hold(tf.zeros([], tf.int64))
            always = False
        if always:
            self.fetch()

    def fetch(self) -> None:
        """Begin, eagerly, at what the servers have now."""
        self._fetch()
        self._begin()

    def come(self) -> None:
        """Begin a `fit` with the others, eagerly: with what the chief has loaded."""
        if bool(self._twins.changed) and self._members.succession.counts:
            self.outer.give()
        self._twins.changed.assign(False)
        self._common.rate.tell()
        if (turns := self.outer.turns) is not None:
            turns.attendance.enter()
        self.fetch()

    # What is kept back.

    @property
    def state(self) -> Mapping[str, tf.Variable]:
        """Residual of compression."""
        return self._changes.state

    @property
    def steps(self) -> int:
        """Number of messages of this worker that were in a round."""
        return self._changes.sent

    def load(self, arrays: Mapping[str, Any], steps: int) -> None:
        """Take over what was saved; what was sent since is not kept back."""
        if self._members.succession.repeats:
            return
        super().load(arrays, steps)
        self._changes.loaded(steps)

    def flush(self, variables: Sequence[Any], apply: Any) -> None:
        """Refuse it.

        Raises:
            ValueError: something is kept back.
        """
        self._changes.refuse_flush()

    def kept(self) -> list[tf.Tensor]:
        """Return the residual."""
        return [residual.read_value() for residual in self.state.values()]
