"""A state moved to host memory between steps, back again, saved and restored: values and memory kinds."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import numpy as np
import optax
import pytest

import zeroj as zj
from tests import oracle

pytestmark = pytest.mark.usefixtures("compile_fast")
CPU = {"device": "cpu"}


def made(precision: str = "bf16", **zero: Any) -> tuple[Any, Any, zj.Plan, Any]:
    m, tx = oracle.model("toy"), optax.adamw(3e-3)
    zero = zj.Zero(stage=3, stage3_param_persistence_threshold=4, **zero)
    plan = zj.make_plan(m.params, tx, oracle.mesh_of(8), zero, precision=precision)
    return m, tx, plan, zj.init_state(m.params, tx, plan)


def kinds(tree: Any) -> list[str]:
    return [x.sharding.memory_kind for x in jax.tree.leaves(tree)]


def same(a: Any, b: Any) -> None:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        if not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.mark.parametrize("offload", [{}, {"offload_optimizer": CPU}])
def test_a_state_goes_away_and_comes_back_bit_for_bit(offload: dict[str, Any]) -> None:
    m, tx, plan, state = made(**offload)
    away = zj.offload_states(state)
    assert all(x.sharding.memory_kind == "pinned_host" for x in jax.tree.leaves(away.params) if x.ndim)
    assert all(x.sharding.memory_kind == "pinned_host" for x in jax.tree.leaves(away.opt_state) if x.ndim)
    same(away, state)
    back = zj.reload_states(away, plan)
    assert kinds(back) == kinds(state)
    same(back, state)
    step = zj.make_train_step(m.loss, tx, plan, donate=False)
    same(step(back, m.batches[0])[0], step(state, m.batches[0])[0])


def test_parts_can_be_chosen_by_name() -> None:
    _, _, _, state = made()
    away = zj.offload_states(state, include=("opt_state",))
    assert kinds(away.params) == kinds(state.params)
    assert "pinned_host" in kinds(away.opt_state)
    with pytest.raises(zj.PlanError, match="hp_params"):
        zj.offload_states(state, include=("hp_params",))


@pytest.mark.parametrize("part", ["params", "opt_state"])
@pytest.mark.parametrize("offloaded", [False, True])
def test_a_state_in_another_memory_is_refused_before_it_is_donated(offloaded: bool, part: str) -> None:
    m, tx, plan, state = made(**({"offload_optimizer": CPU, "offload_param": CPU} if offloaded else {}))

    def moved(x: jax.Array) -> jax.Array:
        other = "device" if x.sharding.memory_kind == "pinned_host" else "pinned_host"
        return jax.device_put(x, x.sharding.with_memory_kind(other)) if x.ndim else x

    wrong = state._replace(**{part: jax.tree.map(moved, getattr(state, part))})
    places = "on the device, planned in host memory" if offloaded else "in host memory, planned on the device"
    step = zj.make_train_step(m.loss, tx, plan)
    with pytest.raises(zj.PlanError, match=rf"w1: {places}[\s\S]*zj\.reload_states"):
        step(wrong, m.batches[0])
    if part == "params":
        with pytest.raises(zj.PlanError, match=f"w1: {places}"):
            zj.make_eval_step(m.loss, plan)(wrong, m.batches[0])
    _, metrics = step(zj.reload_states(wrong, plan), m.batches[0])  # nothing was lost
    assert np.isfinite(float(metrics["loss"]))


@pytest.mark.parametrize(
    "offload", [{"offload_optimizer": CPU}, {"offload_optimizer": CPU, "offload_param": CPU}]
)
def test_a_restored_leaf_is_in_the_memory_that_the_plan_says(
    tmp_path: pathlib.Path, offload: dict[str, Any]
) -> None:
    m, tx, plan, state = made(**offload)
    step = zj.make_train_step(m.loss, tx, plan)
    state, _ = step(state, m.batches[0])
    with_host = kinds(state)
    checkpoints = zj.Checkpointer(tmp_path)
    checkpoints.save(state, plan, {}, step=1, wait=True)
    restored, _ = checkpoints.restore(plan, tx=tx)
    assert kinds(restored) == with_host and "pinned_host" in with_host
    same(restored, state)
    _, _, plain_plan, _ = made()
    on_device, _ = checkpoints.restore(plain_plan, tx=tx)
    assert set(kinds(on_device)) == {"device"}
    same(zj.full_params(on_device, plain_plan), zj.full_params(state, plan))
    checkpoints.close()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_no_gradient_of_a_micro_batch_is_lost(stage: int) -> None:
    """Gradients 1, 2, 3, 4 in four micro-batches, three windows in a row: their mean each time."""
    sections: dict[str, Any] = {"offload_optimizer": CPU}
    sections |= {"offload_param": CPU} if stage == 3 else {}
    zero = zj.Zero(stage=stage, stage3_param_persistence_threshold=0, **sections)
    params = {"w": np.zeros(8, np.float32)}
    tx = optax.sgd(1.0, momentum=0.0, accumulator_dtype=np.float32)
    plan = zj.make_plan(params, tx, oracle.mesh_of(8), zero)
    assert plan.streams
    step = zj.make_train_step(lambda p, b: (p["w"] * b["c"].mean()).sum(), tx, plan, accumulation_steps=4)
    state = zj.init_state(params, tx, plan)
    batch = {"c": np.tile(np.repeat(np.arange(1, 5, dtype=np.float32), 1), 8)}
    for window in (1, 2, 3):
        state, metrics = step(state, batch)
        np.testing.assert_allclose(zj.full_params(state, plan)["w"], -2.5 * window)
        np.testing.assert_allclose(metrics["grad_norm"], 2.5 * np.sqrt(8), rtol=1e-6)
