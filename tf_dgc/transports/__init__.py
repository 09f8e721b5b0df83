"""Transports: how tensors get from worker to worker."""

from tf_dgc.transports.base import Transport
from tf_dgc.transports.resolver import resolve

__all__ = ["Transport", "resolve"]
