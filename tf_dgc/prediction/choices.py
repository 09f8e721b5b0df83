"""The choice of a strategy by the model in `costs`, and how it is saved."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from tf_dgc.compression import budget, warmup
from tf_dgc.config import ALLOWED, AutoConfig, AveragingConfig, DGCConfig
from tf_dgc.exchanges import formats, state_files
from tf_dgc.exchanges.parts import TOLD_BYTES
from tf_dgc.exchanges.records import CHOICE, Record, together
from tf_dgc.prediction import costs
from tf_dgc.prediction.costs import Measured, Network, Tensors
from tf_dgc.transports import handshake
from tf_dgc.transports.base import Transport

RATIO = 50.0  # of the budget where none is given; see docs/evidence/accuracy.md
# What is chosen takes at most so much longer than what is fastest.
_MARGIN = 1.05
_LEAST_STEP = 1e-3  # seconds of a step of Keras, beside which less does not count


class Choice(NamedTuple):
    """A strategy, its settings, and why.

    Attributes:
        strategy: one of `config.ALLOWED`.
        config: settings as plain values; none for dense training.
        reason: with the numbers behind it.
    """

    strategy: str
    config: Mapping[str, Any]
    reason: str

    def record(self) -> list[Record]:
        """Return what is saved of it."""
        return [Record([CHOICE, json.dumps(self._asdict())], 0, {})]


class Situation(NamedTuple):
    """Everything that a choice depends on."""

    tensors: Tensors
    workers: int
    steps: int | None  # of the training, where known
    refused: str = ""  # why DGC is not looked at
    has_owners: bool = True  # whether workers can send each other different tensors


def compression(config: DGCConfig | None, situation: Situation) -> DGCConfig:
    """Return settings of DGC with a sparsity.

    Args:
        config: of the user; None for the default.
        situation: its tensors, workers and steps count.

    Raises:
        ValueError: a budget of the user is less than what is always sent.
    """
    tensors, workers, steps, *_ = situation
    if config is None:
        usual = DGCConfig(hierarchical="auto")
        if steps is None:
            return usual
        wanted = DGCConfig(ratio=RATIO, total_steps=steps, hierarchical="auto")
        try:
            return compression(wanted, situation)
        except ValueError:  # such as for its biases
            return usual
    if config.has_budget and config.total_steps is None:
        config = dataclasses.replace(config, total_steps=steps)
    settings = config

    def sent(sparsity: float) -> int:
        return formats.cost(tensors.layout, sparsity, settings, workers).sent

    rest = tensors.rest_bytes + TOLD_BYTES * workers
    args = tensors.layout, rest, tensors.gradient_bytes
    return budget.settled(config, *args, sent)


def compressed_seconds(
    config: DGCConfig, situation: Situation, measured: Measured, network: Network
) -> tuple[float, str]:
    """Return the mean step of a training with DGC, and the faster exchange.

    Args:
        config: with a sparsity.
        situation: of the training.
        measured: at that sparsity.
        network: between the workers.
    """
    tensors, workers, steps, *_ = situation
    stages = warmup.stages(config)
    ends = [stage.first_step for stage in stages[1:]]
    ends.append(max(steps or 0, stages[-1].first_step + 1))
    total = {"allgather": 0.0, "owners": 0.0}
    for stage, end in zip(stages, ends, strict=True):
        settled = dataclasses.replace(config, sparsity=stage.sparsity, warmup_steps=0)
        larger = (1 - stage.sparsity) / (1 - config.sparsity)
        grown = measured._replace(message=larger * measured.message)
        found = costs.predict(grown, tensors, settled, 1, workers, network)
        share = (end - stage.first_step) / ends[-1] if steps else end == ends[-1]
        total["allgather"] += share * found["DGC"].seconds
        total["owners"] += share * found["owners"].seconds
    if config.exchange != "auto":
        return total[config.exchange], config.exchange
    fastest = min(total, key=lambda name: total[name])
    if not situation.has_owners:
        fastest = "allgather"
    return total[fastest], fastest


def choose(
    wanted: AutoConfig,
    situation: Situation,
    network: Network,
    measure: Callable[[DGCConfig], Measured],
) -> Choice:
    """Choose what is predicted to be fastest; of those about as fast the most exact.

    Args:
        wanted: what may be chosen.
        situation: of the training.
        network: as it was measured.
        measure: returns what compression with settings takes on this machine.
    """
    tensors, workers, *_ = situation
    averaging = wanted.averaging or AveragingConfig()
    dgc, left_out = _compression_or_why(wanted, situation)
    measured = Measured(0.0, 0.0, 0.0, 0.0, 0.0) if dgc is None else measure(dgc)
    period = averaging.period
    args = averaging.max_period if isinstance(period, str) else period, workers
    plain = DGCConfig(sparsity=0.0)
    found = costs.predict(measured, tensors, dgc or plain, *args, network)
    names = [name for name in wanted.allow if name != "dgc"]
    if dgc is None and not names:
        names = ["dense"]
    seconds = {name: found[name].seconds for name in names}
    configs: dict[str, dict[str, Any]] = {"averaging": averaging.get_config()}
    if dgc is not None:
        seconds["dgc"], exchange = compressed_seconds(dgc, situation, measured, network)
        configs["dgc"] = dgc.get_config() | {"exchange": exchange}
    rest = max(0.0, _LEAST_STEP - measured.dense)
    most = _MARGIN * (min(seconds.values()) + rest) - rest
    listed = [name for name in ALLOWED if name in seconds]  # the most exact first
    chosen = next(name for name in listed if seconds[name] <= most)
    predicted = ", ".join(f"{name} {1e3 * seconds[name]:.3g} ms" for name in listed)
    reason = (
        f"predicted for a step beside the forward and backward pass: {predicted}; "
        f"measured between {workers} workers: {network.bandwidth / 1e6:.3g} Mbit/s, "
        f"{1e3 * network.latency:.3g} ms"
    )
    if dgc is not None:
        work = measured.compressed - measured.dense
        reason += f", and {1e3 * work:.3g} ms for compression"
    return Choice(chosen, configs.get(chosen, {}), reason + left_out)


def _compression_or_why(
    wanted: AutoConfig, situation: Situation
) -> tuple[DGCConfig | None, str]:
    """Return settings of DGC, or None and why it is left out."""
    refused, tensors = situation.refused, situation.tensors
    if "dgc" not in wanted.allow:
        return None, ""
    if not tensors.layout.size:
        refused = refused or "no tensor is large enough to compress"
    if not refused:
        config = compression(wanted.dgc, situation)
        args = tensors, config, situation.workers
        by_owners = situation.has_owners and costs.by_owners(*args) is not None
        if by_owners or costs.sends_messages(*args):
            return config, ""
        refused = "messages would cost more than dense tensors"
    return None, f"; dgc is left out: {refused}"


def of_chief(transport: Transport, choice: Choice) -> Choice:
    """Return the choice of worker 0; all workers call this."""
    own = choice._asdict() if transport.rank == 0 else {}
    return _of(handshake.tell(transport, CHOICE, own)[0], f"The {CHOICE}")


def saved(transport: Transport, path: Any) -> Choice | None:
    """Return the choice in a folder of state, or None; all workers call this.

    Raises:
        FileNotFoundError: there is no state.
        ValueError: it is damaged, or workers see different ones.
    """
    folder = state_files.local_folder("path", path)

    def read() -> list[Any]:
        accounts = state_files.read_manifest(folder)["accounts"]
        listed = [account["variables"] for account in accounts]
        return [forms[1:] for forms in listed if forms[:1] == [CHOICE]]

    found = together(transport, "outcome of reading the choice", read)
    handshake.agree(transport, f"{CHOICE} in {folder}", {"choice": found})
    if not found:
        return None
    what = f"{folder}: the {CHOICE}"
    return _of(handshake.read_object("".join(found[0]).encode(), what), what)


def _of(record: Mapping[str, Any], what: str) -> Choice:
    """Return the choice of a record.

    Raises:
        ValueError: it is none.
    """
    strategy, config = record.get("strategy"), record.get("config")
    if strategy not in ALLOWED or not isinstance(config, Mapping):
        raise ValueError(f"{what} is damaged: {ascii(record)[:200]}")
    return Choice(strategy, config, str(record.get("reason")))
