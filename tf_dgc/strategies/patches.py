"""THE LIST: what is replaced in Keras and TensorFlow, in which order, and why.

All of it is replaced when the first strategy of a process is made, and asks whose a
model, an optimizer or a dataset is: those of other strategies are left alone. A row is
a place, what runs there, and the reason. Where a place has several rows, a later one
runs around those before it.

Beside the list: `_host.startup` replaces three functions until TensorFlow is first
used; `_host.applying.clip_sums` puts its row here without a strategy, for Horovod's
optimizers; `verify` records, or silences, a run of its own process;
`search.tuners.prepare` replaces two methods of KerasTuner's tuners, if it is imported.
"""

from typing import Any, NamedTuple

from tf_dgc import _host
from tf_dgc._host.patches import Hook, Place
from tf_dgc.strategies import (
    adopted,
    checkpoints,
    drawn_rows,
    early_ends,
    embeddings,
    files,
    first_builds,
    fits,
    handed_over,
    outside,
    own_batches,
    positions,
    randomness,
    reports,
    served_fits,
    shared_paths,
    step_hooks,
    stopping,
    watched,
)


class Patch(NamedTuple):
    """A function of Keras or TensorFlow that is replaced.

    Attributes:
        place: a name of `_host.patches.PLACES`, or an owner and an attribute.
        hook: gets the function that was there before, and its arguments.
        reason: why.
        whole: whether `hook(original)` makes what stands there instead.
    """

    place: Place
    hook: Hook
    reason: str
    whole: bool = False


def _scopes() -> list[Patch]:
    again = "scopes stay entered where the default graph is reset"
    graphs = "AutoGraph need not convert what makes graphs already"
    follow = _host.scopes.get_default_graph
    return [
        Patch("default graph", follow, again),
        Patch("global default graph", follow, again),
        Patch("set strategy", fits.set_strategy, "it is the strategy of new threads"),
        Patch("conversion", _host.tensorflow.runs_as_it_is, graphs),
    ]


def _files() -> list[Patch]:
    own = "two workers may not write one file"
    instant = "others read the file at any time"
    wait = "a worker may load what the chief has not written yet"
    parts = "parts of weights are in no file of one worker"
    on_chief = "files and logs are written once"
    return [
        Patch("download", shared_paths.retrieve, instant),
        Patch("cache", shared_paths.cache, own),
        Patch("save folder", shared_paths.save_folder, instant),
        Patch("save checkpoint", checkpoints.save, own),
        Patch("record checkpoint", checkpoints.record, own),
        Patch("delete checkpoint", checkpoints.delete, own),
        Patch("checkpoint state", checkpoints.read_record, wait),
        Patch("checkpoint state, too", checkpoints.read_record, wait),
        Patch("load weights", shared_paths.load_weights, wait),
        Patch("load model", shared_paths.load_model, wait),
        Patch("load model, too", shared_paths.load_model, wait),
        *(Patch((k, n), hook, on_chief) for k, n, hook in files.methods_that_write()),
        Patch("list of callbacks", files.set_model, "workers wait for what is written"),
        Patch("export", files.export, parts),
        Patch("save optimizer", files.save_slots, parts),
        Patch("load optimizer", files.load_slots, parts),
        Patch("save", files.save, instant),
        Patch("save weights", files.save, instant),
        Patch("save model", files.save_model, instant),
        Patch("save model, too", files.save_model, instant),
    ]


def _runs() -> list[Patch]:
    noted = "hooks ask which run is theirs; two threads may not train at once"
    lost = "outside of replicas a gradient would not be exchanged"
    chief = "the chief prints for all"
    scope = "a model made outside of the scope would train alone"
    return [
        Patch("build", first_builds.build_by_first_batches, "data are read once only"),
        Patch("fit", fits.fit, noted),
        Patch("evaluate", fits.evaluate, noted),
        Patch("predict", fits.predict, noted),
        Patch("apply", outside.apply, lost),
        Patch("apply scaled", outside.apply, lost),
        Patch("print", reports.print_on_chief, chief),
        Patch("fit", reports.fit, "what `fit` exchanges is reported"),
        Patch("steps", reports.steps, "the first step is timed"),
        Patch("batch end", reports.end_batch, "batches are counted"),
        Patch(
            "build", watched.check_and_build, "refuses a model before its first step"
        ),
        Patch("fit", watched.refuse_outsider, scope),
        Patch("train function", watched.refuse_outsider, scope),
        Patch("compile", watched.tell_what_is_lost, "residuals of an optimizer go"),
        Patch("train function", watched.expect_fit, "variables are compared"),
        Patch("steps", watched.compare_before_steps, "variables are compared"),
    ]


