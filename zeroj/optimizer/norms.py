"""Gradients that wait in host memory as they came: their norm, piece by piece on the device; what is left to do."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from zeroj import _compat
from zeroj.gather.host_gradients import squares_of
from zeroj.plan.cuts import PIECE_BYTES
from zeroj.plan.precision import Precision


class Unfinished(NamedTuple):
    """What is left to do to gradients in host memory, once they are back on the device. A pytree.

    Attributes:
        divisor: fp32 scalar that sums over micro-batches are divided by, or None where they are means.
        scale: fp32 scalar that they were made with, or None for 1.
        factor: fp32 scalar that clips them, or None.
    """

    divisor: jax.Array | None
    scale: jax.Array | None
    factor: jax.Array | None

    def finish(self, grad: jax.Array, dtype: np.dtype, precision: Precision) -> jax.Array:
        """Makes of a gradient, or a piece of it, what the optimizer is to see; ``dtype`` is its leaf's."""
        return self.clip(self.fetched(grad, dtype, precision))

    def fetched(self, grad: jax.Array, dtype: np.dtype, precision: Precision) -> jax.Array:
        """The same before clipping: rounded and unscaled as it would have been on the device."""
        mean = grad if self.divisor is None else grad / self.divisor.astype(grad.dtype)
        return self.unscaled(mean.astype(precision.gradient(dtype)), dtype, precision)

    def unscaled(self, grad: jax.Array, dtype: np.dtype, precision: Precision) -> jax.Array:
        """A mean without the scale, in the dtype in which the optimizer sees it."""
        wide = grad.astype(precision.seen(dtype))
        return wide if self.scale is None else wide / self.scale.astype(wide.dtype)

    def clip(self, grad: jax.Array) -> jax.Array:
        """Clips one that is unscaled."""
        return grad if self.factor is None else grad * self.factor.astype(grad.dtype)


def sum_of_squares(
    grad: jax.Array, of: Callable[[jax.Array], jax.Array] | None = None, parts: int = 1
) -> jax.Array:
    """The sum of the squares of a gradient's elements, an fp32 scalar.

    Args:
        grad: a global array, each element counted once, on the device or on the host.
        of: what is first made of a piece that has come to the device.
        parts: among how many devices it is split: a piece has at most :data:`PIECE_BYTES` on each, where dim 0
            can be cut so.
    """
    if not _compat.is_on_host(grad):
        return squares_of(grad)
    rows = grad.shape[0] if grad.ndim else 1
    wanted = min(rows, math.ceil(grad.size * grad.dtype.itemsize / (parts * PIECE_BYTES)))
    count = next(n for n in range(max(1, wanted), rows + 1) if rows % n == 0)
    total = jnp.zeros((), jnp.float32)
    for index in range(count):
        grad, total = jax.lax.optimization_barrier((grad, total))  # one piece at a time
        piece = (
            grad
            if count == 1
            else jax.lax.dynamic_slice_in_dim(grad, index * rows // count, rows // count, 0)
        )
        piece = jax.device_put(piece, jax.memory.Space.Device)
        total = total + squares_of(piece if of is None else of(piece))
    return total
