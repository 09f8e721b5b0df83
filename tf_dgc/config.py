"""Settings: frozen records, validated once, before any tensor exists."""

import dataclasses
import math
import numbers
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Self

FLOATING = ("float32", "float16", "bfloat16")
VALUE_DTYPES = (*FLOATING, "sign", "log4")
NONFINITE = ("raise", "skip")
EXCHANGES = ("auto", "allgather", "owners")
HIERARCHICAL = (False, True, "auto")
# Where no sparsity is given: about as many bytes as of 0.999 in float32.
CHOSEN_SPARSITY = {"sign": 0.996, "log4": 0.997}
PAPER: dict[str, Any] = {
    "sparsity": 0.999,
    "value_dtype": "float32",
    "momentum_masking": True,
}
ALLOWED = ("dense", "dgc", "averaging")
ADAPTIVE, AUTO, DENSE = "adaptive", "auto", "dense"
COMBINATIONS = ("auto", "mean", "senders")
_NOT_HIERARCHICAL = "of hierarchical=False: each worker has steps of its own"
VISITS = 10.0  # of an element in a training that loses nothing
ROUND_SPARSITY = 0.95  # of signs, where none is given for rounds of averaging


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Settings:
    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Build the settings from what `get_config` returned.

        Raises:
            ValueError: `config` has a key that is not a setting.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(config) - known)
        if unknown:
            raise ValueError(
                f"`config` must only have the settings of {cls.__name__}: "
                f"{sorted(known)}. Received: unknown keys {unknown}"
            )
        return cls(**config)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DGCConfig(_Settings):
    """Settings of Deep Gradient Compression.

    Without a `sparsity` the values that are sent, how many, and masking are what
    docs/evidence/accuracy.md found best; with one they are as in the paper.
    `DGCConfig.paper()` is the paper's own setting.

    Attributes:
        sparsity: fraction of the elements that is NOT sent, in [0, 1). 0.999 sends
            one element in a thousand; higher compresses harder. By default 0.996, of
            signs: as many bytes as of 0.999 in float32. None where there is a budget.
        warmup_steps: number of optimizer steps over which the sparsity climbs
            through `warmup_stages`, 0 or more. The paper warms up for 4 of 90
            epochs (ImageNet) to 4 of 164 (CIFAR-10).
        warmup_stages: sparsities of the warm-up, ascending, each held for an equal
            share of `warmup_steps`. Stages at or above `sparsity` are left out.
        clip_norm: largest global norm of the gradient, or None. Each of N workers
            clips its own, by Keras already divided by N, to `clip_norm * N**-0.5`.
        momentum_correction: accumulate the optimizer's own steps, instead of gradients:
            those of `keras.optimizers.SGD`, with its momentum and learning rate, and of
            others, such as Adam, whose steps depend on gradients alone; their slots are
            then each worker's own.
        momentum_masking: clear the velocity of the elements that were sent; not where
            everything is, at a sparsity of 0 or because it is cheaper. Of SGD. By
            default as in the paper where there is a `sparsity`; else not, with which
            short trainings are better off, see docs/evidence/accuracy.md.
        rate_correction: where the learning rate falls to half of the last step's or
            less, what waits is multiplied by as much, so that it counts at the new
            rate. With `momentum_correction` only; else what waits are gradients.
        min_elements: tensors with fewer elements are reduced densely, and so are
            all tensors of rank 0 and 1.
        sample_fraction: fraction of a tensor that is looked at to estimate its
            threshold, in (0, 1]. 1.0 selects exactly; small tensors always are.
        value_dtype: type of the sent values: "float32", "float16" or "bfloat16"; or,
            with a scale for each tensor, "sign", their sign only, or "log4", sign and
            one of 8 magnitudes. What rounding takes off a value is kept and sent later.
            With "sign" four times as many elements take as many bytes as with
            "float32", with "log4" three times: a sparsity of 0.996 or 0.997. By default
            "float32" where there is a `sparsity`, else "sign".
        exchange: how selections are summed. "allgather": each worker receives those of
            all others, N - 1 messages. "owners": an element of the arena belongs to one
            of the workers, which sums what all send of it and passes the largest sums
            on; what waits there comes later. What a worker receives does not grow with
            N then. "auto": owners on more than 32 workers, where they take 10% less
            time by bytes and latency of a network of 1 Gbit/s and 0.1 ms; else
            "allgather".
        growth: with owners, how many times as many elements as one worker selects are
            passed on; positive, more than N counts as N, all. 1 is the least traffic;
            less loses accuracy in short trainings.
        hierarchical: whether workers that share a host sum their gradients densely
            there, so that one message of each host is exchanged; what waits and its
            momentum are then the host's. "auto": where several share one of several
            hosts, and that is measured to take 10% less time. False: each worker sends
            its own.
        nonfinite: what to do when some worker's gradient holds a NaN or an
            infinity: "raise" stops all workers, "skip" leaves the step out on all.
        bytes_per_step: a budget in place of `sparsity`: the most bytes that a worker
            sends in a step, or on average where there are `total_steps`, tensors that
            go densely included; as `stats()` counts them, of all optimizers of a model
            together, each by the bytes that it trains.
        ratio: the same as a fraction of dense training: 277 sends 1/277 of its bytes.
        total_steps: with a budget, steps of the whole training: half of its bytes are
            spent in a warm-up then. None has no warm-up.

    Raises:
        ValueError: a value is out of its range, or two contradict each other.
        TypeError: a value is of the wrong type.

    References:
        Lin, Han, Mao, Wang, Dally: Deep Gradient Compression, ICLR 2018,
        https://arxiv.org/abs/1712.01887
    """

    sparsity: Any = None  # a float, but for budgets
    warmup_steps: int = 0
    warmup_stages: tuple[float, ...] = (0.75, 0.9375, 0.984375, 0.996)
    clip_norm: float | None = None
    momentum_correction: bool = True
    momentum_masking: Any = None  # a bool, in the end
    rate_correction: bool = True
    min_elements: int = 1024
    sample_fraction: float = 0.01
    value_dtype: Any = None  # a str, in the end
    exchange: str = "auto"
    growth: float = 4.0
    hierarchical: bool | str = False
    nonfinite: str = "raise"
    bytes_per_step: int | None = None
    ratio: float | None = None
    total_steps: int | None = None
    not_given: ClassVar[frozenset[str]]  # what of PAPER was chosen here

    @classmethod
    def paper(cls, warmup_steps: int = 0, **others: Any) -> Self:
        """Return the paper's own setting: 0.1% of the elements, whole, with masking.

        Args:
            warmup_steps: see above.
            others: what is to be different.

        References:
            Lin, Han, Mao, Wang, Dally, as above, sections 3 and 4.
        """
        return cls(**(PAPER | {"warmup_steps": warmup_steps} | others))

    def __post_init__(self) -> None:
        self._choose()
        if self.sparsity is not None:
            self._set("sparsity", _fraction("sparsity", self.sparsity))
        for name in ("warmup_steps", "min_elements"):
            self._set(name, _count(name, getattr(self, name)))
        _check_stages(self)
        if self.clip_norm is not None:
            rule = "None or positive"
            _settle_number(self, "clip_norm", rule, lambda n: 0 < n < math.inf)
        _check_flags(self, "momentum_correction", "momentum_masking", "rate_correction")
        _settle_number(self, "sample_fraction", "in (0, 1]", lambda n: 0 < n <= 1)
        _settle_number(self, "growth", "positive", lambda n: n > 0)
        _check_names(self)

    def _choose(self) -> None:
        """Settle what was not given, and what is instead of a sparsity."""
        chosen = self.sparsity is None
        missing = [name for name in PAPER if getattr(self, name) is None]
        self._set("not_given", frozenset(missing))
        if self.value_dtype is None:
            self._set("value_dtype", "sign" if chosen else PAPER["value_dtype"])
        if self.momentum_masking is None:
            self._set("momentum_masking", not chosen)
        _check_budget(self)
        if self.sparsity is None and not self.has_budget:
            kind, usual = self.value_dtype, PAPER["sparsity"]
            found = CHOSEN_SPARSITY.get(kind, usual) if isinstance(kind, str) else usual
            self._set("sparsity", found)

    @property
    def has_budget(self) -> bool:
        """Tell whether the sparsity is still to be found, by the tensors there are."""
        return self.bytes_per_step is not None or self.ratio is not None

    def without_budget(self, sparsity: float, warmup_steps: int = 0) -> Self:
        """Return these settings with a sparsity that keeps to their budget."""
        changes: dict[str, Any] = {"sparsity": sparsity, "warmup_steps": warmup_steps}
        changes |= dict.fromkeys(("bytes_per_step", "ratio", "total_steps"))
        return dataclasses.replace(self, **changes)

    def get_config(self) -> dict[str, Any]:
        """Return the settings as plain values, fit for JSON."""
        config = dataclasses.asdict(self)
        return config | {"warmup_stages": list(self.warmup_stages)}


