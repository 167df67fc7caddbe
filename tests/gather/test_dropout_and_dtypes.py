"""Dropout inside rematerialised layers, and params of several dtypes in one tree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zeroj as zj
from tests.gather.forms import B, D, data, normal

TX = optax.sgd(0.1)
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compile_fast")]


def plan_for(params: Any, stage: int = 3, **options: Any) -> zj.Plan:
    zero = zj.Zero(stage=stage, stage3_param_persistence_threshold=0)
    return zj.make_plan(params, TX, zj.make_mesh(node=2, local=4), zero, **options)


def dropped(remat: bool) -> Callable[..., jax.Array]:
    def layer(x: jax.Array, w: jax.Array, key: jax.Array) -> jax.Array:
        return x + jnp.tanh(x @ w) * jax.random.bernoulli(key, 0.5, x.shape)

    def loss(p: Any, x: jax.Array, rng: jax.Array) -> jax.Array:
        for i, w in enumerate(p):
            x = (jax.checkpoint(layer) if remat else layer)(x, w, jax.random.fold_in(rng, i))
        return jnp.mean(x**2)

    return loss


@pytest.mark.parametrize("stage", [0, 3])
def test_dropout_under_remat_gives_the_same_gradient(stage: int) -> None:
    params = [normal(i, D, D) for i in range(3)]
    plan = plan_for(params, stage)
    grads = []
    for remat in (False, True, True):
        run = jax.jit(zj.value_and_grad(dropped(remat), plan))
        grads.append(run(zj.shard_params(plan, params), data(), jax.random.key(3))[1])
    for plain, remat, again in zip(*grads, strict=True):
        assert np.linalg.norm(plain - remat) <= 1e-6 * np.linalg.norm(plain)
        np.testing.assert_array_equal(remat, again)


def test_every_device_micro_batch_and_step_draws_its_own_mask() -> None:
    def loss(p: Any, x: jax.Array, rng: jax.Array) -> Any:
        return jnp.mean(p["w"]) * x.mean(), {"mask": x[:1, :1] * jax.random.normal(rng, (1, 64))}

    params = {"w": normal(1, D, D)}
    plan = plan_for(params)
    step = zj.make_train_step(loss, TX, plan, accumulation_steps=2)
    state = zj.init_state(params, TX, plan)
    seen = []
    for _ in range(2):
        for row in range(B):  # one row of the batch is not zero: its device and micro-batch are what is seen
            batch = jnp.zeros((B, D)).at[row].set(1.0)
            state, metrics = step(state._replace(scale=state.scale), batch)
            seen.append(np.asarray(metrics["aux"]["mask"]).tobytes())
    assert len(set(seen)) == 2 * B


@pytest.mark.parametrize("stage", [2, 3])
def test_each_leaf_keeps_its_dtype_and_equals_plain_jax(stage: int) -> None:
    params = {
        "bf16": normal(1, D, 2 * D).astype(jnp.bfloat16),
        "norm": 1 + normal(2, 2 * D),
        "fp16": normal(3, 2 * D, D).astype(jnp.float16),
        "ids": jnp.arange(D)[::-1],
    }

    def loss(p: Any, x: jax.Array) -> jax.Array:
        h = jnp.tanh(x[:, p["ids"]] @ p["bf16"].astype(jnp.float32)) * p["norm"]
        return jnp.mean((h @ p["fp16"].astype(jnp.float32)) ** 2)

    plan = plan_for(params, stage)
    want = jax.grad(loss, allow_int=True)(params, data())
    _, grads = jax.jit(zj.value_and_grad(loss, plan))(zj.shard_params(plan, params), data())
    assert grads["ids"] is None
    for name, bound in (("bf16", 1e-2), ("norm", 1e-5), ("fp16", 2e-3)):
        exact = np.asarray(want[name], np.float32)
        assert np.linalg.norm(np.asarray(grads[name], np.float32) - exact) <= bound * np.linalg.norm(exact)
    step = zj.make_train_step(loss, TX, plan)
    state, _ = step(zj.init_state(params, TX, plan), data())
    full = zj.full_params(state, plan)
    assert {k: v.dtype for k, v in full.items()} == {k: v.dtype for k, v in params.items()}
    np.testing.assert_array_equal(full["ids"], params["ids"])
