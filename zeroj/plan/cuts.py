"""How large leaves are cut into pieces that are moved one by one, and how params in files are asked for.

A param in files is no array of the compiled step. In its place stands a *ticket*: a small array of integers with
one number for each piece, sharded like the param, so that slicing a stack of layers slices its ticket. Where the
param is used, the numbers are what a host callback is asked for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zeroj.plan.memory import devices_per_host, file_bytes, shard_bytes
from zeroj.plan.rules import NVME, STACK_LIMIT, Placement

if TYPE_CHECKING:
    from zeroj.plan.plan import ParamLeaf, Plan, StateLeaf

#: Bytes of a device's optimizer state in one piece, unless sub_group_size says otherwise.
PIECE_BYTES = 64 * 2**20
#: Bytes of which buffers and files are multiples.
PAGE = 4096
#: Bytes of a device's part of one layer from which on a stack of params lies in files layer by layer.
LAYER_BYTES = 64 * 2**10


@dataclass(frozen=True)
class Cut:
    """``count`` pieces of ``size`` along ``dim``."""

    dim: int
    size: int
    count: int


def cut_along(placement: Placement, count: int) -> Cut | None:
    """The cut along an unsharded dim into the fewest equal pieces that are at least ``count``, or nearly so many.

    Args:
        placement: of the leaf.
        count: how many pieces there should be.

    Returns:
        The cut; None where one piece is enough, or no dim can be cut.
    """
    if count <= 1:
        return None
    best: Cut | None = None
    for dim, size in enumerate(placement.shape):
        if not _free(placement, dim) or size == 1:
            continue
        parts = next(d for d in range(min(count, size), size + 1) if size % d == 0)
        if best is None or (best.count < count < parts) or (count <= parts < best.count):
            best = Cut(dim, size // parts, parts)
    return best


def state_piece_bytes(plan: Plan, total: int) -> int | None:
    """Bytes of a device's state in one piece, as "sub_group_size" says it; None where it is left out.

    Args:
        plan: the plan.
        total: bytes of a device's state that is moved.
    """
    if "sub_group_size" not in plan.zero.model_fields_set:
        return None
    elements = sum(shard_bytes(plan, x.placement, x.dtype) // x.dtype.itemsize for x in plan.leaves)
    return int(plan.zero.sub_group_size * total / max(elements, 1))


def file_cuts(plan: Plan) -> dict[str, Cut | None]:
    """Path of a leaf -> how its files are cut: its param, its master, and all of its state that has its shape.

    A stack of layers whose param is in files is cut layer by layer, since that is how it is used. Any other leaf
    is cut where a device's state of it is more than one piece should have. Ask ``plan.file_cuts``, which is kept.
    """
    sizes = dict.fromkeys((leaf.path for leaf in plan.leaves), 0)
    for state in plan.state_leaves:
        if state.placement.memory == NVME and state.owner in sizes:
            sizes[state.owner] += shard_bytes(plan, state.placement, state.dtype)
    for leaf in plan.leaves:
        if leaf.trainable and plan.master_placement(leaf).memory == NVME:
            sizes[leaf.path] += shard_bytes(plan, plan.master_placement(leaf), plan.master_dtype(leaf))
    given = state_piece_bytes(plan, sum(sizes.values()))
    limit = max(PIECE_BYTES if given is None else given, 1)
    return {
        leaf.path: _layers(plan, leaf) or cut_along(leaf.placement, math.ceil(sizes[leaf.path] / limit))
        for leaf in plan.leaves
    }


def _layers(plan: Plan, leaf: ParamLeaf) -> Cut | None:
    """The cut of a stack of params in files into its layers."""
    if plan.spill_params is None or leaf.param_memory != NVME or len(leaf.placement.shape) < 3:
        return None
    layers = leaf.placement.shape[0]
    smallest = layers * min(LAYER_BYTES, plan.spill_params.smallest)
    worth = shard_bytes(plan, leaf.placement, plan.param_dtype(leaf)) >= smallest
    return Cut(0, 1, layers) if 1 < layers <= STACK_LIMIT and _free(leaf.placement, 0) and worth else None


def ticket_shape(plan: Plan, leaf: ParamLeaf) -> tuple[int, ...]:
    """The shape of a param's ticket: its number of layers, if it is cut so; along other dims, of shards."""
    placement, cut = plan.param_placement(leaf), plan.file_cuts[leaf.path]
    shape = list(parts_of(plan, placement))
    if cut is not None and by_layer(cut):
        shape[0] = cut.count
    return tuple(shape)


