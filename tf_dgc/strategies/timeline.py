"""A picture of where the time of training steps goes, on each worker."""

import json
import logging
import pathlib
import time
from typing import Any

import keras

from tf_dgc.strategies import marks
from tf_dgc.strategies.base import BaseStrategy, of_callback
from tf_dgc.strategies.downpour import DownpourStrategy
from tf_dgc.strategies.marks import APPLY, EXCHANGE, FLIGHT, Reader, Span
from tf_dgc.transports import handshake

_logger = logging.getLogger("tf_dgc")
_PHASES = ("computing", "selecting", "exchanging", "waiting", "applying")
_DRAINED = 1000  # batches after which what is not wanted is thrown away


class Timeline(keras.callbacks.Callback):
    """Writes a trace of some steps of `fit`, with a row for each worker.

    The file opens in https://ui.perfetto.dev and chrome://tracing. Each worker has a
    row of phases and one of collectives, by the chief's clock:

    | phase | from | to |
    |---|---|---|
    | `computing` | the batch begins, its rows are read | gradients are there |
    | `selecting` | compression, before and between collectives |  |
    | `waiting` | this worker begins a collective | the last worker begins it |
    | `exchanging` | the last worker has begun it | it ends on this worker |
    | `applying` | the exchange ends | weights are changed |

    Rounds in flight have a third row, from where they depart to where they are there.

    All workers need the callback. A step is traced anew when `fit` begins and after it
    has ended; without the callback nothing of it is in a step. Clocks are compared at
    barriers, so that times of two workers are true to the latency of the network.

    Attributes:
        file: what was written last, or None.
        summary: seconds of each phase in a step, mean of the steps, by rank.

    Example:
        model.fit(dataset, callbacks=[tf_dgc.callbacks.Timeline("timeline")])
    """

    def __init__(self, folder: str, skip: int = 2, steps: int = 100) -> None:
        """Choose the folder, and which batches of `fit`.

        Args:
            folder: is created; `timeline.json` there is the chief's, and written over.
            skip: batches at the beginning, of which the first compiles the step.
            steps: batches after these.

        Raises:
            ValueError: `skip` is negative, or `steps` not positive.
        """
        super().__init__()
        for name, value, least in (("skip", skip, 0), ("steps", steps, 1)):
            if not (isinstance(value, int) and value >= least):
                raise ValueError(
                    f"`{name}` must be an integer of at least {least}. Received: "
                    f"{name}={value!r}"
                )
        self.folder, self.skip, self.steps = pathlib.Path(folder), skip, steps
        self.file: pathlib.Path | None = None
        self.summary: list[dict[str, float]] = []
        self._batches: list[tuple[float, float]] = []
        self._spans: list[Span] = []
        self._seen, self._begun, self._ahead = 0, 0.0, 0.0

    def on_train_begin(self, logs: Any = None) -> None:
        """Begin to note, with clocks that are compared.

        Raises:
            ValueError: workers train at their own pace, or the model has no strategy of
                this package.
        """
        strategy = _together(self)
        settings = {"skip": self.skip, "steps": self.steps}
        handshake.agree(strategy.transport, "callbacks.Timeline", settings)
        self._batches, self._spans, self._seen = [], [], 0
        self._ahead = marks.clock_difference(strategy.transport)
        self._marks = Reader(strategy, self.model)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Note when a batch begins."""
        self._begun = time.time()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Note when it has ended."""
        self._seen += 1
        if self.skip < self._seen <= self.skip + self.steps:
            self._batches.append((self._begun, time.time()))
        if self._seen == self.skip + self.steps:
            self._spans = self._marks.take()
        elif self._seen % _DRAINED == 0 and self._seen > self.skip + self.steps:
            self._marks.take()

    def on_train_end(self, logs: Any = None) -> None:
        """Gather what all workers have noted, and write it on the chief."""
        strategy = of_callback(self)
        noted = self._marks.take()
        if self._seen < self.skip + self.steps:
            self._spans = noted
        self._marks.end()
        ahead = (self._ahead + marks.clock_difference(strategy.transport)) / 2
        first = self._batches[0][0] if self._batches else float("inf")
        own = {
            "batches": [(begin - ahead, end - ahead) for begin, end in self._batches],
            "spans": [
                (name, begin - ahead, end - ahead)
                for name, begin, end in self._spans
                if begin >= first
            ],
        }
        told = handshake.tell(strategy.transport, "callbacks.Timeline", own)
        workers = [_Worker(each) for each in told]
        last = _last_begins([worker.collectives for worker in workers])
        rows = [worker.phases(last) for worker in workers]
        self.summary = [
            _mean(row, len(w.batches)) for row, w in zip(rows, workers, strict=True)
        ]
        if strategy.is_chief:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.file = self.folder / "timeline.json"
            unfinished = self.file.with_suffix(".tmp")
            unfinished.write_text(json.dumps({"traceEvents": _events(rows, workers)}))
            unfinished.replace(self.file)
            _logger.info("timeline of %d steps: %s", len(self._batches), self.file)


