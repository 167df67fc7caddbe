"""One update of all leaves at once, on global arrays in the user's shapes.

The transformation runs under ``jit``, outside ``shard_map``: a global norm, a factored mean or a
Newton-Schulz iteration is over the whole array, whatever its layout. Stored arrays may be padded; the padding
is cut off before the transformation sees them and put back after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from zeroj import _compat
from zeroj.collectives import frozen, plain
from zeroj.plan.plan import ParamLeaf, Plan
from zeroj.plan.rules import Placement


class Arrays(NamedTuple):
    """What an update changes.

    Attributes:
        params: stored params, of trainable leaves.
        masters: what is updated: their fp32 masters, or the same params where those are their own.
        inner: the leaves of the transformation's state.
    """

    params: list[jax.Array]
    masters: list[jax.Array]
    inner: list[jax.Array]


def at_once(
    tx: optax.GradientTransformationExtraArgs,
    plan: Plan,
    arrays: Arrays,
    grads: list[jax.Array],
    applied: jax.Array | None,
    extra: dict[str, Any],
) -> Arrays:
    """The update of a plan whose state is all on the device; see :func:`updated`."""
    masters, inner = updated(tx, plan, arrays.masters, grads, arrays.inner, applied, extra)
    live = [leaf for leaf in plan.leaves if leaf.trainable]
    return Arrays(as_params(plan, live, masters), masters, inner)


def updated(
    tx: optax.GradientTransformationExtraArgs,
    plan: Plan,
    masters: list[jax.Array],
    grads: list[jax.Array],
    inner: list[jax.Array],
    applied: jax.Array | None,
    extra: dict[str, Any],
) -> tuple[list[jax.Array], list[jax.Array]]:
    """One update of stored arrays on the device. Returns the new masters and the new state, as lists.

    Args:
        tx: the user's transformation.
        plan: where everything lives; memory kinds are not looked at.
        masters: what is updated, one array per trainable leaf: the fp32 master, or the stored param.
        grads: their gradients.
        inner: the leaves of the transformation's state.
        applied: bool scalar; where it is False everything stays as it is. None: the update is always made.
        extra: passed on to ``tx.update``.
    """
    live = [leaf for leaf in plan.leaves if leaf.trainable]
    before = unflatten(plan, master_views(plan, live, masters))
    seen = [
        as_dtype(plain.unpad(g, plan.grad_placement(leaf)), plan.precision.seen(leaf.dtype))
        for leaf, g in zip(live, grads, strict=True)
    ]
    inner_before = load_state(plan, plan.state_treedef.unflatten(inner))
    updates, after = tx.update(unflatten(plan, seen), inner_before, before, **extra)
    new = optax.apply_updates(before, updates)
    if applied is not None:
        new, after = jax.tree.map(
            lambda new, old: jnp.where(applied, new, old), (new, after), (before, inner_before)
        )
    shards = store(plan, [(plan.master_placement(x), plan.master_dtype(x)) for x in live], flatten(plan, new))
    return shards, plan.state_treedef.flatten_up_to(store_state(plan, after))


def unflatten(plan: Plan, live: list[Any]) -> Any:
    """The tree of params from values of its trainable leaves; frozen ones are ``optax.MaskedNode``."""
    rest = iter(live)
    return plan.treedef.unflatten(
        [next(rest) if leaf.trainable else optax.MaskedNode() for leaf in plan.leaves]
    )


def flatten(plan: Plan, tree: Any) -> list[Any]:
    """Undoes :func:`unflatten`."""
    return [
        v for v, leaf in zip(plan.treedef.flatten_up_to(tree), plan.leaves, strict=True) if leaf.trainable
    ]


def store_state(plan: Plan, inner: Any) -> Any:
    """The transformation's state in stored shapes and in its place."""
    flat = plan.state_treedef.flatten_up_to(inner)
    stored = store(plan, [(s.placement, s.dtype) for s in plan.state_leaves], flat)
    return plan.state_treedef.unflatten(stored)


