"""Every private name of TensorFlow and Keras that this package touches.

Each function says where the name lives, since when it has been as it is used here, and
why no public name does. Seen in TensorFlow 2.18 to 2.21 and Keras 3.10 to 3.15.
"""

from tf_dgc._host import (
    datasets,
    distribute,
    flow,
    hooks,
    iterators,
    keras,
    operations,
    probe,
    scopes,
    shared,
    startup,
    tensorflow,
    tracebacks,
)

__all__ = [
    "datasets",
    "distribute",
    "flow",
    "hooks",
    "iterators",
    "keras",
    "operations",
    "probe",
    "scopes",
    "shared",
    "startup",
    "tensorflow",
    "tracebacks",
]
