"""Sums over gradients that wait in host memory: they come to the device piece by piece."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from zeroj import _compat
from zeroj.plan.cuts import PIECE_BYTES


def sum_of_squares(grad: jax.Array, divisor: jax.Array | None, parts: int = 1) -> jax.Array:
    """The sum of the squares of a gradient's elements over ``divisor``, an fp32 scalar.

    Args:
        grad: a global array, each element counted once, on the device or on the host.
        divisor: scalar; None for 1.
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


def _squares(value: jax.Array, divisor: jax.Array | None) -> jax.Array:
    wide = value.astype(jnp.promote_types(value.dtype, jnp.float32))
    return jnp.sum(jnp.square(wide if divisor is None else wide / divisor.astype(wide.dtype)))
