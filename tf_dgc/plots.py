"""Figures of a training: see `tf_dgc.lab.plots`."""

from tf_dgc.lab.plots import loss_and_compression, sparsity_by_layer

__all__ = ["loss_and_compression", "sparsity_by_layer"]
