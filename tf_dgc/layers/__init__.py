"""Layers whose weights are split over the workers."""

from tf_dgc.layers.dense import SplitDense
from tf_dgc.layers.models import joined, split_dense

__all__ = ["SplitDense", "joined", "split_dense"]
