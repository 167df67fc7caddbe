"""Every leaf lives where the plan says after every step, also on explicit meshes and inside ``jax.set_mesh``."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import zeroj as zj
from tests import oracle

pytestmark = pytest.mark.usefixtures("compile_fast")
STAGES = (0, 1, 2, 3)


def assert_as_planned(plan: zj.Plan, state: zj.TrainState) -> None:
    """Shardings, shapes and dtypes of every leaf are those of ``zj.abstract_state``, none of them missing."""
    wanted = (plan.params_struct(), plan.opt_state_struct())
    found = (state.params, state.opt_state)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for (path, leaf), want in zip(
        jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(wanted), strict=True
    ):
        where = jax.tree_util.keystr(path)
        assert isinstance(leaf.sharding, NamedSharding), where
        assert leaf.sharding.is_equivalent_to(want.sharding, leaf.ndim), (where, leaf.sharding.spec)
        assert (leaf.shape, leaf.dtype) == (want.shape, want.dtype), where
    for leaf in jax.tree.leaves((state.step, state.skipped, state.scale, state.rng)):
        assert isinstance(leaf.sharding, NamedSharding) and leaf.sharding.is_fully_replicated
    for leaf, value in zip(plan.leaves, jax.tree.leaves(state.params), strict=True):
        is_sharded = plan.zero.stage == 3 and leaf.placement.sharded
        assert value.sharding.is_fully_replicated != is_sharded, leaf.path


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("precision", ("fp32", "bf16"))
def test_params_are_whole_below_stage_3_and_sharded_at_it_after_every_step(
    stage: int, precision: str
) -> None:
    params, tx = oracle.toy_params(), optax.adamw(1e-3)
    plan = zj.make_plan(params, tx, oracle.mesh_of(8), zj.Zero(stage=stage), precision=precision)
    assert any(leaf.placement.sharded for leaf in plan.leaves)
    traced = []

    def loss(p: Any, batch: Any) -> jax.Array:
        traced.append(True)
        return oracle.toy_loss(p, batch)

    step = zj.make_train_step(loss, tx, plan, accumulation_steps=2, clip_norm=1.0)
    state = zj.init_state(params, tx, plan)
    assert_as_planned(plan, state)
    tracings = []
    for batch in oracle.toy_batches(2, 32):
        state, _ = step(state, batch)
        assert_as_planned(plan, state)
        tracings.append(len(traced))
    assert tracings[0] == tracings[1] > 0, "the second step was traced anew"


@pytest.mark.parametrize("stage", (1, 3))
@pytest.mark.parametrize("kind", (AxisType.Explicit, AxisType.Auto), ids=("explicit", "auto"))
@pytest.mark.parametrize("inside", (True, False), ids=("in set_mesh", "outside"))
def test_the_users_mesh_may_be_explicit_and_set(stage: int, kind: AxisType, inside: bool) -> None:
    mesh = Mesh(np.array(jax.devices()), ("data",), axis_types=(kind,))
    params, tx = oracle.toy_params(), optax.adamw(1e-3)
    batches = oracle.toy_batches(2, 32)
    with jax.set_mesh(mesh) if inside else contextlib.nullcontext():
        plan = zj.make_plan(params, tx, mesh, zj.Zero(stage=stage), zero_axes=("data",))
        step = zj.make_train_step(oracle.toy_loss, tx, plan)
        born = zj.init_state(lambda: jax.tree.map(jnp.asarray, params), tx, plan)
        state = zj.init_state(params, tx, plan)
        np.testing.assert_array_equal(zj.full_params(born, plan)["w1"], params["w1"])
        for batch in batches:
            sharding = NamedSharding(mesh, PartitionSpec("data"))
            placed = jax.tree.map(lambda x, s=sharding: jax.device_put(x, s), batch)
            state, metrics = step(state, placed)
            assert_as_planned(plan, state)
        assert float(zj.make_eval_step(oracle.toy_loss, plan)(state, batch)["loss"]) < float(metrics["loss"])
        opt_state = jax.jit(zj.wrap_optimizer(tx, plan).init, out_shardings=plan.opt_state)(state.params)
        loss, _ = jax.jit(zj.value_and_grad(oracle.toy_loss, plan))(state.params, batch)
        assert_as_planned(plan, state._replace(opt_state=opt_state))
    wanted = oracle.oracle(oracle.Model(oracle.toy_loss, params, batches), tx)
    assert oracle.distance(zj.full_params(state, plan), wanted.params) <= 1e-6
    assert float(loss) < wanted.losses[-1]


@pytest.mark.parametrize("stage", STAGES)
def test_scalars_of_the_optimizers_state_keep_their_place_and_dtype(stage: int) -> None:
    """Counters, injected hyperparameters and moments of a scalar param: whole, named, and int32 stays int32."""
    params = oracle.toy_params()
    tx = optax.inject_hyperparams(optax.adamw)(learning_rate=optax.linear_schedule(1e-3, 0, 10))
    plan = zj.make_plan(params, tx, oracle.mesh_of(8), zj.Zero(stage=stage))
    state = zj.init_state(params, tx, plan)
    state, _ = zj.make_train_step(oracle.toy_loss, tx, plan)(state, oracle.toy_batches(1, 16)[0])
    assert_as_planned(plan, state)
    inner: Any = state.opt_state.inner
    assert inner.count.dtype == jnp.int32 and int(inner.count) == 1
    assert float(inner.hyperparams["learning_rate"]) == pytest.approx(1e-3)
    scalars = [x for x in jax.tree.leaves(inner) if x.ndim == 0]
    assert len(scalars) >= 5 and all(x.sharding == plan.replicated for x in scalars)