def _steps() -> list[Patch]:
    undivided = "a loss is what one process computes, not a part of a sum"
    clips = "one process clips the gradient of all rows"
    kept = "a step keeps numbers of the rows of all"
    writes = ("write", "write sum", "write difference")
    return [
        Patch("apply", step_hooks.apply_own_gradients, "a worker may have no rows"),
        Patch("clip", _host.applying.leave_to_the_exchange, clips),
        Patch("clip", step_hooks.leave_to_the_exchange, clips),
        Patch("logs", step_hooks.agree_on_logs, "callbacks decide alike"),
        Patch("evaluate", step_hooks.note_evaluation, "its logs are of the whole"),
        Patch("loss division", step_hooks.leave_undivided, undivided),
        Patch("loss scale", step_hooks.keep_undivided, undivided),
        Patch("gradient", step_hooks.weigh_losses, "gradients become one"),
        Patch("moments", step_hooks.note_moments, "they are each worker's on purpose"),
        Patch("mean", step_hooks.weigh_scalar, "means over steps go by rows"),
        Patch("sum", step_hooks.share_scalar, "a number of a step is added once"),
        Patch("clip by global norm", step_hooks.clip_those_of_all, clips),
        Patch("clip by norm", step_hooks.clip_that_of_all, clips),
        Patch("clip by value", step_hooks.clip_that_of_all, clips),
        Patch("global norm", step_hooks.clip_those_of_all, clips),
        Patch("condition", step_hooks.decide_together, "all workers decide alike"),
        Patch("truth", step_hooks.decide_at_once, "all workers decide alike"),
        *(Patch(name, step_hooks.write_those_of_all, kept) for name in writes),
        Patch("loss call", step_hooks.call_loss, "logits of a split layer stay away"),
        Patch("assign", adopted.assign, "a metric counts the rows of all workers"),
    ]


def _data() -> list[Patch]:
    alike = "all workers hand over the same data, or predict each its own"
    ended = "training ends on all workers after the same batch"
    voted = "a run ends on all workers after the same batch"
    drawn = "one process draws for the rows of all"
    seeds = "replicas draw noise of their own"
    order = "all workers read in one order"
    whole_data = "an epoch goes through all data of a worker's own"
    of_epochs = "epochs", "next epoch"
    parallel = ("interleave", "map", "batch", "parallel interleave")
    pydataset = randomness.OrderOfPyDatasets
    return [
        Patch("fit", handed_over.fit, alike),
        Patch("predict", handed_over.predict, alike),
        Patch("evaluate", handed_over.evaluate, alike),
        Patch("predict on batch", own_batches.predict_on_batch, alike),
        Patch("train on batch", handed_over.train_on_batch, alike),
        Patch("fit", stopping.fit, ended),
        Patch("steps", stopping.steps, ended),
        Patch("logs", stopping.end_of_data, ended),
        Patch("batch end", stopping.end_batch, ended),
        Patch("epoch end", stopping.end_epoch, ended),
        Patch("test begin", early_ends.begin, voted),
        Patch("test batch end", early_ends.end_batch, voted),
        Patch("predict begin", early_ends.begin, voted),
        Patch("predict batch end", early_ends.end_batch, voted),
        Patch("seeds", randomness.seed_by_rank, seeds),
        Patch("generator", randomness.next_by_rank, seeds),
        *(Patch(n, drawn_rows.draw, drawn) for n in _host.patches.DRAWING),
        Patch("initialize", drawn_rows.build, "weights have no rows of a batch"),
        Patch("data seeds", randomness.seed_alike, order),
        *(Patch(n, _host.distribute.count_steps, whole_data) for n in of_epochs),
        Patch("arrays", randomness.arrays_alike, order),
        *(Patch(name, randomness.in_order, order) for name in parallel),
        Patch("order of PyDatasets", pydataset, order, whole=True),
    ]


def _servers() -> list[Patch]:
    table = "a large table is on the servers only"
    whole = "what is trained is on the servers"
    return [
        Patch("initialize", embeddings.initialize, table),
        Patch("build embedding", embeddings.build, table),
        Patch("look up", embeddings.look_up, table),
        Patch("save embedding", embeddings.save_embedding, table),
        Patch("load embedding", embeddings.load_embedding, table),
        Patch("save optimizer", embeddings.save_optimizer, table),
        Patch("load optimizer", embeddings.load_optimizer, table),
        Patch("memory", embeddings.is_memory_sufficient, table),
        Patch("apply", served_fits.apply, whole),
        Patch("fit", served_fits.fit, whole),
        Patch("evaluate", served_fits.evaluate, whole),
        Patch("next epoch", served_fits.note_data, "a `fit` may be passed over"),
        Patch("predict", served_fits.evaluate, whole),
        Patch("steps", positions.steps_from_position, "a backup is within an epoch"),
    ]


PATCHES: tuple[Patch, ...] = (
    *_scopes(),
    *_files(),
    *_runs(),
    *_steps(),
    *_data(),
    *_servers(),
)


def install() -> None:
    """Replace all that is in the list, once for this process."""
    for place, hook, _, whole in PATCHES:
        (_host.patches.replace if whole else _host.patches.wrap)(place, hook)


def fetch_whole_files() -> None:
    """Replace what downloads, before there is a strategy."""
    _host.patches.wrap("download", shared_paths.retrieve)


def remove() -> None:
    """Put back what was there: Keras is plain again.

    Strategies of before must not train any more. The next one installs the list again.
    """
    for place, hook, *_ in reversed(PATCHES):
        _host.patches.unwrap(place, hook)


def replaced() -> dict[tuple[Any, str], list[Patch]]:
    """Return the rows of the list by object and attribute."""
    rows: dict[tuple[Any, str], list[Patch]] = {}
    for patch in PATCHES:
        rows.setdefault(_host.patches.target(patch.place), []).append(patch)
    return rows
