"""Comparison of what one worker and N workers computed, in plain words. Pure NumPy.

The first quantity that differs, in the order in which a step computes them, decides:
what comes after it follows from it.
"""

import collections
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tf_dgc.verify.records import RecordedRun, RecordedSample, RecordedStep

# Sums of float32 in another order differ by less, in relation to the norm.
_ROUNDING = 1e-3
# Steps amplify rounding: later ones may differ by so much more each.
_GROWTH = 4.0
_TINY = 1e-7


class Difference(NamedTuple):
    """The first tensor, rows or logs that differ.

    Attributes:
        what: the quantity: one of the keys of `_TITLES`.
        step: number of the step, from 1; 0 before the first.
        name: of the tensor, component or log.
        alone: the value of one worker, as text.
        together: the value of N workers, as text.
        cause: the likely cause, with what can be done.
    """

    what: str
    step: int
    name: str
    alone: str
    together: str
    cause: str


_TITLES = {
    "initial": "weights before the first step",
    "rows": "rows of the batches",
    "gradients": "gradients",
    "weights": "trained weights",
    "variables": "other variables of the model",
    "logs": "losses and metrics in the logs",
}


def compare(alone: RecordedRun, workers: Sequence[RecordedRun]) -> Difference | None:
    """Return the first difference, None where all is equal to rounding.

    Args:
        alone: of one worker.
        workers: of N workers, by rank.
    """
    found = _of_initial(alone, workers)
    for number in range(min(len(alone.steps), *(len(w.steps) for w in workers))):
        if found is not None:
            return found
        steps = [worker.steps[number] for worker in workers]
        found = _of_step(alone, alone.steps[number], steps, number + 1)
    if found is None and len({len(r.steps) for r in (alone, *workers)}) > 1:
        counts = [len(worker.steps) for worker in workers]
        return Difference(
            *("rows", min(counts) + 1, "number of steps"),
            *(str(len(alone.steps)), " and ".join(map(str, counts))),
            "the data of one worker end earlier: each reads others",
        )
    return found


def _of_initial(
    alone: RecordedRun, workers: Sequence[RecordedRun]
) -> Difference | None:
    cause = (
        "weights are set from numbers without a seed, or from a file that differs. "
        "Seed them, or let the strategy be made before they are drawn"
    )
    return _of_samples("initial", 0, alone.initial, [w.initial for w in workers], cause)


def _of_step(
    run: RecordedRun, alone: RecordedStep, workers: Sequence[RecordedStep], number: int
) -> Difference | None:
    """Return the first difference of a step."""
    found = _of_rows(alone, workers, number)
    if found is None:
        found = _of_gradients(run, alone, workers, number)
    if found is None:
        found = _of_weights(run, alone, workers, number)
    return found or _of_logs(alone, workers, number)


# Rows.


def _of_rows(
    alone: RecordedStep, workers: Sequence[RecordedStep], number: int
) -> Difference | None:
    for name in alone.rows:
        parts = [worker.rows.get(name, []) for worker in workers]
        whole = alone.rows[name]
        if all(part == whole for part in parts) and len(parts) > 1:
            continue  # taken whole by all, or a batch of equal rows
        gathered = [row for part in parts for row in part]
        if collections.Counter(gathered) == collections.Counter(whole):
            continue
        return _rows_differ(name, alone, workers, gathered, number)
    return None


def _rows_differ(
    name: str,
    alone: RecordedStep,
    workers: Sequence[RecordedStep],
    gathered: Sequence[str],
    number: int,
) -> Difference:
    whole = alone.rows[name]
    common = sum((collections.Counter(gathered) & collections.Counter(whole)).values())
    counts = [len(worker.rows.get(name, [])) for worker in workers]
    if len(gathered) != len(whole):
        cause = (
            "the workers together have other numbers of rows: a part of the batch has "
            "another first dimension than the others, or each reads data of its own"
        )
    elif common == 0:
        cause = (
            "the values of all rows differ: numbers are drawn while data are read "
            "(augmentation), or words are numbered in an order that each process has "
            "for itself (a set). What follows from the rows cannot be compared"
        )
    else:
        cause = (
            "the workers read rows in different orders: each row must come in the same "
            "place on all. Seed what shuffles, and read files in one order"
        )
    return Difference(
        *("rows", number, name),
        f"{len(whole)} rows, {_numbers(alone.shown.get(name, []))} ...",
        f"{' + '.join(map(str, counts))} rows, {common} of them the same, "
        f"{_numbers(workers[0].shown.get(name, []))} ...",
        cause,
    )


# Gradients.


