"""The loss scaler over many steps, low-precision masters, and the sum in place of the mean."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zeroj as zj
from tests import oracle
from zeroj.plan.precision import make_precision
from zeroj.step.precision import MAX_SCALE, init_scale, is_stuck, next_scale

pytestmark = pytest.mark.usefixtures("compile_fast")
W = {"w": np.zeros(8, np.float32)}


def injected(params: Any, batch: Any) -> jax.Array:
    return jnp.mean(batch["g"]) * jnp.sum(params["w"].astype(jnp.float32))


@dataclasses.dataclass
class Scaler:
    """DeepSpeed's dynamic scaler, as its state machine is documented: one overflow flag after the other."""

    config: zj.LossScale

    def __post_init__(self) -> None:
        self.scale, self.iteration, self.last = 2.0**self.config.initial_power, 0, -1
        self.left = self.config.hysteresis

    def stuck(self) -> bool:
        return (self.config.hysteresis == 1 or self.left == 1) and self.scale == self.config.min_scale

    def step(self, overflow: bool) -> None:
        c = self.config
        if overflow:
            if c.hysteresis == 1 or self.left == 1:
                self.scale = max(self.scale / 2, c.min_scale)
            else:
                self.left -= 1
            self.last = self.iteration
        else:
            if c.consecutive_hysteresis:
                self.left = c.hysteresis
            stable = self.iteration - self.last - 1
            if stable > 0 and stable % c.window == 0:
                if not c.consecutive_hysteresis:
                    self.left = c.hysteresis
                self.scale = min(2 * self.scale, MAX_SCALE)  # DeepSpeed's has no upper bound
        self.iteration += 1


CONFIGS = [
    zj.LossScale(initial_power=4, window=2),
    zj.LossScale(initial_power=4, window=1, hysteresis=1),
    zj.LossScale(initial_power=6, window=3, hysteresis=3),
    zj.LossScale(initial_power=6, window=3, hysteresis=3, consecutive_hysteresis=True),
    zj.LossScale(initial_power=3, window=5, hysteresis=2, min_scale=4.0),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.window}-{c.hysteresis}-{c.min_scale:g}")
def test_scale_sequence_is_the_state_machines(config: zj.LossScale) -> None:
    step = jax.jit(lambda s, ok: (next_scale(s, ok, config), is_stuck(s, ok, config)))
    for often in (0.1, 0.3, 0.7, 1.0):
        flags = np.random.default_rng(int(10 * often)).random(300) < often
        wanted, state = Scaler(config), init_scale(config)
        for overflow in flags:
            stuck = wanted.stuck() and bool(overflow)
            wanted.step(bool(overflow))
            state, found = step(state, not overflow)
            assert (float(state.scale), bool(found)) == (wanted.scale, stuck)


@pytest.mark.parametrize("stage", (1, 3))
def test_fifty_crafted_steps_keep_params_finite_and_apply_exactly_the_clean_ones(stage: int) -> None:
    config = zj.LossScale(initial_power=5, window=3, hysteresis=2)
    tx = optax.sgd(1 / 64)  # sums of these are exact
    zero = zj.Zero(stage=stage, stage3_param_persistence_threshold=0)
    plan = zj.make_plan(W, tx, oracle.mesh_of(8), zero, precision="fp16")
    step, state = (
        zj.make_train_step(injected, tx, plan, loss_scale=config),
        zj.init_state(W, tx, plan, loss_scale=config),
    )
    bad = np.random.default_rng(5).random(50) < 0.25
    wanted, clean, scales = Scaler(config), 0, set()
    for overflow in bad:
        g = np.ones(8, np.float32)
        g[3] = np.inf if overflow else 1
        assert float(state.scale.scale) == wanted.scale
        scales.add(wanted.scale)
        state, metrics = step(state, {"g": g})
        wanted.step(bool(overflow))
        clean += not overflow
        assert bool(metrics["applied"]) == (not overflow)
        if not overflow:
            assert float(metrics["grad_norm"]) == pytest.approx(np.sqrt(8))
        assert np.all(np.asarray(state.params["w"]) == -clean / 64)
    assert (int(state.step), int(state.skipped)) == (clean, 50 - clean)
    assert len(scales) > 3, "the scale hardly moved, so nothing was shown"


