"""A gather in two halves, between which a step may keep what it has: hpZ (arXiv 2306.10209, section 3.2).

The first half gathers across nodes and gives a *near* shard: one that is split within the node alone. The
second half gathers it within the node: MiCS's hierarchical gather, where nothing is kept between the two. A leaf that
is gathered in one has an empty first half. For use inside
``shard_map`` over the ZeRO axes.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from zeroj.collectives import plain, quantized
from zeroj.plan.rules import Placement


def near(shard: jax.Array, placement: Placement) -> jax.Array:
    """What may be kept for later gathers of the step.

    Args:
        shard: this device's part, in the compute dtype, or as it is stored: int8 (bytes,) or (layers, bytes).
        placement: how the leaf is sharded; its ``wire`` says over which axes to gather here, and in what form.

    Returns:
        The node's shard, or the leaf itself if the first half gathers over all axes; quantised if the leaf travels
        so: int8 (devices along the first axes, bytes).
    """
    first = placement.wire.first
    if placement.wire.weights is None:
        return plain.gather(shard, placement.over(first)) if first else shard
    packed = shard if placement.wire.stored else quantized.pack(shard, placement)
    return jax.lax.all_gather(packed, first) if first else packed


def whole(near_shard: jax.Array, placement: Placement, dtype: np.dtype) -> jax.Array:
    """The leaf in the user's shape, from what :func:`near` gave.

    Args:
        near_shard: the near shard.
        placement: how the leaf is sharded.
        dtype: the compute dtype.
    """
    first = placement.wire.first
    rest = tuple(axis for axis in placement.axes if axis not in first)
    if placement.wire.weights is None:
        return plain.unpad(plain.gather(near_shard, placement.over(rest)), placement)
    packed = jax.lax.all_gather(near_shard, rest) if rest else near_shard
    one = packed.shape[bool(rest) + bool(first) :]
    sizes = [jax.lax.axis_size(axis) for axis in (*rest, *first)]
    return quantized.unpack(
        packed.reshape(*sizes, *one), placement, (*rest, *first), shard_shape(placement), dtype
    )


def shard_shape(placement: Placement) -> Sequence[int]:
    """The shape of one device's shard."""
    shape = list(placement.padded)
    for dim, axes in placement.dims:
        for axis in axes:
            shape[dim] //= jax.lax.axis_size(axis)
    return shape
