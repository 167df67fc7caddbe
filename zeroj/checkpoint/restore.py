"""From a checkpoint to the state of any plan, each leaf straight to its place."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zeroj.checkpoint import arrays, database
from zeroj.checkpoint.arrays import Target
from zeroj.checkpoint.assemble import assemble, first_fields, first_opt_state, master_tree, stored_params
from zeroj.checkpoint.carried import saved_errors, saved_model_state
from zeroj.checkpoint.layout import key_data, optimizer_targets, param_targets, small_targets
from zeroj.checkpoint.manifest import Leaf, Manifest
from zeroj.config.precision import LossScale
from zeroj.errors import CheckpointError
from zeroj.optimizer.birth import born_in_files
from zeroj.optimizer.zero import wrap_optimizer
from zeroj.plan.host_memory import check_host_memory
from zeroj.plan.plan import Plan
from zeroj.plan.tree import ZeroOptState
from zeroj.spill.state import Spilled, spill_to_files
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
    model_state: Any = (),
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
        model_state: what the model carries, as given to ``init_state``: its values are replaced by the saved
            ones, except with ``weights_only``.

    Raises:
        CheckpointError: what is stored does not fit the plan; lists every leaf.
    """
    check_host_memory(plan)
    spilled = spill_to_files(plan) if plan.spills else None
    masters = _masters(folder, manifest, plan, fill if partial else None, spilled)
    differing = [] if weights_only else _optimizer_faults(manifest, plan, partial)
    fresh = weights_only or bool(differing)
    if fresh and tx is None:
        raise CheckpointError("The optimizer's state starts anew here, so pass it: restore(..., tx=tx).")
    if differing:
        listed = "\n  - ".join(differing)
        warnings.warn(f"The optimizer's state starts anew; it differs at:\n  - {listed}", stacklevel=3)
    if fresh and spilled is not None:
        tx = wrap_optimizer(tx, plan).user_tx
        _, opt_state = born_in_files(tx, plan, masters.__getitem__, spilled)
    elif fresh:
        opt_state = first_opt_state(tx, plan, masters)
    else:
        inner = plan.state_treedef.unflatten(database.read(folder, optimizer_targets(plan, spilled)))
        opt_state = ZeroOptState(master_tree(plan, masters), inner)
    small = first_fields(plan, loss_scale, rng)
    if not weights_only:
        small |= _saved_fields(folder, manifest, plan)
        model_state = saved_model_state(folder, manifest, plan, model_state)
    small["model_state"] = model_state
    errors = None if weights_only else saved_errors(folder, manifest, plan)
    return assemble(plan, stored_params(plan, masters, spilled), opt_state, small, errors)


def _masters(folder: str, manifest: Manifest, plan: Plan, fill: Any, spilled: Spilled | None) -> list[Any]:
    """What the optimizer updates, one array per leaf of the plan, sharded like its state at every stage."""
    targets = param_targets(plan, spilled)
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


def _optimizer_faults(manifest: Manifest, plan: Plan, allowed: bool) -> list[str]:
    """Where the stored optimizer state is not that of the plan. One difference is enough for all of it to start
    anew: moments without their count would be wrong in silence."""
    saved = {name: leaf for name, leaf in manifest.leaves.items() if name.split("/")[0] == "opt_state"}
    faults = _faults(optimizer_targets(plan), saved)
    if faults and not allowed:
        raise CheckpointError(
            "The stored optimizer state is not that of the plan's optimizer:\n  - "
            + "\n  - ".join(faults)
            + "\nUse the optimizer that was saved, or pass partial=True (params, counters and key are restored, "
            "the optimizer starts anew) or weights_only=True."
        )
    return faults


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


def _saved_fields(folder: str, manifest: Manifest, plan: Plan) -> dict[str, Any]:
    """Counters, loss scale and key of the checkpoint. The scale, unless one of both runs is in fp16."""
    fields = first_fields(plan, None, jax.random.key(0, impl=manifest.rng or None))
    fields["rng"] = jax.eval_shape(lambda: key_data(fields["rng"])[0])
    if (plan.precision.name == "fp16") != (manifest.precision == "fp16"):
        del fields["scale"]
    found = jax.tree.unflatten(jax.tree.structure(fields), database.read(folder, small_targets(plan, fields)))
    if manifest.rng:
        found["rng"] = jax.random.wrap_key_data(found["rng"], impl=manifest.rng)
    return found
