"""Gradients as the optimizer is to see them: without the loss scale, and clipped by their global norm."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from zeroj import _compat
from zeroj.gather.gradients import Gradients
from zeroj.optimizer.norms import Unfinished, sum_of_squares
from zeroj.plan.plan import Plan

#: Added to the norm before it divides, as DeepSpeed does: clip_factor = min(1, max_norm / (norm + 1e-6)).
CLIP_EPSILON = 1e-6


class Clipped(NamedTuple):
    """Gradients as the optimizer is to see them.

    Attributes:
        grads: unscaled and clipped; those in host memory as they came.
        norm: fp32 scalar, the global norm before clipping.
        factor: fp32 scalar, what they were multiplied by.
        finite: bool (leaves,), for each whether all its elements, on every device, are finite, and the sum of
            their squares with them.
        left: makes the same of what of a gradient is brought to the device.
    """

    grads: list[jax.Array]
    norm: jax.Array
    factor: jax.Array
    finite: jax.Array
    left: Unfinished


def unscale_and_clip(plan: Plan, out: Gradients, scale: jax.Array | None, clip_norm: float | None) -> Clipped:
    """Divides by the scale that the gradients were made with, and clips by the global norm.

    A leaf counts as finite where the sum of its squares is: a larger one overflows the norm, and with it the step.
    """
    dtypes = [leaf.dtype for leaf in plan.leaves if leaf.trainable]
    away = [_compat.is_on_host(g) for g in out.grads]
    left = Unfinished(out.divisor, scale, None)

    fetched = partial(left.fetched, precision=plan.precision)
    grads = [
        g if host else left.unscaled(g, x, plan.precision)
        for g, x, host in zip(out.grads, dtypes, away, strict=True)
    ]
    each = [
        sum_of_squares(g, partial(fetched, dtype=x) if host else None, plan.degree)
        for g, x, host in zip(grads, dtypes, away, strict=True)
    ]
    squares = jnp.stack(each) if each else jnp.zeros((0,), jnp.float32)
    norm = jnp.sqrt(jnp.sum(squares))
    factor = jnp.float32(1)
    if clip_norm is not None:
        factor = jnp.minimum(1.0, clip_norm / (norm + CLIP_EPSILON))
        left = left._replace(factor=factor)
    done = [g if host else left.clip(g) for g, host in zip(grads, away, strict=True)]
    return Clipped(done, norm, factor, jnp.isfinite(squares), left)