def load_state(plan: Plan, inner: Any) -> Any:
    """The transformation's state in the shapes that it knows."""
    flat = plan.state_treedef.flatten_up_to(inner)
    seen = [plain.unpad(v, s.placement) for s, v in zip(plan.state_leaves, flat, strict=True)]
    return plan.state_treedef.unflatten(seen)


def params_from_masters(plan: Plan, shards: list[Any], old: list[Any] | None = None) -> Any:
    """Stored params from masters: the masters themselves, or gathered whole in the compute dtype.

    Args:
        plan: the plan.
        shards: one master per leaf.
        old: stored params from which frozen leaves are taken; left out, they come from ``shards`` too.
    """
    live = [i for i, leaf in enumerate(plan.leaves) if leaf.trainable or old is None]
    new = list(shards if old is None else old)
    leaves = [plan.leaves[i] for i in live]
    for i, value in zip(live, as_params(plan, leaves, [shards[i] for i in live]), strict=True):
        new[i] = value
    return plan.treedef.unflatten(new)


def as_params(plan: Plan, leaves: list[ParamLeaf], shards: list[jax.Array]) -> list[jax.Array]:
    """Stored params of these leaves from their masters."""
    cast = [
        on_device(s, plan.master_placement(x)).astype(plan.param_dtype(x))
        for s, x in zip(shards, leaves, strict=True)
    ]
    if plan.stage.params or not plan.stage.opt_state:
        return [frozen.pack(plan, x, v) if x.packed else v for x, v in zip(leaves, cast, strict=True)]
    placements = [plan.master_placement(leaf) for leaf in leaves]
    return jax.shard_map(
        lambda values: [plain.gather(v, p) for v, p in zip(values, placements, strict=True)],
        mesh=plan.mesh,
        in_specs=([p.zero_spec for p in placements],),
        out_specs=[p.whole().zero_spec for p in placements],
        axis_names=set(plan.zero_axes),
        check_vma=False,
    )(cast)


def on_device(value: jax.Array, placement: Placement) -> jax.Array:
    """A stored array, brought to the device if it lives elsewhere."""
    away = placement.memory and _compat.is_on_host(value)
    return jax.device_put(value, jax.memory.Space.Device) if away else value


def master_views(plan: Plan, leaves: Sequence[ParamLeaf], values: Sequence[jax.Array]) -> list[jax.Array]:
    """Params or masters as the optimizer sees them: user shapes, the masters' dtype, sharded as their state."""
    placements = [plan.master_placement(leaf) for leaf in leaves]
    whole = []
    for leaf, placement, value in zip(leaves, placements, values, strict=True):
        value = frozen.unpack(plan, leaf, value) if leaf.packed and value.dtype == jnp.int8 else value
        whole.append(plain.pad(value, placement) if value.shape == leaf.shape else value)
    return [
        as_dtype(plain.unpad(value, placement), plan.master_dtype(leaf))
        for leaf, placement, value in zip(leaves, placements, _placed(plan, placements, whole), strict=True)
    ]


def store(plan: Plan, places: Sequence[tuple[Placement, np.dtype]], values: Sequence[Any]) -> list[jax.Array]:
    """Values in their stored shapes and dtypes, sharded, on the device."""
    padded = [plain.pad(as_dtype(v, dtype), p) for (p, dtype), v in zip(places, values, strict=True)]
    return _placed(plan, [placement for placement, _ in places], padded)


def _placed(plan: Plan, placements: Sequence[Placement], values: list[jax.Array]) -> list[jax.Array]:
    """All arrays constrained in one call, which is traced faster than one for each."""
    shardings = [plan.sharding(placement.at("")) for placement in placements]
    return jax.lax.with_sharding_constraint(values, shardings)


def as_dtype(value: Any, dtype: np.dtype) -> jax.Array:
    """The value as an array of this dtype; one that is so already costs a trace nothing."""
    return value if isinstance(value, jax.Array) and value.dtype == dtype else jnp.asarray(value, dtype)
