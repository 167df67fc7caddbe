"""Gathering and reducing one leaf along its placement. For use inside ``shard_map`` over the ZeRO axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from zeroj.plan.rules import Placement


def gather(shard: jax.Array, placement: Placement) -> jax.Array:
    """All-gathers a shard to the whole leaf in the user's shape.

    Outer axes come first, so that what crosses nodes is still the smallest piece.

    Args:
        shard: this device's part, of shape ``placement.padded`` with each sharded dim divided by its axes.
        placement: how the leaf is sharded; a whole leaf is returned as it is.
    """
    for dim, axes in placement.dims:
        shard = jax.lax.all_gather(shard, axes, axis=dim, tiled=True)
    return unpad(shard, placement)


def reduce_scatter(value: jax.Array, placement: Placement, axes: Sequence[str]) -> jax.Array:
    """Sums a whole leaf over ``axes`` and keeps this device's shard of the sum.

    Args:
        value: this device's addend, in the user's shape.
        placement: how the result is sharded; over axes that do not split it, it is summed whole.
        axes: the ZeRO axes.
    """
    value = pad(value, placement)
    for dim, names in reversed(placement.dims):
        value = _in_full(
            value, partial(jax.lax.psum_scatter, axis_name=names, scatter_dimension=dim, tiled=True)
        )
    rest = tuple(axis for axis in axes if axis not in placement.axes)
    return total(value, rest)


def total(value: Any, axes: Sequence[str]) -> Any:
    """Sums over devices. An axis of one device is left out: XLA cannot reduce over it beside automatic axes."""
    split = tuple(axis for axis in axes if jax.lax.axis_size(axis) > 1)
    if not split:
        return value
    return jax.tree.map(lambda x: _in_full(x, partial(jax.lax.psum, axis_name=split)), value)


def _in_full(value: jax.Array, reduce: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Reduces over devices; in fp32 where XLA:CPU aborts on half precision: on a mesh with automatic axes."""
    automatic = jax.sharding.get_abstract_mesh().auto_axes
    if not automatic or jnp.result_type(value) not in (jnp.bfloat16, jnp.float16):
        return reduce(value)

    def widened(x: jax.Array) -> jax.Array:
        return reduce(x.astype(jnp.float32)).astype(x.dtype)

    return jax.lax.platform_dependent(value, cpu=widened, default=reduce)


def pad(value: jax.Array, placement: Placement) -> jax.Array:
    """Appends zeros to the stored shape."""
    if placement.padded == placement.shape:
        return value
    widths = [(0, p - s) for s, p in zip(placement.shape, placement.padded, strict=True)]
    return jnp.pad(value, widths)


def unpad(value: jax.Array, placement: Placement) -> jax.Array:
    """Cuts the stored shape to the user's shape."""
    if placement.padded == placement.shape:
        return value
    return jax.lax.slice(value, (0,) * value.ndim, placement.shape)
