"""Any optax transformation over sharded state: it sees global arrays in the user's shapes.

The transformation runs under ``jit``, outside ``shard_map``: a global norm, a factored mean or a
Newton-Schulz iteration is over the whole array, whatever its layout. Stored arrays may be padded; the padding
is cut off before the transformation sees them and put back after it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from zeroj.collectives import plain
from zeroj.errors import PlanError
from zeroj.plan import tree
from zeroj.plan.mesh import traced_on
from zeroj.plan.plan import ParamLeaf, Plan, check_tx
from zeroj.plan.rules import Placement
from zeroj.plan.tree import ZeroOptState


class ZeroOptimizer(optax.GradientTransformationExtraArgs):
    """An optax transformation whose state lives as a plan says; made by :func:`wrap_optimizer`.

    Attributes:
        user_tx: the user's transformation.
        plan: the plan.
    """

    user_tx: optax.GradientTransformationExtraArgs
    plan: Plan


def wrap_optimizer(tx: optax.GradientTransformation, plan: Plan) -> ZeroOptimizer:
    """Makes ``tx`` keep its state, and an fp32 master where one is needed, where the plan says.

    Args:
        tx: the transformation that the plan was made with.
        plan: the plan.

    Returns:
        A ``GradientTransformationExtraArgs`` on stored params and gradients in the layout of ``plan.grads``.
        Its ``init`` gives a :class:`ZeroOptState`; jit it with ``out_shardings=plan.opt_state``.

    Raises:
        PlanError: the state of ``tx`` is not the one in the plan.

    Example:
        >>> tx = zj.wrap_optimizer(optax.adamw(1e-3), plan)
        >>> opt_state = jax.jit(tx.init, out_shardings=plan.opt_state)(params)
    """
    if isinstance(tx, ZeroOptimizer):
        if tx.plan is not plan:
            raise PlanError("tx is already wrapped for another plan; wrap the bare optax optimizer again.")
        return tx
    check_tx(tx)
    user_tx = optax.with_extra_args_support(tx)
    _check_state(user_tx, plan)

    def init(params: Any) -> ZeroOptState:
        return first_state(user_tx, plan, masters_of(plan, params))

    def update(grads: Any, state: ZeroOptState, params: Any = None, **extra: Any) -> tuple[Any, ZeroOptState]:
        if params is None:
            raise PlanError("Pass the params: tx.update(grads, opt_state, params).")
        new_params, new_state = apply_gradients(user_tx, plan, grads, state, params, **extra)
        return _differences(plan, new_params, params), new_state

    wrapped = ZeroOptimizer(traced_on(plan.mesh, init), traced_on(plan.mesh, update))
    wrapped.user_tx, wrapped.plan = user_tx, plan
    return wrapped


def masters_of(plan: Plan, params: Any) -> list[jax.Array]:
    """What the optimizer updates, one array per leaf, from stored params or params in the user's shapes."""
    flat = plan.treedef.flatten_up_to(params)
    return [
        _store(plan, plan.master_placement(leaf), _master_view(plan, leaf, value), plan.master_dtype(leaf))
        for leaf, value in zip(plan.leaves, flat, strict=True)
    ]


def first_state(tx: optax.GradientTransformation, plan: Plan, masters: list[jax.Array]) -> ZeroOptState:
    """The optimizer's first state from :func:`masters_of`."""
    views = [plain.unpad(m, plan.master_placement(x)) for m, x in zip(masters, plan.leaves, strict=True)]
    inner = store_state(plan, tx.init(tree.trainable_only(plan, plan.treedef.unflatten(views))))
    master = tree.trainable_only(plan, plan.treedef.unflatten(masters)) if plan.has_master else ()
    return ZeroOptState(master, inner)