def _check_stages(config: DGCConfig) -> None:
    """Refuse what is no warm-up."""
    name = "warmup_stages"
    try:
        stages = tuple(config.warmup_stages)
    except TypeError:
        rule = "a sequence of numbers"
        raise TypeError(_message(name, rule, config)) from None
    config._set(name, tuple(_fraction(name, stage) for stage in stages))
    if list(config.warmup_stages) != sorted(set(config.warmup_stages)):
        raise ValueError(_message(name, "strictly ascending", config))
    if config.warmup_steps and not config.warmup_stages:
        rule = "non-empty where `warmup_steps` > 0"
        raise ValueError(_message(name, rule, config))


def _check_budget(config: DGCConfig) -> None:
    """Refuse a budget beside what it decides, and what goes with a budget only."""
    if config.bytes_per_step is not None:
        count = _count("bytes_per_step", config.bytes_per_step, 1)
        config._set("bytes_per_step", count)
    if config.ratio is not None:
        _settle_number(config, "ratio", "1 or more", lambda n: 1 <= n < math.inf)
    if config.total_steps is not None:
        config._set("total_steps", _count("total_steps", config.total_steps, 1))
        if not config.has_budget:
            rule = "None without `bytes_per_step` or `ratio`"
            raise ValueError(_message("total_steps", rule, config))
    if not config.has_budget:
        return
    if config.ratio is not None and config.bytes_per_step is not None:
        raise ValueError(_message("ratio", "None with `bytes_per_step`", config))
    if config.sparsity is not None:
        rule = "None with a budget, `bytes_per_step` or `ratio`"
        raise ValueError(_message("sparsity", rule, config))
    if config.warmup_steps:
        rule = "0 with a budget, which `total_steps` shares out"
        raise ValueError(_message("warmup_steps", rule, config))


