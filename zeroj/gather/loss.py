"""What a loss may return, and the loss and its gradient as one traced program."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from zeroj import _compat
from zeroj.collectives.plain import total as total_over
from zeroj.errors import PlanError
from zeroj.gather import model_state as carried


class Mean(NamedTuple):
    """An exactly weighted mean: the sum of totals over devices and micro-batches by the sum of counts.

    Attributes:
        total: scalar, the sum over this device's slice of the batch.
        count: scalar, what to divide by, such as the number of valid tokens in the slice.

    Example:
        >>> def loss_fn(params, batch):
        ...     losses = token_losses(params, batch) * batch["mask"]
        ...     return zj.Mean(losses.sum(), batch["mask"].sum())
    """

    total: Any
    count: Any


class LossOut(NamedTuple):
    """A loss in one form: ``total / weight`` is the mean; ``weight`` is None for a plain mean."""

    total: jax.Array
    weight: jax.Array | None
    aux: Any
    model_state: Any = ()


#: The name of the parameter by which a loss asks for the model's state.
STATE = "model_state"


def takes_state(loss_fn: Callable[..., Any]) -> bool:
    """Whether ``loss_fn`` has a parameter ``model_state``; it is then passed by that name."""
    try:
        return STATE in inspect.signature(loss_fn).parameters
    except (TypeError, ValueError):
        return False


def takes_rng(loss_fn: Callable[..., Any]) -> bool:
    """Whether ``loss_fn`` takes (params, batch, rng) rather than (params, batch).

    Raises:
        PlanError: it takes neither two nor three positional arguments.
    """
    try:
        signature = inspect.signature(loss_fn)
    except (TypeError, ValueError):
        return False
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    named = [p for p in signature.parameters.values() if p.kind in kinds and p.name != STATE]
    required = [p for p in named if p.default is inspect.Parameter.empty]
    if any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in signature.parameters.values()):
        return False
    if len(required) > 3 or len(named) < 2:
        raise PlanError(
            f"loss_fn must take (params, batch) or (params, batch, rng); it takes {signature}. "
            "Bind further arguments with functools.partial."
        )
    return len(required) == 3 or (len(named) >= 3 and named[2].name in ("rng", "key", "rngs"))


def call_loss(
    loss_fn: Callable[..., Any], params: Any, batch: Any, rng: Any, model_state: Any, has_aux: bool
) -> LossOut:
    """Calls the user's loss and brings what it returns to one form.

    Raises:
        PlanError: what it returned is not a scalar, a Mean, or a pair of one of them and aux; with a
            ``model_state``, not (loss, model_state) or (loss, model_state, aux) either.
    """
    args = (params, batch, rng) if takes_rng(loss_fn) else (params, batch)
    stateful = takes_state(loss_fn)
    # Made anew within the innermost trace: nnx lets its variables be changed only in the trace that made them.
    fresh = jax.tree.map(lambda x: x, model_state)
    out = loss_fn(*args, **({STATE: fresh} if stateful else {}))
    if stateful and isinstance(out, tuple) and not isinstance(out, Mean):
        if len(out) not in (2, 3):
            raise PlanError(
                "A loss_fn that takes model_state returns loss, (loss, model_state) or "
                f"(loss, model_state, aux); it returned a tuple of {len(out)}."
            )
        value, new, *more = out
        model_state = carried.fit(model_state, new)
        out = (value, *more) if more else value
    aux: Any = ()
    pair = isinstance(out, tuple) and not isinstance(out, Mean) and len(out) == 2
    if (has_aux and not stateful) or pair:
        if not pair:
            raise PlanError(
                f"has_aux=True, so loss_fn must return (loss, aux); it returned {_describe(out)}."
            )
        out, aux = out
    weighted = isinstance(out, Mean)
    total, count = (out.total, out.count) if isinstance(out, Mean) else (out, 1.0)
    for what, value in (("loss", total), ("count", count)):
        if not (hasattr(value, "shape") or isinstance(value, (int, float))) or jnp.shape(value) != ():
            raise PlanError(
                f"loss_fn must return a scalar {what}, zj.Mean(total, count) of scalars, or a pair of one of "
                f"them and aux; the {what} is {_describe(value)}. Take its mean over the batch."
            )
    total = jnp.asarray(total)
    if not jnp.issubdtype(total.dtype, jnp.floating):
        raise PlanError(f"loss_fn must return a floating-point loss; it returned {_describe(total)}.")
    weight = jax.lax.stop_gradient(jnp.asarray(count, jnp.float32)) if weighted else None
    return LossOut(total, weight, aux, model_state)


def gradient_program(
    loss_fn: Callable[..., Any],
    params: Any,
    batch: Any,
    rng: Any,
    scale: Any,
    model_state: Any,
    *,
    trains: Sequence[bool],
    axes: tuple[str, ...],
    degree: int,
    has_aux: bool,
) -> tuple[_compat.Program, Any]:
    """Traces (leaves of params, batch, rng, scale, model_state) -> (LossOut, gradients of the trained leaves).

    The gradient is this device's addend to that of the mean over the whole micro-batch: the seed of the
    backward pass is ``scale`` by the sum of counts over devices.

    Args:
        loss_fn: the user's loss.
        params: ShapeDtypeStructs of whole leaves, in compute dtype.
        batch: this device's micro-batch, as ShapeDtypeStructs.
        rng: a key's ShapeDtypeStruct.
        scale: ShapeDtypeStruct of the fp32 loss scale.
        model_state: what the model carries, as ShapeDtypeStructs.
        trains: per leaf of params, whether it gets a gradient.
        axes: the ZeRO axes.
        degree: the number of devices along them.
        has_aux: whether the loss must return a pair.
    """
    leaves, treedef = jax.tree.flatten(params)
    live = [i for i, flag in enumerate(trains) if flag]

    def joint(leaves: list[Any], batch: Any, rng: Any, scale: Any, state: Any) -> tuple[LossOut, list[Any]]:
        def of_live(values: list[Any]) -> tuple[Any, LossOut]:
            merged = list(leaves)
            for index, value in zip(live, values, strict=True):
                merged[index] = value
            out = call_loss(loss_fn, jax.tree.unflatten(treedef, merged), batch, rng, state, has_aux)
            return out.total, out

        total, backward, out = jax.vjp(of_live, [leaves[i] for i in live], has_aux=True)
        whole = jnp.float32(degree) if out.weight is None else total_over(out.weight, axes)
        seed = jnp.where(whole > 0, scale / jnp.where(whole > 0, whole, 1.0), 0.0)
        (grads,) = backward(seed.astype(total.dtype))
        return out, grads

    return _compat.trace(joint, leaves, batch, rng, scale, model_state)


def loss_program(
    loss_fn: Callable[..., Any],
    params: Any,
    batch: Any,
    rng: Any,
    model_state: Any = (),
    *,
    has_aux: bool = False,
) -> tuple[_compat.Program, Any]:
    """Traces (leaves of params, batch, rng, model_state) -> LossOut, without a gradient."""
    leaves, treedef = jax.tree.flatten(params)

    def forward(leaves: list[Any], batch: Any, rng: Any, state: Any) -> LossOut:
        return call_loss(loss_fn, jax.tree.unflatten(treedef, leaves), batch, rng, state, has_aux)

    return _compat.trace(forward, leaves, batch, rng, model_state)


def struct_of(tree: Any) -> Any:
    """The ShapeDtypeStructs of a tree of arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def _describe(value: Any) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"an array of shape {tuple(value.shape)} and dtype {value.dtype}"
    return f"a {type(value).__name__}"
