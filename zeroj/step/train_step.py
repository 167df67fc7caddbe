"""The whole step: gradient, finite check, norm, clip, update, new loss scale."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from zeroj import flags
from zeroj.config.precision import LossScale
from zeroj.errors import PlanError
from zeroj.gather.evaluate import evaluate
from zeroj.gather.gradients import Gradients, gradients
from zeroj.gather.renewals import Renewing
from zeroj.gather.residual_check import check_near, check_offload
from zeroj.gather.sinks import Made, Taking
from zeroj.gather.views import make_view
from zeroj.optimizer import layerwise, rotation
from zeroj.optimizer.spill import SpilledUpdate
from zeroj.optimizer.zero import ZeroOptimizer, apply_gradients, wrap_optimizer
from zeroj.plan.feedback import errors_struct
from zeroj.plan.mesh import traced_on
from zeroj.plan.plan import ParamLeaf, Plan
from zeroj.spill.reader import ParamReader
from zeroj.step import rotated
from zeroj.step.clip import Clipped, stays, unscale_and_clip
from zeroj.step.precision import default_scaling, is_stuck, next_scale
from zeroj.step.spilled import SpilledStep, WithoutFiles
from zeroj.step.state import TrainState, check_settled


def make_train_step(
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation,
    plan: Plan,
    accumulation_steps: int = 1,
    clip_norm: float | None = None,
    *,
    has_aux: bool = False,
    loss_over: str = "device",
    loss_scale: LossScale | None = None,
    skip_nonfinite: bool | None = None,
    reduce_op: str = "mean",
    donate: bool = True,
    offload_activations: bool = False,
    rotate: bool = False,
) -> Callable[[TrainState, Any], tuple[TrainState, dict[str, Any]]]:
    """Builds the jitted step ``(state, batch) -> (state, metrics)``.

    Args:
        loss_fn: ``loss_fn(params, batch)`` or ``(params, batch, rng)``; see :func:`zeroj.value_and_grad`. A model
            that carries running statistics, counters or random streams takes one more parameter by the name
            of ``model_state`` (given to :func:`zeroj.init_state`) and returns (loss, model_state) or (loss,
            model_state, aux): floats are averaged over devices, integers are the largest of any device,
            keys are folded; over the global batch it is what the loss returned.
        tx: the optax optimizer, bare or wrapped by :func:`zeroj.wrap_optimizer`.
        plan: where everything lives.
        accumulation_steps: micro-batches per update.
        clip_norm: the gradient's global norm is clipped to this; left out, it is not clipped.
        has_aux: whether the loss must return (loss, aux); a loss that returns a pair is always understood.
        loss_over: "device" or "global"; see :func:`zeroj.value_and_grad`.
        loss_scale: the loss scaler's settings; left out, dynamic for fp16 and none otherwise.
        skip_nonfinite: whether a step with a non-finite gradient changes nothing but the scale and
            ``skipped``; left out, True in half precision and False in fp32.
        reduce_op: "mean", or "sum": gradients are those of the sum of the devices' means, N times as large
            (DeepSpeed's gradient_allreduce_op); norm and clipping see them so.
        donate: whether the old state's buffers are reused for the new one.
        offload_activations: whether what the loss's ``jax.checkpoint`` regions keep for the backward pass waits in
            host memory.
        rotate: whether the update of stacks of layers is left to the next step's forward pass, behind which the
            copies of optimizer state in host memory then hide, clipped or not; the result is a
            :class:`zeroj.step.rotated.RotatedStep`.

    Returns:
        A jitted function, or a :class:`zeroj.step.spilled.SpilledStep` where the plan keeps state in files.
        ``batch`` has leaves (global batch, ...). Metrics, all scalars: ``loss`` (before
        the update), ``grad_norm`` (before clipping), ``clip_factor`` (what the gradient was multiplied by),
        ``loss_scale`` (the one this step used), ``skipped`` (updates skipped so far), ``applied`` (whether
        this one was made), ``step`` (updates made so far), and ``aux`` if the loss has one. Where
        ``skip_nonfinite`` also ``stuck`` (the loss scale is as low as it may be, and gradients overflow all the
        same) and ``finite``, one bool per trained leaf: :class:`zeroj.OverflowWatch` names the leaves.

    Raises:
        PlanError: now or at the first call, when something does not fit together; now, when activations, or the
            second shards of hpZ, are to be offloaded on a backend that is known, or seen, to do it wrongly.

    Example:
        >>> step = zj.make_train_step(loss_fn, tx, plan, accumulation_steps=4, clip_norm=1.0)
        >>> state, metrics = step(state, batch)
    """
    _check_arguments(loss_fn, accumulation_steps, clip_norm, reduce_op)
    if offload_activations:
        check_offload(plan.mesh)
    check_near(plan)
    wrapped = wrap_optimizer(tx, plan)
    reader = ParamReader(plan) if plan.spills_params else None
    skips = plan.precision.half if skip_nonfinite is None else skip_nonfinite
    alone = (loss_over, accumulation_steps, reduce_op, clip_norm, skips) == ("device", 1, "mean", None, False)
    late = rotated.check(plan, wrapped, loss_over) if rotate else []
    head = _head(
        partial(
            gradients,
            loss_fn,
            plan,
            view=make_view(plan, loss_over, reader),
            accumulation=accumulation_steps,
            has_aux=has_aux,
            host=True,
            offload_activations=offload_activations,
        ),
        plan,
        times=plan.degree if reduce_op == "sum" else 1,
        clip_norm=clip_norm,
        scaling=loss_scale or default_scaling(plan.precision.name),
        skips=skips,
        taking=partial(layerwise.taking, wrapped) if alone and not late and layerwise.applies(plan) else None,
        renewing=partial(rotation.renewing, wrapped),
    )

    def before_update(state: TrainState, batch: Any) -> tuple[Any, ...]:
        clipped, new, metrics = head(state, batch)
        return clipped.grads, new.fields, metrics, clipped.left

    options = flags.step_options()
    if plan.spills:
        places = (_waiting(plan), _field_shardings(plan), None, plan.replicated)
        program = jax.jit(traced_on(plan.mesh, before_update), out_shardings=places, compiler_options=options)
        update = SpilledUpdate(wrapped.user_tx, plan, donate, accumulation_steps)
        return SpilledStep(WithoutFiles(program, plan, reader), update)
    step = _whole(head, wrapped, late)
    program = jax.jit(
        traced_on(plan.mesh, step), donate_argnums=(0,) if donate else (), compiler_options=options
    )
    return rotated.RotatedStep(program, wrapped, donate) if late else program


def _whole(
    head: Callable[..., tuple[Clipped, Advance, dict[str, Any]]], tx: ZeroOptimizer, late: list[str]
) -> Callable[[TrainState, Any], tuple[TrainState, dict[str, Any]]]:
    """The step with its update, but for that of the leaves in ``late``, which is left to the next one."""

    def step(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        clipped, new, metrics = head(state, batch)
        state = rotated.put(tx.plan, state, clipped.renewed)._replace(pending=())
        if late:
            clipped, state = rotated.put_off(tx, state, clipped, new.applied, late)
        params, opt_state = _update(tx, state, clipped, metrics["loss"], new.applied)
        return state._replace(params=params, opt_state=opt_state, **new.fields), metrics

    return step


def _waiting(plan: Plan) -> list[Any]:
    """Where the gradients of trainable leaves wait for an update that is a program of its own."""
    live = [leaf for leaf in plan.leaves if leaf.trainable]
    return [plan.sharding(plan.grad_placement(leaf).at(plan.gradient_memory(leaf))) for leaf in live]


def _field_shardings(plan: Plan) -> dict[str, Any]:
    """Where the small fields of the state live, and the errors of quantised gradients."""
    errors = jax.tree.map(lambda s: s.sharding, errors_struct(plan)) or ()
    fields = ("step", "skipped", "scale", "model_state")
    return {
        **dict.fromkeys(fields, plan.replicated),
        "errors": errors,
        "feeds": plan.replicated if errors else (),
    }


def _head(
    evaluate_gradients: Callable[..., Gradients],
    plan: Plan,
    *,
    times: int,
    clip_norm: float | None,
    scaling: LossScale,
    skips: bool,
    taking: Callable[[Any], Taking | None] | None,
    renewing: Callable[[Any, Any], Renewing],
) -> Callable[..., tuple[Clipped, Advance, dict[str, Any]]]:
    """Everything before the update: (state, batch) -> (gradients, unscaled and clipped; small fields; metrics)."""

    scaled = scaling.dynamic or scaling.static != 1
    early = None if scaled else taking

    def head(state: TrainState, batch: Any) -> tuple[Clipped, Advance, dict[str, Any]]:
        rng = jax.random.fold_in(state.rng, state.scale.iteration)
        scale = state.scale.scale if scaled else jnp.float32(1)
        fed = {"errors": state.errors, "feeds": state.feeds}
        if state.pending:
            fed["renewing"] = renewing(state.opt_state, state.pending)
        elif early:
            fed["taking"] = early(state.opt_state)
        out = evaluate_gradients(state.params, batch, rng, scale, state.model_state, **fed)
        made_with = scale / times if scaled or times != 1 else None
        clipped = unscale_and_clip(plan, out, made_with, clip_norm)
        flags = clipped.finite if skips else None
        finite = None if flags is None else jnp.all(flags) & jnp.isfinite(clipped.norm)
        new = _advance(plan, state, out, finite, scaling)
        metrics = {
            "loss": out.loss,
            "grad_norm": clipped.norm,
            "clip_factor": clipped.factor,
            "loss_scale": scale,
            "skipped": new.fields["skipped"],
            "applied": jnp.bool_(True) if new.applied is None else new.applied,
            "step": new.fields["step"],
        }
        if finite is not None and flags is not None:
            metrics |= {"stuck": is_stuck(state.scale, finite, scaling), "finite": flags}
        metrics |= {"aux": out.aux} if jax.tree.leaves(out.aux) else {}
        if plan.streams or plan.spills:  # so that host memory and files round alike, whatever XLA makes of it
            grads = [g if stays(g) else jax.lax.optimization_barrier(g) for g in clipped.grads]
            clipped = clipped._replace(grads=grads)
        return clipped, new, metrics

    return head


def _check_arguments(loss_fn: Any, accumulation_steps: int, clip_norm: float | None, reduce_op: str) -> None:
    if not callable(loss_fn):
        raise PlanError(f"loss_fn must be a function, not {type(loss_fn).__name__}.")
    if accumulation_steps < 1 or (clip_norm is not None and clip_norm <= 0):
        raise PlanError(
            f"accumulation_steps must be at least 1 and clip_norm positive or None; "
            f"they are {accumulation_steps} and {clip_norm}."
        )
    if reduce_op not in ("mean", "sum"):
        raise PlanError(f"reduce_op must be 'mean' or 'sum', not {reduce_op!r}.")


def make_eval_step(
    loss_fn: Callable[..., Any], plan: Plan, *, has_aux: bool = False, loss_over: str = "device"
) -> Callable[[TrainState, Any], dict[str, Any]]:
    """Builds the jitted ``(state, batch) -> metrics``: the loss without gradients, same gather on use.

    Args:
        loss_fn: as for :func:`make_train_step`.
        plan: where the params live.
        has_aux: whether the loss must return (loss, aux).
        loss_over: "device" or "global"; see :func:`zeroj.value_and_grad`.

    Returns:
        A jitted function; its metrics are ``loss``, and ``aux`` if the loss has one.

    Example:
        >>> eval_step = zj.make_eval_step(loss_fn, plan)
        >>> eval_step(state, batch)["loss"]
    """

    reader = ParamReader(plan) if plan.spills_params else None
    view = make_view(plan, loss_over, reader)

    def step(state: TrainState, batch: Any) -> dict[str, Any]:
        check_settled(state)
        carried = state.model_state
        loss, aux = evaluate(
            loss_fn, plan, state.params, batch, state.rng, carried, view=view, has_aux=has_aux
        )
        return {"loss": loss, **({"aux": aux} if jax.tree.leaves(aux) else {})}

    jitted = jax.jit(traced_on(plan.mesh, step))
    return WithoutFiles(jitted, plan, reader) if plan.spills else jitted


class Advance(NamedTuple):
    """The small fields of the state after the step, and whether it is applied; None where it always is."""

    fields: dict[str, Any]
    applied: jax.Array | None


def _advance(
    plan: Plan, state: TrainState, out: Gradients, finite: jax.Array | None, scaling: LossScale
) -> Advance:
    """A step whose gradients are not finite, or whose loss counted nothing, changes the scaler and ``skipped`` alone.

    Args:
        plan: the plan.
        state: the state before.
        out: what the pass over the batch gave.
        finite: bool scalar, or None where gradients are not looked at.
        scaling: the loss scaler's settings.
    """
    conditions = [finite] if finite is not None else []
    conditions += [out.weight > 0] if out.weight is not None else []
    applied = jnp.bool_(True)
    for condition in conditions:
        applied = applied & condition
    scale = next_scale(state.scale, jnp.bool_(True) if finite is None else finite, scaling)
    done = applied.astype(jnp.int32)
    carried = _carry(plan, state.model_state, out.model_state, applied if conditions else None)
    fields = {"step": state.step + done, "skipped": state.skipped + 1 - done, "scale": scale}
    fields |= {"model_state": carried, **_errors(plan, out.errors, applied, fields["step"])}
    return Advance(fields, applied if conditions else None)


def _errors(plan: Plan, errors: Any, applied: jax.Array, step: jax.Array) -> dict[str, Any]:
    """LoCo's errors for the next update: none after one that is skipped, as in DeepSpeed, or every ``reset_T``."""
    loco = plan.zero.zeropp_loco_param
    if loco is None or not errors:
        return {"errors": errors, "feeds": ()}
    shardings = jax.tree.map(lambda s: s.sharding, errors_struct(plan))
    errors = jax.lax.with_sharding_constraint(errors, shardings)
    return {"errors": errors, "feeds": applied & (step % loco.reset_T != 0)}


def _carry(plan: Plan, before: Any, after: Any, applied: jax.Array | None) -> Any:
    """The model's state after the step, whole on every device; that before it, where the step is skipped."""
    if applied is not None:
        after = jax.tree.map(lambda new, old: jnp.where(applied, new, old), after, before)
    return jax.lax.with_sharding_constraint(after, plan.replicated) if jax.tree.leaves(after) else after


def _update(
    tx: ZeroOptimizer,
    state: TrainState,
    clipped: Clipped,
    loss: jax.Array,
    applied: jax.Array | None,
) -> tuple[Any, Any]:
    plan, made = tx.plan, {j: g for j, g in enumerate(clipped.grads) if isinstance(g, Made)}
    trained = (leaf for leaf in plan.leaves if leaf.trainable)
    pairs = zip(trained, clipped.grads, strict=True)
    live = iter([_taken(plan, x) if isinstance(g, Made) else g for x, g in pairs])
    tree = plan.treedef.unflatten([next(live) if leaf.trainable else None for leaf in plan.leaves])
    return apply_gradients(
        tx.user_tx,
        plan,
        tree,
        state.opt_state,
        state.params,
        applied=applied,
        finish=partial(clipped.left.finish, precision=plan.precision),
        made=made,
        order=clipped.order if applied is None else (),
        value=loss,
        grad=tree,
    )


def _taken(plan: Plan, leaf: ParamLeaf) -> jax.ShapeDtypeStruct:
    """Stands in place of the gradient of a leaf that is updated already."""
    return jax.ShapeDtypeStruct(plan.grad_placement(leaf).padded, plan.precision.seen(leaf.dtype))
