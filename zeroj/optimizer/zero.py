"""Any optax transformation over state that lives where a plan says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from zeroj.collectives import plain
from zeroj.errors import PlanError
from zeroj.gather.inputs import check_memory
from zeroj.gather.sinks import Made
from zeroj.optimizer.stream import Finish, streamed
from zeroj.optimizer.update import (
    Arrays,
    at_once,
    master_views,
    on_device,
    params_from_masters,
    store,
    store_state,
    unflatten,
)
from zeroj.plan import tree
from zeroj.plan.mesh import traced_on
from zeroj.plan.plan import ParamLeaf, Plan, check_tx
from zeroj.plan.tree import ZeroOptState

__all__ = [
    "ZeroOptimizer",
    "apply_gradients",
    "first_state",
    "masters_of",
    "params_from_masters",
    "wrap_optimizer",
]


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
    if tx is not plan.tx:
        _check_state(user_tx, plan)

    def init(params: Any) -> ZeroOptState:
        _refuse_files(plan)
        return first_state(user_tx, plan, masters_of(plan, params))

    def update(grads: Any, state: ZeroOptState, params: Any = None, **extra: Any) -> tuple[Any, ZeroOptState]:
        _refuse_files(plan)
        if params is None:
            raise PlanError("Pass the params: tx.update(grads, opt_state, params).")
        new_params, new_state = apply_gradients(user_tx, plan, grads, state, params, **extra)
        return _differences(plan, new_params, params), new_state

    wrapped = ZeroOptimizer(traced_on(plan.mesh, init), traced_on(plan.mesh, update))
    wrapped.user_tx, wrapped.plan = user_tx, plan
    return wrapped


def _refuse_files(plan: Plan) -> None:
    if plan.spills:
        raise PlanError(
            "The plan keeps optimizer state in files, which one jitted function cannot read: use zj.init_state and "
            'zj.make_train_step, or "device": "cpu" in offload_optimizer for a step of your own.'
        )


def masters_of(plan: Plan, params: Any) -> list[jax.Array]:
    """What the optimizer updates, one array per leaf, from stored params or params in the user's shapes."""
    views = master_views(plan, plan.leaves, plan.treedef.flatten_up_to(params))
    return store(
        plan, [(plan.master_placement(leaf), plan.master_dtype(leaf)) for leaf in plan.leaves], views
    )


def first_state(tx: optax.GradientTransformation, plan: Plan, masters: list[jax.Array]) -> ZeroOptState:
    """The optimizer's first state from :func:`masters_of`."""
    placements = [plan.master_placement(leaf) for leaf in plan.leaves]
    views = [plain.unpad(on_device(m, p), p) for m, p in zip(masters, placements, strict=True)]
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
    finish: Finish | None = None,
    made: Mapping[int, Made] | None = None,
    order: Sequence[int] = (),
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
        finish: what is still to be done with a gradient that is in host memory, once it is on the device; given
            the leaf's dtype as well.
        made: leaves that are updated already, by number among the trainable ones; their gradients are not read.
        order: the trainable leaves by number, in the order in which their gradients are there, where that counts.
        **extra: passed on to ``tx.update``.
    """
    flat_params = plan.treedef.flatten_up_to(params)
    live = [i for i, leaf in enumerate(plan.leaves) if leaf.trainable]
    masters = plan.treedef.flatten_up_to(state.master) if plan.has_master else flat_params
    flat_grads = plan.treedef.flatten_up_to(grads)
    inner = plan.state_treedef.flatten_up_to(state.inner)
    check_memory((x.path, v, plan.param_placement(x)) for x, v in zip(plan.leaves, flat_params, strict=True))
    check_memory((s.path, v, s.placement) for s, v in zip(plan.state_leaves, inner, strict=True))
    if plan.has_master:
        check_memory(
            (f"master/{plan.leaves[i].path}", masters[i], plan.master_placement(plan.leaves[i])) for i in live
        )
    arrays = Arrays([flat_params[i] for i in live], [masters[i] for i in live], inner)
    live_grads = [flat_grads[i] for i in live]
    if plan.streams:
        new = streamed(tx, plan, arrays, live_grads, applied, extra, finish, made, order)
    else:
        new = at_once(tx, plan, arrays, live_grads, applied, extra)
    for i, value in zip(live, new.params, strict=True):
        flat_params[i] = value
    master = unflatten(plan, new.masters) if plan.has_master else ()
    return plan.treedef.unflatten(flat_params), ZeroOptState(master, plan.state_treedef.unflatten(new.inner))


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
