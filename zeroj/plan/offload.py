"""Which params, and which of their optimizer state, live in host memory or in files."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jax.sharding import Mesh

from zeroj.config.zero import Zero
from zeroj.errors import PlanError
from zeroj.plan.feedback import fed_back
from zeroj.plan.memory import shard_bytes
from zeroj.plan.rules import NVME, Placement

if TYPE_CHECKING:
    from zeroj.plan.plan import ParamLeaf, Plan

#: Page-locked host memory: what a GPU copies from and to at full speed, while it computes.
PINNED = "pinned_host"


def state_off_device(zero: Zero) -> bool:
    """Whether optimizer state is kept in host memory or in files."""
    part = zero.offload_optimizer
    return part is not None and part.device != "none"


def offloaded(plan: Plan) -> Plan:
    """The plan with the params and the optimizer state that its config offloads in host memory.

    Leaves of at most the persistence threshold stay on the device: moving a few bytes costs more than it saves.

    Raises:
        PlanError: the devices have no such memory.
    """
    return _errors_offloaded(_state_offloaded(_params_spilled(_params_offloaded(plan))))


def _state_offloaded(plan: Plan) -> Plan:
    part = plan.zero.offload_optimizer
    if plan.spill is not None and part is not None:
        smallest = plan.spill.smallest
        return _state_moved(plan, NVME, part.ratio, lambda p, dtype: shard_bytes(plan, p, dtype) >= smallest)
    if part is None or part.device != "cpu":
        return plan
    kind = host_kind(plan.mesh, part.pin_memory)
    return _state_moved(plan, kind, part.ratio, lambda p, _: math.prod(p.shape) > plan.threshold)


def _state_moved(plan: Plan, kind: str, ratio: float, large: Callable[[Placement, Any], bool]) -> Plan:
    """The plan with ``ratio`` of its optimizer state in another memory kind: of that, what is large enough.

    Args:
        plan: the plan.
        kind: the memory kind, or NVME.
        ratio: by bytes.
        large: whether an array of a placement and dtype is moved.
    """
    chosen = _choose(state_bytes(plan), ratio)
    leaves = tuple(
        replace(x, state_memory=kind)
        if x.path in chosen and large(plan.state_placement(x), plan.master_dtype(x))
        else x
        for x in plan.leaves
    )
    state = tuple(
        replace(s, placement=s.placement.at(kind)) if s.owner in chosen and large(s.placement, s.dtype) else s
        for s in plan.state_leaves
    )
    return replace(plan, leaves=leaves, state_leaves=state)


def _errors_offloaded(plan: Plan) -> Plan:
    """The plan with LoCo's errors in host memory where the optimizer's state is there, or in files.

    With a ratio below 1 the errors of a leaf are where its state is; a leaf without state keeps them on the device.
    """
    part = plan.zero.offload_optimizer
    fed = {leaf.path for leaf in fed_back(plan)}
    if part is None or not state_off_device(plan.zero) or not fed:
        return plan
    kind = host_kind(plan.mesh, part.pin_memory)
    moved = {x.path for x in plan.leaves if x.path in fed and (x.state_memory or part.ratio >= 1)}
    leaves = (replace(x, error_memory=kind) if x.path in moved else x for x in plan.leaves)
    return replace(plan, leaves=tuple(leaves))


def _params_offloaded(plan: Plan) -> Plan:
    part = plan.zero.offload_param
    if part is None or part.device != "cpu":
        return plan
    kind = host_kind(plan.mesh, part.pin_memory)
    large = {x.path for x in plan.leaves if math.prod(x.shape) > plan.threshold}
    leaves = (_away(x, kind, kind) if x.path in large else x for x in plan.leaves)
    return replace(plan, leaves=tuple(leaves))


def _away(leaf: ParamLeaf, kind: str, near: str) -> ParamLeaf:
    """A leaf whose stored shard is in ``kind``, and what hpZ keeps of its gathers during a step in ``near``.

    A device that is to hold a few layers cannot hold a whole node's share of all of them: as in DeepSpeed, where the
    second shard is on the device of offload_param. What ``reshard_after_forward: false`` keeps stays on the device.
    """
    wire = leaf.placement.wire
    second = wire.keeps and not leaf.placement.kept_whole
    placement = replace(leaf.placement, wire=replace(wire, near_memory=near if second else ""))
    return replace(leaf, param_memory=kind, placement=placement)


def _params_spilled(plan: Plan) -> Plan:
    """The plan with params in files: what has shards of at least ``smallest`` bytes.

    Raises:
        PlanError: a leaf is sharded on axes of the user's own, or has larger pieces than a buffer may be.
    """
    settings = plan.spill_params
    if settings is None:
        return plan

    def large(leaf: ParamLeaf) -> bool:
        size = shard_bytes(plan, leaf.placement, plan.param_dtype(leaf))
        return math.prod(leaf.shape) > plan.threshold and size >= settings.smallest

    own = [leaf.path for leaf in plan.leaves if large(leaf) and any(leaf.placement.model)]
    if own:
        raise PlanError(
            f"offload_param nvme: {', '.join(own)} are sharded on axes of the model's own, and params in files "
            'are read for the ZeRO axes alone. Use "device": "cpu" in offload_param.'
        )
    small = [leaf.path for leaf in plan.leaves if large(leaf) and leaf.placement.wire.stored]
    if small:
        raise PlanError(
            f"offload_param nvme: {', '.join(small)} are frozen and stored as int8 "
            "(zero_quantized_nontrainable_weights), which is not done for params in files. Leave out one of the two."
        )
    part = plan.zero.offload_param
    keeps = any(leaf.placement.wire.keeps for leaf in plan.leaves)
    near = host_kind(plan.mesh, part is None or part.pin_memory) if keeps else ""
    return replace(plan, leaves=tuple(_away(x, NVME, near) if large(x) else x for x in plan.leaves))


def state_bytes(plan: Plan) -> dict[str, int]:
    """Path of a param -> bytes of its optimizer state and master, of params that are large enough to offload."""
    large: dict[str, ParamLeaf] = {
        leaf.path: leaf for leaf in plan.leaves if leaf.trainable and math.prod(leaf.shape) > plan.threshold
    }
    sizes = {
        path: math.prod(leaf.shape) * plan.master_dtype(leaf).itemsize if plan.has_master else 0
        for path, leaf in large.items()
    }
    for state in plan.state_leaves:
        if state.owner in sizes:
            sizes[state.owner] += math.prod(state.placement.shape) * state.dtype.itemsize
    return {path: size for path, size in sizes.items() if size}


def host_kind(mesh: Any, pin_memory: bool = True) -> str:
    """The memory kind of the host.

    Raises:
        PlanError: the mesh's devices have none, or memory that is not page-locked was asked for.
    """
    if not pin_memory:
        raise PlanError(
            '"pin_memory": false cannot be honoured: a compiled program moves arrays to and from page-locked host '
            "memory alone (CUDA has no other kind, and JAX takes unpinned_host for device memory). Leave it out."
        )
    if isinstance(mesh, Mesh):
        device = mesh.devices.flat[0]
        kinds = [memory.kind for memory in device.addressable_memories()]
        if PINNED not in kinds:
            raise PlanError(
                f"Offload needs memory of the kind {PINNED!r}, which {device} does not have; its kinds are "
                f"{kinds}. Leave offload_optimizer and offload_param out on this backend."
            )
    return PINNED


def _choose(sizes: dict[str, int], ratio: float) -> set[str]:
    """The paths whose bytes come nearest to ``ratio`` of all from below, the largest first."""
    left = ratio * sum(sizes.values())
    chosen = set()
    for path, size in sorted(sizes.items(), key=lambda item: -item[1]):
        if size <= left:
            chosen.add(path)
            left -= size
    return chosen
