"""Every program form and kind of parameter: loss and gradient equal those of plain JAX."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest

import zeroj as zj
from tests.gather.kinds import FORMS


@pytest.mark.parametrize("name", FORMS)
def test_loss_and_gradient_equal_plain_jax(name: str) -> None:
    params, loss_fn, batch = FORMS[name]()
    parts = batch.reshape(8, -1, *batch.shape[1:])
    branches = "_on_data" in name or "differs" in name  # on each device by its own slice

    def oracle(p: object, x: jax.Array) -> jax.Array:
        return jax.lax.map(lambda part: loss_fn(p, part), parts).mean() if branches else loss_fn(p, x)

    want_loss, want = jax.jit(jax.value_and_grad(oracle))(params, batch)
    for stage in (2, 3):
        zero = zj.Zero(stage=stage, stage3_param_persistence_threshold=0)
        plan = zj.make_plan(params, optax.sgd(0.1), zj.make_mesh(node=2, local=4), zero)
        loss, grads = jax.jit(zj.value_and_grad(loss_fn, plan))(zj.shard_params(plan, params), batch)
        bound = 2e-6 if "cast" not in name else 2e-2
        assert abs(float(loss) - float(want_loss)) <= bound * max(abs(float(want_loss)), 1)
        for leaf, got, exact in zip(plan.leaves, jax.tree.leaves(grads), jax.tree.leaves(want), strict=True):
            whole = np.asarray(got)[tuple(slice(0, n) for n in leaf.shape)]
            distance = np.linalg.norm(whole - exact)
            assert distance <= bound * max(np.linalg.norm(exact), 1e-3), (stage, leaf.path)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_scalar_that_no_output_depends_on_has_a_literal_for_a_gradient(accumulation: int) -> None:
    """Found by the fuzzer: a literal has no hash."""
    params = {"w": np.ones((8, 8), np.float32), "unused": np.float32(2), "stopped": np.float32(3)}

    def loss(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        return jax.lax.stop_gradient(p["stopped"]) * ((x @ p["w"]) ** 2).mean()

    tx = optax.sgd(0.1)
    for stage in (0, 1, 2, 3):
        zero = zj.Zero(stage=stage, stage3_param_persistence_threshold=0)
        plan = zj.make_plan(params, tx, zj.make_mesh(), zero)
        step = zj.make_train_step(loss, tx, plan, accumulation_steps=accumulation)
        state, metrics = step(zj.init_state(params, tx, plan), np.ones((16, 8), np.float32))
        assert float(metrics["loss"]) == 3 * 64
        after = zj.full_params(state, plan)
        assert (after["unused"], after["stopped"]) == (2, 3)
        np.testing.assert_allclose(after["w"], 1 - 0.1 * 3 * 2 * 8 / 8)
