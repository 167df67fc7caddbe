"""A run that cannot go on: when it stops, and which leaves it names."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zeroj as zj
from tests import oracle

pytestmark = pytest.mark.usefixtures("compile_fast")
PARAMS = {
    "good": np.ones(8, np.float32),
    "bad": {"w": np.ones((3, 5), np.float32)},
    "frozen": np.ones(2, np.int32),
}


def loss(params: Any, batch: Any) -> jax.Array:
    good = jnp.sum(params["good"].astype(jnp.float32))
    return jnp.mean(batch["x"]) * jnp.sum(params["bad"]["w"].astype(jnp.float32)) + good


def engine(**sections: Any) -> zj.Engine:
    config = {"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 1.0}}}
    return zj.initialize(loss, PARAMS, config | sections, mesh=oracle.mesh_of(8))


FINITE, INFINITE = {"x": np.ones(8, np.float32)}, {"x": np.full(8, np.inf, np.float32)}


@pytest.mark.parametrize("hysteresis", (1, 3))
def test_overflow_at_the_floor_stops_the_run_and_names_the_leaves(hysteresis: int) -> None:
    run = engine(
        fp16={"enabled": True, "initial_scale_power": 4, "min_loss_scale": 2, "hysteresis": hysteresis}
    )
    scales = []
    with pytest.raises(zj.ZerojError) as caught:
        for _ in range(40):
            scales.append(float(run.train_batch(INFINITE)["loss_scale"]))
    text = str(caught.value)
    assert "floor, 2;" in text and "1 of 2: bad/w." in text
    assert min(scales) == 2
    # used 16 until the hysteresis is used up, then 8, 4, 2; the overflow at 2 is seen one step late
    assert scales == [16.0] * hysteresis + [8, 4, 2]
    assert int(run.state.step) == 0 and run.skipped_steps == len(scales) + 1
    assert all(np.all(np.isfinite(np.asarray(x))) for x in jax.tree.leaves(run.state.params))


def test_a_clean_step_at_the_floor_is_no_reason_to_stop() -> None:
    run = engine(fp16={"enabled": True, "initial_scale_power": 1, "min_loss_scale": 1, "hysteresis": 1})
    for batch in (INFINITE, FINITE, FINITE):
        run.train_batch(batch)
    run.close()
    assert run.skipped_steps == 1


def test_the_last_overflow_is_seen_when_the_engine_closes() -> None:
    run = engine(fp16={"enabled": True, "initial_scale_power": 0, "hysteresis": 1})
    run.train_batch(INFINITE)
    with pytest.raises(zj.ZerojError, match="bad/w"):
        run.close()


def test_bf16_skips_and_warns_but_goes_on() -> None:
    run = engine(bf16={"enabled": True})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(8):
            run.train_batch(INFINITE)
        run.train_batch(FINITE)
        for _ in range(20):
            run.train_batch(INFINITE)
    with pytest.warns(UserWarning, match=r"20 updates in a row were skipped.*bad/w"):
        run.train_batch(FINITE)
    assert (run.skipped_steps, int(run.state.step)) == (28, 2)
    unchecked = engine(bf16={"enabled": True, "check_grad_overflow": False})
    for _ in range(8):
        unchecked.train_batch(INFINITE)
    unchecked.close()
    assert unchecked.skipped_steps == 0
    assert not np.all(np.isfinite(np.asarray(unchecked.state.params["bad"]["w"], np.float32)))


def test_a_finite_gradient_whose_norm_is_not_skips_the_step_and_its_leaf_is_named() -> None:
    """1e25 is finite in bf16 and fp32; its square is not, and nothing could be clipped by such a norm."""
    run = engine(bf16={"enabled": True})
    metrics = run.train_batch({"x": np.full(8, 1e25, np.float32)})
    assert not bool(metrics["applied"]) and np.isinf(float(metrics["grad_norm"]))
    named = dict(zip(("bad/w", "good"), np.asarray(metrics["finite"]), strict=True))
    assert named == {"bad/w": False, "good": True}
    run.train_batch(FINITE)
    run.close()
    assert (run.skipped_steps, int(run.state.step)) == (1, 1)
