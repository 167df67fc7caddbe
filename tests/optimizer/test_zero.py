"""Any optax transformation, unmodified: factored, whole-matrix, masked, partitioned, injected, or the user's own."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zeroj as zj
from tests import oracle

pytestmark = pytest.mark.usefixtures("compile_fast")
SHARDED = (1, 2, 3)


def matrices(*shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(4)
    return {f"p{i}": oracle.normal(rng, *shape) for i, shape in enumerate(shapes)}


@pytest.mark.parametrize("stage", (0, *SHARDED))
def test_adafactors_means_are_over_whole_tensors(stage: int) -> None:
    """State leaves have not the params' shapes: each is placed by its own."""
    params = matrices((256, 512), (4, 4), (512,), (2, 256, 512))
    plan, _ = oracle.compare(oracle.pull_model(params), optax.adafactor(1e-2), stage)
    placed = {leaf.path: leaf.placement for leaf in plan.state_leaves}
    rows = [p for path, p in placed.items() if path.endswith("v_row/p0")]
    assert [p.shape for p in rows] == [(256,)]
    assert all(p.sharded == (stage > 0) for p in rows)
    assert all(not p.sharded for p in placed.values() if p.shape in ((1,), ()))


@pytest.mark.parametrize("stage", SHARDED)
def test_muon_sees_the_whole_matrix(stage: int) -> None:
    params = matrices((64, 32), (32,), (3, 3, 8, 16))
    plan, _ = oracle.compare(oracle.pull_model(params), optax.contrib.muon(1e-2), stage)
    assert all(leaf.placement.sharded for leaf in plan.leaves)


@pytest.mark.parametrize("name", ("dog", "prodigy", "dadapt_adamw"))
def test_optimizers_whose_init_may_need_values_start_from_the_real_ones(name: str) -> None:
    tx = {
        "dog": optax.contrib.dog,
        "prodigy": optax.contrib.prodigy,
        "dadapt_adamw": optax.contrib.dadapt_adamw,
    }[name]()
    oracle.compare(oracle.pull_model(matrices((16, 5), (13,))), tx, 3)


def label(params: Any) -> Any:
    kinds = {0: "scalar", 1: "vector"}
    return jax.tree.map(lambda p: kinds.get(p.ndim, "matrix"), params)


NESTED: dict[str, Any] = {
    "adamw with a mask": lambda: optax.adamw(1e-2, mask=lambda ps: jax.tree.map(lambda p: p.ndim > 1, ps)),
    "masked lamb": lambda: optax.chain(
        optax.masked(optax.lamb(1e-2), lambda ps: jax.tree.map(lambda p: p.ndim > 1, ps)), optax.scale(0.5)
    ),
    "three labels": lambda: optax.multi_transform(
        {"scalar": optax.sgd(1e-2), "vector": optax.adam(1e-2), "matrix": optax.adamw(1e-2)}, label
    ),
}


def linen_like() -> Any:
    return {"dense": {"kernel": oracle.normal(np.random.default_rng(0), 12, 9), "bias": np.ones(9, np.float32)},
            "scale": np.float32(1.5) * np.ones((), np.float32)}  # fmt: skip


def nnx_state() -> Any:
    class Net(nnx.Module):
        def __init__(self) -> None:
            self.dense = nnx.Linear(12, 9, rngs=nnx.Rngs(0))
            self.scale = nnx.Param(jnp.float32(1.5))

    return jax.tree.map(np.asarray, nnx.split(Net(), nnx.Param, ...)[1])


@pytest.mark.parametrize("kind", (linen_like, nnx_state), ids=("dict", "nnx.State"))
@pytest.mark.parametrize("name", NESTED)
@pytest.mark.parametrize("stage", (1, 3))
def test_masked_and_partitioned_state_trains_saves_and_comes_back(
    kind: Any, name: str, stage: int, tmp_path: Any
) -> None:
    m, tx = oracle.pull_model(kind(), steps=3), NESTED[name]()
    plan, found = oracle.compare(m, tx, stage)
    assert all("MaskedNode" not in leaf.path for leaf in plan.state_leaves)
    assert jax.tree.structure(found.params) == jax.tree.structure(m.params)
    state = zj.init_state(m.params, tx, plan)
    state, _ = zj.make_train_step(m.loss, tx, plan)(state, m.batches[0])
    with zj.Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(state, plan, wait=True)
        back, _ = checkpoints.restore(plan)
    assert jax.tree.structure(back.opt_state) == jax.tree.structure(state.opt_state)
    pairs = zip(
        jax.tree.leaves((state.params, state.opt_state)), jax.tree.leaves((back.params, back.opt_state))
    )
    for old, new in pairs:
        np.testing.assert_array_equal(np.asarray(old), np.asarray(new))
        assert old.sharding.is_equivalent_to(new.sharding, old.ndim)


