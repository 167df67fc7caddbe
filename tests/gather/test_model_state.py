"""What a model carries beside its params: averaged over devices by the documented rule, kept where a step is
skipped, saved and restored; over the global batch equal to plain JAX."""

from __future__ import annotations

import pathlib
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zeroj as zj
from tests.gather.forms import data

TX = optax.sgd(0.1)


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Dense(11)(x)
        return nn.Dense(3)(nn.relu(nn.BatchNorm(use_running_average=False, momentum=0.9)(x)))


MODEL = Normed()


def linen_loss(params: Any, batch: jax.Array, model_state: Any) -> Any:
    y, new = MODEL.apply({"params": params, **model_state}, batch, mutable=["batch_stats"])
    return jnp.mean((y - 1) ** 2), new, {"mean": y.mean()}


def linen_parts() -> tuple[Any, Any]:
    variables = MODEL.init(jax.random.key(0), data())
    return variables["params"], {"batch_stats": variables["batch_stats"]}


class Noisy(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(8, 12, rngs=rngs)
        self.norm = nnx.BatchNorm(12, momentum=0.9, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.last = nnx.Linear(12, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(self.drop(nnx.relu(self.norm(self.first(x)))))


def nnx_parts() -> tuple[Any, Any, Any]:
    graph, params, rest = nnx.split(Noisy(nnx.Rngs(0)), nnx.Param, ...)

    def loss_fn(params: Any, batch: jax.Array, model_state: Any) -> Any:
        model = nnx.merge(graph, params, model_state)
        loss = jnp.mean((model(batch) - 1) ** 2)
        return loss, nnx.state(model, nnx.Not(nnx.Param))

    return params, rest, loss_fn


def plan_for(params: Any, stage: int = 3, precision: str = "fp32") -> zj.Plan:
    zero = zj.Zero(stage=stage, stage3_param_persistence_threshold=0)
    return zj.make_plan(params, TX, zj.make_mesh(node=2, local=4), zero, precision=precision)


def same(got: Any, want: Any, tolerance: float = 1e-6) -> None:
    got, want = jax.tree.leaves(got), jax.tree.leaves(want)
    for a, b in zip(got, want, strict=True):
        if jnp.issubdtype(b.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=tolerance, atol=tolerance)


def plain_steps(loss_fn: Any, params: Any, state: Any, batch: jax.Array, steps: int) -> tuple[Any, Any]:
    opt = TX.init(params)

    @jax.jit
    def one(params: Any, state: Any, opt: Any) -> Any:
        def loss(p: Any, s: Any) -> Any:
            return loss_fn(p, batch, model_state=jax.tree.map(lambda x: x, s))[:2]

        grads, new = jax.grad(loss, has_aux=True)(params, state)
        updates, opt = TX.update(grads, opt, params)
        return optax.apply_updates(params, updates), new, opt

    for _ in range(steps):
        params, state, opt = one(params, state, opt)
    return params, state


@pytest.mark.parametrize("framework", ["linen", "nnx"])
def test_over_the_global_batch_params_and_state_equal_plain_jax(framework: str) -> None:
    params, carried, loss_fn = (*linen_parts(), linen_loss) if framework == "linen" else nnx_parts()
    want_params, want_state = plain_steps(loss_fn, params, carried, data(), 3)
    plan = plan_for(params)
    step = zj.make_train_step(loss_fn, TX, plan, loss_over="global")
    state = zj.init_state(params, TX, plan, model_state=carried)
    for _ in range(3):
        state, metrics = step(state, data())
    same(zj.full_params(state, plan), want_params)
    same(state.model_state, want_state)
    assert ("aux" in metrics) == (framework == "linen")
    assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves(state.model_state))


def test_over_devices_statistics_are_averaged_and_counters_are_not() -> None:
    params, carried, loss_fn = nnx_parts()
    plan = plan_for(params)
    state = zj.init_state(params, TX, plan, model_state=carried)
    start = jax.device_get(state.model_state["norm"]["mean"][...])
    state, _ = zj.make_train_step(loss_fn, TX, plan, accumulation_steps=2)(state, data())
    first = data() @ params["first"]["kernel"][...] + params["first"]["bias"][...]
    # each device: its first micro-batch, then its second; then the mean over devices
    micro = first.reshape(8, 2, -1, 12).mean(2)
    want = 0.9 * (0.9 * start + 0.1 * micro[:, 0]) + 0.1 * micro[:, 1]
    np.testing.assert_allclose(state.model_state["norm"]["mean"][...], want.mean(0), rtol=1e-5, atol=1e-6)
    counts = [x for x in jax.tree.leaves(state.model_state) if x.dtype == jnp.uint32]
    assert counts and all(int(x) == 2 for x in counts)


def test_each_device_and_each_step_draws_its_own_mask() -> None:
    params, carried, _ = nnx_parts()
    plan = plan_for(params)

    def masks(params: Any, batch: jax.Array, model_state: Any) -> Any:
        drop = nnx.merge(nnx.split(Noisy(nnx.Rngs(0)))[0], params, model_state)
        seen = drop.drop(jnp.ones((64,))) > 0
        index = jax.lax.axis_index(plan.zero_axes)
        rows = jnp.zeros((8, 64)).at[index].set(seen)  # averaged over devices: one device's row is 1/8 of it
        new = nnx.state(drop, nnx.Not(nnx.Param))
        return jnp.mean(params["last"]["bias"][...]) * batch.mean(), new, rows

    step = zj.make_train_step(masks, TX, plan)
    state = zj.init_state(params, TX, plan, model_state=carried)
    rows = []
    for _ in range(2):
        state, metrics = step(state, data())
        rows.append(np.asarray(metrics["aux"]) > 0)
    assert len({row.tobytes() for seen in rows for row in seen}) == 16


def test_a_skipped_step_leaves_the_state_as_it_was() -> None:
    params, carried = linen_parts()
    plan = plan_for(params)
    step = zj.make_train_step(linen_loss, TX, plan, skip_nonfinite=True, donate=False)
    state, _ = step(zj.init_state(params, TX, plan, model_state=carried), data())
    after, metrics = step(state, data().at[0, 0].set(jnp.inf))
    assert int(metrics["skipped"]) == 1
    same(after.model_state, state.model_state, 0)


def test_it_is_saved_and_restored_onto_another_stage(tmp_path: pathlib.Path) -> None:
    params, carried, loss_fn = nnx_parts()
    plan = plan_for(params)
    state, _ = zj.make_train_step(loss_fn, TX, plan)(
        zj.init_state(params, TX, plan, model_state=carried), data()
    )
    with zj.Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(state, plan)
        other, _ = checkpoints.restore(plan_for(params, stage=1), model_state=carried)
        same(other.model_state, state.model_state, 0)
        with pytest.raises(zj.CheckpointError, match=r"model_state.*norm/mean"):
            checkpoints.restore(plan)
        wrong = jax.tree.map(lambda x: jnp.zeros(7) if x.shape == (12,) else x, carried)
        with pytest.raises(zj.CheckpointError, match=r"norm/mean/value: saved \(12,\), given \(7,\)"):
            checkpoints.restore(plan, model_state=wrong)


def test_a_loss_that_returns_another_state_is_refused_with_its_leaves() -> None:
    params, carried = linen_parts()
    plan = plan_for(params)

    def loss_fn(params: Any, batch: jax.Array, model_state: Any) -> Any:
        return jnp.mean(batch), {"batch_stats": {"BatchNorm_0": {"mean": jnp.zeros(3)}}}

    step = zj.make_train_step(loss_fn, TX, plan)
    with pytest.raises(zj.PlanError, match=r"(?s)mean: shape \(3,\), given \(11,\).*missing: .*var"):
        step(zj.init_state(params, TX, plan, model_state=carried), data())


def test_evaluation_reads_the_state_and_value_and_grad_returns_it() -> None:
    params, carried = linen_parts()
    plan = plan_for(params)
    state = zj.init_state(params, TX, plan, model_state=carried)
    want = linen_loss(params, data(), carried)

    def seen(params: Any, batch: jax.Array, model_state: Any) -> jax.Array:
        return MODEL.apply({"params": params, **model_state}, batch, mutable=["batch_stats"])[0].mean()

    assert float(
        zj.make_eval_step(linen_loss, plan, loss_over="global")(state, data())["loss"]
    ) == pytest.approx(float(want[0]), rel=1e-6)
    assert "aux" not in zj.make_eval_step(seen, plan)(state, data())
    run = zj.value_and_grad(linen_loss, plan, has_aux=True, loss_over="global")
    (loss, new, aux), _ = jax.jit(run)(state.params, data(), model_state=carried)
    same((loss, new, aux), want)
