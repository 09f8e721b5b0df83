"""Data of workers with servers: who reads a share of them, and who all."""

import weakref
from typing import Any

import tensorflow as tf

from tf_dgc import _host
from tf_dgc.strategies import data


class DataShares:
    """Shares of data that were distributed; what is evaluated has all rows.

    Attributes:
        training_next: whether what is distributed next is the training data of `fit`.
    """

    def __init__(self) -> None:
        """Begin with none."""
        self.training_next = False
        # For a share that a script has distributed by itself, all of the dataset.
        self._whole: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def shared(self, dataset: Any, strategy: Any) -> tuple[Any, bool]:
        """Return what a worker reads of a dataset, and whether that is a share.

        Args:
            dataset: of global batches.
            strategy: of the worker.
        """
        fits = strategy.inner.fits
        if fits.running:
            divided, self.training_next = self.training_next, False
        else:
            divided = not fits.evaluating  # a loop of the user's
        if not divided:
            return dataset, False
        # A step of all is of those without rows, too.
        all_batches = fits.running and strategy.inner.share is not None
        share_of = data.share_of if all_batches else own_share
        return share_of(dataset, strategy.rank, strategy.workers), True

    def note(self, share: Any, whole: Any) -> None:
        """Note of which dataset a share is, as it was distributed."""
        self._whole[share] = whole

    def of_fit(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return arguments of `fit` with validation data that have all rows.

        What is distributed next is its training data, if the script has not done so.
        """
        given = arguments.get("x")
        self.training_next = not _host.distribute.is_distributed(given)
        names = arguments.keys() & {"validation_data"}
        return arguments | {name: self._all_of(arguments[name]) for name in names}

    def of_evaluation(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return arguments of `evaluate` or `predict` with data that have all rows."""
        if args:
            return (self._all_of(args[0]), *args[1:]), kwargs
        return args, {k: self._all_of(v) if k == "x" else v for k, v in kwargs.items()}

    def _all_of(self, data: Any) -> Any:
        shared_out = _host.distribute.is_distributed(data)
        return self._whole.get(data, data) if shared_out else data


def own_share(dataset: tf.data.Dataset, rank: int, workers: int) -> tf.data.Dataset:
    """Return a worker's rows of global batches, without batches of no rows."""
    share = data.share_of(dataset, rank, workers)
    first = tf.nest.flatten(dataset.element_spec)[0]
    if workers == 1 or (first.shape.rank and first.shape[0] is not None):
        return share

    def has_rows(*element: Any) -> tf.Tensor:
        part = tf.nest.flatten(element)[0]
        return tf.shape(part)[0] > 0

    return share.filter(has_rows)
