"""Means over tokens, micro-batches and devices; gradient norms and clipping: read straight off the params."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zeroj as zj
from tests import oracle

STAGES = (0, 1, 2, 3)
W = {"w": np.zeros(8, np.float32)}


def token_loss(params: Any, batch: Any) -> zj.Mean:
    """Each token's gradient with respect to every element of ``w`` is the batch's "g"."""
    per_token = batch["g"] * batch["mask"] * jnp.sum(params["w"])
    return zj.Mean(per_token.sum(), batch["mask"].sum())


def injected(params: Any, batch: Any) -> jax.Array:
    """The gradient of ``w`` is the mean of "g" over the batch, in every element."""
    return jnp.mean(batch["g"]) * jnp.sum(params["w"].astype(jnp.float32))


def sgd1(loss: Any, stage: int, devices: int, **options: Any) -> tuple[Any, Any]:
    """A step of plain SGD at learning rate 1 on ``w`` of zeros, and its first state."""
    precision = options.pop("precision", "fp32")
    tx = optax.sgd(1.0)
    plan = zj.make_plan(
        W, tx, oracle.mesh_of(devices), zj.Zero(stage=stage, stage3_param_persistence_threshold=0),
        precision=precision,
    )  # fmt: skip
    scale = options.get("loss_scale")
    return zj.make_train_step(loss, tx, plan, **options), zj.init_state(W, tx, plan, loss_scale=scale)


def tokens(*micro: tuple[float, int], width: int = 4) -> dict[str, np.ndarray]:
    """A row per (gradient of each token, number of valid tokens)."""
    mask = np.array([[float(i < n) for i in range(width)] for _, n in micro], np.float32)
    return {"g": np.array([[g] * width for g, _ in micro], np.float32), "mask": mask}


def value(state: zj.TrainState) -> np.ndarray:
    return np.asarray(jax.device_get(state.params["w"]), np.float32)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("devices", "accumulation", "batch", "wanted"),
    [
        (1, 2, tokens((1, 3), (5, 1)), -2.0),
        (2, 1, tokens((1, 3), (5, 1)), -2.0),
        # rows are device-major: device 0 has counts 3 and 1, device 1 has 0 and 4
        (2, 2, tokens((1, 3), (5, 1), (7, 0), (2, 4)), -(3 * 1 + 5 + 4 * 2) / 8),
        (2, 2, tokens((1, 0), (5, 2), (7, 0), (2, 1)), -(5 * 2 + 2) / 3),
    ],
)
def test_every_token_weighs_the_same(
    stage: int, devices: int, accumulation: int, batch: Any, wanted: float
) -> None:
    step, state = sgd1(token_loss, stage, devices, accumulation_steps=accumulation)
    state, metrics = step(state, batch)
    np.testing.assert_allclose(value(state), np.full(8, wanted), rtol=1e-6)
    np.testing.assert_allclose(metrics["grad_norm"], abs(wanted) * np.sqrt(8), rtol=1e-6)
    assert metrics["step"] == 1 and metrics["skipped"] == 0


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("accumulation", (1, 2))
def test_without_any_valid_token_nothing_is_updated(stage: int, accumulation: int) -> None:
    step, state = sgd1(token_loss, stage, 2, accumulation_steps=accumulation)
    state, metrics = step(state, tokens(*[(3.0, 0)] * 4))
    assert np.all(value(state) == 0) and metrics["skipped"] == 1 and metrics["step"] == 0
    assert np.isfinite(metrics["loss"]) and metrics["grad_norm"] == 0
    state, metrics = step(state, tokens(*[(3.0, 1)] * 4))
    np.testing.assert_allclose(value(state), -3.0)


@pytest.mark.parametrize("stage", STAGES)
def test_windows_of_accumulation_average_all_their_micro_batches(stage: int) -> None:
    """Gradients 1, 2, 3, 4, three windows in a row: each moves by -2.5, and says so."""
    step, state = sgd1(injected, stage, 8, accumulation_steps=4)
    batch = {"g": np.tile(np.arange(1, 5, dtype=np.float32), 8)}
    for window in range(1, 4):
        state, metrics = step(state, batch)
        np.testing.assert_allclose(value(state), -2.5 * window, rtol=1e-6)
        np.testing.assert_allclose(metrics["grad_norm"], 2.5 * np.sqrt(8), rtol=1e-6)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("microbatches", ((1, 1), (2, 4)))
def test_a_constant_loss_is_shown_as_it_is(stage: int, microbatches: tuple[int, int]) -> None:
    """Whatever the accumulation, devices and padding of the batch, a loss of 2 per token is 2."""
    devices, accumulation = microbatches

    def loss(params: Any, batch: Any) -> zj.Mean:
        return zj.Mean((2.0 + 0 * jnp.sum(params["w"])) * batch["mask"].sum(), batch["mask"].sum())

    step, state = sgd1(loss, stage, devices, accumulation_steps=accumulation)
    rows = [(0.0, n % 5) for n in range(1, 8 * devices + 1)]
    _, metrics = step(state, tokens(*rows))
    assert metrics["loss"] == pytest.approx(2.0, abs=1e-6)


@pytest.mark.parametrize("stage", STAGES)
def test_the_norm_shown_is_that_before_clipping_and_the_factor_says_what_clipping_did(stage: int) -> None:
    step, state = sgd1(injected, stage, 8, clip_norm=1.0)
    gradient = 10 / np.sqrt(8)
    state, metrics = step(state, {"g": np.full(8, gradient, np.float32)})
    assert metrics["grad_norm"] == pytest.approx(10.0, rel=1e-6)
    assert metrics["clip_factor"] == pytest.approx(0.1, rel=1e-6)
    assert np.linalg.norm(value(state)) == pytest.approx(1.0, rel=1e-6)
    state, metrics = step(state, {"g": np.full(8, 0.01, np.float32)})
    assert metrics["clip_factor"] == 1.0


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("dtype", (jnp.bfloat16, jnp.float32))
def test_the_norm_is_global_and_exact_for_a_million_bf16_ones(stage: int, dtype: Any) -> None:
    """Each leaf counts once, sharded or whole, and the sum of squares is not made in bf16."""
    params = {"w": jnp.zeros(2**20, dtype), "small": jnp.zeros((3,), dtype)}
    tx = optax.sgd(1.0)
    precision = "bf16" if dtype == jnp.bfloat16 else "fp32"
    plan = zj.make_plan(params, tx, oracle.mesh_of(8), zj.Zero(stage=stage), precision=precision)
    assert plan.leaves[1].placement.sharded and not plan.leaves[0].placement.sharded

    def loss(p: Any, batch: Any) -> jax.Array:
        return jnp.sum(p["w"].astype(jnp.float32)) + 0 * jnp.sum(p["small"]) + 0 * batch.sum()

    step = zj.make_train_step(loss, tx, plan, clip_norm=512.0)
    state, metrics = step(zj.init_state(params, tx, plan), np.zeros(8, np.float32))
    assert metrics["grad_norm"] == 1024.0
    assert metrics["clip_factor"] == pytest.approx(0.5, rel=1e-6)
    np.testing.assert_allclose(np.asarray(state.params["w"], np.float32), -0.5, rtol=1e-6)


@pytest.mark.parametrize("stage", STAGES)
def test_bf16_is_not_scaled_and_every_step_starts_from_zero_gradients(stage: int) -> None:
    step, state = sgd1(injected, stage, 8, precision="bf16")
    for count in (1, 2):
        state, metrics = step(state, {"g": np.ones(8, np.float32)})
        assert np.all(value(state) == -count)
        assert metrics["loss_scale"] == 1.0


SCALE = zj.LossScale(dynamic=True, initial_power=2, window=1, hysteresis=1)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("clip", "move"), ((None, -1.0), (0.5 * np.sqrt(8), -0.5)))
def test_gradients_are_divided_by_the_scale_that_they_were_made_with(
    stage: int, clip: float | None, move: float
) -> None:
    step, state = sgd1(injected, stage, 8, precision="fp16", loss_scale=SCALE, clip_norm=clip)
    scales = []
    for count in range(1, 6):
        state, metrics = step(state, {"g": np.ones(8, np.float32)})
        scales.append(float(metrics["loss_scale"]))
        np.testing.assert_allclose(value(state), move * count, rtol=1e-3)
        assert metrics["grad_norm"] == pytest.approx(np.sqrt(8), rel=1e-6)
    assert scales[0] == 4 and scales[-1] > 4, "the scale never grew, so nothing was shown"


@pytest.mark.parametrize("stage", STAGES)
def test_an_overflow_changes_nothing_but_the_scale_and_the_count_of_skips(stage: int) -> None:
    tx = optax.adam(1.0)
    zero = zj.Zero(stage=stage, stage3_param_persistence_threshold=0)
    plan = zj.make_plan(W, tx, oracle.mesh_of(8), zero, precision="fp16")
    step = zj.make_train_step(injected, tx, plan, loss_scale=SCALE, donate=False)
    first, _ = step(zj.init_state(W, tx, plan, loss_scale=SCALE), {"g": np.ones(8, np.float32)})
    bad = np.ones(8, np.float32)
    bad[5] = np.inf  # on one device of eight
    second, metrics = step(first, {"g": bad})
    assert metrics["skipped"] == 1 and metrics["step"] == 1
    for old, new in zip(
        jax.tree.leaves((first.params, first.opt_state)), jax.tree.leaves((second.params, second.opt_state))
    ):
        np.testing.assert_array_equal(np.asarray(old), np.asarray(new))
    assert float(second.scale.scale) == float(first.scale.scale) / 2
    third, metrics = step(second, {"g": np.ones(8, np.float32)})
    assert metrics["step"] == 2 and np.all(value(third) < value(second))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("small", "precision"),
    [(1 / 2, "bf16"), (1 / 256, zj.Precision("bf16", communication=np.dtype(np.float32)))],
    ids=("reduced in bf16", "reduced in fp32"),
)
def test_accumulation_is_exact_where_bf16_sums_would_stick(stage: int, small: float, precision: Any) -> None:
    """256 micro-batches of gradient 1, then 256 of a small one: a bf16 accumulator would stay at 256.

    The mean of the first case is a bf16 number, so that a reduction in bf16 does not round it.
    """
    batch = {"g": np.tile(np.repeat(np.array([1, small], np.float32), 256), 2)}
    step, state = sgd1(injected, stage, 2, precision=precision, accumulation_steps=512)
    _, metrics = step(state, batch)
    assert metrics["grad_norm"] == pytest.approx((1 + small) / 2 * np.sqrt(8), rel=1e-6)
