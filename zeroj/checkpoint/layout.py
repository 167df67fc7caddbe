"""What a checkpoint holds of a training state: names, user shapes, and where each array lives in a plan.

Names are "params/<path>", "opt_state/<path>", and "step", "skipped", "scale/<field>", "rng", and
"model_state/<path>" where the model carries a state. Under LoCo "errors/<path>/<hop>" holds what every device lost
at a hop: (devices, *its buffer), in the order of the mesh, padding included; no other mesh can read it; and "feeds"
whether that counts, or stands for zeros. Params are stored as what the optimizer updates: their fp32 master where
there is one. So a checkpoint of any stage and precision has the same arrays.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from zeroj._compat import is_tracer
from zeroj.checkpoint.arrays import ArraySpec, Target, array_spec
from zeroj.collectives.frozen import unpacked
from zeroj.errors import CheckpointError, SpillError
from zeroj.plan import tree
from zeroj.plan.feedback import errors_struct
from zeroj.plan.plan import ParamLeaf, Plan, StateLeaf
from zeroj.spill.state import Spilled
from zeroj.spill.tier import SpilledArray
from zeroj.step.state import TrainState, check_settled

#: Fields of TrainState beside params and opt_state: small, and whole on every device.
SMALL_FIELDS = tuple(f for f in TrainState._fields if f not in ("params", "opt_state", "errors", "pending"))


class Stored(NamedTuple):
    """One array to be saved."""

    spec: ArraySpec
    value: jax.Array


def param_name(leaf: ParamLeaf) -> str:
    """The stored name of a param."""
    return _join("params", leaf.path)


def state_name(leaf: StateLeaf) -> str:
    """The stored name of a leaf of the optimizer's state."""
    return _join("opt_state", leaf.path)


def stored_leaves(state: TrainState, plan: Plan) -> list[Stored]:
    """All arrays of a state, in the plan's order.

    Args:
        state: the state.
        plan: its plan.

    Raises:
        CheckpointError: leaves that hold no data (abstract, deleted or donated), all of them named.
    """
    found = _param_leaves(state, plan) + _optimizer_leaves(state, plan) + _small_leaves(state)
    found += [(name, value, tuple(value.shape)) for name, value in _flat_fields({"errors": state.errors})]
    bad = [f"{name} ({_what_is_wrong(value)})" for name, value, _ in found if _what_is_wrong(value)]
    if bad:
        raise CheckpointError(
            "These leaves of the state hold no data, so nothing was saved: " + "; ".join(bad) + ". "
            "Pass the state that the last step returned."
        )
    return [Stored(array_spec(name, value, shape), value) for name, value, shape in found]


def param_targets(plan: Plan, spilled: Spilled | None = None) -> list[Target]:
    """Where the stored params go, as masters: one target per leaf of the plan.

    A master that is part of the state, or a param that is its own master, is read to its final place, memory
    kind included; any other is read sharded on the devices, for the whole param to be gathered from it.
    """
    final: list[Any] = (
        jax.tree.leaves(plan.params_struct()) if plan.stage.params else [None] * len(plan.leaves)
    )
    if plan.has_master:
        masters = plan.treedef.flatten_up_to(plan.opt_state_struct().master)
        final = [m if x.trainable else None for m, x in zip(masters, plan.leaves, strict=True)]
    final = [None if x.packed else s for x, s in zip(plan.leaves, final, strict=True)]
    targets = []
    into = spilled.updated if spilled else {}
    for i, (leaf, struct) in enumerate(zip(plan.leaves, final, strict=True)):
        placement = plan.master_placement(leaf)
        sharding = plan.sharding(placement) if struct is None else struct.sharding
        name = param_name(leaf)
        dtype = plan.master_dtype(leaf)
        targets.append(Target(name, leaf.shape, placement.padded, dtype, sharding, into.get(i)))
    return targets


def optimizer_targets(plan: Plan, spilled: Spilled | None = None) -> list[Target]:
    """Where the optimizer's inner state goes; see :func:`param_targets`."""
    into = spilled.inner if spilled else {}
    structs = jax.tree.leaves(plan.opt_state_struct().inner)
    return [
        Target(state_name(leaf), leaf.placement.shape, struct.shape, leaf.dtype, struct.sharding, into.get(i))
        for i, (leaf, struct) in enumerate(zip(plan.state_leaves, structs, strict=True))
    ]


def small_targets(plan: Plan, fields: dict[str, Any]) -> list[Target]:
    """Where counters, scales and keys go: whole on every device.

    Args:
        plan: the plan.
        fields: name of a field of TrainState -> tree of arrays or ShapeDtypeStructs.
    """
    return [
        Target(name, value.shape, value.shape, np.dtype(value.dtype), plan.replicated)
        for name, value in _flat_fields(fields)
    ]


def error_targets(plan: Plan) -> list[Target]:
    """Where the errors of quantised gradients go: each device reads its own."""
    return [
        Target(name, s.shape, s.shape, np.dtype(s.dtype), s.sharding)
        for name, s in _flat_fields({"errors": errors_struct(plan)})
    ]


def key_data(key: Any) -> tuple[Any, str]:
    """The words of a random key, and the name of its generator; empty for keys of the old, untyped kind."""
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(key), str(jax.random.key_impl(key))
    return key, ""


def _param_leaves(state: TrainState, plan: Plan) -> list[tuple[str, Any, tuple[int, ...]]]:
    check_settled(state)
    values = plan.treedef.flatten_up_to(state.params)
    values = [
        v if _what_is_wrong(v) else unpacked(plan, x, v) for v, x in zip(values, plan.leaves, strict=True)
    ]
    if plan.has_master:
        masters = plan.treedef.flatten_up_to(state.opt_state.master)
        values = [m if x.trainable else v for v, m, x in zip(values, masters, plan.leaves, strict=True)]
    return [(param_name(x), v, x.shape) for x, v in zip(plan.leaves, values, strict=True)]


def _optimizer_leaves(state: TrainState, plan: Plan) -> list[tuple[str, Any, tuple[int, ...]]]:
    values = plan.state_treedef.flatten_up_to(state.opt_state.inner)
    return [(state_name(x), v, x.placement.shape) for x, v in zip(plan.state_leaves, values, strict=True)]


def _small_leaves(state: TrainState) -> list[tuple[str, Any, tuple[int, ...]]]:
    fields = {field: getattr(state, field) for field in SMALL_FIELDS}
    for field in ("rng", "model_state"):
        fields[field] = jax.tree.map(lambda x: x if _what_is_wrong(x) else key_data(x)[0], fields[field])
    return [(name, value, tuple(value.shape)) for name, value in _flat_fields(fields)]


def _flat_fields(fields: dict[str, Any]) -> list[tuple[str, Any]]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(fields)
    return [(tree.path_str(keys), leaf) for keys, leaf in leaves]


def _join(part: str, path: str) -> str:
    return f"{part}/{path}" if path else part


def _what_is_wrong(value: Any) -> str:
    if isinstance(value, SpilledArray):
        try:
            value.tier.check(value)
        except SpillError as error:
            return str(error)
        return ""
    if not isinstance(value, jax.Array):
        return type(value).__name__
    if is_tracer(value):
        return "a tracer: save outside jit"
    return "deleted or donated" if value.is_deleted() else ""