def apply_gradients(
    tx: optax.GradientTransformationExtraArgs,
    plan: Plan,
    grads: Any,
    state: ZeroOptState,
    params: Any,
    *,
    applied: jax.Array | None = None,
    **extra: Any,
) -> tuple[Any, ZeroOptState]:
    """One update. Returns the new stored params and the new state.

    Args:
        tx: the user's transformation.
        plan: the plan.
        grads: in the layout of ``plan.grads``; frozen leaves are ignored.
        state: the state.
        params: stored params.
        applied: bool scalar; where it is False everything stays as it is, bit for bit. Selected on shards, before
            whole params are gathered from them. Left out, the update is always made.
        **extra: passed on to ``tx.update``.
    """
    flat_params = plan.treedef.flatten_up_to(params)
    flat_grads = plan.treedef.flatten_up_to(grads)
    masters = plan.treedef.flatten_up_to(state.master) if plan.has_master else [None] * len(plan.leaves)
    views: list[Any] = []
    seen: list[Any] = []
    for leaf, param, grad, master in zip(plan.leaves, flat_params, flat_grads, masters, strict=True):
        if not leaf.trainable:
            views.append(optax.MaskedNode())
            seen.append(optax.MaskedNode())
            continue
        views.append(_master_view(plan, leaf, param if master is None else master))
        seen.append(plain.unpad(grad, plan.grad_placement(leaf)).astype(plan.precision.seen(leaf.dtype)))
    before = plan.treedef.unflatten(views)
    inner_before = load_state(plan, state.inner)
    updates, inner = tx.update(plan.treedef.unflatten(seen), inner_before, before, **extra)
    updated = optax.apply_updates(before, updates)
    if applied is not None:
        updated, inner = jax.tree.map(
            lambda new, old: jnp.where(applied, new, old), (updated, inner), (before, inner_before)
        )
    after = plan.treedef.flatten_up_to(updated)
    shards = [
        _store(plan, plan.master_placement(leaf), value, plan.master_dtype(leaf))
        if leaf.trainable
        else optax.MaskedNode()
        for leaf, value in zip(plan.leaves, after, strict=True)
    ]
    new_params = params_from_masters(plan, shards, flat_params)
    master = plan.treedef.unflatten(shards) if plan.has_master else ()
    return new_params, ZeroOptState(master, store_state(plan, inner))


def store_state(plan: Plan, inner: Any) -> Any:
    """The transformation's state in stored shapes and in its place."""
    flat = plan.state_treedef.flatten_up_to(inner)
    stored = [_store(plan, s.placement, v, s.dtype) for s, v in zip(plan.state_leaves, flat, strict=True)]
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
    if plan.stage.params or not plan.stage.opt_state:
        for i in live:
            new[i] = shards[i].astype(plan.param_dtype(plan.leaves[i]))
        return plan.treedef.unflatten(new)
    cast = [shards[i].astype(plan.param_dtype(plan.leaves[i])) for i in live]
    placements = [plan.master_placement(plan.leaves[i]) for i in live]
    gathered = jax.shard_map(
        lambda values: [plain.gather(v, p) for v, p in zip(values, placements, strict=True)],
        mesh=plan.mesh,
        in_specs=([p.zero_spec for p in placements],),
        out_specs=[p.whole().zero_spec for p in placements],
        axis_names=set(plan.zero_axes),
        check_vma=False,
    )(cast)
    for i, value in zip(live, gathered, strict=True):
        new[i] = value
    return plan.treedef.unflatten(new)


def _master_view(plan: Plan, leaf: ParamLeaf, value: jax.Array) -> jax.Array:
    """A param or master as the optimizer sees it: the user's shape, the master's dtype, sharded as its state."""
    placement = plan.master_placement(leaf)
    if value.shape == leaf.shape:
        value = plain.pad(value, placement)
    value = jax.lax.with_sharding_constraint(value, plan.sharding(placement))
    return plain.unpad(value, placement).astype(plan.master_dtype(leaf))


def _store(plan: Plan, placement: Placement, value: Any, dtype: np.dtype) -> jax.Array:
    value = plain.pad(jnp.asarray(value, dtype), placement)
    return jax.lax.with_sharding_constraint(value, plan.sharding(placement))


def _differences(plan: Plan, new: Any, old: Any) -> Any:
    """Updates u such that ``optax.apply_updates(old, u)`` is ``new``; frozen leaves get minus zero."""

    def one(leaf: ParamLeaf, after: jax.Array, before: jax.Array) -> jax.Array:
        if not leaf.trainable:
            return jnp.asarray(-0.0 if jnp.issubdtype(before.dtype, jnp.inexact) else 0).astype(before.dtype)
        wide: Callable[[jax.Array], jax.Array] = lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32))  # noqa: E731
        return wide(after) - wide(before)

    pairs = zip(plan.leaves, plan.treedef.flatten_up_to(new), plan.treedef.flatten_up_to(old), strict=True)
    return plan.treedef.unflatten([one(*pair) for pair in pairs])


def _check_state(tx: optax.GradientTransformation, plan: Plan) -> None:
    masters = plan.treedef.unflatten(
        [jax.ShapeDtypeStruct(leaf.shape, plan.precision.master(leaf.dtype)) for leaf in plan.leaves]
    )
    shapes, _ = tree.abstract_init(tx, tree.trainable_only(plan, masters))
    found, _ = tree.flatten(shapes)
    planned = {s.path: s.placement.shape for s in plan.state_leaves}
    have = {path: entry.shape for path, entry in found.items()}
    if have != planned:
        differing = sorted(p for p in have.keys() | planned.keys() if have.get(p) != planned.get(p))
        raise PlanError(
            "The optimizer's state is not the one that the plan was made for; these leaves differ: "
            + "; ".join(
                f"{p}: {have.get(p, 'absent')} here, {planned.get(p, 'absent')} planned" for p in differing
            )
            + ". Make the plan with this tx."
        )
