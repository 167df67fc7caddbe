"""What enters the program on one device: lazy params, a slice of the batch, a key; checked against the plan."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from zeroj import _compat
from zeroj.errors import PlanError
from zeroj.gather.interpret import Interpreter
from zeroj.gather.lazy import Shard
from zeroj.gather.tokens import Gather
from zeroj.plan import tree
from zeroj.plan.cuts import ticket_shape
from zeroj.plan.feedback import fed_back
from zeroj.plan.plan import ParamLeaf, Plan
from zeroj.plan.rules import NVME, Placement

#: Elements gathered together unless the config says otherwise (stage3_prefetch_bucket_size). About one layer of
#: width 4096: with DeepSpeed's 5e7 a large matrix would have to hide behind a single small one.
DEFAULT_BUCKET = 200_000_000
#: ... and at most this part of the sharded parameters, so that a small model is not gathered all at once.
BUCKET_SHARE = 1 / 16
#: Elements that may be gathered at a time unless the config says otherwise (stage3_max_live_parameters).
DEFAULT_MAX_LIVE = 1_000_000_000


def check_params(plan: Plan, params: Any) -> list[jax.Array]:
    """The leaves of stored params, in the plan's order.

    Raises:
        PlanError: their tree or shapes are not those of the plan; lists every leaf that differs.
    """
    found, treedef = tree.flatten(params)
    planned = {leaf.path: leaf for leaf in plan.leaves}
    stored = {
        path: ticket_shape(plan, leaf) if leaf.param_memory == NVME else plan.param_placement(leaf).padded
        for path, leaf in planned.items()
    }
    missing, extra = sorted(planned.keys() - found.keys()), sorted(found.keys() - planned.keys())
    wrong = [
        f"{path}: shape {found[path].shape}, but the plan stores {plan.stored_placement(leaf).padded}"
        for path, leaf in planned.items()
        if path in found and found[path].shape not in (stored[path], plan.stored_placement(leaf).padded)
    ]
    faults = [f"missing: {p}" for p in missing] + [f"not in the plan: {p}" for p in extra] + wrong
    if faults:
        raise PlanError(
            "The params do not fit the plan:\n  - " + "\n  - ".join(faults) + "\n"
            "Make the plan from these params, and bring them into its layout with zj.shard_params(plan, params)."
        )
    if treedef != plan.treedef:
        raise PlanError(f"The params have another tree type than the plan:\n  {treedef}\n  {plan.treedef}")
    values = [entry.value for entry in found.values()]
    check_memory((x.path, v, plan.param_placement(x)) for x, v in zip(plan.leaves, values, strict=True))
    return values


def check_errors(plan: Plan, errors: Any) -> None:
    """Refuses LoCo's errors where they are in another memory than they are planned in.

    Raises:
        PlanError: names all of them.
    """
    check_memory(
        (f"errors/{x.path}/{hop}", value, x.placement.at(x.error_memory))
        for x in (fed_back(plan) if errors else [])
        for hop, value in enumerate(errors[x.path])
    )


def check_memory(arrays: Iterable[tuple[str, Any, Placement]]) -> None:
    """Refuses arrays that are in another memory than they are planned in.

    A donated array would become a result in that other memory, which ends the process on a GPU.

    Args:
        arrays: of each its path, itself (traced) and its place in the plan.

    Raises:
        PlanError: names all of them.
    """
    names = {False: "on the device", True: "in host memory"}
    wrong = [
        f"{path}: {names[here]}, planned {names[planned]}"
        for path, value, placement in arrays
        if placement.memory != NVME
        and (here := _compat.is_on_host(value)) != (planned := bool(placement.memory))
    ]
    if wrong:
        raise PlanError(
            "These arrays of the state are in another memory than they are planned in:\n  - "
            + "\n  - ".join(wrong)
            + "\nzj.reload_states(state, plan) puts them where they belong; zj.init_state makes them there."
        )


def check_batch(plan: Plan, batch: Any, accumulation: int = 1) -> int:
    """The global batch size.

    Raises:
        PlanError: leaves disagree on it, there is none, or devices x micro-batches do not divide it.
    """
    sizes = {path: leaf.shape[0] for path, leaf in tree.flatten(batch)[0].items() if leaf.shape}
    if not sizes:
        raise PlanError("The batch has no leaf with a batch dim (dim 0); every leaf is a scalar or missing.")
    if len(set(sizes.values())) > 1:
        raise PlanError(
            f"Dim 0 of every leaf of the batch must be the global batch size, but they differ: {sizes}. "
            "Broadcast what belongs to every example, or close over it in loss_fn."
        )
    size = next(iter(sizes.values()))
    axes = " x ".join(f"{axis}={plan.mesh.shape[axis]}" for axis in plan.zero_axes)
    if size % (plan.degree * accumulation):
        small = (
            f" The global batch must be at least {plan.degree * accumulation}: one example per device and "
            "micro-batch. To put less than one example on a device, use a mesh with an axis that does not "
            "split the batch, such as zj.make_mesh(local=1, model=8)."
            if size < plan.degree * accumulation
            else ""
        )
        raise PlanError(
            f"The global batch size {size} (leaves: {sizes}) is not divisible by {plan.degree} devices "
            f"({axes}) x {accumulation} micro-batches = {plan.degree * accumulation}.{small}"
        )
    return size


def batch_specs(plan: Plan, batch: Any) -> Any:
    """PartitionSpecs of a batch: dim 0 over the ZeRO axes, scalars whole."""
    return jax.tree.map(lambda x: PartitionSpec(plan.zero_axes) if np.ndim(x) else PartitionSpec(), batch)


def whole_struct(plan: Plan, leaf: ParamLeaf) -> jax.ShapeDtypeStruct:
    """A leaf as the loss sees it: the user's shape, the compute dtype."""
    return jax.ShapeDtypeStruct(leaf.shape, plan.precision.compute(leaf.dtype))


def lazy_leaves(plan: Plan, leaves: list[jax.Array]) -> list[Any]:
    """Sharded leaves as lazy shards in the compute dtype; whole ones as they are, cast."""
    out: list[Any] = []
    for leaf, array in zip(plan.leaves, leaves, strict=True):
        dtype = plan.precision.compute(leaf.dtype)
        placement = plan.param_placement(leaf)
        waits = placement.sharded or placement.memory
        out.append(Shard(array, placement, dtype, leaf.path) if waits else array.astype(dtype))
    return out


def interpreter(plan: Plan, gather: Gather) -> Interpreter:
    """The walker of programs, with the plan's look-ahead and reuse settings."""
    given = plan.zero.model_fields_set
    bucket = plan.zero.stage3_prefetch_bucket_size if "stage3_prefetch_bucket_size" in given else None
    live = plan.zero.stage3_max_live_parameters if "stage3_max_live_parameters" in given else None
    reuse = plan.zero.stage3_max_reuse_distance if "stage3_max_reuse_distance" in given else 0
    return Interpreter(
        gather,
        _default_bucket(plan) if bucket is None else int(bucket),
        int(reuse or 0),
        DEFAULT_MAX_LIVE if live is None else int(live),
    )


def _default_bucket(plan: Plan) -> int:
    placements = [plan.param_placement(leaf) for leaf in plan.leaves]
    sharded = sum(math.prod(p.shape) for p in placements if p.sharded)
    return min(DEFAULT_BUCKET, int(sharded * BUCKET_SHARE))
