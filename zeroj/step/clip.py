"""Gradients as the optimizer is to see them: without the loss scale, and clipped by their global norm."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from zeroj import _compat
from zeroj.gather.gradients import Gradients
from zeroj.gather.sinks import Made, Measured
from zeroj.optimizer.norms import Unfinished, sum_of_squares
from zeroj.plan.plan import Plan

#: Added to the norm before it divides, as DeepSpeed does: clip_factor = min(1, max_norm / (norm + 1e-6)).
CLIP_EPSILON = 1e-6


class Clipped(NamedTuple):
    """Gradients as the optimizer is to see them.

    Attributes:
        grads: unscaled and clipped; those in host memory, and what was made of those that were taken, as they came.
        norm: fp32 scalar, the global norm before clipping.
        factor: fp32 scalar, what they were multiplied by.
        finite: bool (leaves,), for each whether all its elements, on every device, are finite, and the sum of
            their squares with them.
        left: makes the same of what of a gradient is brought to the device.
        order: the leaves by number, in the order in which their gradients are made, unless all wait for the norm.
        came: the gradients as they came.
        renewed: see :class:`zeroj.gather.gradients.Gradients`.
    """

    grads: list[Any]
    norm: jax.Array
    factor: jax.Array
    finite: jax.Array
    left: Unfinished
    order: tuple[int, ...] = ()
    came: Sequence[Any] = ()
    renewed: Any = ()


def unscale_and_clip(plan: Plan, out: Gradients, scale: jax.Array | None, clip_norm: float | None) -> Clipped:
    """Divides by the scale that the gradients were made with, and clips by the global norm.

    A leaf counts as finite where the sum of its squares is: a larger one overflows the norm, and with it the step.
    """
    dtypes = [leaf.dtype for leaf in plan.leaves if leaf.trainable]
    left = Unfinished(out.divisor, scale, None)
    grads = [_unscaled(plan, left, g, x) for g, x in zip(out.grads, dtypes, strict=True)]
    each = [_squares(plan, left, g, x) for g, x in zip(grads, dtypes, strict=True)]
    squares = jnp.stack(each) if each else jnp.zeros((0,), jnp.float32)
    norm = jnp.sqrt(jnp.sum(squares))
    factor = jnp.float32(1)
    if clip_norm is not None:
        factor = jnp.minimum(1.0, clip_norm / (norm + CLIP_EPSILON))
        left = left._replace(factor=factor)
    done = [_bare(g) if stays(g) else left.clip(g) for g in grads]
    order = out.arrival.order if clip_norm is None else ()
    came = [_bare(g) for g in out.grads]
    return Clipped(done, norm, factor, jnp.isfinite(squares), left, order, came, out.renewed)


def stays(grad: Any) -> bool:
    """Whether a gradient is left as it came: it is in host memory, or was taken where it arose."""
    return isinstance(grad, (Made, Measured)) or _compat.is_on_host(grad)


def _bare(grad: Any) -> Any:
    """A gradient without what was measured of it."""
    return grad.grad if isinstance(grad, Measured) else grad


def _unscaled(plan: Plan, left: Unfinished, grad: Any, dtype: np.dtype) -> Any:
    return grad if stays(grad) else left.unscaled(grad, dtype, plan.precision)


def _squares(plan: Plan, left: Unfinished, grad: Any, dtype: np.dtype) -> jax.Array:
    """The sum of the squares of a gradient's elements."""
    if isinstance(grad, Made):
        return grad.squares
    if isinstance(grad, Measured):
        return grad.squares if left.scale is None else grad.squares / jnp.square(left.scale)
    fetched = partial(left.fetched, dtype=dtype, precision=plan.precision)
    return sum_of_squares(grad, fetched if _compat.is_on_host(grad) else None, plan.degree)
