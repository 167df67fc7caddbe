"""Means over micro-batches and devices: sums of totals by sums of counts, never means of means."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from zeroj.collectives.plain import total
from zeroj.gather.kept import Kept
from zeroj.gather.loss import LossOut, Mean

#: Runs one micro-batch: (micro-batch, key, model state, what is kept of gathers) -> (loss, gradients, token); what
#: it keeps itself it adds.
OneMicrobatch = Callable[[Any, jax.Array, Any, Kept], tuple[LossOut, list[jax.Array | None], jax.Array]]


def accumulate(
    one: OneMicrobatch,
    batches: Any,
    keys: jax.Array,
    state: Any,
    accumulation: int,
    axes: tuple[str, ...],
    keeps: bool = False,
) -> tuple[LossOut, list[jax.Array | None], jax.Array, jax.Array]:
    """Runs the micro-batches one after the other and averages them.

    A micro-batch's gradient is that of its own mean over all devices; one with a count weighs as much as it
    counts, so that tokens, not micro-batches, are equal. Without valid tokens at all, the gradient is zero.

    Args:
        one: runs one micro-batch.
        batches: leaves of shape (accumulation, micro-batch, ...).
        keys: (accumulation,) keys.
        state: what the model carries; each micro-batch gets what the one before it returned.
        accumulation: the number of micro-batches.
        axes: the ZeRO axes.
        keeps: whether a micro-batch keeps of its gathers, or makes, what later ones use. Then the first one stands
            before the loop over the others: what a loop's first iteration makes, its second cannot see.

    Returns:
        This device's loss (its total and count summed, or a plain mean), the averaged gradients (None for those
        that a micro-batch adds to sums in its state), a token, and by what such sums are to be divided.
    """

    def weighted(micro: Any, key: jax.Array, state: Any, kept: Kept) -> Any:
        head, grads, token = one(micro, key, state, kept)
        head, state = _summable(head)._replace(model_state=()), head.model_state
        if head.weight is None or accumulation == 1:
            return (head, grads, token, jnp.float32(1)), state
        weight = total(head.weight, axes)
        return (
            head,
            [None if g is None else g * weight.astype(g.dtype) for g in grads],
            token,
            weight,
        ), state

    kept: Kept = {}
    rest = (batches, keys)
    first = jax.tree.map(lambda x: x[0], batches), keys[0]
    if accumulation == 1 or keeps:
        start, state = weighted(*first, state, kept)
        rest = jax.tree.map(lambda x: x[1:], rest)
    else:
        shapes, _ = jax.eval_shape(lambda micro, key, state: weighted(micro, key, state, {}), *first, state)
        start = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    if accumulation == 1:
        head, grads, token, weight = start
        return head._replace(model_state=state), grads, token, weight

    def add(carry: tuple[Any, Any], x: tuple[Any, jax.Array]) -> tuple[tuple[Any, Any], None]:
        found, state = weighted(*x, carry[1], dict(kept))
        return (jax.tree.map(jnp.add, carry[0], found), state), None

    (summed, state), _ = jax.lax.scan(add, (start, state), rest)
    head, grads, token, weight = summed
    mean = head.total / accumulation if head.weight is None else head.total
    aux = _map_aux(head.aux, lambda x: x / accumulation if _floating(x) else x, lambda mean: mean)
    head = LossOut(mean, head.weight, aux, state)
    weight = _nonzero(weight)
    return head, [None if g is None else g / weight.astype(g.dtype) for g in grads], token, weight


def over_devices(
    head: LossOut, axes: tuple[str, ...], degree: int
) -> tuple[jax.Array, jax.Array | None, Any]:
    """(loss, count, aux) over all devices: fp32 mean, the sum of counts or None, and the reduced aux."""
    head = _summable(head)
    count = None if head.weight is None else total(head.weight, axes)
    loss = total(head.total, axes) / (degree if count is None else _nonzero(count))

    def plain(x: jax.Array) -> jax.Array:
        summed = total(x, axes)
        return summed / degree if _floating(x) else summed

    def exact(mean: Mean) -> jax.Array:
        return total(mean.total, axes) / _nonzero(total(mean.count, axes))

    return loss, count, _map_aux(head.aux, plain, exact)


def _summable(head: LossOut) -> LossOut:
    """The same in dtypes whose sums over micro-batches and devices are exact enough: fp32 and int32."""
    aux = _map_aux(
        head.aux, _wide, lambda mean: Mean(_wide(jnp.asarray(mean.total)), jnp.float32(mean.count))
    )
    return LossOut(_wide(head.total), head.weight, aux, head.model_state)


def _wide(x: jax.Array) -> jax.Array:
    if _floating(x):
        return x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return x.astype(jnp.int32) if x.dtype == jnp.bool_ else x


def _map_aux(aux: Any, plain: Callable[[Any], Any], mean: Callable[[Mean], Any]) -> Any:
    def one(leaf: Any) -> Any:
        return mean(leaf) if isinstance(leaf, Mean) else plain(jnp.asarray(leaf))

    return jax.tree.map(one, aux, is_leaf=lambda x: isinstance(x, Mean))


def _floating(x: jax.Array) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))


def _nonzero(count: jax.Array) -> jax.Array:
    return jnp.where(count > 0, count, 1.0)
