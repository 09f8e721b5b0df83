"""Activations between workers, and their gradients.

Axes: N workers, M rows of the worker that has most, I inputs, U units, W columns or
rows of a part.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_dgc.transports.mesh import Mesh


class Movement:
    """Moves the activations of one layer, forth and back."""

    def __init__(self, mesh: Mesh, name: str) -> None:
        """Choose the wire.

        Args:
            mesh: of the workers.
            name: prefix of the names of the collectives.
        """
        self._mesh, self._name = mesh, name

    def most(self, rows: tf.Tensor) -> tf.Tensor:
        """Return M, shape [], int64, of this worker's number of rows."""
        counts = self._mesh.everybody.all_gather(rows, f"{self._name}.rows")
        return tf.reduce_max(counts)

    def gathered(self, x: tf.Tensor, way: str) -> tf.Tensor:
        """Return the rows of all workers, [N, M, I], of this worker's [M, I].

        Its gradient is the sum over what each worker has computed with these rows.

        Args:
            x: the rows.
            way: what they are, for the names of collectives.
        """

        @tf.custom_gradient
        def gather(x: tf.Tensor) -> tuple[tf.Tensor, Callable[..., Any]]:
            bits, back = _portable(x)
            found = back(self._mesh.everybody.all_gather(bits, f"{self._name}.{way}"))
            return found, lambda upstream: self.scattered(upstream, f"d{way}")

        found: tf.Tensor = gather(x)
        return found

    def scattered(self, parts: tf.Tensor, way: str) -> tf.Tensor:
        """Return the sum of what all workers have of this one's rows: reduce-scatter.

        Its gradient goes to all of them.

        Args:
            parts: of the rows of each worker, [N, M, U].
            way: what they are, for the names of collectives.

        Returns:
            shape [M, U].
        """

        @tf.custom_gradient
        def scatter(parts: tf.Tensor) -> tuple[tf.Tensor, Callable[..., Any]]:
            bits, back = _portable(parts)
            found = back(self._mesh.everybody.all_to_all(bits, f"{self._name}.{way}"))
            wide = tf.float64 if parts.dtype == tf.float64 else tf.float32
            total = tf.cast(tf.reduce_sum(tf.cast(found, wide), 0), parts.dtype)
            return total, lambda upstream: self.gathered(upstream, f"d{way}")

        found: tf.Tensor = scatter(parts)
        return found

    def exchanged(self, rows: tf.Tensor, way: str) -> tf.Tensor:
        """Send [N, ...] by worker, and get [N, ...]; its gradient goes the way back."""

        @tf.custom_gradient
        def exchange(rows: tf.Tensor) -> tuple[tf.Tensor, Callable[..., Any]]:
            def grad(upstream: tf.Tensor) -> tf.Tensor:
                return self.exchanged(upstream, f"d{way}")

            bits, back = _portable(rows)
            name = f"{self._name}.{way}"
            return back(self._mesh.everybody.all_to_all(bits, name)), grad

        found: tf.Tensor = exchange(rows)
        return found

    def told(self, own: tf.Tensor, what: str) -> tf.Tensor:
        """Return what each worker tells, [N, *S], of this one's [*S]; no gradient."""
        return self._mesh.everybody.all_gather(own, f"{self._name}.{what}")

    def shared(self, bias: tf.Tensor, width: int) -> tf.Tensor:
        """Return the own elements of a bias that all workers have, for the rows of all.

        Args:
            bias: shape [U].
            width: W.

        Returns:
            shape [N, W]; its gradient brings home what this worker's rows give.
        """
        workers, rank = self._mesh.everybody.size, self._mesh.everybody.rank
        units = bias.shape[0]

        @tf.custom_gradient
        def share(bias: tf.Tensor) -> tuple[tf.Tensor, Callable[..., Any]]:
            def grad(upstream: tf.Tensor) -> tf.Tensor:
                return tf.reshape(self.exchanged(upstream, "dbias"), [-1])[:units]

            padded = tf.pad(bias, [[0, workers * width - units]])
            own = padded[rank * width : (rank + 1) * width]
            return tf.tile(own[tf.newaxis], [workers, 1]), grad

        found: tf.Tensor = share(bias)
        return found

    def summed(self, own: tf.Tensor) -> tf.Tensor:
        """Sum a number, shape [], over workers; the gradient is this one's alone."""

        @tf.custom_gradient
        def add(own: tf.Tensor) -> tuple[tf.Tensor, Callable[..., Any]]:
            (total,) = self._mesh.everybody.all_reduce([own], f"{self._name}.sum")
            return total, lambda upstream: upstream

        found: tf.Tensor = add(own)
        return found


def product(
    x: tf.Tensor, kernel: tf.Tensor, weights: Callable[[], tf.Tensor]
) -> tf.Tensor:
    """Multiply rows by a kernel of which no other worker has a gradient.

    Args:
        x: shape [N, M, I].
        kernel: shape [I, W].
        weights: returns, in the backward pass, what the gradients of each worker's rows
            count for the kernel: shape [N], float32; 0 where they are not to be used.

    Returns:
        shape [N, M, W].
    """

    @tf.custom_gradient
    def multiply(
        x: tf.Tensor, kernel: tf.Tensor
    ) -> tuple[tf.Tensor, Callable[..., Any]]:
        def grad(upstream: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            counts = tf.cast(weights(), upstream.dtype)[:, tf.newaxis, tf.newaxis]
            # Not only a product: what is computed without rows may be no number.
            rows = tf.where(counts == 0, tf.zeros_like(upstream), upstream * counts)
            used = tf.where(counts == 0, tf.zeros_like(x), x)
            dkernel = tf.matmul(_flat(used), _flat(rows), transpose_a=True)
            return product(upstream, tf.transpose(kernel), weights), dkernel

        flat = tf.matmul(_flat(x), kernel)
        form = tf.concat([tf.shape(x)[:2], tf.shape(kernel)[1:]], 0)
        return tf.reshape(flat, form), grad

    found: tf.Tensor = multiply(x, kernel)
    return tf.ensure_shape(found, [x.shape[0], None, kernel.shape[1]])


def _flat(tensor: tf.Tensor) -> tf.Tensor:
    return tf.reshape(tensor, [-1, tensor.shape[-1]])


def _portable(tensor: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
    """Return a tensor in a type that all transports carry, and the way back."""
    if tensor.dtype != tf.bfloat16:
        return tensor, tf.identity
    return tf.bitcast(tensor, tf.float16), lambda bits: tf.bitcast(bits, tf.bfloat16)
