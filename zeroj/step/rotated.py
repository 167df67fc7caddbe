"""A step that leaves the update of its stacks to the next step; see :mod:`zeroj.optimizer.rotation`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from zeroj.errors import PlanError
from zeroj.gather.renewals import Renewed
from zeroj.gather.sinks import Made
from zeroj.optimizer import layerwise, rotation
from zeroj.optimizer.layer_update import LayerUpdate, stored_of
from zeroj.optimizer.zero import ZeroOptimizer
from zeroj.plan.mesh import traced_on
from zeroj.plan.plan import Plan
from zeroj.plan.tree import ZeroOptState
from zeroj.step.clip import Clipped
from zeroj.step.state import TrainState

Step = Callable[[TrainState, Any], tuple[TrainState, dict[str, Any]]]


class RotatedStep:
    """The jitted step ``(state, batch) -> (state, metrics)`` whose state has an update pending.

    Losses and metrics are those of the step that is not rotated. The state that it returns is for the next step;
    whatever else reads it (``zj.full_params``, checkpoints, an evaluation) takes ``settle(state)``, and so does the
    end of training. The step takes both a settled state and one with an update pending.

    Attributes:
        program: the jitted step.
        settle: jitted ``state -> state``: makes the pending update. A settled state comes back as it is.

    Example:
        >>> step = zj.make_train_step(loss_fn, tx, plan, clip_norm=1.0, rotate=True)
        >>> for batch in batches:
        ...     state, metrics = step(state, batch)
        >>> state = step.settle(state)
    """

    def __init__(self, program: Any, tx: ZeroOptimizer, donate: bool) -> None:
        self.program, self.plan = program, tx.plan
        self.settle = jax.jit(
            traced_on(tx.plan.mesh, partial(settled, tx)), donate_argnums=(0,) if donate else ()
        )

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        """Makes the update that is pending, in the forward pass, and leaves its own."""
        return self.program(state, batch)

    def trace(self, state: Any, batch: Any) -> Any:
        """Traces the program, as that of a jitted function."""
        return self.program.trace(state, batch)

    def lower(self, state: Any, batch: Any) -> Any:
        """Lowers the program, as that of a jitted function."""
        return self.program.lower(state, batch)

    def pending_state(self, state: Any, batch: Any) -> Any:
        """A state with an update pending, which every step but a first takes, as ShapeDtypeStructs with shardings.

        Args:
            state: a settled one (:func:`zeroj.abstract_state`).
            batch: the batch, as arrays or structs.
        """
        plan, pending = self.plan, self.program.eval_shape(state, batch)[0].pending
        places = {leaf.path: plan.grad_placement(leaf).at(plan.gradient_memory(leaf)) for leaf in plan.leaves}

        def struct(x: Any, sharding: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        grads = {path: struct(x, plan.sharding(places[path])) for path, x in pending.grads.items()}
        small = jax.tree.map(lambda x: struct(x, plan.replicated), pending._replace(grads={}))
        return state._replace(pending=small._replace(grads=grads))


def check(plan: Plan, tx: ZeroOptimizer, loss_over: str) -> list[str]:
    """The paths of the leaves whose update can wait for the next step's forward pass.

    Args:
        plan: the plan.
        tx: the wrapped transformation.
        loss_over: what the loss sees of the batch.

    Raises:
        PlanError: there are none, or steps cannot be rotated; with the reason.
    """
    found = [leaf.path for leaf in LayerUpdate(tx.user_tx, plan).leaves()] if layerwise.applies(plan) else []
    if not found or loss_over != "device":
        raise PlanError(
            "rotate=True needs stage 3, offload_optimizer in host memory, a stack of layers that a scan runs over "
            "(make_plan(..., scanned=...)), an optimizer whose update of it is elementwise and mixes no leaves (adamw, "
            'lion, sgd) and loss_over="device"; '
            + (f"loss_over is {loss_over!r}." if found else "no leaf of this plan can be updated so.")
            + " Leave rotate out: the step gives the same losses."
        )
    return found


def put(plan: Plan, state: TrainState, renewed: dict[str, Renewed]) -> TrainState:
    """The state with what was renewed in its place."""
    if not renewed:
        return state
    numbers = {leaf.path: i for i, leaf in enumerate(plan.leaves)}
    params = plan.treedef.flatten_up_to(state.params)
    masters = plan.treedef.flatten_up_to(state.opt_state.master) if plan.has_master else []
    inner = plan.state_treedef.flatten_up_to(state.opt_state.inner)
    for path, made in renewed.items():
        stored = list(made.stored)
        params[numbers[path]] = made.param
        if masters:
            masters[numbers[path]] = stored.pop(0)
        places = [i for i, s in enumerate(plan.state_leaves) if s.owner == path]
        for i, value in zip(places, stored, strict=True):
            inner[i] = value
    master = plan.treedef.unflatten(masters) if plan.has_master else state.opt_state.master
    opt_state = ZeroOptState(master, plan.state_treedef.unflatten(inner))
    return state._replace(params=plan.treedef.unflatten(params), opt_state=opt_state)


def put_off(
    tx: ZeroOptimizer, state: TrainState, clipped: Clipped, applied: jax.Array | None, paths: list[str]
) -> tuple[Clipped, TrainState]:
    """Takes the gradients of the leaves in ``paths`` out of an update, which is left pending in the state."""
    plan = tx.plan
    params = plan.treedef.flatten_up_to(state.params)
    stored = stored_of(plan, state.opt_state, paths)
    live = [i for i, leaf in enumerate(plan.leaves) if leaf.trainable]
    grads, later = list(clipped.grads), {}
    for j, i in enumerate(live):
        path = plan.leaves[i].path
        if path in stored:
            later[path] = clipped.came[j]
            grads[j] = Made(params[i], None, stored[path])
    update = LayerUpdate(tx.user_tx, plan)
    counters = update.counters(plan.state_treedef.flatten_up_to(state.opt_state.inner))
    pending = rotation.Pending(later, clipped.left, counters, applied)
    return clipped._replace(grads=grads), state._replace(pending=pending)


def settled(tx: ZeroOptimizer, state: TrainState) -> TrainState:
    """The state with the update made that is pending."""
    if not state.pending:
        return state
    plan, renewing = tx.plan, rotation.renewing(tx, state.opt_state, state.pending)

    def program(values: Any, params: list[jax.Array], also: Any) -> dict[str, Renewed]:
        return renewing.of(plan, values, params, also).rest()

    params = plan.treedef.flatten_up_to(state.params)
    specs = [plan.stored_placement(leaf).zero_spec for leaf in plan.leaves]
    renewed = jax.shard_map(
        program,
        mesh=plan.mesh,
        in_specs=(renewing.value_specs, specs, jax.sharding.PartitionSpec()),
        out_specs=renewing.out_specs,
        axis_names=set(plan.zero_axes),
        check_vma=False,
    )(dict(renewing.values), params, renewing.also)
    return put(plan, state, renewed)._replace(pending=())
