"""Reading and writing single leaves of a state by path: params, gradients, optimizer state; whole or by shard."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from zeroj.collectives import frozen, plain
from zeroj.errors import PlanError
from zeroj.plan import tree
from zeroj.plan.plan import ParamLeaf, Plan
from zeroj.plan.rules import Placement
from zeroj.spill.tier import is_spilled
from zeroj.step.state import TrainState, check_settled, fetch, place_array

#: PyTorch's names of optimizer state, and optax's.
ALIASES = {"exp_avg": "mu", "exp_avg_sq": "nu", "momentum_buffer": "trace", "sum": "sum_of_squares"}


@dataclasses.dataclass(frozen=True)
class LocalShard:
    """What one device of this process holds of a leaf.

    Attributes:
        device: the device.
        index: which elements of the leaf in the user's shape, as a tuple of slices.
        data: their values; empty where the shard is padding alone.
    """

    device: jax.Device
    index: tuple[slice, ...]
    data: np.ndarray


@dataclasses.dataclass(frozen=True)
class _Slot:
    """One stored array of a state: what it is, in which list of arrays, and where in it."""

    array: jax.Array
    placement: Placement
    part: str
    index: int


def get_full(state: Any, plan: Plan, path: str, what: str = "param") -> np.ndarray:
    """One leaf, whole, on the host. Every process must call it; each gets the whole.

    Args:
        state: a :class:`zeroj.TrainState`; for ``what="grad"`` gradients in the layout of ``plan.grads``, as
            :func:`zeroj.value_and_grad` returns them.
        plan: its plan.
        path: the leaf's path in the user's tree, such as "blocks/0/kernel".
        what: "param" (the fp32 master where there is one), "grad", or the name of the leaf's optimizer state:
            "mu", "nu", PyTorch's "exp_avg", "exp_avg_sq", or more of its path ("0/mu") where one is not enough.

    Returns:
        A numpy array in the user's shape and the stored dtype, which may be written to without an effect.

    Raises:
        PlanError: there is no such leaf or state; lists what there is.

    Example:
        >>> zj.get_full(state, plan, "blocks/0/kernel", "exp_avg")
    """
    slot = _slot(state, plan, path, what)
    whole = fetch(plan, slot.array)[tuple(slice(0, n) for n in slot.placement.shape)]
    return np.array(whole)


def set_full(state: Any, plan: Plan, path: str, value: Any, what: str = "param") -> Any:
    """The state with one leaf replaced. Every process must call it with the same value.

    Args:
        state: as for :func:`get_full`.
        plan: its plan.
        path: the leaf's path.
        value: an array in the user's shape; cast to the stored dtype.
        what: as for :func:`get_full`. With "param" the master and the params computed from it both change.

    Returns:
        The new state; the old one stays as it was.

    Raises:
        PlanError: there is no such leaf, or the value has another shape.
    """
    slot = _on_devices(_slot(state, plan, path, what), path, what)
    found = np.asarray(value)
    if found.shape != slot.placement.shape:
        raise PlanError(f"{path} ({what}) has shape {slot.placement.shape}; the new value has {found.shape}.")
    array = place_array(found, slot.placement, np.dtype(slot.array.dtype), slot.array.sharding)
    return _with(state, plan, slot, array)


def get_local(state: Any, plan: Plan, path: str, what: str = "param") -> list[LocalShard]:
    """What this process's devices hold of one leaf. Involves no other process.

    Args:
        state: as for :func:`get_full`.
        plan: its plan.
        path: the leaf's path.
        what: as for :func:`get_full`.
    """
    slot = _on_devices(_slot(state, plan, path, what), path, what)
    return [
        LocalShard(
            shard.device, index, np.asarray(shard.data)[tuple(slice(0, i.stop - i.start) for i in index)]
        )
        for shard in slot.array.addressable_shards
        for index in [_clip(shard.index, slot.placement)]
    ]


def set_local(state: Any, plan: Plan, path: str, shards: Sequence[LocalShard], what: str = "param") -> Any:
    """The state with some of this process's shards of a leaf replaced. Every process must call it.

    Args:
        state: as for :func:`get_full`.
        plan: its plan.
        path: the leaf's path.
        shards: new values, with device and index as :func:`get_local` returned them. Where several devices hold
            the same elements, one shard is enough for those of this process.
        what: as for :func:`get_full`.

    Raises:
        PlanError: a shard is not one of the leaf's, or has another shape.
    """
    slot = _on_devices(_slot(state, plan, path, what), path, what)
    given = {str(shard.index): np.asarray(shard.data) for shard in shards}
    parts = []
    for stored in slot.array.addressable_shards:
        index = _clip(stored.index, slot.placement)
        new = given.get(str(index))
        part = stored.data
        if new is not None:
            inside = tuple(slice(0, i.stop - i.start) for i in index)
            whole = np.array(stored.data)
            if new.shape != whole[inside].shape:
                raise PlanError(
                    f"{path} ({what}): the shard at {index} has shape {whole[inside].shape}, not {new.shape}."
                )
            whole[inside] = new
            part = jax.device_put(whole, stored.data.sharding)
        parts.append((str(index), part))
    unknown = given.keys() - {index for index, _ in parts}
    if unknown:
        raise PlanError(f"{path} ({what}): this process holds no shard at {sorted(unknown)}.")
    array = jax.make_array_from_single_device_arrays(
        slot.array.shape, slot.array.sharding, [part for _, part in parts]
    )
    return _with(state, plan, slot, array)


class Gathered(dict[str, np.ndarray]):
    """Whole leaves by path, to be read and written to; ``state`` is the new state after the block."""

    state: Any = None


@contextlib.contextmanager
def gathered(
    state: TrainState, plan: Plan, paths: str | Iterable[str], what: str = "param"
) -> Iterator[Gathered]:
    """Gathers leaves for a block of code, and writes them back at its end. Every process must enter it.

    With several processes those values are written that process 0 has at the end of the block, so that no two
    processes can disagree. An exception in the block leaves the state as it was.

    Args:
        state: the state.
        plan: its plan.
        paths: paths of leaves, or prefixes of paths: "blocks/0" is everything below it.
        what: as for :func:`get_full`.

    Yields:
        A dict from path to numpy array. After the block its ``state`` is the new state.

    Raises:
        PlanError: no leaf has such a path; or at the end, an array has another shape or an unknown path.

    Example:
        >>> with zj.gathered(state, plan, ["embed"]) as leaves:
        ...     leaves["embed"][pad_id] = 0
        >>> state = leaves.state
    """
    paths = [paths] if isinstance(paths, str) else list(paths)
    for path in paths:
        if not any(map(tree.path_predicate([path]), (leaf.path for leaf in plan.leaves))):
            raise PlanError(_unknown(plan, path))
    chosen = [leaf.path for leaf in plan.leaves if tree.path_predicate(paths)(leaf.path)]
    leaves = Gathered({path: get_full(state, plan, path, what) for path in chosen})
    yield leaves
    if set(leaves) != set(chosen):
        raise PlanError(f"gathered {sorted(chosen)}, but at the end of the block there are {sorted(leaves)}.")
    for path in chosen:
        value = leaves[path]
        if jax.process_count() > 1:
            value = multihost_utils.broadcast_one_to_all(value)
        state = set_full(state, plan, path, value, what)
    leaves.state = state


def _slot(state: Any, plan: Plan, path: str, what: str) -> _Slot:
    """Finds the stored array that ``path`` and ``what`` name."""
    leaf = next((leaf for leaf in plan.leaves if leaf.path == path), None)
    if leaf is None:
        raise PlanError(_unknown(plan, path))
    index = plan.leaves.index(leaf)
    if what == "grad":
        if isinstance(state, TrainState):
            raise PlanError("A TrainState holds no gradients: pass what zj.value_and_grad returned.")
        if not leaf.trainable:
            raise PlanError(f"{path} is frozen, so it has no gradient.")
        return _Slot(plan.treedef.flatten_up_to(state)[index], plan.grad_placement(leaf), "grads", index)
    if not isinstance(state, TrainState):
        raise PlanError(f"For {what!r} pass a TrainState, not a {type(state).__name__}.")
    check_settled(state)
    if what != "param":
        return _state_slot(state, plan, leaf, what)
    if plan.has_master and leaf.trainable:
        master = plan.treedef.flatten_up_to(state.opt_state.master)[index]
        return _Slot(master, plan.master_placement(leaf), "master", index)
    param = frozen.unpacked(plan, leaf, plan.treedef.flatten_up_to(state.params)[index])
    return _Slot(param, plan.param_placement(leaf), "params", index)


def _on_devices(slot: _Slot, path: str, what: str) -> _Slot:
    """Raises where the array lies in files, which only whole leaves can be read from."""
    if is_spilled(slot.array):
        raise PlanError(
            f"{path} ({what}) lies in files (an offload section has device nvme): get_full reads it, and nothing "
            "else reaches it. To change it, restore a checkpoint onto a plan without files and save it again."
        )
    return slot


def _state_slot(state: TrainState, plan: Plan, leaf: ParamLeaf, what: str) -> _Slot:
    """The optimizer's state of a leaf by name: the part of its path before the leaf's own, or the end of it."""
    wanted, found = ALIASES.get(what, what), {}
    for index, entry in enumerate(plan.state_leaves):
        name = entry.path.removesuffix("/" + leaf.path)
        longest = max(
            (x.path for x in plan.leaves if entry.path.endswith("/" + x.path)), key=len, default=None
        )
        if name != entry.path and (entry.of or longest) == leaf.path:
            found[name] = index
    matching = [name for name in found if name == wanted or name.endswith("/" + wanted)]
    if len(matching) != 1:
        which = f"several: {matching}" if matching else "none"
        raise PlanError(
            f"The optimizer's state of {leaf.path} named {what!r}: {which}. There is: {sorted(found)}."
        )
    index = found[matching[0]]
    arrays = plan.state_treedef.flatten_up_to(state.opt_state.inner)
    return _Slot(arrays[index], plan.state_leaves[index].placement, "inner", index)


def _with(state: Any, plan: Plan, slot: _Slot, array: jax.Array) -> Any:
    """The state with another array in a slot, and what is computed from it."""

    def put(treedef: Any, old: Any, new: jax.Array) -> Any:
        arrays = treedef.flatten_up_to(old)
        arrays[slot.index] = new
        return treedef.unflatten(arrays)

    if slot.part == "grads":
        return put(plan.treedef, state, array)
    if slot.part == "params":
        if plan.leaves[slot.index].packed:
            array = frozen.packed(plan, plan.leaves[slot.index], array)
        return state._replace(params=put(plan.treedef, state.params, array))
    if slot.part == "inner":
        inner = put(plan.state_treedef, state.opt_state.inner, array)
        return state._replace(opt_state=state.opt_state._replace(inner=inner))
    leaf = plan.leaves[slot.index]
    old, placement = plan.treedef.flatten_up_to(state.params)[slot.index], plan.param_placement(leaf)
    if is_spilled(old):
        raise PlanError(
            f"{leaf.path} lies in files (offload_param.device is nvme), and cannot be changed there."
        )
    derive = jax.jit(
        lambda x: plain.pad(plain.unpad(x, slot.placement), placement).astype(old.dtype),
        out_shardings=old.sharding,
    )
    master = put(plan.treedef, state.opt_state.master, array)
    opt_state = state.opt_state._replace(master=master)
    return state._replace(opt_state=opt_state, params=put(plan.treedef, state.params, derive(array)))


def _clip(index: tuple[slice, ...], placement: Placement) -> tuple[slice, ...]:
    """Which elements of the user's shape a stored shard holds; its padding left out."""
    clipped = []
    for part, n in zip(index, placement.shape, strict=True):
        start, stop, _ = part.indices(max(n, part.stop or 0))
        clipped.append(slice(min(start, n), min(stop, n)))
    return tuple(clipped)


def _unknown(plan: Plan, path: str) -> str:
    paths = [leaf.path for leaf in plan.leaves]
    near = difflib.get_close_matches(path, paths, n=3, cutoff=0.4) or paths[:10]
    return f"There is no leaf {path!r} among the {len(paths)} of the plan. Near it: {', '.join(near)}."
