"""Params that are gathered once a step and kept (``reshard_after_forward: false``) train as those gathered again."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zeroj as zj

LAYERS, WIDTH = 3, 16


def params() -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 2)
    make = lambda key: 0.3 * jax.random.normal(key, (LAYERS, WIDTH, WIDTH))  # noqa: E731
    return {"w": make(keys[0]), "v": make(keys[1]), "head": jnp.ones((WIDTH, 3))}


def block(x: jax.Array, p: Any) -> jax.Array:
    return x + jnp.tanh(x @ p["w"]) @ p["v"]


def by_scan(p: Any, x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda c, q: (jax.checkpoint(block)(c, q), None), x, {k: p[k] for k in "wv"})[0]


def by_index(p: Any, x: jax.Array) -> jax.Array:
    return jax.lax.fori_loop(0, LAYERS, lambda i, c: block(c, {k: p[k][i] for k in "wv"}), x)


def by_list(p: Any, x: jax.Array) -> jax.Array:
    for i in range(LAYERS):
        x = jax.checkpoint(block)(x, {k: p[k][i] for k in "wv"})
    return x


def trained(run: Any, accumulation: int, loss_over: str = "device", **zero: Any) -> Any:
    assert jax.device_count() == 8
    tx, start = optax.adamw(1e-2), params()
    mesh = zj.make_mesh(node=2, local=4) if loss_over == "device" else zj.make_mesh()
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, **zero}
    plan = zj.make_plan(start, tx, mesh, zj.Zero(**zero), scanned=["w", "v"])

    def loss_fn(p: Any, batch: Any) -> jax.Array:
        return jnp.mean(jnp.square(run(p, batch["x"]) @ p["head"] - batch["y"]))

    step = zj.make_train_step(loss_fn, tx, plan, accumulation, clip_norm=0.5, loss_over=loss_over)
    state = zj.init_state(start, tx, plan)
    rng = np.random.default_rng(0)
    for _ in range(3):
        x, y = rng.normal(size=(16, WIDTH)), rng.normal(size=(16, 3))
        state, metrics = step(state, {"x": x.astype(np.float32), "y": y.astype(np.float32)})
    return zj.full_params(state, plan), float(metrics["loss"]), plan


def assert_alike(one: Any, other: Any) -> None:
    for a, b in zip(jax.tree.leaves(one[0]), jax.tree.leaves(other[0]), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-7)
    assert one[1] == pytest.approx(other[1], rel=1e-6)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("run", [by_scan, by_index, by_list])
def test_kept_params_train_as_those_that_are_gathered_again(run: Any, accumulation: int) -> None:
    kept = trained(run, accumulation, reshard_after_forward=False)
    assert_alike(kept, trained(run, accumulation))


@pytest.mark.parametrize("run", [by_scan, by_list])
def test_over_the_global_batch(run: Any) -> None:
    kept = trained(run, 1, "global", reshard_after_forward=False)
    assert_alike(kept, trained(run, 1, "global"))


@pytest.mark.parametrize(
    "more",
    [
        {"zero_quantized_weights": True},
        {"zero_quantized_gradients": True},
        {"zero_hpz_partition_size": 4},
        {"mics_shard_size": 4},
        {"offload_param": {"device": "cpu"}},
    ],
    ids=lambda more: next(iter(more)),
)
def test_beside_other_ways_to_gather(more: dict[str, Any]) -> None:
    kept = trained(by_scan, 2, reshard_after_forward=False, **more)
    assert_alike(kept, trained(by_scan, 2, **more))


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("run", [by_scan, by_list])
def test_stage_2_with_overlap_comm_trains_as_stage_2_and_holds_shards_between_steps(
    run: Any, accumulation: int
) -> None:
    found = {of: trained(run, accumulation, stage=2, overlap_comm=of) for of in (True, False)}
    assert_alike(found[True], found[False])
    memory = {of: plan.memory().device for of, (_, _, plan) in found.items()}
    assert memory[True]["params"] == pytest.approx(memory[False]["params"] / 8, rel=0.01)
    assert memory[True]["opt_state"] == pytest.approx(memory[False]["opt_state"], rel=0.01)


def test_the_plan_counts_what_is_kept() -> None:
    plan = trained(by_scan, 1, reshard_after_forward=False)[2]
    whole = sum(4 * leaf.size for leaf in jax.tree.leaves(params()))
    assert plan.memory().device["secondary"] == pytest.approx(whole, rel=0.02)
    assert (
        "gathered over node/local once a step, and kept whole to its end, as at stage 2 with overlap_comm"
        in str(plan)
    )
