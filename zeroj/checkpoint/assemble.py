"""From masters, one array per param, to the parts of a training state."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np

from zeroj.checkpoint.arrays import Target, place
from zeroj.checkpoint.layout import key_data
from zeroj.config.precision import LossScale
from zeroj.optimizer.update import as_params
from zeroj.optimizer.zero import first_state, params_from_masters, wrap_optimizer
from zeroj.plan import tree
from zeroj.plan.feedback import first_errors
from zeroj.plan.mesh import traced_on
from zeroj.plan.plan import Plan
from zeroj.plan.tree import ZeroOptState
from zeroj.spill.state import Spilled
from zeroj.spill.tier import is_spilled
from zeroj.step.precision import default_scaling, init_scale
from zeroj.step.state import TrainState


def master_tree(plan: Plan, masters: list[jax.Array]) -> Any:
    """What the optimizer's state holds as its master: nothing where the params are it themselves."""
    return tree.trainable_only(plan, plan.treedef.unflatten(masters)) if plan.has_master else ()


def stored_params(plan: Plan, masters: list[Any], spilled: Spilled | None = None) -> Any:
    """Stored params: the masters themselves where they are the same thing, else gathered from them.

    Args:
        plan: the plan.
        masters: one per leaf.
        spilled: the files of a plan that has some.
    """
    if spilled is not None:
        return plan.treedef.unflatten([_stored_param(plan, i, m, spilled) for i, m in enumerate(masters)])
    structs = jax.tree.leaves(plan.params_struct())
    same = [m.dtype == s.dtype and m.sharding == s.sharding for m, s in zip(masters, structs, strict=True)]
    if all(same) and not plan.has_master:
        return plan.treedef.unflatten(masters)
    shardings = plan.params
    return jax.jit(partial(params_from_masters, plan), out_shardings=shardings)(masters)


def _stored_param(plan: Plan, index: int, master: Any, spilled: Spilled) -> Any:
    """One stored param, from a master that may lie in files; in files itself where the plan says so."""
    into = spilled.params.get(index)
    if into is not None and into is master:
        return into
    leaf = plan.leaves[index]
    make = traced_on(plan.mesh, lambda x: as_params(plan, [leaf], [x]))
    shardings = [plan.sharding(plan.stored_placement(leaf))]
    value = master.to_devices() if is_spilled(master) else master
    (param,) = jax.jit(make, out_shardings=shardings)(value)
    if into is None:
        return param
    into.write(param)
    return into


def first_opt_state(tx: Any, plan: Plan, masters: list[jax.Array]) -> ZeroOptState:
    """The optimizer's state at the start of a run, in its place."""
    make = partial(first_state, wrap_optimizer(tx, plan).user_tx, plan)
    if plan.concrete_init:
        return jax.tree.map(jax.device_put, make(masters), plan.opt_state)
    return jax.jit(make, out_shardings=plan.opt_state)(masters)


def first_fields(plan: Plan, loss_scale: LossScale | None, rng: jax.Array | int) -> dict[str, Any]:
    """Counters, loss scale and key of a run that starts."""
    key = jax.random.key(rng) if isinstance(rng, int) else rng
    scale = init_scale(loss_scale or default_scaling(plan.precision.name))
    return {"step": np.int32(0), "skipped": np.int32(0), "scale": scale, "rng": key}


def assemble(
    plan: Plan, params: Any, opt_state: ZeroOptState, fields: dict[str, Any], errors: Any = None
) -> TrainState:
    """The state, its small fields brought whole to every device; LoCo's errors are zero, unless given."""
    errors = first_errors(plan) or () if errors is None else errors
    fields = fields | {"feeds": np.bool_(True) if errors else ()}
    small = {name: jax.tree.map(lambda x: _everywhere(plan, x), field) for name, field in fields.items()}
    return TrainState(params, opt_state, **small, errors=errors)


def _everywhere(plan: Plan, value: Any) -> jax.Array:
    """A small array on every device of every process, from the same value in each process."""
    if isinstance(value, jax.Array) and value.sharding == plan.replicated:
        return value
    data, generator = key_data(value)
    host = np.asarray(data)
    target = Target("", host.shape, host.shape, host.dtype, plan.replicated)
    placed = place(host, target)
    return jax.random.wrap_key_data(placed, impl=generator) if generator else placed
