"""The schedules against DeepSpeed's formulas, one update at a time; deepspeed.md 1b, behaviours J1."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from zeroj.config import Config


def schedule_of(kind: str, **params: Any) -> optax.Schedule:
    data = {
        "optimizer": {"type": "AdamW", "params": {"lr": 0.5}},
        "scheduler": {"type": kind, "params": params},
    }
    schedule = Config.load(data).make_schedule()
    assert schedule is not None
    return schedule


def applied(schedule: optax.Schedule, updates: int) -> np.ndarray:
    """The rate of each update, from one compiled function of an int32 count."""
    rates = jax.jit(jax.vmap(schedule))(jnp.arange(updates, dtype=jnp.int32))
    assert rates.dtype == jnp.float32
    return np.asarray(rates)


def warm(k: int, steps: int, kind: str) -> float:
    """The warm-up's share at scheduler step `k`, below `steps`."""
    return math.log(k + 1) / math.log(steps) if kind == "log" else k / steps


def reference(kind: str, updates: int, **p: Any) -> Iterator[float]:
    """DeepSpeed's rate for each update: `k` is -1 for the first, 0 for the second, and so on."""
    steps = max(2, p.get("warmup_num_steps", 1000))
    warmup_type, total = p.get("warmup_type", "log"), p.get("total_num_steps", 0)
    low, high = p.get("warmup_min_lr", 0.0), p.get("warmup_max_lr", 0.5)
    for k in range(-1, updates - 1):
        if kind in ("WarmupLR", "WarmupDecayLR"):
            if k < 0:
                gamma = 0.0
            elif k < steps:
                gamma = warm(k, steps, warmup_type)
            elif kind == "WarmupLR":
                gamma = 1.0
            else:
                gamma = max(0.0, (total - k) / max(1.0, total - steps))
            yield low + (high - low) * gamma
        elif kind == "WarmupCosineLR":
            floor, start = p.get("cos_min_ratio", 1e-4), p.get("warmup_min_ratio", 0.0)
            if k < 0:
                yield 0.0
            elif k < steps:
                yield 0.5 * (start + (1 - start) * warm(k, steps, warmup_type))
            else:
                progress = min(1.0, (k - steps + 1) / max(1, total - steps))
                yield 0.5 * (floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2)


