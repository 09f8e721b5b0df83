"""Files in which Keras saves, read and written in parts."""

import operator
from typing import Any

import numpy as np

from tf_dgc._host import probe

with probe.imports():
    from keras.src.saving import saving_lib


def wanted() -> list[tuple[Any, str]]:
    """Return the private names, with the object or class that must have each."""
    store = getattr(saving_lib, "H5IOStore", None)
    return [
        (saving_lib, "H5IOStore"),
        (store, "_h5_entry_group"),
        (store, "_h5_entry_initialized"),
        (store, "_h5_entry_path"),
        (store, "_create_h5_group"),
    ]


probe.check(wanted())


def dataset_in(store: Any, key: str, like: Any = None) -> Any:
    """Return a dataset of a file in which Keras saves, to be read or written in parts.

    keras/src/saving/saving_lib.py: H5IOStore._h5_entry_group, _create_h5_group.

    Args:
        store: of `save_own_variables`, or `load_own_variables`.
        key: of the dataset.
        like: of a new one: a variable.

    Raises:
        ValueError: the file is of another kind.
    """
    if type(store) is not saving_lib.H5IOStore:
        raise ValueError(
            "A table that lives on the servers only is saved to, and loaded from, one "
            f"HDF5 file (`.keras` or `.weights.h5`). Received: {type(store).__name__}"
        )
    if like is None:
        # Older versions of Keras have no reading that refuses links to other files.
        read = getattr(saving_lib, "safe_get_h5_dataset", operator.getitem)
        return read(store._h5_entry_group, key)
    if not store._h5_entry_initialized:
        store._create_h5_group(store._h5_entry_path)
    return store._h5_entry_group.create_dataset(
        key, tuple(like.shape), np.dtype(like.dtype.name)
    )