class Timed:
    """Figures of `CompressionStats(times=True)`, from `on_train_begin` to `end`."""

    def __init__(self, callback: keras.callbacks.Callback) -> None:
        """Begin to note; all workers do.

        Raises:
            ValueError: workers train at their own pace.
        """
        strategy = _together(callback)
        self._mesh, everybody = strategy.mesh, strategy.mesh.everybody
        handshake.agree(everybody, type(callback).__name__, {"times": True})
        self._ahead = marks.clock_difference(everybody)
        self._marks = Reader(strategy, callback.model)
        self._begun = time.time()

    def begin_epoch(self) -> None:
        """Leave out what was before."""
        self._marks.take()
        self._begun = time.time()

    def figures(self) -> dict[str, float]:
        """Return the logs of an epoch; `slowest_rank` is alike on all workers."""
        spans, seconds = self._marks.take(), time.time() - self._begun
        found = [s for s in spans if s.name not in (EXCHANGE, APPLY, FLIGHT)]
        network = marks.union((begin, end) for _, begin, end in found)
        # The collective that steps begin with: of those of every step, the first.
        names = [span.name for span in found]
        first = max(names, key=names.count) if names else ""
        begins = [s.begin - self._ahead for s in found if s.name == first]
        told = handshake.tell(self._mesh.everybody, "times", {"begins": begins})
        steps = zip(*(each["begins"] for each in told), strict=False)
        last = [times.index(max(times)) for times in steps]
        return {
            "exchange_share": marks.length(network) / max(seconds, 1e-9),
            "slowest_rank": max(set(last), key=last.count) if last else 0,
        }

    def end(self) -> None:
        """Leave the strategy and the step as they were."""
        self._marks.end()


def _together(callback: keras.callbacks.Callback) -> BaseStrategy:
    """Return the strategy of a callback, whose workers take steps together.

    Raises:
        ValueError: they do not.
    """
    strategy = of_callback(callback)
    if isinstance(strategy, DownpourStrategy):
        raise ValueError(
            f"{type(callback).__name__} shows times of steps that workers take "
            "together. With DownpourStrategy each trains at its own pace; use "
            "server_stats(), or TensorFlow's profiler"
        )
    return strategy


class _Worker:
    """Times of one worker, by the chief's clock."""

    def __init__(self, told: dict[str, Any]) -> None:
        self.batches = [(begin, end) for begin, end in told["batches"]]
        spans = [Span(*each) for each in told["spans"]]
        self.exchanges = [s for s in spans if s.name == EXCHANGE]
        self.applied = [s for s in spans if s.name == APPLY]
        self.flights = [s for s in spans if s.name == FLIGHT]
        others = (EXCHANGE, APPLY, FLIGHT)
        self.collectives = [s for s in spans if s.name not in others]

    def phases(self, last: dict[tuple[str, int], float]) -> list[Span]:
        """Return what this worker did, one after the other.

        Args:
            last: when the last worker began each collective.
        """
        waiting, found = [], []
        counts: dict[str, int] = {}
        for name, begin, end in self.collectives:
            number = counts[name] = counts.get(name, -1) + 1
            ready = min(max(last[name, number], begin), end)
            waiting.append((begin, ready))
        waits = marks.union(waiting)
        network = marks.union((begin, end) for _, begin, end in self.collectives)
        busy = list(network)
        found += [Span("waiting", *each) for each in waits if each[0] < each[1]]
        for each in network:
            found += [Span("exchanging", *left) for left in marks.without(each, waits)]
        for kind, spans in (("selecting", self.exchanges), ("applying", self.applied)):
            united = marks.union((begin, end) for _, begin, end in spans)
            for whole in united:
                left = marks.without(whole, busy)
                found += [Span(kind, *each) for each in left]
            busy = marks.union([*busy, *united])
        for batch in self.batches:
            found += [Span("computing", *each) for each in marks.without(batch, busy)]
        return sorted(found, key=lambda span: span.begin)


def _last_begins(collectives: list[list[Span]]) -> dict[tuple[str, int], float]:
    """Return when the last worker began a collective, by its name and count."""
    found: dict[tuple[str, int], float] = {}
    for own in collectives:
        counts: dict[str, int] = {}
        for name, begin, _ in own:
            key = name, counts.get(name, 0)
            counts[name] = key[1] + 1
            found[key] = max(found.get(key, begin), begin)
    return found


def _mean(phases: list[Span], batches: int) -> dict[str, float]:
    """Return the seconds of each phase in a batch."""
    return {
        phase: sum(end - begin for name, begin, end in phases if name == phase)
        / max(batches, 1)
        for phase in _PHASES
    }


def _events(phased: list[list[Span]], workers: list[_Worker]) -> list[dict[str, Any]]:
    """Return events as the format of Chrome's traces has them."""
    found: list[dict[str, Any]] = []
    for rank, (phases, worker) in enumerate(zip(phased, workers, strict=True)):
        names = {"process_name": (0, f"rank {rank}"), "thread_name": (1, "phases")}
        for kind, (thread, name) in names.items():
            found.append(_about(kind, rank, thread, name))
        rows = [(1, phases), (2, worker.collectives)]
        found.append(_about("thread_name", rank, 2, "collectives"))
        if worker.flights:
            found.append(_about("thread_name", rank, 3, "rounds in flight"))
            rows.append((3, worker.flights))
        for thread, spans in rows:
            found += [
                {
                    "name": name,
                    "ph": "X",
                    "pid": rank,
                    "tid": thread,
                    "ts": round(1e6 * begin, 1),
                    "dur": round(1e6 * (end - begin), 1),
                }
                for name, begin, end in spans
            ]
    return found


def _about(kind: str, rank: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": rank, "tid": thread, "args": {"name": name}}