@pytest.mark.parametrize("kind", ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"])
@pytest.mark.parametrize("warmup_type", ["log", "linear"])
@pytest.mark.parametrize(("steps", "total"), [(1, 30), (2, 30), (10, 30), (10, 10), (40, 30), (7, 8)])
def test_warm_ups(kind: str, warmup_type: str, steps: int, total: int) -> None:
    params: dict[str, Any] = {"warmup_num_steps": steps, "warmup_type": warmup_type}
    if kind != "WarmupLR":
        params["total_num_steps"] = total
    if kind == "WarmupDecayLR":
        params |= {"warmup_min_lr": 0.01, "warmup_max_lr": 0.5}
    if kind == "WarmupCosineLR":
        params |= {"warmup_min_ratio": 0.1, "cos_min_ratio": 0.05}
    rates = applied(schedule_of(kind, **params), 60)
    np.testing.assert_allclose(rates, list(reference(kind, 60, **params)), rtol=2e-6, atol=1e-8)


def test_the_first_two_updates_run_at_the_start() -> None:
    for kind in ("log", "linear"):
        rates = applied(schedule_of("WarmupLR", warmup_num_steps=100, warmup_min_lr=0.1, warmup_type=kind), 3)
        assert rates[0] == rates[1] == np.float32(0.1) < rates[2]


def test_defaults() -> None:
    log = applied(schedule_of("WarmupLR"), 2001)
    np.testing.assert_allclose(log[501], 0.5 * math.log(501) / math.log(1000), rtol=1e-6)
    np.testing.assert_allclose(log[1001:], 0.5)
    assert applied(schedule_of("WarmupDecayLR", total_num_steps=2000), 1002)[-1] == np.float32(1e-3)


def test_ten_updates_of_a_linear_warm_up_of_two() -> None:
    """J1: the rates of 2 epochs of 5 updates, warm-up 2, total 10."""
    schedule = schedule_of(
        "WarmupDecayLR", warmup_num_steps=2, total_num_steps=10, warmup_max_lr=1.0, warmup_type="linear"
    )
    expected = [0, 0, 0.5, 1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8]
    np.testing.assert_allclose(applied(schedule, 10), expected, rtol=1e-6)


@pytest.mark.parametrize("staircase", [False, True])
def test_range_test(staircase: bool) -> None:
    schedule = schedule_of(
        "LRRangeTest",
        lr_range_test_min_lr=1e-3,
        lr_range_test_step_size=7,
        lr_range_test_step_rate=0.5,
        lr_range_test_staircase=staircase,
    )
    expected = [1e-3 * (1 + 0.5 * (t // 7 if staircase else t / 7)) for t in range(30)]
    np.testing.assert_allclose(applied(schedule, 30), expected, rtol=1e-6)


def one_cycle(updates: int, first: int, second: int, decay_size: int, rate: float) -> Iterator[float]:
    """The rate of a OneCycle from 0.1 to 1.0 without stairs."""
    for t in range(updates):
        if t <= first:
            yield 0.1 + 0.9 * t / first
        elif t <= first + second:
            yield 0.1 + 0.9 * (first + second - t) / second
        else:
            yield 0.1 / (1 + rate * (t - first - second) / decay_size) if decay_size else 0.1


@pytest.mark.parametrize(("first", "second"), [(10, 10), (4, 12), (1, 1)])
@pytest.mark.parametrize(("decay_size", "rate"), [(0, 0.0), (5, 0.5), (0, 0.5), (5, 0.0)])
def test_one_cycle(first: int, second: int, decay_size: int, rate: float) -> None:
    schedule = schedule_of(
        "OneCycle",
        cycle_min_lr=0.1,
        cycle_max_lr=1.0,
        cycle_first_step_size=first,
        cycle_second_step_size=second,
        decay_step_size=decay_size,
        decay_lr_rate=rate,
    )
    rates = applied(schedule, 40)
    np.testing.assert_allclose(rates, list(one_cycle(40, first, second, decay_size, rate)), rtol=2e-6)


def test_one_cycle_in_stairs() -> None:
    params = {
        "cycle_min_lr": 0.0,
        "cycle_max_lr": 1.0,
        "cycle_first_step_size": 6,
        "cycle_first_stair_count": 3,
    }
    expected = [0, 0, 1 / 3, 1 / 3, 2 / 3, 2 / 3, 1, 2 / 3, 2 / 3, 1 / 3, 1 / 3, 0, 0, 0]
    np.testing.assert_allclose(applied(schedule_of("OneCycle", **params), 14), expected, rtol=1e-6)
    uneven = {**params, "cycle_second_step_size": 4, "cycle_second_stair_count": 2}
    expected = [0, 0, 1 / 3, 1 / 3, 2 / 3, 2 / 3, 1, 0.5, 0.5, 0, 0, 0]
    np.testing.assert_allclose(applied(schedule_of("OneCycle", **uneven), 12), expected, rtol=1e-6)


def test_changing_the_count_does_not_recompile() -> None:
    schedule = jax.jit(schedule_of("WarmupCosineLR", total_num_steps=100))
    for count in range(5):
        schedule(jnp.int32(count))
    assert schedule._cache_size() == 1


def test_a_long_run_keeps_its_precision() -> None:
    schedule = schedule_of(
        "WarmupDecayLR", total_num_steps=1_000_000, warmup_max_lr=1.0, warmup_num_steps=1000
    )
    for t in (500_001, 999_001):
        np.testing.assert_allclose(float(schedule(t)), (1_000_000 - (t - 1)) / 999_000, rtol=1e-6)
    assert float(schedule(2_000_000)) == 0.0
