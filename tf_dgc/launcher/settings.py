"""Settings of a strategy on the command line, checked before any worker starts."""

import dataclasses
import json
import pathlib
import secrets
from collections.abc import Mapping
from typing import Any

from tf_dgc.config import AutoConfig, AveragingConfig, DGCConfig, DownpourConfig

NO_STRATEGY = "-"  # in the place of settings: the script makes its strategy itself
STRATEGIES = ("auto", "dense", "dgc", "averaging", "downpour")
_Record = AutoConfig | DGCConfig | AveragingConfig | DownpourConfig


@dataclasses.dataclass(frozen=True)
class Settings:
    """A strategy by its name.

    Attributes:
        strategy: one of STRATEGIES.
        config: what its settings' `from_config` takes.
        seed: of `random` and `numpy.random` on all workers, where the script sets none.
    """

    strategy: str
    config: Mapping[str, Any]
    seed: int = dataclasses.field(default_factory=lambda: secrets.randbits(32))

    def __post_init__(self) -> None:
        """Check them.

        Raises:
            ValueError: there is no such strategy, or a setting is out of its range.
            TypeError: a setting is of the wrong type.
        """
        self.record()

    def record(self) -> _Record | None:
        """Return the record of settings; None for a strategy that has none."""
        if self.strategy == "auto":
            return AutoConfig.from_config(self.config)
        if self.strategy == "dgc":
            return DGCConfig.from_config(self.config)
        if self.strategy == "averaging":
            return AveragingConfig.from_config(self.config)
        if self.strategy == "downpour":
            return DownpourConfig.from_config(self.config)
        if self.strategy not in STRATEGIES:
            raise ValueError(
                f"`--strategy` must be one of {STRATEGIES}. "
                f"Received: --strategy {self.strategy}"
            )
        if self.config:
            raise ValueError(
                "`--strategy dense` has no settings. Received: "
                f"{', '.join(sorted(self.config))}"
            )
        return None

    def text(self) -> str:
        """Return all of it in one word of a command line."""
        return json.dumps(dataclasses.asdict(self))


def of_text(text: str) -> Settings:
    """Invert `Settings.text`."""
    return Settings(**json.loads(text))


def read(strategy: str, sparsity: float | None, path: str | None) -> Settings:
    """Return the settings that the command line gives.

    Args:
        strategy: one of STRATEGIES.
        sparsity: of `DGCConfig`, of `compression` where parameters are averaged, or of
            `dgc` of a strategy that chooses itself; counts more than the file.
        path: of a JSON file with an object: what the settings' `get_config` returns, or
            a part of it.

    Raises:
        ValueError, TypeError: see `Settings`; no file holds a JSON object.
    """
    config: dict[str, Any] = {}
    if path is not None:
        try:
            config = json.loads(pathlib.Path(path).read_text())
        except (OSError, ValueError) as error:
            raise ValueError(
                f"`--config` must be a JSON file: {path}: {error}"
            ) from error
        if not isinstance(config, dict):
            raise ValueError(
                "`--config` must hold a JSON object of settings. "
                f"Received: {config!r} in {path}"
            )
    within = {"averaging": "compression", "auto": "dgc"}.get(strategy)
    if sparsity is not None and within is not None:
        config[within] = {**(config.get(within) or {}), "sparsity": sparsity}
    elif sparsity is not None:
        config["sparsity"] = sparsity
    return Settings(strategy, config)
