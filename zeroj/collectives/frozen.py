"""Frozen params that are stored as int8: each device's shard in the format of its gather, scales and all.

``zero_quantized_nontrainable_weights``. The stored array is (bytes of all devices,), or (layers, bytes of all devices)
for a stack of layers, so that a loop can take it slice by slice; see :meth:`zeroj.plan.leaves.ParamLeaf.stored`.
"""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp

from zeroj.collectives.fetch import shard_shape
from zeroj.collectives.quantize import dequantize, quantize
from zeroj.plan.mesh import traced_on
from zeroj.plan.plan import ParamLeaf, Plan


def pack(plan: Plan, leaf: ParamLeaf, value: jax.Array) -> jax.Array:
    """A frozen leaf as it is stored, from its shards in the compute dtype; within ``jit``."""
    fmt, stored = leaf.placement.wire.weights, plan.stored_placement(leaf)
    assert fmt is not None

    def one(shard: jax.Array) -> jax.Array:
        return quantize(shard.reshape(*shard.shape[: len(stored.shape) - 1], -1), fmt)

    return jax.shard_map(
        one,
        mesh=plan.mesh,
        in_specs=leaf.placement.zero_spec,
        out_specs=stored.zero_spec,
        axis_names=set(plan.zero_axes),
        check_vma=False,
    )(value)


def unpack(plan: Plan, leaf: ParamLeaf, stored: jax.Array) -> jax.Array:
    """Undoes :func:`pack`: sharded as the leaf would be, in the compute dtype; within ``jit``."""
    fmt, dtype = leaf.placement.wire.weights, plan.precision.compute(leaf.dtype)
    assert fmt is not None

    def one(packed: jax.Array) -> jax.Array:
        shape = shard_shape(leaf.placement)
        count = math.prod(shape[packed.ndim - 1 :])
        return dequantize(packed, fmt, count, dtype).reshape(shape)

    return jax.shard_map(
        one,
        mesh=plan.mesh,
        in_specs=plan.stored_placement(leaf).zero_spec,
        out_specs=leaf.placement.zero_spec,
        axis_names=set(plan.zero_axes),
        check_vma=False,
    )(stored)


def packed(plan: Plan, leaf: ParamLeaf, value: jax.Array) -> jax.Array:
    """:func:`pack` outside ``jit``: in its place."""
    make = traced_on(plan.mesh, partial(pack, plan, leaf))
    return jax.jit(make, out_shardings=plan.sharding(plan.stored_placement(leaf)))(value)


def unpacked(plan: Plan, leaf: ParamLeaf, stored: jax.Array) -> jax.Array:
    """The param itself, sharded: of one that is stored as it is, what is stored; of any other, dequantised."""
    if not leaf.packed or stored.dtype != jnp.int8:
        return stored
    make = traced_on(plan.mesh, partial(unpack, plan, leaf))
    return jax.jit(make, out_shardings=plan.sharding(plan.param_placement(leaf)))(stored)
