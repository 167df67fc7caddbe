"""Loss and gradient over sharded params: what stands in place of ``jax.value_and_grad``."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from zeroj import _compat
from zeroj.collectives.plain import total
from zeroj.errors import PlanError
from zeroj.gather import host_sums
from zeroj.gather import loss as losses
from zeroj.gather import model_state as carried
from zeroj.gather.inputs import (
    check_batch,
    check_errors,
    check_params,
    whole_struct,
)
from zeroj.gather.means import accumulate, over_devices
from zeroj.gather.microbatch import MicroBatch, widened
from zeroj.gather.reductions import Reduction
from zeroj.gather.renewals import Renewing
from zeroj.gather.residual_check import check_near, check_offload
from zeroj.gather.residuals import offload_residuals
from zeroj.gather.sinks import Arrival, Made, Measured, NotTaken, Taking, arrival_of
from zeroj.gather.views import View, make_view
from zeroj.gather.where import Moves, empty_sums, moves_of, reductions_of
from zeroj.plan.feedback import Errors, fed_back
from zeroj.plan.mesh import traced_on
from zeroj.plan.plan import ParamLeaf, Plan

#: Which output of the traced loss and gradient is the count, where the loss has one.
WEIGHT = 1


class Gradients(NamedTuple):
    """What one pass over a batch gives.

    Attributes:
        loss: fp32 scalar, the mean over the global batch.
        weight: fp32 scalar, the sum of counts, or None for a plain mean.
        aux: the loss's aux: floats averaged and integers summed over devices and micro-batches, and every
            :class:`zeroj.Mean` divided out.
        grads: one array per trained leaf, where the plan has gradients; :class:`Made` of one that was taken,
            :class:`Measured` of one that left for host memory.
        model_state: what the model carries on, the same on every device.
        errors: what quantising lost of the gradients (LoCo); see :mod:`zeroj.plan.feedback`.
        divisor: fp32 scalar by which gradients in host memory are still to be divided, or None.
        arrival: in which order the gradients are made.
        renewed: path -> :class:`zeroj.gather.renewals.Renewed`, of the leaves that were to be.
    """

    loss: jax.Array
    weight: jax.Array | None
    aux: Any
    grads: list[Any]
    model_state: Any = ()
    errors: Any = ()
    divisor: jax.Array | None = None
    arrival: Arrival = Arrival(())
    renewed: Any = ()


def value_and_grad(
    loss_fn: Callable[..., Any],
    plan: Plan,
    has_aux: bool = False,
    loss_over: str = "device",
    *,
    offload_activations: bool = False,
) -> Callable[..., Any]:
    """Stands in place of ``jax.value_and_grad`` for params that live as a plan says. Call it under ``jit``.

    Args:
        loss_fn: ``loss_fn(params, batch)`` or ``(params, batch, rng)``: params in the user's tree, shapes and
            compute dtype, this device's slice of the batch; returns the mean loss, ``zj.Mean`` or (loss, aux).
        plan: where params and gradients live.
        has_aux: whether the loss returns (loss, aux); then the result is ((loss, aux), grads).
        loss_over: "device": the loss sees this device's slice of the batch. "global": the whole batch, as
            under plain pjit, so that in-batch negatives and batch statistics are those of the whole batch;
            then ``rng`` is the same on every device, and aux is returned as it is.
        offload_activations: whether what ``jax.checkpoint`` regions keep for the backward pass (their inputs, or
            what their policy saves) waits in host memory.

    Returns:
        A function of (params, batch, rng=None, model_state=()) that returns (loss, grads): the mean over the
        global batch, and its gradient in the layout of ``plan.grads``. Frozen leaves have None for a gradient.
        For a loss that takes ``model_state`` (see :func:`zeroj.make_train_step`) the loss is replaced by
        (loss, model_state), or (loss, model_state, aux).

    Raises:
        PlanError: at the first call, when params, batch or loss do not fit the plan; now, when activations, or
            the second shards of hpZ, are to be offloaded on a backend that is known, or seen, to do it wrongly.

    Example:
        >>> loss, grads = jax.jit(zj.value_and_grad(loss_fn, plan))(params, batch)
    """
    view = make_view(plan, loss_over)
    if offload_activations:
        check_offload(plan.mesh)
    check_near(plan)
    if fed_back(plan):
        warnings.warn(
            "zeropp_loco_param: the errors of quantised gradients are state of the whole step (make_train_step); "
            "value_and_grad gives gradients without feedback.",
            stacklevel=2,
        )
    needs_rng = losses.takes_rng(loss_fn)

    stateful = losses.takes_state(loss_fn)

    def run(params: Any, batch: Any, rng: Any = None, model_state: Any = ()) -> Any:
        if needs_rng and rng is None:
            raise PlanError("loss_fn takes an rng: pass one, as in value_and_grad(...)(params, batch, rng).")
        out = gradients(
            loss_fn,
            plan,
            params,
            batch,
            rng,
            model_state=model_state,
            view=view,
            has_aux=has_aux,
            offload_activations=offload_activations,
        )
        live = iter(out.grads)
        grads = plan.treedef.unflatten([next(live) if leaf.trainable else None for leaf in plan.leaves])
        value = (out.loss, *([out.model_state] if stateful else []), *([out.aux] if has_aux else []))
        return (value if len(value) > 1 else out.loss), grads

    return traced_on(plan.mesh, run)


def gradients(
    loss_fn: Callable[..., Any],
    plan: Plan,
    params: Any,
    batch: Any,
    rng: Any = None,
    scale: Any = 1.0,
    model_state: Any = (),
    *,
    view: View,
    accumulation: int = 1,
    has_aux: bool = False,
    host: bool = False,
    offload_activations: bool = False,
    errors: Errors | tuple[()] = (),
    feeds: Any = (),
    taking: Taking | None = None,
    renewing: Renewing | None = None,
) -> Gradients:
    """The gradient of the mean over the global batch, times ``scale``, in the layout of ``plan.grads``.

    Args:
        loss_fn: the user's loss.
        plan: where params and gradients live.
        params: the stored params.
        batch: leaves of shape (global batch, ...).
        rng: a key, folded per micro-batch, and per device where the view is one device's; left out, a constant.
        scale: fp32 scalar that the loss is multiplied by for the backward pass.
        model_state: what the model carries, whole on every device.
        view: what the loss sees of the batch.
        accumulation: micro-batches per device, run one after the other.
        has_aux: whether the loss must return (loss, aux).
        host: whether gradients of leaves whose param and state are in host memory go there as they are made, in
            the dtype in which they arise; of several micro-batches their sums are there, in the accumulator's
            dtype, see :mod:`zeroj.gather.host_sums`.
        offload_activations: whether what ``jax.checkpoint`` regions keep waits in host memory.
        errors: what quantising lost of the gradients before; left out, it is not fed back.
        feeds: bool scalar beside ``errors``: where it is False, they stand for zeros.
        taking: what takes gradients where they arise, of a single micro-batch under the view of one device; left
            out, nothing does.
        renewing: what renews params in the first micro-batch, before they are used; left out, all are up to date.
    """
    leaves = check_params(plan, params)
    check_errors(plan, errors)
    check_batch(plan, batch, accumulation)
    rng = jax.random.key(0) if rng is None else rng

    def run(taking: Taking | None) -> Gradients:
        moves = moves_of(plan, taking, renewing, host and accumulation == 1 and bool(view.axes))

        def program(*args: Any) -> tuple[Any, list[Any], Any]:
            return _program(
                loss_fn, plan, view, args, accumulation, has_aux, host, offload_activations, moves
            )

        beside, scaled = moves.beside, jnp.asarray(scale, jnp.float32)
        args = (leaves, batch, rng, scaled, model_state, feeds, beside and beside.also)
        whole, (*grads, renewed), left = view.run(program, args, moves.specs(plan), errors, beside)
        loss, weight, aux, state, token, divisor, arrival = whole
        return Gradients(loss + token, weight, aux, grads, state, left, divisor, arrival, renewed)

    try:
        return run(taking)
    except NotTaken:
        return run(None)


def _program(
    loss_fn: Callable[..., Any],
    plan: Plan,
    view: View,
    args: tuple[Any, ...],
    accumulation: int,
    has_aux: bool,
    host: bool,
    offload: bool,
    moves: Moves,
) -> tuple[Any, list[Any], Any]:
    """Micro-batches one after the other, then what is left to reduce."""
    leaves, batch, rng, scale, before, feeds, also, errors, taken = args
    state = carried.enter(before, view.axes)
    live = [leaf for leaf in plan.leaves if leaf.trainable]
    batches = view.split(batch, accumulation)
    keys = view.keys(rng, accumulation)
    traced, out_shape = _traced(loss_fn, plan, view, batches, keys, state, has_aux, offload)
    at_once = accumulation == 1 or plan.stage.accumulator or not view.axes
    # Groups that hold the same state add their gradients once, after the last micro-batch.
    later = plan.replica_axes if at_once and accumulation > 1 and view.axes else ()
    own = jax.tree.map(lambda x: jax.lax.squeeze(x, (0,)), errors) if errors else {}
    weighted = out_shape.weight is not None
    count = host_sums.count_ahead(traced, len(plan.leaves), WEIGHT, view.axes) if weighted else None
    if moves.taking and weighted and count is None:
        raise NotTaken
    can_sum = at_once and not later and (count is not None or not weighted)
    host = host and (can_sum or accumulation == 1)
    reductions = reductions_of(plan, view, later, host, accumulation, own, moves.sunk)
    sums = empty_sums(plan, reductions) if accumulation > 1 else {}
    keeps = any(plan.param_placement(leaf).wire.kept for leaf in plan.leaves) or bool(moves.renewing)
    heads = len(jax.tree.leaves(out_shape))
    wanted: list[Reduction | None] = [None] * heads
    wanted += reductions if at_once else [None] * len(live)

    one = MicroBatch(
        plan, view, traced, out_shape, reductions, wanted, leaves, scale, count, moves, taken, also
    )
    carry = state, own, feeds, sums
    head, means, token, divisor = accumulate(one, batches, keys, carry, accumulation, view.axes, keeps)
    summed = bool(sums)
    state, own, _, sums = head.model_state
    grads: list[Any] = [sums[r.into] if r.into else g for r, g in zip(reductions, means, strict=True)]
    if not at_once:
        grads = [r(g) for r, g in zip(reductions, grads, strict=True)]
    grads = [_settled(g, later, plan, x) for g, x in zip(grads, live, strict=True)]
    loss, weight, aux = over_devices(head, view.axes, view.degree)
    after = carried.leave(before, state, view.axes, view.degree)
    left = jax.tree.map(lambda x: jax.lax.expand_dims(x, (0,)), own) if errors else ()
    arrival = arrival_of(traced, heads)
    whole = loss, weight, aux, after, token, divisor if summed else None, arrival
    return whole, [*grads, one.renewed], left


def _traced(
    loss_fn: Callable[..., Any],
    plan: Plan,
    view: View,
    batches: Any,
    keys: jax.Array,
    state: Any,
    has_aux: bool,
    offload: bool,
) -> tuple[_compat.Program, Any]:
    """The loss of one micro-batch and its gradient as one program, and the shapes of what the loss returns."""
    traced, (out_shape, _) = losses.gradient_program(
        loss_fn,
        plan.treedef.unflatten([whole_struct(plan, leaf) for leaf in plan.leaves]),
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), batches),
        jax.ShapeDtypeStruct((), keys.dtype),
        jax.ShapeDtypeStruct((), jnp.float32),
        losses.struct_of(state),
        trains=[leaf.trainable for leaf in plan.leaves],
        axes=view.axes,
        degree=view.degree,
        has_aux=has_aux,
    )
    if offload:
        inputs = range(len(traced.jaxpr.invars))
        seed = len(plan.leaves) + len(jax.tree.leaves(batches)) + 1  # behind params, batch and key
        traced = offload_residuals(
            traced, [i < len(plan.leaves) for i in inputs], [i == seed for i in inputs]
        )
    return traced, out_shape


def _settled(grad: Any, later: tuple[str, ...], plan: Plan, leaf: ParamLeaf) -> Any:
    """A gradient summed over the axes in ``later``, in its dtype; of one that is not here, the sum of its squares."""
    if isinstance(grad, (Made, Measured)):
        return grad._replace(squares=total(grad.squares, leaf.placement.axes))
    return widened(total(grad, later), plan.precision.gradient(leaf.dtype))
