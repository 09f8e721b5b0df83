"""Random numbers that workers draw alike, and those that each draws for itself.

One process draws the order of its data once, and other noise for each row. So all
workers draw the same orders, also where no seed is set, and each its own noise.
"""

import contextlib
import inspect
import logging
import random
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tf_dgc import _host
from tf_dgc.strategies import drawn_rows
from tf_dgc.transports.base import Transport

# A worker's own seeds are those of rank 0 and its rank times this.
_STRIDE = 7919
_LARGEST = 2**31 - 1
_WORDS = 624  # of the Mersenne Twister's state
# The name of operations whose result is the same on all workers, whatever went in.
ALIKE = "drawn_alike"
OTHER_HASHES = (
    "Python's hashes differ between the workers, so that each goes through a set in "
    "another order: words that are numbered by it get other numbers on each. Set "
    "PYTHONHASHSEED, the same on all, in the environment of the workers (tf-dgc-run "
    "does), or sort"
)

_logger = logging.getLogger("tf_dgc")
_streams: dict[str, random.Random] = {}


def share(seed: int) -> None:
    """Draw by a seed that all workers know where the user has set none.

    From now on, in this process:

    * The order of data is drawn from `seed` unless `tf.random.set_seed` was called: by
      operations of tf.data without a seed, and where Keras shuffles arrays and the
      batches of a PyDataset. All workers must make their datasets in the same order.
      There is no global seed, so random operations in `Dataset.map` go on, and
      shuffled arrays come in another order in every epoch.
    * Datasets that are made from now on come in one order also where they were to come
      in any (`deterministic=False`).
    * In replicas, random operations and Keras's generators take a worker's rank into
      their seeds. What is drawn outside, and on rank 0, is what one process draws.

    Args:
        seed: the same on all workers.
    """
    for name in ("tf.data", "arrays", "PyDataset"):
        _streams[name] = random.Random(f"{seed} {name}")


def agree(transport: Transport) -> None:
    """Let all workers draw the order of their data alike; all call this."""
    own = tf.constant(secrets.randbits(31), tf.int64)
    (seed,) = transport.broadcast([own], "seed")
    share(int(seed))
    if not take_over(transport) and transport.rank == 0:
        _logger.warning(OTHER_HASHES)


def take_over(transport: Transport) -> bool:
    """Let `random` and `numpy.random` go on from the chief's state; all call this.

    Where a script seeds them alike nothing changes; where it does not, what it draws
    from now on is the same on all workers.

    Args:
        transport: between the workers.

    Returns:
        Whether Python's hashes of texts, which no worker can change, are alike.
    """
    states = [tf.constant(each) for each in encoded_states()]
    hashed = tf.constant(hash("tf_dgc"), tf.int64)
    integers, floats, first = transport.broadcast([*states, hashed], "random_state")
    restore_states(integers.numpy(), floats.numpy())
    return bool(transport.holds_on_all(first == hashed, "hashes"))


def told() -> dict[str, Any]:
    """Return what workers that do not meet are to go on from, for JSON."""
    integers, floats = encoded_states()
    return {
        "integers": integers.tolist(),
        "floats": floats.tolist(),
        "hash": hash("tf_dgc"),
    }


def take_over_told(chief: Mapping[str, Any]) -> list[str]:
    """Go on from what the chief has told; return warnings."""
    integers = np.array(chief["integers"], np.int64)
    restore_states(integers, np.array(chief["floats"], np.float64))
    return [] if chief["hash"] == hash("tf_dgc") else [OTHER_HASHES]


def encoded_states() -> tuple[np.ndarray, np.ndarray]:
    """Return the states of `random` and of NumPy's global generator.

    Returns:
        shape [1252], int64, and shape [2], float64, finite: as `restore_states` takes
        them.
    """
    _, words, gauss = random.getstate()
    numpys = np.random.get_state(legacy=False)
    key = np.zeros(_WORDS, np.int64)
    is_known = numpys["bit_generator"] == "MT19937"
    if is_known:
        key[:] = numpys["state"]["key"]
    position = numpys["state"]["pos"] if is_known else -1
    more = [gauss is not None, position, numpys["has_gauss"]]
    integers = np.concatenate([np.array(words, np.int64), key, more])
    return integers, np.array([gauss or 0.0, numpys["gauss"]])


def restore_states(integers: np.ndarray, floats: np.ndarray) -> None:
    """Take over states; NumPy's only where both are of its usual generator."""
    count = _WORDS + 1
    words = tuple(map(int, integers[:count]))
    key, (is_drawn, position, has_gauss) = integers[count:-3], integers[-3:]
    random.setstate((3, words, float(floats[0]) if is_drawn else None))
    known = np.random.get_state(legacy=False)["bit_generator"] == "MT19937"
    if known and position >= 0:
        state = "MT19937", key.astype(np.uint32), int(position), int(has_gauss)
        np.random.set_state((*state, float(floats[1])))


def key_by(rank: int, state: tf.Tensor) -> tf.Tensor:
    """Return a state for a worker's `tf.random.Generator`; its key stands last."""
    return tf.concat([state[:-1], state[-1:] + rank * _STRIDE], axis=0)


def seed_by_rank(original: Callable[..., Any], op_seed: Any) -> Any:
    """Take the rank of a replica into the seeds of an operation."""
    first, second = original(op_seed)
    rank = _host.distribute.replica_rank() if _streams else 0
    if rank and first is not None:
        first = (first + rank * _STRIDE) % _LARGEST
    return first, second


def next_by_rank(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Take the rank of a replica into the next seed of a generator of Keras."""
    seed = original(*args, **kwargs)
    rank = _host.distribute.replica_rank() if _streams else 0
    if rank:
        seed += tf.constant([rank * _STRIDE, 0], seed.dtype)
    return drawn_rows.note_own(seed)


def seed_alike(original: Callable[..., Any], seed: Any) -> Any:
    """Take the seed of a dataset from the workers' stream, where none is set."""
    if _streams and seed is None and _host.tensorflow.global_seed() is None:
        seed = _streams["tf.data"].getrandbits(31)
    return original(seed)


def in_order(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Make a dataset that works in parallel, but not in whatever order."""
    if not _streams:
        return original(*args, **kwargs)
    given = inspect.signature(original).bind(*args, **kwargs)
    for name, other in (("deterministic", False), ("sloppy", True)):
        if given.arguments.get(name) is other:
            given.arguments[name] = not other
    return original(*given.args, **given.kwargs)


def arrays_alike(original: Callable[..., Any], adapter: Any) -> Any:
    """Shuffle arrays in one order on all workers."""
    if not _streams or not _host.keras.shuffles(adapter):
        return original(adapter)
    if _host.tensorflow.global_seed() is not None:
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


class OrderOfPyDatasets:
    """The module `random`, but for the order in which a PyDataset is read."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def shuffle(self, indices: list[int]) -> None:
        """Shuffle in place, alike on all workers."""
        set_by_user = _host.tensorflow.global_seed() is not None
        own = set_by_user or not _streams
        (self._original if own else _streams["PyDataset"]).shuffle(indices)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)