def test_injected_hyperparameters_stay_in_fp32_and_may_change_without_a_new_trace() -> None:
    """optax casts them to the params' dtype: the optimizer only ever sees the fp32 master."""
    params = {"w": jnp.ones((16, 8), jnp.bfloat16)}
    tx = optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3, weight_decay=0.0)
    for stage in (0, 1, 3):
        plan = zj.make_plan(params, tx, oracle.mesh_of(8), zj.Zero(stage=stage), precision="bf16")
        traced = []

        def loss(p: Any, batch: Any, traced: list[int] = traced) -> jax.Array:
            traced.append(1)
            return jnp.sum(p["w"].astype(jnp.float32)) + 0 * batch.sum()

        step = zj.make_train_step(loss, tx, plan)
        state, _ = step(zj.init_state(params, tx, plan), np.zeros(8, np.float32))
        inner: Any = state.opt_state.inner
        assert inner.hyperparams["b2"].dtype == jnp.float32
        assert float(inner.hyperparams["b2"]) == pytest.approx(0.999, rel=1e-6)
        master = state.opt_state.master if plan.has_master else state.params
        np.testing.assert_allclose(np.asarray(master["w"]), 1 - 1e-3, rtol=1e-6)
        count = len(traced)
        rate = jax.device_put(jnp.float32(1.0), plan.replicated)
        hyper = inner._replace(hyperparams={**inner.hyperparams, "learning_rate": rate})
        state = state._replace(opt_state=state.opt_state._replace(inner=hyper))
        state, _ = step(state, np.zeros(8, np.float32))
        master = state.opt_state.master if plan.has_master else state.params
        np.testing.assert_allclose(np.asarray(master["w"]), -1e-3, atol=1e-4)
        assert len(traced) == count, "a changed learning rate traced the loss anew"


def users_own() -> optax.GradientTransformation:
    """A transformation whose state looks like no param: the largest norm of an update so far."""

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        largest = jnp.maximum(state, optax.tree.norm(grads))
        return jax.tree.map(lambda g, p: -1e-2 * g / largest - 1e-3 * p, grads, params), largest

    return optax.GradientTransformation(lambda params: jnp.float32(1e-3), update)


@pytest.mark.parametrize("tx", (optax.sgd(0.1), optax.lion(1e-2), users_own()), ids=("sgd", "lion", "own"))
@pytest.mark.parametrize("stage", SHARDED)
def test_any_transformation_is_taken(tx: optax.GradientTransformation, stage: int) -> None:
    oracle.compare(oracle.pull_model(matrices((16, 5), (13,)), steps=3), tx, stage)


@pytest.mark.parametrize("stage", SHARDED)
@pytest.mark.parametrize("how", ("mask", "predicate"))
def test_frozen_leaves_cost_no_state_and_stay_bit_identical_under_weight_decay(stage: int, how: str) -> None:
    params = oracle.toy_params()
    live = {key: key == "w2" for key in params}
    trainable = live if how == "mask" else (lambda path, leaf: path == "w2")
    tx = optax.adamw(1e-2, weight_decay=0.5)
    plan = zj.make_plan(
        params, tx, oracle.mesh_of(8), zj.Zero(stage=stage), precision="bf16", trainable=trainable
    )
    assert plan.memory().whole["opt_state"] == 2 * params["w2"].nbytes + 4
    assert plan.memory().whole["master"] == (0 if stage == 3 else params["w2"].nbytes)
    step = zj.make_train_step(oracle.toy_loss, tx, plan, donate=False)
    first = state = zj.init_state(params, tx, plan)
    for batch in oracle.toy_batches(20, 16):
        state, metrics = step(state, batch)
    for key in params:
        same = np.array_equal(np.asarray(first.params[key]), np.asarray(state.params[key]))
        assert same != live[key], key
    big = {leaf.path: leaf.placement.sharded for leaf in plan.leaves}
    assert big["w1"] and (stage < 3) == state.params["w1"].sharding.is_fully_replicated
    seen = jax.tree.map(lambda p: jnp.asarray(p, jnp.bfloat16), zj.full_params(first, plan))
    _, before = step(first, oracle.toy_batches(1, 16)[0])
    grads = jax.grad(oracle.toy_loss)(seen, oracle.toy_batches(1, 16)[0])
    wanted = float(jnp.linalg.norm(grads["w2"].astype(jnp.float32)))
    assert float(before["grad_norm"]) == pytest.approx(wanted, rel=1e-2)
    assert wanted < 0.9 * float(optax.tree.norm(grads)), "the frozen leaves' gradients would not have shown"
    assert np.isfinite(metrics["loss"])


def test_a_wholly_frozen_subtree_and_nothing_to_train() -> None:
    params, tx = {"a": {"b": np.ones((8, 2), np.float32)}, "c": np.ones(8, np.float32)}, optax.adam(1e-1)
    m = oracle.pull_model(params, steps=1)
    for trainable in (lambda path, leaf: path == "c", lambda path, leaf: False):
        plan = zj.make_plan(params, tx, oracle.mesh_of(8), zj.Zero(stage=3), trainable=trainable)
        state, _ = zj.make_train_step(m.loss, tx, plan)(zj.init_state(params, tx, plan), m.batches[0])
        np.testing.assert_array_equal(zj.full_params(state, plan)["a"]["b"], params["a"]["b"])
