"""Sums over gradients that wait in host memory: they come to the device piece by piece."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from zeroj import _compat
from zeroj.plan.cuts import PIECE_BYTES


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
        return _squares(grad)
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
        total = total + _squares(piece if of is None else of(piece))
    return total


def _squares(value: jax.Array) -> jax.Array:
    return jnp.sum(jnp.square(value.astype(jnp.promote_types(value.dtype, jnp.float32))))