def _check_names(config: DGCConfig) -> None:
    """Raise ValueError where a setting is none of the names that it may be."""
    for name, allowed in (
        ("value_dtype", VALUE_DTYPES),
        ("nonfinite", NONFINITE),
        ("exchange", EXCHANGES),
    ):
        value = getattr(config, name)
        if not isinstance(value, str) or value not in allowed:
            raise ValueError(_message(name, f"one of {allowed}", config))
    if not isinstance(config.hierarchical, bool) and config.hierarchical != "auto":
        raise ValueError(_message("hierarchical", f"one of {HIERARCHICAL}", config))


@dataclasses.dataclass(frozen=True, kw_only=True)
class AveragingConfig(_Settings):
    """Settings of parameter averaging.

    Attributes:
        period: local steps between two rounds, 1 or more, or "adaptive": it begins with
            `max_period` and shortens with the root of the loss that a step returns (of
            Keras, the mean since the epoch began), down to `min_period`.
        min_period: least period where it adapts.
        max_period: first and largest period where it adapts.
        synchronous_steps: number of first steps in which gradients are exchanged as by
            `DenseStrategy`, 0 or more: post-local SGD.
        outer_optimizer: a Keras optimizer that takes the averaged change of the
            parameters for a gradient, as in DiLoCo; SGD of learning rate 0.7, Nesterov
            momentum 0.9 there. None takes the average itself. Its settings count: one
            of its own is made for each optimizer of the user. Or a function that makes
            it, which TensorFlow's collectives need: an optimizer that is made before
            the strategy starts TensorFlow too early for them.
        compression: a DGCConfig, to send only the largest changes of the parameters;
            what is not sent comes with a later round. Its steps are rounds, its
            gradients changes, its `nonfinite` "raise", its budget for a round. Without
            a sparsity or a budget 5% of the elements go, as signs. None sends
            everything.
        combine: what compressed changes of an element become: "mean", the mean over all
            workers; "senders", the mean over those that sent this element in this
            round, or four times that over all, if that is less; or "auto". That is
            "senders" for optimizers that normalize their steps, as Adam, Lion and
            RMSprop do, whose mean is too short a step, and "mean" for SGD, and where
            there is an outer optimizer, or `exchange="owners"`, which makes sums.
        error_decay: what of a change that was not sent is left after each round, in
            (0, 1]; by default 0.95 with "senders", and 1, all of it, with "mean".
        average_slots: average also what the optimizer keeps, such as momentum, which
            multiplies the traffic; by default that is each worker's own.
        non_trainable: which variables of layers that are not trained by gradients, such
            as moving statistics, are averaged: patterns of their whole paths, such as
            "*/moving_mean". Floating point only, no part of an optimizer or metric.
        overlap: local steps for which a round is in flight, at most a period: it is
            sent while the next period trains, and what was done since is kept where it
            lands. "auto" is a whole period for optimizers that normalize their steps,
            and a quarter for others, such as SGD. None, or 0, has training wait.
            Statistics are averaged where workers meet then, as at ends of epochs.
        within: what workers of one site exchange in each step: "dense", their whole
            gradients; or a DGCConfig, its `nonfinite` "raise", its `exchange`
            "allgather". They take each step together, and rounds are between sites,
            whose changes count by the rows they are of. Each host is a site, or what
            TF_DGC_SITES or Slurm's topology tell. None: each worker steps by itself.

    Raises:
        ValueError: a value is out of its range.
        TypeError: a value is of the wrong type.

    References:
        See `tf_dgc.averaging`. `combine` and `error_decay`: SparseLoCo, Sarfi et al.,
        arXiv:2508.15706.
    """

    period: int | str = 16
    min_period: int = 4
    max_period: int = 64
    synchronous_steps: int = 0
    outer_optimizer: Any = None
    compression: DGCConfig | None = None
    combine: str = "auto"
    error_decay: float | None = None
    average_slots: bool = False
    non_trainable: tuple[str, ...] = ("*",)
    overlap: int | str | None = None
    within: str | DGCConfig | None = None

    @classmethod
    def auto(
        cls, optimizer: str = "adam", *, total_steps: int | None = None, **others: Any
    ) -> Self:
        """Return settings that were measured to lose least, for slow networks.

        5% of the changes go, as signs, in rounds in flight; more where there are so few
        rounds that elements would go less than ten times, and all where that is half of
        them or more. There is an outer optimizer where all go, and for SGD.

        Args:
            optimizer: the script's, by its name in Keras.
            total_steps: of the whole training, if known.
            others: what is to be different; see above.
        """
        period = cls(**others).least_period
        rounds = math.inf if total_steps is None else max(total_steps // period, 1)
        density = max(1 - ROUND_SPARSITY, VISITS / rounds)
        chosen: dict[str, Any] = {"overlap": AUTO}
        if density < 0.5:
            compression = DGCConfig(sparsity=1 - density, value_dtype="sign")
            chosen["compression"] = compression
        if density >= 0.5 or optimizer.lower() == "sgd":
            settings = {"learning_rate": 1.0, "momentum": 0.5, "nesterov": True}
            chosen["outer_optimizer"] = {"class_name": "SGD", "config": settings}
        return cls(**(chosen | others))

    def __post_init__(self) -> None:
        if self.period != ADAPTIVE:
            if isinstance(self.period, str):
                rule = f"an integer of at least 1, or {ADAPTIVE!r}"
                raise ValueError(_message("period", rule, self))
            self._set("period", _count("period", self.period, 1))
        for name in ("min_period", "max_period"):
            self._set(name, _count(name, getattr(self, name), 1))
        if self.min_period > self.max_period:
            rule = f"at most max_period={self.max_period}"
            raise ValueError(_message("min_period", rule, self))
        name = "synchronous_steps"
        self._set(name, _count(name, self.synchronous_steps))
        _check_outer(self)
        _settle_nested(self, "compression", DGCConfig)
        if self.compression and self.compression.nonfinite != "raise":
            rule = "of nonfinite='raise', as rounds always do"
            raise ValueError(_message("compression", rule, self))
        if self.compression and self.compression.hierarchical:
            raise ValueError(_message("compression", _NOT_HIERARCHICAL, self))
        _check_combine(self)
        if self.compression:
            _settle_compression(self, _of_rounds(self.compression))
        _check_flags(self, "average_slots")
        patterns: Any = self.non_trainable
        if isinstance(patterns, str) or not isinstance(patterns, Iterable):
            raise TypeError(_message("non_trainable", "a sequence of patterns", self))
        patterns = tuple(patterns)
        if not all(isinstance(pattern, str) for pattern in patterns):
            raise TypeError(_message("non_trainable", "a sequence of patterns", self))
        self._set("non_trainable", patterns)
        _check_overlap(self)
        self._set("within", _within_of(self))

    @property
    def least_period(self) -> int:
        """Local steps between two rounds, at least."""
        return self.min_period if isinstance(self.period, str) else self.period

    def get_config(self) -> dict[str, Any]:
        """Return the settings as plain values, fit for JSON.

        `from_config` makes a built-in outer optimizer of them; one of a class of your
        own must be registered with Keras.
        """
        fields = dataclasses.fields(self)
        config = {field.name: getattr(self, field.name) for field in fields}
        compression, within = self.compression, self.within
        return config | {
            "outer_optimizer": _plain_outer(self.outer_optimizer),
            "compression": compression and compression.get_config(),
            "non_trainable": list(self.non_trainable),
            "within": within.get_config() if isinstance(within, DGCConfig) else within,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class DownpourConfig(_Settings):
    """Settings of asynchronous SGD with parameter servers.

    Attributes:
        fetch_period: steps of a worker from one fetch of the parameters to the next, 1
            or more. In between SGD takes the worker's own steps, as in the paper; other
            optimizers leave its copy as it was fetched.
        push_period: steps whose gradients a worker adds up before it pushes their sum
            to the servers, 1 or more.
        max_staleness: steps that a worker may be ahead of the slowest living one, 0 or
            more; 0 is lockstep. None sets no bound.
        staleness_rate: whether a push is applied at the learning rate divided by its
            staleness, the number of pushes since its worker's fetch, where that is
            more than 1.
        liveness: seconds after which a worker that is not heard of holds nobody back,
            and another may take its place; positive.
        table_bytes: size from which on the table of a `keras.layers.Embedding` lives on
            the servers only, 1 or more; None has a copy of each on each worker.
        synchronous: whether a step is one of all workers, by the gradient of the loss
            of all their rows: the synchronous parameter server.
        backup_workers: of how many workers such a step does not wait, 0 or more; what
            they compute for it is dropped.
        compression: a DGCConfig, to push only the largest elements of what has been
            accumulated, and to fetch only what has changed. For `keras.optimizers.SGD`.
            Its steps are this worker's pushes, `clip_norm` is the norm allowed to its
            own gradient, `nonfinite` is "raise", `value_dtype` a floating-point type;
            what is not given is as in the paper, and there is no budget. None pushes
            and fetches everything. With `local_steps`, for any optimizer, it is of
            changes, as in AveragingConfig, without a warm-up, a budget, or `clip_norm`.
        combine: with `local_steps` and `compression`, what changes of an element
            become; see AveragingConfig.
        error_decay: with these, what is left of a change that was not sent; see
            AveragingConfig.
        local_steps: steps that a worker takes with its own optimizer, on its own copy,
            between two rounds, 1 or more: parameter averaging on servers, for any
            optimizer. In a round the change of its copy goes to the servers. None has
            the optimizer itself on the servers.
        outer_optimizer: with `local_steps`, a Keras optimizer, or a function that makes
            one, that takes the mean of the changes, each weighted by its number of
            steps, for a gradient, as in DiLoCo. None takes the average itself.
        quorum: with `local_steps`, how many workers make a round; at most those that
            train. A change that comes later counts in the next round. None waits for
            all that train.
        grace: with `local_steps`, seconds after the first change of a round when it is
            held without those that have not come. None waits for the quorum, or until
            `liveness` has passed for those that are not heard of.

    Raises:
        ValueError: a value is out of its range.
        TypeError: a value is of the wrong type.

    References:
        Dean et al.: Large Scale Distributed Deep Networks, NIPS 2012 (Downpour SGD,
        `n_fetch` and `n_push`). Ho et al.: More Effective Distributed ML via a Stale
        Synchronous Parallel Parameter Server, NIPS 2013. Zhang et al.: Staleness-aware
        Async-SGD for Distributed Deep Learning, IJCAI 2016. Chen et al.: Revisiting
        Distributed Synchronous SGD, 2016 (backup workers).
    """

    fetch_period: int = 1
    push_period: int = 1
    max_staleness: int | None = None
    staleness_rate: bool = True
    liveness: float = 30.0
    table_bytes: int | None = None
    compression: DGCConfig | None = None
    synchronous: bool = False
    backup_workers: int = 0
    local_steps: int | None = None
    outer_optimizer: Any = None
    quorum: int | None = None
    grace: float | None = None
    combine: str = "auto"
    error_decay: float | None = None

    def __post_init__(self) -> None:
        for name in ("fetch_period", "push_period"):
            self._set(name, _count(name, getattr(self, name), 1))
        self._set("backup_workers", _count("backup_workers", self.backup_workers))
        if self.max_staleness is not None:
            self._set("max_staleness", _count("max_staleness", self.max_staleness))
        if self.table_bytes is not None:
            self._set("table_bytes", _count("table_bytes", self.table_bytes, 1))
        _check_flags(self, "staleness_rate", "synchronous")
        rule = "a positive number of seconds"
        _settle_number(self, "liveness", rule, lambda n: 0 < n < math.inf)
        _settle_nested(self, "compression", DGCConfig)
        compression: Any = self.compression
        if compression and compression.has_budget:
            rule = "without a budget: `bytes_per_step` and `ratio` None"
            raise ValueError(_message("compression", rule, self))
        if compression and self.local_steps is not None:
            compression = _of_rounds(compression)
            self._set("compression", compression)
        elif compression and "sparsity" in compression.not_given:
            usual = {name: PAPER[name] for name in compression.not_given}
            compression = dataclasses.replace(compression, **usual)
            self._set("compression", compression)
        if compression and compression.nonfinite != "raise":
            rule = "of nonfinite='raise', as no other worker waits for a step"
            raise ValueError(_message("compression", rule, self))
        if compression and compression.exchange == "owners":
            rule = "of an exchange other than 'owners', as servers sum what is pushed"
            raise ValueError(_message("compression", rule, self))
        if compression and compression.hierarchical:
            raise ValueError(_message("compression", _NOT_HIERARCHICAL, self))
        in_steps = compression and self.local_steps is None
        if in_steps and compression.value_dtype not in FLOATING:
            rule = f"of a value_dtype among {FLOATING}"
            raise ValueError(_message("compression", rule, self))
        _check_synchronous(self)
        _check_rounds(self)

    @property
    def on_servers(self) -> "DownpourConfig":
        """The settings of the optimizer that is on the servers: the outer one."""
        if self.local_steps is None:
            return self
        return DownpourConfig(liveness=self.liveness, synchronous=True)

    def get_config(self) -> dict[str, Any]:
        """Return the settings as plain values, fit for JSON."""
        compression = self.compression and self.compression.get_config()
        fields = dataclasses.fields(self)
        config = {field.name: getattr(self, field.name) for field in fields}
        outer = _plain_outer(self.outer_optimizer)
        return config | {"outer_optimizer": outer, "compression": compression}


@dataclasses.dataclass(frozen=True, kw_only=True)
class AutoConfig(_Settings):
    """Settings of a strategy that chooses itself.

    Attributes:
        allow: what it may choose: "dense", "dgc" and "averaging", any of them. It looks
            at them in this order: where two differ by less than 5%, it takes the first.
        dgc: a DGCConfig; None for a budget of 1/50 of the bytes where the number of
            steps is known, and for `DGCConfig()` elsewhere, with `hierarchical="auto"`.
            A budget without `total_steps` gets those of the first `fit`. An `exchange`
            of "auto" becomes what is predicted to be faster, a `hierarchical` of "auto"
            what is measured to be.
        averaging: an AveragingConfig; None for `AveragingConfig()`.

    Raises:
        ValueError: a value is out of its range.
        TypeError: a value is of the wrong type.
    """

    allow: tuple[str, ...] = ("dense", "dgc")
    dgc: DGCConfig | None = None
    averaging: AveragingConfig | None = None

    def __post_init__(self) -> None:
        allow: Any = self.allow
        if isinstance(allow, str) or not isinstance(allow, Iterable):
            raise TypeError(_message("allow", "a sequence of names", self))
        names = list(allow)
        if not names or any(name not in ALLOWED for name in names):
            raise ValueError(_message("allow", f"one or more of {ALLOWED}", self))
        self._set("allow", tuple(name for name in ALLOWED if name in names))
        for name, kind in (("dgc", DGCConfig), ("averaging", AveragingConfig)):
            _settle_nested(self, name, kind)
        if self.dgc and self.dgc.nonfinite != "raise":
            rule = "of nonfinite='raise', as what is chosen comes after the optimizer"
            raise ValueError(_message("dgc", rule, self))
        if self.averaging and self.averaging.within is not None:
            rule = "of within=None: two levels are not chosen by themselves"
            raise ValueError(_message("averaging", rule, self))

    def get_config(self) -> dict[str, Any]:
        """Return the settings as plain values, fit for JSON."""
        return {
            "allow": list(self.allow),
            "dgc": self.dgc and self.dgc.get_config(),
            "averaging": self.averaging and self.averaging.get_config(),
        }


def _check_overlap(config: AveragingConfig) -> None:
    """Refuse flights that are longer than a period, or what does not fly."""
    if config.overlap in (None, 0):
        config._set("overlap", None)
        return
    if config.overlap != AUTO:
        if isinstance(config.overlap, str):
            rule = f"None, a number of steps, or {AUTO!r}"
            raise ValueError(_message("overlap", rule, config))
        config._set("overlap", _count("overlap", config.overlap))
        if config.overlap > config.least_period:
            rule = f"at most a period, {config.least_period}"
            raise ValueError(_message("overlap", rule, config))
    if config.average_slots:
        rule = "False with `overlap`: what optimizers keep is not in flight"
        raise ValueError(_message("average_slots", rule, config))


def _settle_compression(config: AveragingConfig, compression: DGCConfig) -> None:
    """Choose what goes together: owners know sums, and not who sent what."""
    if compression.exchange == "owners":
        if config.combine == "senders":
            rule = "'mean' or 'auto' with exchange='owners', where sums are made"
            raise ValueError(_message("combine", rule, config))
        config._set("combine", "mean")
    elif config.combine != "mean":
        compression = dataclasses.replace(compression, exchange="allgather")
    config._set("compression", compression)


def _within_of(config: AveragingConfig) -> str | DGCConfig | None:
    """Return what a site exchanges in each step, by messages that all receive."""
    within: Any = config.within
    if isinstance(within, Mapping):
        within = DGCConfig.from_config(within)
    if within is None or within == DENSE:
        return DENSE if within else None
    if not isinstance(within, DGCConfig):
        kind = ValueError if isinstance(within, str) else TypeError
        raise kind(_message("within", f"None, {DENSE!r}, or a DGCConfig", config))
    if within.exchange == "owners":
        rule = "of an exchange other than 'owners'"
    elif within.nonfinite != "raise":
        rule = "of nonfinite='raise', as sites count steps alike"
    elif within.hierarchical:
        rule = "of hierarchical=False, as what is on one host is one site"
    elif config.synchronous_steps:
        rule = f"{DENSE!r} or None with synchronous_steps; DGC has a warm-up"
    else:
        return dataclasses.replace(within, exchange="allgather")
    raise ValueError(_message("within", rule, config))


def _check_rounds(config: DownpourConfig) -> None:
    """Refuse settings of rounds without local steps, and others with them."""
    if config.local_steps is None:
        alone: dict[str, Any] = {"combine": "auto"}
        names = "outer_optimizer", "quorum", "grace", "error_decay"
        alone |= dict.fromkeys(names)
        for name, value in alone.items():
            if getattr(config, name) != value:
                rule = f"{value!r} without `local_steps`"
                raise ValueError(_message(name, rule, config))
        return
    config._set("local_steps", _count("local_steps", config.local_steps, 1))
    _check_outer(config)
    if config.quorum is not None:
        config._set("quorum", _count("quorum", config.quorum, 1))
    if config.grace is not None:
        rule = "a number of seconds"
        _settle_number(config, "grace", rule, lambda n: 0 <= n < math.inf)
    _check_combine(config)
    compression = config.compression
    if compression and (compression.warmup_steps or compression.clip_norm):
        rule = "without `warmup_steps` and `clip_norm`, with `local_steps`"
        raise ValueError(_message("compression", rule, config))
    alone = {"fetch_period": 1, "push_period": 1, "synchronous": False}
    alone |= dict.fromkeys(("max_staleness", "table_bytes"))
    for name, value in alone.items():
        if getattr(config, name) != value:
            raise ValueError(_message(name, f"{value} with `local_steps`", config))


def _check_synchronous(config: DownpourConfig) -> None:
    """Refuse what does not go with steps of all workers, or goes with them only."""
    if not config.synchronous:
        if config.backup_workers:
            rule = "0 without synchronous=True"
            raise ValueError(_message("backup_workers", rule, config))
        return
    alone: dict[str, Any] = {"fetch_period": 1, "push_period": 1}
    alone |= dict.fromkeys(("max_staleness", "table_bytes", "compression"))
    for name, value in alone.items():
        if getattr(config, name) != value:
            rule = f"{value} with synchronous=True"
            raise ValueError(_message(name, rule, config))


def _check_outer(config: Any) -> None:
    """Refuse what is no outer optimizer, and makes none."""
    outer = config.outer_optimizer
    if isinstance(outer, Mapping):
        known = {"class_name", "config"} <= outer.keys()
    else:
        made = all(hasattr(outer, name) for name in ("get_config", "apply"))
        known = outer is None or made or callable(outer)
    if not known:
        rule = "a Keras optimizer, or a function that makes one"
        raise TypeError(_message("outer_optimizer", rule, config))


def _check_combine(config: Any) -> None:
    """Refuse what cannot be done with compressed changes."""
    if config.combine not in COMBINATIONS:
        raise ValueError(_message("combine", f"one of {COMBINATIONS}", config))
    if config.error_decay is not None:
        rule = "None or in (0, 1]"
        _settle_number(config, "error_decay", rule, lambda n: 0 < n <= 1)


def _plain_outer(outer: Any) -> Any:
    """Return an outer optimizer as plain values, fit for JSON."""
    outer = outer() if callable(outer) else outer
    if outer is None or isinstance(outer, Mapping):
        return outer
    settings = dict(outer.get_config())
    settings.pop("name", None)  # Keras counts those it makes in a process
    return {"class_name": type(outer).__name__, "config": settings}


def _of_rounds(compression: DGCConfig) -> DGCConfig:
    """Return the settings of compressed rounds, where no sparsity was given."""
    given = "sparsity" not in compression.not_given or compression.has_budget
    if given or compression.value_dtype != "sign":
        return compression
    return dataclasses.replace(compression, sparsity=ROUND_SPARSITY)


def _settle_nested(config: _Settings, name: str, kind: type[_Settings]) -> None:
    """Let a setting be settings of a kind, or None; they may come as plain values."""
    value: Any = getattr(config, name)
    if isinstance(value, Mapping):
        config._set(name, kind.from_config(value))
    elif not (value is None or isinstance(value, kind)):
        raise TypeError(_message(name, f"a {kind.__name__} or None", config))


def _check_flags(config: _Settings, *names: str) -> None:
    """Refuse what is neither True nor False."""
    for name in names:
        if not isinstance(getattr(config, name), bool):
            raise TypeError(_message(name, "True or False", config))


def _settle_number(
    config: _Settings, name: str, rule: str, keeps: Callable[[float], bool]
) -> None:
    """Let a setting be a number that keeps to a rule."""
    value = _number(name, getattr(config, name))
    config._set(name, value)
    if not keeps(value):
        raise ValueError(_message(name, rule, config))


def _message(name: str, rule: str, config: object) -> str:
    return f"`{name}` must be {rule}. Received: {name}={getattr(config, name)!r}"


def _number(name: str, value: object) -> float:
    """Return a number of any kind, NumPy's included, as Python's."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"`{name}` must be a number. Received: {name}={value!r}")
    return float(value)


def _fraction(name: str, value: object) -> float:
    number = _number(name, value)
    if not 0 <= number < 1:
        raise ValueError(
            f"`{name}` must be in [0, 1): the fraction that is not sent. "
            f"Received: {name}={value!r}"
        )
    return number


def _count(name: str, value: object, least: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"`{name}` must be an integer. Received: {name}={value!r}")
    if value < least:
        raise ValueError(
            f"`{name}` must be {least} or more. Received: {name}={value!r}"
        )
    return int(value)
