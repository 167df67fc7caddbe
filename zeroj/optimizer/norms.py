"""Gradients that wait in host memory as they came: their norm, piece by piece on the device; what is left to do."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from zeroj import _compat
from zeroj.plan.cuts import PIECE_BYTES
from zeroj.plan.precision import Precision


class Unfinished(NamedTuple):
    """What is left to do to gradients in host memory, once they are back on the device.

    Attributes:
        divisor: scalar, the scale that they were made with.
        factor: fp32 scalar that clips them, or None.
    """

    divisor: jax.Array
    factor: jax.Array | None

    def finish(self, grad: jax.Array, precision: Precision) -> jax.Array:
        """Unscales and clips a gradient, or a piece of it, in the dtype in which the optimizer sees it."""
        wide = grad.astype(precision.seen(grad.dtype))
        return self.clip(wide / self.divisor.astype(wide.dtype))

    def clip(self, grad: jax.Array) -> jax.Array:
        """Clips one that is unscaled."""
        return grad if self.factor is None else grad * self.factor.astype(grad.dtype)


def sum_of_squares(grad: jax.Array, divisor: jax.Array, parts: int = 1) -> jax.Array:
    """The sum of the squares of a gradient's elements over ``divisor``, an fp32 scalar.

    Args:
        grad: a global array, each element counted once, on the device or on the host.
        divisor: scalar.
        parts: among how many devices it is split: a piece has at most :data:`PIECE_BYTES` on each, where dim 0
            can be cut so.
    """
    if not _compat.is_on_host(grad):
        return _squares(grad, divisor)
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
        total = total + _squares(jax.device_put(piece, jax.memory.Space.Device), divisor)
    return total


def _squares(value: jax.Array, divisor: jax.Array) -> jax.Array:
    wide = value.astype(jnp.promote_types(value.dtype, jnp.float32))
    return jnp.sum(jnp.square(wide / divisor.astype(wide.dtype)))
