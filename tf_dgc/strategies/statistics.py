"""Moving statistics, of which each worker has those of its rows, become their mean.

Steps read none of them: what all workers are to agree on is what `evaluate` and
`predict` compute, and what is saved.
"""

import zlib
from typing import Any

import keras
import tensorflow as tf

from tf_dgc import _host
from tf_dgc.transports import Transport

_NAMES = ("moving_mean", "moving_variance")  # of batch normalization


def settle(model: keras.Model, transport: Transport, steps: int) -> None:
    """Give all workers the mean of theirs, where these differ; all call this.

    Those count most who had rows in most steps, and who had none in any, nothing.

    Args:
        model: of the user.
        transport: between the workers.
        steps: in which this worker had rows since the last time.
    """
    found = [_host.keras.plain(v) for v in _statistics_of(model)]
    if not found:
        return
    arrays = [variable.numpy() for variable in found]
    form = str([(array.shape, array.dtype.name) for array in arrays])
    bits = b"".join(array.tobytes() for array in arrays)
    digest = [zlib.crc32(form.encode()), zlib.crc32(bits), steps]
    own = tf.constant(digest, tf.int64)
    told = transport.all_gather(own, "statistics.digest").numpy()
    differs = (told != told[0]).any(axis=0)
    if differs[0] or not differs[1]:
        return
    weights = told[:, 2] / told[:, 2].sum() if told[:, 2].any() else None
    weight = 1 / transport.size if weights is None else weights[transport.rank]
    values = [tf.constant(array * array.dtype.type(weight)) for array in arrays]
    means = transport.all_reduce(values, "statistics")
    for variable, mean in zip(found, means, strict=True):
        variable.assign(mean)


def _statistics_of(model: keras.Model) -> list[Any]:
    return [
        variable
        for variable in model.non_trainable_variables
        if variable.name in _NAMES
        and isinstance(_host.keras.plain(variable), tf.Variable)
        and _host.keras.plain(variable).dtype.is_floating
    ]
