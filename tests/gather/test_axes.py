"""Losses that use mesh axes themselves: the ZeRO axes by collectives, and axes of their own for the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import zeroj as zj
from tests.gather.forms import D, data, square, stack

pytestmark = pytest.mark.usefixtures("compile_fast")
Loss = Callable[[Any, jax.Array], jax.Array]
ZERO = ("node", "local")
SPLIT = PartitionSpec(None, "model")


def check(loss: Loss, oracle: Loss, mesh: jax.sharding.Mesh, **kwargs: Any) -> None:
    """``loss`` under stage 3 has the value and the gradient of ``oracle`` in plain JAX on the whole batch."""
    params, batch = stack(), data()
    zero = zj.Zero(stage=3, stage3_param_persistence_threshold=0)
    plan = zj.make_plan(params, optax.sgd(0.1), mesh, zero)
    with jax.set_mesh(plan.mesh):
        step = jax.jit(zj.value_and_grad(loss, plan, **kwargs))
        value, grads = step(zj.shard_params(plan, params), batch)
    want, exact = jax.value_and_grad(oracle)(params, batch)
    np.testing.assert_allclose(value, want, rtol=2e-6)
    for got, wanted in zip(jax.tree.leaves(grads), jax.tree.leaves(exact), strict=True):
        whole = np.asarray(got)[tuple(slice(0, n) for n in wanted.shape)]
        assert np.linalg.norm(whole - wanted) <= 2e-6 * np.linalg.norm(wanted)


def hidden(p: Any, x: jax.Array) -> jax.Array:
    return x @ p["w"] @ p["v"]


def less_the_mean(p: Any, x: jax.Array) -> jax.Array:
    h = hidden(p, x)
    return square(h - jax.lax.pmean(h.mean(0), ZERO)) + square(p["b"])


def in_batch_negatives(p: Any, x: jax.Array) -> jax.Array:
    h = hidden(p, x)
    return square(h @ jax.lax.all_gather(h, ZERO, tiled=True).T) + square(p["b"])


def by_the_neighbour(p: Any, x: jax.Array) -> jax.Array:
    h = hidden(p, x)
    return square(h * jax.lax.ppermute(h, "local", [(i, (i + 1) % 4) for i in range(4)])) + square(p["b"])


def turned(h: jax.Array) -> jax.Array:
    """What the devices of a node (two nodes of four) get from their neighbours."""
    return jnp.roll(h.reshape(2, 4, -1, D), 1, 1).reshape(h.shape)


@pytest.mark.parametrize(
    ("loss", "oracle"),
    [
        (less_the_mean, lambda p, x: square((h := hidden(p, x)) - h.mean(0)) + square(p["b"])),
        (in_batch_negatives, lambda p, x: square((h := hidden(p, x)) @ h.T) + square(p["b"])),
        (by_the_neighbour, lambda p, x: square((h := hidden(p, x)) * turned(h)) + square(p["b"])),
    ],
    ids=["pmean", "all_gather", "ppermute"],
)
def test_collectives_over_the_zero_axes(loss: Loss, oracle: Loss) -> None:
    check(loss, oracle, zj.make_mesh(node=2, local=4))


def plain(p: Any, x: jax.Array) -> jax.Array:
    return square(jnp.tanh(x @ p["w"]) @ p["v"] + p["b"])


def constrained(p: Any, x: jax.Array) -> jax.Array:
    h = jax.lax.with_sharding_constraint(jnp.tanh(x @ p["w"]), SPLIT)
    return square(h @ p["v"] + p["b"])


def by_hand(p: Any, x: jax.Array) -> jax.Array:
    def part(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        return jax.lax.psum(jnp.tanh(x @ w) @ v, "model")

    specs = (PartitionSpec(), SPLIT, PartitionSpec("model", None))
    f = jax.shard_map(part, in_specs=specs, out_specs=PartitionSpec(), axis_names={"model"})
    return square(f(x, p["w"], p["v"]) + p["b"])


@pytest.mark.parametrize("loss_over", ["device", "global"])
@pytest.mark.parametrize("loss", [constrained, by_hand], ids=["with_sharding_constraint", "shard_map"])
def test_an_axis_of_the_models_own(loss: Loss, loss_over: str) -> None:
    check(loss, plain, zj.make_mesh(local=4, model=2), loss_over=loss_over)