def held_params(plan: Plan) -> frozenset[str]:
    """Paths of params that stay in host memory under "max_in_cpu": the first ones that fit, whole leaves."""
    left = plan.spill_params.held if plan.spill_params is not None else 0
    held = set()
    for leaf in plan.leaves:
        dtype = plan.param_dtype(leaf)
        size = file_bytes(plan, plan.param_placement(leaf), dtype) // dtype.itemsize
        if leaf.param_memory == NVME and size <= left:
            held.add(leaf.path)
            left -= size
    return frozenset(held)


def param_window(plan: Plan) -> tuple[int, int]:
    """Bytes of a host's memory into which params are read ahead, and of pieces on their way to the devices.

    Each device has ``buffer_count`` buffers and one piece on its way, in whole pages.
    """
    settings, held = plan.spill_params, held_params(plan)
    away = [x for x in plan.leaves if x.param_memory == NVME and x.path not in held]
    if settings is None or not away:
        return 0, 0
    pages = lambda n: -(-n // PAGE) * PAGE  # noqa: E731
    largest = max(pages(_param_piece(plan, leaf)) for leaf in away)
    itemsize = max(plan.param_dtype(leaf).itemsize for leaf in away)
    buffer = largest if settings.buffer_size is None else pages(settings.buffer_size * itemsize)
    many = devices_per_host(plan.mesh)
    total = sum(pages(_param_piece(plan, x)) * _pieces(plan, x) for x in away)
    return min(settings.buffer_count * buffer * many, total), many * largest


def update_buffer(plan: Plan) -> int:
    """Bytes on one host of the largest piece of state in files, where the update is elementwise."""
    largest = 0
    owned: dict[str, list[StateLeaf]] = {}
    for state in plan.state_leaves:
        owned.setdefault(state.owner, []).append(state)
    for leaf in plan.leaves:
        own = owned.get(leaf.path, [])
        rows = [(s.placement, s.dtype) for s in own]
        if leaf.trainable:
            rows.append((plan.master_placement(leaf), plan.master_dtype(leaf)))
            if plan.has_master:
                rows.append((plan.param_placement(leaf), plan.param_dtype(leaf)))
        total = sum(file_bytes(plan, p, d) for p, d in rows if p.memory == NVME)
        mixed = any(not s.of and s.placement.shape for s in own)  # factored, say: read whole
        cut = None if mixed else plan.file_cuts[leaf.path]
        largest = max(largest, total // cut.count if cut else total)
    return largest


def by_layer(cut: Cut | None) -> bool:
    """Whether a param's files are one for each layer of a stack."""
    return cut is not None and cut.dim == 0 and cut.size == 1


def _param_piece(plan: Plan, leaf: ParamLeaf) -> int:
    nbytes = shard_bytes(plan, plan.param_placement(leaf), plan.param_dtype(leaf))
    cut = plan.file_cuts[leaf.path]
    return nbytes // cut.count if cut is not None and by_layer(cut) else nbytes


def _pieces(plan: Plan, leaf: ParamLeaf) -> int:
    """How many of them there are on one host, at most."""
    placement, dtype = plan.param_placement(leaf), plan.param_dtype(leaf)
    shards = file_bytes(plan, placement, dtype) // max(shard_bytes(plan, placement, dtype), 1)
    cut = plan.file_cuts[leaf.path]
    return shards * cut.count if cut is not None and by_layer(cut) else shards


def parts_of(plan: Plan, placement: Placement) -> tuple[int, ...]:
    """Into how many parts each dim of a stored array is split over devices."""
    entries = dict(placement.dims)
    model = placement.model or (None,) * len(placement.shape)
    return tuple(
        math.prod(plan.mesh.shape[axis] for axis in (*entries.get(dim, ()), *(model[dim] or ())))
        for dim in range(len(placement.shape))
    )


def _free(placement: Placement, dim: int) -> bool:
    """Whether a dim is neither sharded nor padded."""
    taken = {d for d, _ in placement.dims} | {d for d, axes in enumerate(placement.model) if axes}
    return dim not in taken and placement.padded[dim] == placement.shape[dim]