@pytest.mark.parametrize("name", ("bf16", "fp16"))
@pytest.mark.parametrize("stage", (1, 2, 3))
def test_low_masters_are_what_plain_optax_does_with_low_params(stage: int, name: str) -> None:
    dtype = {"bf16": jnp.bfloat16, "fp16": jnp.float16}[name]
    config = zj.Config.load(
        {
            "train_batch_size": 8,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.125}},
            name: {"enabled": True, f"{name}_master_weights_and_grads": True}
            | ({"loss_scale": 128} if name == "fp16" else {}),
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "gradient_clipping": 0,
        }
    )
    tx = config.make_optimizer()
    assert tx is not None and config.master_dtype == name
    start = {"w": np.linspace(-1, 1, 24, dtype=np.float32)}
    engine = zj.initialize(
        lambda p, b: jnp.mean(b["g"]) * jnp.sum(p["w"].astype(jnp.float32) ** 2), start, config
    )
    assert engine.plan.opt_state_struct().master == ()
    assert {np.dtype(a.dtype) for a in jax.tree.leaves(engine.state.params)} == {np.dtype(dtype)}
    params = {"w": jnp.asarray(start["w"], dtype)}
    opt_state = tx.init(params)
    for _ in range(6):
        engine.train_batch({"g": np.ones(8, np.float32)})
        grads = {"w": (2 * params["w"].astype(jnp.float32)).astype(dtype).astype(jnp.float32)}
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
    found = zj.full_params(engine.state, engine.plan)["w"]
    # one unit in the last place of the first params at most: the gradient is summed in another order
    eps = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(found, params["w"].astype(np.float32), rtol=eps, atol=eps)
    held = engine.plan.memory()
    assert held.device["master"] == 0
    usual = zj.make_plan(start, tx, engine.plan.mesh, engine.plan.zero, precision=name).memory()
    assert held.device["grads"] * 2 == usual.device["grads"]
    assert held.device_total < usual.device_total


def test_low_masters_round_small_updates_away_and_fp32_masters_do_not() -> None:
    """AdamW at 1e-4 on params of one, a hundred gradients of one: 1e-2 in all, below bf16's resolution each."""
    moved = {}
    for low in (False, True):
        tx = optax.adamw(1e-4, weight_decay=0.0, mu_dtype=jnp.float32)
        precision = make_precision("bf16", low_master=low)
        start = {"w": np.ones(8, np.float32)}
        plan = zj.make_plan(start, tx, oracle.mesh_of(8), zj.Zero(stage=2), precision=precision)
        step, state = zj.make_train_step(injected, tx, plan), zj.init_state(start, tx, plan)
        if not low:
            kinds = {np.dtype(a.dtype) for a in jax.tree.leaves(state.opt_state) if a.ndim}
            assert kinds == {np.dtype(np.float32)}  # masters and both moments
        for _ in range(100):
            state, _ = step(state, {"g": np.ones(8, np.float32)})
            jax.block_until_ready(state.step)  # simulated devices starve where many steps are in flight
        moved[low] = float(1 - zj.full_params(state, plan)["w"][0])
    assert moved[False] == pytest.approx(1e-2, rel=1e-3)
    assert moved[True] == 0


@pytest.mark.parametrize("stage", (0, 2, 3))
def test_the_sum_is_n_times_the_mean(stage: int) -> None:
    moved = {}
    for op in ("mean", "sum"):
        tx = optax.sgd(1 / 64)
        plan = zj.make_plan(W, tx, oracle.mesh_of(8), zj.Zero(stage=stage))
        step = zj.make_train_step(injected, tx, plan, 2, reduce_op=op)
        state, metrics = step(zj.init_state(W, tx, plan), {"g": np.ones(16, np.float32)})
        moved[op] = (float(state.params["w"][0]), float(metrics["grad_norm"]), float(metrics["loss"]))
    assert moved["mean"] == (-1 / 64, pytest.approx(np.sqrt(8)), 0)
    assert moved["sum"] == (-8 / 64, pytest.approx(8 * np.sqrt(8)), 0)
    with pytest.raises(zj.PlanError, match="reduce_op must be 'mean' or 'sum'"):
        zj.make_train_step(injected, tx, plan, reduce_op="max")
