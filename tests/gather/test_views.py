"""Losses over the whole batch: in-batch negatives and batch statistics equal the oracle, unmodified."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zeroj as zj
from tests.gather.forms import FORMS, data, normal


def contrastive(p: Any, x: jax.Array) -> jax.Array:
    a, b = x @ p["a"], jnp.tanh(x) @ p["b"]
    return optax.softmax_cross_entropy_with_integer_labels(a @ b.T, jnp.arange(x.shape[0])).mean()


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Dense(11)(x)
        return nn.Dense(3)(nn.relu(nn.BatchNorm(use_running_average=False, momentum=0.9)(x)))


def cases() -> dict[str, tuple[Any, Callable[..., Any]]]:
    model = Normed()
    variables = model.init(jax.random.key(0), data())

    def batch_norm(p: Any, x: jax.Array) -> Any:
        state = {"params": p, "batch_stats": variables["batch_stats"]}
        y, new = model.apply(state, x, mutable=["batch_stats"])
        return jnp.mean(y**2), new["batch_stats"]

    return {
        "contrastive": ({"a": normal(1, 8, 16), "b": normal(2, 8, 16)}, contrastive),
        "batch_norm": (variables["params"], batch_norm),
        "scan_remat": FORMS["scan_remat"]()[:2],
    }


@pytest.mark.parametrize("name", ["contrastive", "batch_norm", "scan_remat"])
def test_global_loss_equals_the_oracle(name: str) -> None:
    params, loss_fn = cases()[name]
    aux = name == "batch_norm"
    batch = data()
    want, exact = jax.jit(jax.value_and_grad(loss_fn, has_aux=aux))(params, batch)
    for stage in range(4):
        zero = zj.Zero(stage=stage, stage3_param_persistence_threshold=0)
        plan = zj.make_plan(params, optax.sgd(0.1), zj.make_mesh(node=2, local=4), zero)
        step = jax.jit(zj.value_and_grad(loss_fn, plan, has_aux=aux, loss_over="global"))
        got, grads = step(zj.shard_params(plan, params), batch)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), got, want)
        size = optax.tree_utils.tree_norm(exact)  # a bias before a batch norm has a gradient of pure noise
        for leaf, g, e in zip(plan.leaves, jax.tree.leaves(grads), jax.tree.leaves(exact), strict=True):
            whole = np.asarray(g)[tuple(slice(0, n) for n in leaf.shape)]
            assert np.linalg.norm(whole - e) <= 1e-6 * size, (stage, leaf.path)
            assert g.sharding.is_equivalent_to(plan.sharding(plan.grad_placement(leaf)), g.ndim)


def test_a_whole_step_over_the_global_batch_with_accumulation_and_dropout_keys() -> None:
    params = {"a": normal(1, 8, 16), "b": normal(2, 8, 16)}
    tx = optax.sgd(0.1)

    def loss_fn(p: Any, x: jax.Array, rng: jax.Array) -> jax.Array:
        return jnp.mean(jnp.square((x * jax.random.bernoulli(rng, 0.5, x.shape)) @ p["a"] @ p["b"].T))

    finals = []
    for stage in (0, 3):
        zero = zj.Zero(stage=stage, stage3_param_persistence_threshold=0)
        plan = zj.make_plan(params, tx, zj.make_mesh(), zero)
        step = zj.make_train_step(loss_fn, tx, plan, accumulation_steps=2, loss_over="global")
        state, metrics = step(zj.init_state(params, tx, plan), data(32, 8))
        finals.append((float(metrics["loss"]), zj.full_params(state, plan)))
    assert finals[0][0] == pytest.approx(finals[1][0], rel=1e-6)
    for whole, sharded in zip(*(jax.tree.leaves(params) for _, params in finals), strict=True):
        assert np.linalg.norm(whole - sharded) <= 1e-6 * np.linalg.norm(
            whole
        )  # by norm, as the contract says


def test_an_unknown_view_is_refused() -> None:
    plan = zj.make_plan({"w": normal(1, 8, 8)}, optax.sgd(0.1), zj.make_mesh())
    with pytest.raises(zj.PlanError, match="'device' or 'global', not 'batch'"):
        zj.value_and_grad(lambda p, b: 0.0, plan, loss_over="batch")
