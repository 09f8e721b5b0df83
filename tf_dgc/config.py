"""Settings: frozen records, validated once, before any tensor exists."""

import dataclasses
import math
import numbers
from collections.abc import Mapping
from typing import Any, Self

VALUE_DTYPES = ("float32", "float16", "bfloat16")
NONFINITE = ("raise", "skip")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DGCConfig:
    """Settings of Deep Gradient Compression.

    Attributes:
        sparsity: fraction of the elements that is NOT sent, in [0, 1). 0.999 sends
            one element in a thousand; higher compresses harder.
        warmup_steps: number of optimizer steps over which the sparsity climbs
            through `warmup_stages`, 0 or more. The paper warms up for 4 of 90
            epochs (ImageNet) to 4 of 164 (CIFAR-10).
        warmup_stages: sparsities of the warm-up, ascending, each held for an equal
            share of `warmup_steps`. Stages at or above `sparsity` are left out.
        clip_norm: largest global norm of the gradient, or None. Each of N workers
            clips its own, by Keras already divided by N, to `clip_norm * N**-0.5`.
        momentum_correction: accumulate the steps of `keras.optimizers.SGD`, with its
            momentum and learning rate, instead of its gradient. Without effect on
            other optimizers.
        momentum_masking: clear the velocity of the elements that were sent. Short
            trainings are better off without, see docs/parity.md.
        min_elements: tensors with fewer elements are reduced densely, and so are
            all tensors of rank 0 and 1.
        sample_fraction: fraction of a tensor that is looked at to estimate its
            threshold, in (0, 1]. 1.0 selects exactly; small tensors always are.
        value_dtype: type of the sent values, "float32", "float16" or "bfloat16".
            What rounding takes off a value is kept and sent later.
        nonfinite: what to do when some worker's gradient holds a NaN or an
            infinity: "raise" stops all workers, "skip" leaves the step out on all.

    Raises:
        ValueError: a value is out of its range.
        TypeError: a value is of the wrong type.

    References:
        Lin, Han, Mao, Wang, Dally: Deep Gradient Compression, ICLR 2018,
        https://arxiv.org/abs/1712.01887
    """

    sparsity: float = 0.999
    warmup_steps: int = 0
    warmup_stages: tuple[float, ...] = (0.75, 0.9375, 0.984375, 0.996)
    clip_norm: float | None = None
    momentum_correction: bool = True
    momentum_masking: bool = True
    min_elements: int = 1024
    sample_fraction: float = 0.01
    value_dtype: str = "float32"
    nonfinite: str = "raise"

    def __post_init__(self) -> None:
        self._set("sparsity", _fraction("sparsity", self.sparsity))
        for name in ("warmup_steps", "min_elements"):
            self._set(name, _count(name, getattr(self, name)))
        try:
            stages = tuple(self.warmup_stages)
        except TypeError:
            rule = "a sequence of numbers"
            raise TypeError(_message("warmup_stages", rule, self)) from None
        stages = tuple(_fraction("warmup_stages", stage) for stage in stages)
        self._set("warmup_stages", stages)
        if list(self.warmup_stages) != sorted(set(self.warmup_stages)):
            raise ValueError(_message("warmup_stages", "strictly ascending", self))
        if self.warmup_steps and not self.warmup_stages:
            raise ValueError(
                _message("warmup_stages", "non-empty where `warmup_steps` > 0", self)
            )
        if self.clip_norm is not None:
            self._set("clip_norm", _number("clip_norm", self.clip_norm))
            if not (math.isfinite(self.clip_norm) and self.clip_norm > 0):
                raise ValueError(_message("clip_norm", "None or positive", self))
        for name in ("momentum_correction", "momentum_masking"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(_message(name, "True or False", self))
        fraction = _number("sample_fraction", self.sample_fraction)
        self._set("sample_fraction", fraction)
        if not 0 < self.sample_fraction <= 1:
            raise ValueError(_message("sample_fraction", "in (0, 1]", self))
        for name, allowed in (("value_dtype", VALUE_DTYPES), ("nonfinite", NONFINITE)):
            value = getattr(self, name)
            if not isinstance(value, str) or value not in allowed:
                raise ValueError(_message(name, f"one of {allowed}", self))

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def get_config(self) -> dict[str, Any]:
        """Return the settings as plain values, fit for JSON."""
        config = dataclasses.asdict(self)
        return config | {"warmup_stages": list(self.warmup_stages)}

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


def _message(name: str, rule: str, config: DGCConfig) -> str:
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


def _count(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"`{name}` must be an integer. Received: {name}={value!r}")
    if value < 0:
        raise ValueError(f"`{name}` must be 0 or more. Received: {name}={value!r}")
    return int(value)
