"""Moving a training state to host memory and back between steps: the devices are free for something else."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import jax

from zeroj.errors import PlanError
from zeroj.plan.feedback import errors_struct
from zeroj.plan.offload import host_kind
from zeroj.plan.plan import Plan
from zeroj.spill.tier import is_spilled
from zeroj.step.state import TrainState, check_settled

#: What may be moved, under the names of :class:`zeroj.MemoryReport`.
PARTS = ("params", "master", "opt_state", "errors")


def offload_states(state: TrainState, include: Collection[str] = PARTS) -> TrainState:
    """Moves parts of a state to page-locked host memory, until :func:`reload_states`.

    For runs that train and generate in turn. Arrays are moved one by one; each is freed on the device as soon as
    nothing else refers to it, so bind the result to the name that the old state had. Scalars stay, and so does
    what a plan with offload keeps in host memory anyway. Steps refuse the state while it is away.

    Args:
        state: the state.
        include: among "params", "master", "opt_state" and "errors" (LoCo's); left out, all of them.

    Returns:
        The state, with the same values.

    Raises:
        PlanError: an unknown name, or devices without such memory.

    Example:
        >>> state = zj.offload_states(state)
        >>> generate()
        >>> state = zj.reload_states(state, plan)
    """
    check_settled(state)
    unknown = sorted(set(include) - set(PARTS))
    if unknown:
        raise PlanError(f"include names {unknown}; what can be moved is {list(PARTS)}.")

    def away(part: str, tree: Any) -> Any:
        return jax.tree.map(_to_host, tree) if part in include else tree

    held = state.opt_state
    moved = held._replace(master=away("master", held.master), inner=away("opt_state", held.inner))
    errors = away("errors", state.errors)
    return state._replace(params=away("params", state.params), opt_state=moved, errors=errors)


def reload_states(state: TrainState, plan: Plan) -> TrainState:
    """Brings a state back to where its plan keeps it.

    Args:
        state: what :func:`offload_states` returned; parts that were not moved are left as they are.
        plan: the plan that the state was made with.

    Returns:
        The state, with the same values, as the steps take it.
    """
    params = jax.tree.map(_to, state.params, plan.params)
    opt_state = jax.tree.map(_to, state.opt_state, plan.opt_state)
    places = jax.tree.map(lambda s: s.sharding, errors_struct(plan)) if state.errors else ()
    return state._replace(params=params, opt_state=opt_state, errors=jax.tree.map(_to, state.errors, places))


def _to_host(value: Any) -> Any:
    if is_spilled(value):
        return value  # what lies in files is on no device anyway
    kind = host_kind(getattr(value.sharding, "mesh", None))
    if value.ndim == 0 or value.sharding.memory_kind == kind:
        return value
    return jax.device_put(value, value.sharding.with_memory_kind(kind))


def _to(value: Any, sharding: Any) -> Any:
    if is_spilled(value):
        return value
    device: Any = next(iter(value.sharding.device_set))
    there = sharding.memory_kind or device.default_memory().kind
    return value if value.sharding.memory_kind == there else jax.device_put(value, sharding)