def _of_gradients(
    run: RecordedRun, alone: RecordedStep, workers: Sequence[RecordedStep], number: int
) -> Difference | None:
    parts = [worker.gradients for worker in workers]
    found = _of_samples("gradients", number, alone.gradients, parts, "")
    if found is None:
        return None
    cause = _cause_of_gradients(run, alone.gradients, parts[0], len(workers))
    return found._replace(cause=cause)


def _cause_of_gradients(
    run: RecordedRun,
    alone: Mapping[str, RecordedSample],
    together: Mapping[str, RecordedSample],
    count: int,
) -> str:
    """Return the likely cause of gradients that differ."""
    if draws := run.notes.get("draws"):
        return (
            f"the step draws random numbers ({', '.join(draws)}), which each worker "
            "does for itself: these gradients cannot be compared"
        )
    factors = [
        factor
        for name in alone
        if name in together
        for factor in (_factor(alone[name], together[name]),)
        if factor is not None
    ]
    different = [f for f in factors if not np.isclose(f, 1.0, rtol=1e-2)]
    clips = run.notes.get("clips")
    if clips:
        return (
            f"gradients are clipped in the step ({', '.join(clips)}): each worker "
            "clips those of its own rows. Clip what `strategy.exchange(gradients)` "
            "returns, or use `global_clipnorm` of the optimizer"
        )
    if different and np.allclose(different, count, rtol=1e-2):
        return (
            f"a loss counts {count} times: it is a mean over the rows of a worker, and "
            "is added up over the workers as a sum"
        )
    if different and np.allclose(different, 1 / count, rtol=1e-2):
        return (
            f"a loss counts 1/{count}: it is a sum over rows (or one loss for each "
            "row), and is averaged over the workers as a mean"
        )
    return (
        "a loss that is not made of the losses of single rows: one that compares a row "
        "with the others of the batch (contrastive), chooses among them (a sort, a "
        "top-k, as of hard examples), is divided by a number that differs by worker (a "
        "mask), or uses statistics of the batch. Gather with "
        "`tf.distribute.get_replica_context().all_gather`, or divide by a number of "
        "the whole batch"
    )


def _factor(alone: RecordedSample, together: RecordedSample) -> float | None:
    """Return f where `together` is f times `alone`, None where it is not."""
    a, b = alone.elements, together.elements
    square = float(a @ a)
    if a.shape != b.shape or square < _TINY**2:
        return None
    factor = float(a @ b) / square
    rest = float(np.linalg.norm(b - factor * a))
    return factor if rest <= 1e-2 * float(np.linalg.norm(b)) else None


# After the update.


def _of_weights(
    run: RecordedRun, alone: RecordedStep, workers: Sequence[RecordedStep], number: int
) -> Difference | None:
    trained = set(run.notes.get("trainable", ()))
    parts = [worker.weights for worker in workers]

    def of(names: bool) -> list[dict[str, RecordedSample]]:
        return [
            {k: v for k, v in each.items() if (k in trained) == names}
            for each in (alone.weights, *parts)
        ]

    first, *others = of(True)
    found = _of_samples("weights", number, first, others, "")
    if found is not None:
        return found._replace(
            cause="the optimizer's update differs though gradients do not: a learning "
            "rate, or a setting, that workers have for themselves"
        )
    first, *others = of(False)
    cause = (
        "a variable that the step, or a layer, changes by the rows that a worker has "
        "(a queue, a counter, statistics of a batch)"
    )
    return _of_samples("variables", number, first, others, cause)


def _of_logs(
    alone: RecordedStep, workers: Sequence[RecordedStep], number: int
) -> Difference | None:
    def samples(logs: Mapping[str, float]) -> dict[str, RecordedSample]:
        return {k: RecordedSample(np.array([v]), abs(v), ()) for k, v in logs.items()}

    others = [samples(worker.logs) for worker in workers]
    found = _of_samples("logs", number, samples(alone.logs), others, "")
    if found is None:
        return None
    together, count = workers[0].logs[found.name], len(workers)
    if np.isclose(together * count, alone.logs[found.name], rtol=1e-2):
        cause = (
            f"what is logged is 1/{count} as large: a loss that was divided by the "
            "rows of the whole batch. Log a mean, or multiply by "
            "`strategy.num_replicas_in_sync`"
        )
    else:
        cause = (
            "a log that is no mean or sum over rows: a number for each batch, a "
            "maximum, a counter. Let a metric derived from `keras.metrics.Metric` keep "
            "sums"
        )
    return found._replace(cause=cause)


# Tensors.


