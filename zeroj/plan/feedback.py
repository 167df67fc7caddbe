"""LoCo: what quantising lost of a gradient, kept by each device and added to what it sends next (arXiv 2407.04480).

A device has one buffer for each hop of a leaf: what it lost of all that it sent there. So the buffers of the first hop
are as large as the whole leaf on every device, those of the next as large as what is left of it after the first. They
are in host memory where the optimizer's state is off the device, and come to the device for their reduction alone.

Buffers are never set to zero in a step, which would have to pass over all of them, in host memory too: a flag beside
them says whether the next step feeds them back.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from zeroj.plan.rules import Placement

if TYPE_CHECKING:
    from zeroj.plan.plan import ParamLeaf, Plan

#: Path of a leaf -> its buffers, one for each hop.
Errors = dict[str, tuple[Any, ...]]


def fed_back(plan: Plan) -> list[ParamLeaf]:
    """The leaves whose gradients are reduced with error feedback: none without ``zeropp_loco_param``."""
    if plan.zero.zeropp_loco_param is None:
        return []
    return [leaf for leaf in plan.leaves if leaf.trainable and leaf.placement.wire.hops]


def error_dtype(plan: Plan, leaf: ParamLeaf) -> np.dtype:
    """The dtype of a buffer: bf16 under half precision, fp32 otherwise.

    bf16 also for fp16: buffers are kept without the loss scale, and bf16 has the exponents for it.
    """
    return np.dtype(jnp.bfloat16 if plan.precision.half else plan.precision.accumulator(leaf.dtype))


def before_hop(placement: Placement, hop: int) -> Placement:
    """The placement of a leaf's gradient before a hop, over the axes that are still to be summed over."""
    return placement.over([axis for axis, _ in placement.wire.hops[hop:]])


def error_shape(plan: Plan, leaf: ParamLeaf, hop: int) -> tuple[int, ...]:
    """The shape of a device's buffer: the stored leaf, split over the axes of the hops before."""
    done = {axis for axis, _ in leaf.placement.wire.hops[:hop]}
    shape = list(leaf.placement.padded)
    for dim, axes in leaf.placement.dims:
        shape[dim] //= math.prod(plan.mesh.shape[axis] for axis in axes if axis in done)
    return tuple(shape)


def errors_struct(plan: Plan) -> Errors:
    """All buffers as ShapeDtypeStructs with shardings: (devices, *a device's buffer), split along dim 0."""

    def one(leaf: ParamLeaf, hop: int) -> jax.ShapeDtypeStruct:
        shape = (plan.degree, *error_shape(plan, leaf, hop))
        model = ((axes or None) for axes in leaf.placement.model)
        spec = PartitionSpec(plan.zero_axes, *model)
        sharding = NamedSharding(plan.mesh, spec, memory_kind=leaf.error_memory or None)
        return jax.ShapeDtypeStruct(shape, error_dtype(plan, leaf), sharding=sharding)

    return {
        leaf.path: tuple(one(leaf, hop) for hop in range(len(leaf.placement.wire.hops)))
        for leaf in fed_back(plan)
    }


def first_errors(plan: Plan) -> Errors:
    """Zeros, born in their places."""
    structs = errors_struct(plan)
    if not structs:
        return {}
    shardings = jax.tree.map(lambda s: s.sharding, structs)
    return jax.jit(
        lambda: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), structs), out_shardings=shardings
    )()


def error_bytes(plan: Plan) -> tuple[int, int]:
    """Bytes of one device's buffers: those on the device, and those in host memory."""
    here, away = 0, 0
    structs = errors_struct(plan)
    for leaf in fed_back(plan):
        size = sum(math.prod(s.sharding.shard_shape(s.shape)) * s.dtype.itemsize for s in structs[leaf.path])
        here, away = (here, away + size) if leaf.error_memory else (here + size, away)
    return here, away
