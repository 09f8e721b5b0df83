"""What workers draw alike, and what each draws for itself.

One process draws the order of its data once, and other noise for each row. So all
workers draw the same orders, also where no seed is set, and each its own noise.
"""

import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tf_dgc import _host

# A worker's own seeds are those of rank 0 and its rank times this.
_STRIDE = 7919
_LARGEST = 2**31 - 1
# The name of operations whose result is the same on all workers, whatever went in.
ALIKE = "drawn_alike"

_streams: dict[str, random.Random] = {}


def share(seed: int) -> None:
    """Draw by a seed that all workers know where the user has set none.

    From now on, in this process:

    * The order of data is drawn from `seed` unless `tf.random.set_seed` was called: by
      operations of tf.data without a seed, and where Keras shuffles arrays and the
      batches of a PyDataset. All workers must make their datasets in the same order.
      There is no global seed, so random operations in `Dataset.map` go on, and
      shuffled arrays come in another order in every epoch.
    * In replicas, random operations and Keras's generators take a worker's rank into
      their seeds. What is drawn outside, and on rank 0, is what one process draws.

    Args:
        seed: the same on all workers.
    """
    for name in ("tf.data", "arrays", "PyDataset"):
        _streams[name] = random.Random(f"{seed} {name}")
    _host.hooks.wrap("seeds", _by_rank)
    _host.hooks.wrap("generator", _next_by_rank)
    _host.hooks.wrap("data seeds", _alike)
    _host.hooks.wrap("arrays", _arrays_alike)
    _host.hooks.replace_random(_Random)


def key_by(rank: int, state: tf.Tensor) -> tf.Tensor:
    """Return a state for a worker's `tf.random.Generator`; its key stands last."""
    return tf.concat([state[:-1], state[-1:] + rank * _STRIDE], axis=0)


def _by_rank(original: Callable[..., Any], op_seed: Any) -> Any:
    first, second = original(op_seed)
    rank = _host.distribute.replica_rank()
    if rank and first is not None:
        first = (first + rank * _STRIDE) % _LARGEST
    return first, second


def _next_by_rank(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    seed = original(*args, **kwargs)
    rank = _host.distribute.replica_rank()
    return seed + tf.constant([rank * _STRIDE, 0], seed.dtype) if rank else seed


def _alike(original: Callable[..., Any], seed: Any) -> Any:
    if seed is None and _host.tensorflow.global_seed() is None:
        seed = _streams["tf.data"].getrandbits(31)
    return original(seed)


def _arrays_alike(original: Callable[..., Any], adapter: Any) -> Any:
    if not _host.keras.shuffles(adapter) or _host.tensorflow.global_seed() is not None:
        return original(adapter)
    shuffle = permutation_by(_streams["arrays"].getrandbits(30))
    with _in_place_of_shuffle(shuffle):
        return original(adapter)


def permutation_by(seed: int) -> Callable[[tf.Tensor], tf.Tensor]:
    """Return what shuffles the indices of the rows of an epoch, or of a batch.

    Args:
        seed: of all epochs, in [0, 2**30).

    Returns:
        A function of indices, shape [n], int64, for one dataset. Each time that it gets
        those that begin with 0, another epoch begins, and orders are other ones. It
        does not count calls: of an iterator that is given up nobody knows how many
        batches were read ahead.
    """
    with tf.init_scope(), tf.device("CPU:0"):
        epoch = tf.Variable(
            tf.zeros([], tf.int64),
            trainable=False,
            synchronization=tf.VariableSynchronization.NONE,
        )

    def shuffle(indices: tf.Tensor) -> tf.Tensor:
        first = indices[0]
        now = epoch.assign_add(tf.cast(first == 0, tf.int64))
        shuffled = tf.random.experimental.stateless_shuffle(
            indices, seed=tf.stack([seed + now, first])
        )
        return tf.identity(shuffled, name=ALIKE)

    return shuffle


@contextlib.contextmanager
def _in_place_of_shuffle(shuffle: Callable[[tf.Tensor], tf.Tensor]) -> Iterator[None]:
    """Let `tf.random.shuffle` be another function, for this thread."""
    original, thread = tf.random.shuffle, threading.get_ident()

    def either(value: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread:
            return shuffle(value)
        return original(value, *args, **kwargs)

    tf.random.shuffle = either
    try:
        yield
    finally:
        tf.random.shuffle = original


class _Random:
    """The module `random`, but for the order in which a PyDataset is read."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def shuffle(self, indices: list[int]) -> None:
        """Shuffle in place, alike on all workers."""
        set_by_user = _host.tensorflow.global_seed() is not None
        (self._original if set_by_user else _streams["PyDataset"]).shuffle(indices)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)