def _of_samples(
    what: str,
    number: int,
    alone: Mapping[str, RecordedSample],
    workers: Sequence[Mapping[str, RecordedSample]],
    cause: str,
) -> Difference | None:
    """Return the first tensor in which any worker differs from one that is alone."""
    workers = [_under_names_of(alone, worker) for worker in workers]
    names = [name for name in alone if all(name in worker for worker in workers)]
    norms = [sample.norm for sample in alone.values() if np.isfinite(sample.norm)]
    scale = max(norms, default=0.0)
    for name in names:
        for rank, worker in enumerate(workers):
            if _equal(alone[name], worker[name], number, scale):
                continue
            at = _widest(alone[name], worker[name])
            return Difference(
                *(what, number, name),
                _value(alone[name], at),
                f"{_value(worker[name], at)} (worker {rank})",
                cause,
            )
    return None


def _under_names_of(
    alone: Mapping[str, RecordedSample], worker: Mapping[str, RecordedSample]
) -> Mapping[str, RecordedSample]:
    """Return a worker's tensors by the names of one that is alone.

    Models may be named anew in each process: then the order tells which is which.
    """
    shapes = [[sample.shape for sample in run.values()] for run in (alone, worker)]
    if alone.keys() == worker.keys() or shapes[0] != shapes[1]:
        return worker
    return dict(zip(alone, worker.values(), strict=True))


def _equal(
    alone: RecordedSample, together: RecordedSample, number: int, scale: float
) -> bool:
    """Tell whether two tensors are equal to rounding, after so many steps."""
    if alone.shape != together.shape:
        return False
    a, b = alone.elements, together.elements
    both = np.isfinite(a) & np.isfinite(b)
    if not np.array_equal(a[~both], b[~both], equal_nan=True):
        return False
    tolerance = _ROUNDING * _GROWTH ** max(number - 1, 0)
    norm = max(float(np.linalg.norm(a[both])), float(np.linalg.norm(b[both])))
    # A tensor whose values cancel has rounding of what they are sums of.
    allowed = tolerance * norm + 1e-5 * scale + _TINY
    return float(np.linalg.norm(a[both] - b[both])) <= allowed


def _widest(alone: RecordedSample, together: RecordedSample) -> int:
    if alone.elements.shape != together.elements.shape or not alone.elements.size:
        return 0
    with np.errstate(invalid="ignore"):
        return int(np.argmax(np.abs(alone.elements - together.elements)))


def _value(sample: RecordedSample, at: int) -> str:
    if not sample.elements.size:
        return f"shape {list(sample.shape)}"
    return f"{sample.elements[min(at, sample.elements.size - 1)]:.6g}"


def _numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.4g}" for value in values)


# Words.


def text(
    alone: RecordedRun, workers: Sequence[RecordedRun], found: Difference | None
) -> str:
    """Return the verdict for people."""
    count, steps = len(workers), len(alone.steps)
    lines = [f"{steps} step(s) of the first `fit`, on 1 worker and on {count}"]
    reached = list(_TITLES)
    last = reached.index(found.what) if found else len(reached)
    for index, (what, title) in enumerate(_TITLES.items()):
        state = "equal to rounding"
        if found is not None and index >= last:
            state = "DIFFERENT" if what == found.what else "not looked at"
        lines.append(f"  {title:<32} {state}")
    if found is not None:
        when = f"in step {found.step}" if found.step else "before the first step"
        lines += [
            f"The first that differs, {when}: {found.name}",
            f"  1 worker    {found.alone}",
            f"  {count} workers   {found.together}",
            f"Likely cause: {found.cause}.",
        ]
    lines += _remarks(alone)
    if found is None:
        lines.append(f"Verdict: {count} workers compute what one does.")
    else:
        lines.append(f"Verdict: {count} workers do NOT compute what one does.")
    return "\n".join(lines)


def _remarks(run: RecordedRun) -> list[str]:
    remarks = []
    asked = run.notes.get("asked", 0)
    if len(run.steps) < asked:
        remarks.append(
            f"The first epoch has ended after {len(run.steps)} of the {asked} steps "
            "that were to be compared; later epochs were not looked at"
        )
    if run.notes.get("batch_norms"):
        remarks.append(
            f"{run.notes['batch_norms']} layer(s) of batch normalization were made "
            "synchronized for this; as written, each worker normalizes by its own rows"
        )
    if names := run.notes.get("rows"):
        remarks.append(
            "The gradients of rows that repeat in a batch were added up before the "
            "optimizer squares them, as several workers do, and Keras alone does not: "
            + ", ".join(names)
        )
    if run.notes.get("left_out"):
        names = ", ".join(run.notes["left_out"])
        remarks.append(f"Callbacks that write files were left out: {names}")
    if not any(step.gradients for step in run.steps):
        remarks.append("No optimizer of Keras applied a gradient in these steps")
    remarks.append(
        "Shuffling, dropout and other layers of noise were switched off on both sides"
    )
    return [f"Note: {remark}." for remark in remarks]
