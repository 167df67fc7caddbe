"""What ``zj.value_and_grad`` gives can itself be differentiated, forward and backward, and batched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zeroj as zj
from tests.gather.forms import D, block, data, normal, square

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compile_fast")]
PARAMS = {"w": normal(1, D, 2 * D), "v": normal(2, 2 * D, D), "b": normal(3, D)}
ALONG = {"w": normal(4, D, 2 * D), "v": normal(5, 2 * D, D), "b": normal(6, D)}


def loss_fn(p: Any, x: jax.Array) -> jax.Array:
    return square(jax.checkpoint(block)(block(x, p), p))


def along(grads: Any) -> jax.Array:
    return sum(jnp.vdot(a, b) for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(ALONG), strict=True))


def derivative(what: str, f: Callable[..., Any]) -> Callable[[Any], Any]:
    """A derivative of ``f(params, batch) -> (loss, gradient)``."""
    x = data()
    return {
        "gradient of the loss": lambda p: jax.grad(lambda p: f(p, x)[0])(p),
        "Hessian, reverse over reverse": lambda p: jax.grad(lambda p: along(f(p, x)[1]))(p),
        "Hessian, forward over reverse": lambda p: jax.jvp(lambda p: f(p, x)[1], (p,), (ALONG,))[1],
        "forward": lambda p: jax.jvp(lambda p: f(p, x)[0], (p,), (ALONG,))[1],
        "vmap": lambda p: jax.vmap(lambda s: f(jax.tree.map(lambda a: a * s, p), x)[1])(jnp.arange(1.0, 3)),
    }[what]


KINDS = (
    "gradient of the loss",
    "Hessian, reverse over reverse",
    "Hessian, forward over reverse",
    "forward",
    "vmap",
)


@pytest.mark.parametrize("what", KINDS)
@pytest.mark.parametrize("view", ["device", "global"])
def test_a_derivative_of_the_gradient_equals_plain_jax(what: str, view: str) -> None:
    zero = zj.Zero(stage=3, stage3_param_persistence_threshold=0)
    plan = zj.make_plan(PARAMS, optax.sgd(0.1), zj.make_mesh(), zero)
    got = jax.jit(derivative(what, zj.value_and_grad(loss_fn, plan, loss_over=view)))
    want = jax.jit(derivative(what, jax.value_and_grad(loss_fn)))(PARAMS)
    found = got(zj.shard_params(plan, PARAMS))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        assert np.linalg.norm(a - b) <= 2e-6 * max(np.linalg.norm(b), 1)
