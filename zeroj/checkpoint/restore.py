"""From a checkpoint to the state of any plan, each leaf straight to its place."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zeroj.checkpoint import arrays, database
from zeroj.checkpoint.arrays import Target
from zeroj.checkpoint.layout import key_data, optimizer_targets, param_targets, small_targets
from zeroj.checkpoint.manifest import Leaf, Manifest
from zeroj.config.precision import LossScale
from zeroj.errors import CheckpointError
from zeroj.optimizer.zero import first_state, params_from_masters, wrap_optimizer
from zeroj.plan import tree
from zeroj.plan.plan import Plan
from zeroj.plan.tree import ZeroOptState
from zeroj.step.precision import default_scaling, init_scale
from zeroj.step.state import TrainState


def restore_state(
    folder: str,
    manifest: Manifest,
    plan: Plan,
    *,
    tx: Any = None,
    partial: bool = False,
    weights_only: bool = False,
    fill: Any = None,
    loss_scale: LossScale | None = None,
    rng: jax.Array | int = 0,
) -> TrainState:
    """Reads the state in ``folder`` into the layout of ``plan``.

    Args:
        folder: where the arrays lie.
        manifest: their description.
        plan: the plan.
        tx: the optimizer; needed only where its state starts anew.
        partial: whether to go on with what fits: the optimizer's state starts anew if it is another
            optimizer's, params that are not in the checkpoint come from ``fill``. A warning lists all of it.
        weights_only: whether to take the params alone: masters are derived from them, the optimizer's state,
            counters and loss scale start anew.
        fill: params in the user's shapes for leaves that the checkpoint lacks; only with ``partial``.
        loss_scale: the loss scaler's settings, for when its state is not the checkpoint's.
        rng: the key or seed, with ``weights_only``.

    Raises:
        CheckpointError: what is stored does not fit the plan; lists every leaf.
    """
    masters = _masters(folder, manifest, plan, fill if partial else None)
    fresh = weights_only or _optimizer_differs(manifest, plan, partial)
    if fresh and tx is None:
        raise CheckpointError("The optimizer's state starts anew here, so pass it: restore(..., tx=tx).")
    if fresh:
        opt_state = _first_opt_state(tx, plan, masters)
    else:
        inner = plan.state_treedef.unflatten(database.read(folder, optimizer_targets(plan)))
        opt_state = ZeroOptState(_master_tree(plan, masters), inner)
    params = _params(plan, masters)
    small = _fresh_fields(plan, loss_scale, rng)
    if not weights_only:
        small |= _saved_fields(folder, manifest, plan)
    small = {k: jax.tree.map(lambda x: jax.device_put(x, plan.replicated), v) for k, v in small.items()}
    return TrainState(params, opt_state, **small)


def _masters(folder: str, manifest: Manifest, plan: Plan, fill: Any) -> list[jax.Array]:
    """What the optimizer updates, one array per leaf of the plan, sharded like its state at every stage."""
    targets = param_targets(plan)
    saved = {name: leaf for name, leaf in manifest.leaves.items() if name.split("/")[0] == "params"}
    faults = _faults(targets, saved)
    missing = [t for t in targets if t.name not in saved]
    if fill is not None and missing:
        known = {t.name for t in missing}
        faults = [f for f in faults if f.split(":")[0] not in known]
        warnings.warn("Not in the checkpoint, taken from fill: " + ", ".join(sorted(known)), stacklevel=4)
    if faults:
        raise CheckpointError(
            f"The params of the checkpoint in {folder} do not fit the plan:\n  - "
            + "\n  - ".join(faults)
            + "\n"
            "Make the plan from the params that were saved, or fill missing ones: partial=True, fill=params."
        )
    found = database.read(folder, [t for t in targets if t.name in saved])
    filling = plan.treedef.flatten_up_to(fill) if fill is not None else [None] * len(targets)
    return [
        next(found) if t.name in saved else arrays.place(np.asarray(value), t)
        for t, value in zip(targets, filling, strict=True)
    ]


def _optimizer_differs(manifest: Manifest, plan: Plan, allowed: bool) -> bool:
    """Whether the stored optimizer state is not that of the plan. All or nothing: moments without their count
    would be wrong in silence."""
    saved = {name: leaf for name, leaf in manifest.leaves.items() if name.split("/")[0] == "opt_state"}
    faults = _faults(optimizer_targets(plan), saved)
    if faults and not allowed:
        raise CheckpointError(
            "The stored optimizer state is not that of the plan's optimizer:\n  - "
            + "\n  - ".join(faults)
            + "\n"
            "Use the optimizer that was saved, or pass partial=True (params, counters and key are restored, "
            "the optimizer starts anew) or weights_only=True."
        )
    if faults:
        warnings.warn(
            "The optimizer's state starts anew; it differs at:\n  - " + "\n  - ".join(faults), stacklevel=4
        )
    return bool(faults)


def _faults(targets: list[Target], saved: dict[str, Leaf]) -> list[str]:
    planned = {t.name: t for t in targets}
    faults = [f"{name}: planned {planned[name].shape}, not saved" for name in planned.keys() - saved.keys()]
    faults += [f"{name}: saved {saved[name].shape}, not planned" for name in saved.keys() - planned.keys()]
    for name in planned.keys() & saved.keys():
        if planned[name].shape != saved[name].shape:
            faults.append(f"{name}: saved {saved[name].shape}, planned {planned[name].shape}")
        elif not _castable(saved[name].dtype, planned[name].dtype):
            faults.append(f"{name}: saved as {saved[name].dtype}, planned as {planned[name].dtype}")
    return sorted(faults)


def _castable(saved: str, planned: np.dtype) -> bool:
    """Whether values of one dtype mean the same in the other: floats in floats, integers in integers."""
    if jnp.dtype(saved) == planned:
        return True
    kinds = (jnp.floating, jnp.complexfloating, jnp.signedinteger, jnp.unsignedinteger)
    return any(jnp.issubdtype(saved, kind) and jnp.issubdtype(planned, kind) for kind in kinds)


def _master_tree(plan: Plan, masters: list[jax.Array]) -> Any:
    return tree.trainable_only(plan, plan.treedef.unflatten(masters)) if plan.has_master else ()


def _params(plan: Plan, masters: list[jax.Array]) -> Any:
    """Stored params: the masters themselves where they are the same thing, else gathered from them."""
    structs = jax.tree.leaves(plan.params_struct())
    same = [m.dtype == s.dtype and m.sharding == s.sharding for m, s in zip(masters, structs, strict=True)]
    if all(same) and not plan.has_master:
        return plan.treedef.unflatten(masters)
    shardings = plan.params
    return jax.jit(partial(params_from_masters, plan), out_shardings=shardings)(masters)


def _first_opt_state(tx: Any, plan: Plan, masters: list[jax.Array]) -> ZeroOptState:
    make = partial(first_state, wrap_optimizer(tx, plan).user_tx, plan)
    if plan.concrete_init:
        return jax.tree.map(jax.device_put, make(masters), plan.opt_state)
    return jax.jit(make, out_shardings=plan.opt_state)(masters)


def _fresh_fields(plan: Plan, loss_scale: LossScale | None, rng: jax.Array | int) -> dict[str, Any]:
    """Counters, loss scale and key of a run that starts."""
    key = jax.random.key(rng) if isinstance(rng, int) else rng
    scale = init_scale(loss_scale or default_scaling(plan.precision.name))
    return {"step": np.int32(0), "skipped": np.int32(0), "scale": scale, "rng": key}


def _saved_fields(folder: str, manifest: Manifest, plan: Plan) -> dict[str, Any]:
    """Counters, loss scale and key of the checkpoint. The scale only between two runs in fp16."""
    fields = _fresh_fields(plan, None, jax.random.key(0, impl=manifest.rng or None))
    fields["rng"] = jax.eval_shape(lambda: key_data(fields["rng"])[0])
    if not plan.precision.name == manifest.precision == "fp16":
        del fields["scale"]
    found = jax.tree.unflatten(jax.tree.structure(fields), database.read(folder, small_targets(plan, fields)))
    if manifest.rng:
        found["rng"] = jax.random.wrap_key_data(found["rng"], impl=manifest.rng)
    return found
