"""The keyword arguments of Horovod's own functions, and what they mean here."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_dgc.config import DGCConfig
from tf_dgc.transports.horovod import import_horovod


class Terms(NamedTuple):
    """Terms by which the workers' gradients become one."""

    total: bool = False  # the sum, and not the mean
    compression: Any = None  # of Horovod: what makes tensors smaller, and back
    sparse_as_dense: bool = False
    passes: int = 1  # each gradient is the mean of so many, and counts as their sum

    def record(self) -> dict[str, object]:
        """Return what all workers must have alike, as JSON can hold it."""
        name = getattr(self.compression, "__name__", type(self.compression).__name__)
        return self._replace(compression=name)._asdict()

    def compress(self, shares: list[Any]) -> tuple[list[Any], list[Any] | None]:
        """Make the dense ones smaller; None where there is no compression."""
        if self.compression is None:
            return shares, None
        pairs = [
            (share, None)
            if isinstance(share, tf.IndexedSlices)
            else self.compression.compress(share)
            for share in shares
        ]
        return [share for share, _ in pairs], [context for _, context in pairs]

    def decompress(self, summed: Sequence[Any], contexts: list[Any]) -> list[Any]:
        """Undo `compress`."""
        return [
            each
            if isinstance(each, tf.IndexedSlices)
            else self.compression.decompress(each, context)
            for each, context in zip(summed, contexts, strict=True)
        ]


@dataclasses.dataclass(frozen=True)
class Options:
    """Keyword arguments by the names that Horovod 0.28 has for them.

    All gradients travel together, so that names, devices and groups of operations have
    nothing to act on; `gradient_predivide_factor` only moves a division.

    Attributes:
        compression: `hvd.Compression.none`, `hvd.Compression.fp16`, or a DGCConfig.
        sparse_as_dense: exchange IndexedSlices as tensors.
        op: `hvd.Average`, which None means, too, or `hvd.Sum`.
        process_set: the workers among whom gradients are exchanged.
        scale_local_gradients: divide what stays on a worker by the number of workers.
    """

    name: str | None = None
    use_locking: bool = False
    device_dense: str = ""
    device_sparse: str = ""
    compression: Any = None
    sparse_as_dense: bool = False
    op: Any = None
    gradient_predivide_factor: float = 1.0
    num_groups: int = 0
    groups: Any = None
    process_set: Any = None
    scale_local_gradients: bool = True

    def resolve(
        self, config: DGCConfig | None, passes: int = 1
    ) -> tuple[DGCConfig | None, Terms]:
        """Return the settings of Deep Gradient Compression, if any, and the rest.

        Args:
            config: given beside these.
            passes: see `Terms`.

        Raises:
            TypeError: `compression` is of the wrong type.
            ValueError: `op` cannot be had, or two kinds of compression were asked for.
        """
        compression = None if _does_nothing(self.compression) else self.compression
        if compression is not None and config is not None:
            raise ValueError(
                "`compression` must not be given beside a DGCConfig, which compresses "
                f"by itself. Received: compression={compression}, config={config}"
            )
        if isinstance(compression, DGCConfig):
            config, compression = compression, None
        if compression is not None and not _is_stateless(compression):
            raise TypeError(
                "`compression` must be hvd.Compression.none, hvd.Compression.fp16 or a "
                f"DGCConfig. Received: compression={compression!r}"
            )
        total = self._is_sum()
        return config, Terms(total, compression, bool(self.sparse_as_dense), passes)

    def _is_sum(self) -> bool:
        if self.op is None:
            return False
        hvd = import_horovod()
        if self.op not in (hvd.Average, hvd.Sum):
            raise ValueError(
                "`op` must be hvd.Average or hvd.Sum: gradients are added up, whole or "
                f"compressed. Received: op={self.op}"
            )
        return bool(self.op == hvd.Sum)


def _does_nothing(compression: Any) -> bool:
    return getattr(compression, "__name__", None) == "NoneCompressor"


def _is_stateless(compression: Any) -> bool:
    """Tell a class of Horovod's, which has functions only, from what keeps state."""
    return isinstance(compression, type) and hasattr(compression, "decompress")
