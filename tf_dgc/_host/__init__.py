"""Every private name of TensorFlow and Keras that this package touches.

Each function says where the name lives, since when it has been as it is used here, and
why no public name does. Seen in TensorFlow 2.18 to 2.21 and Keras 3.10 to 3.15.
"""

from tf_dgc._host import (
    applying,
    datasets,
    distribute,
    flow,
    iterators,
    keras,
    operations,
    patches,
    probe,
    scopes,
    shared,
    startup,
    stores,
    tensorflow,
    tracebacks,
)

__all__ = [
    "applying",
    "datasets",
    "distribute",
    "flow",
    "iterators",
    "keras",
    "operations",
    "patches",
    "probe",
    "scopes",
    "shared",
    "startup",
    "stores",
    "tensorflow",
    "tracebacks",
]
