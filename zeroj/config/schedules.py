"""DeepSpeed's learning rate schedules, as functions of the number of updates made.

DeepSpeed steps its scheduler after an update, and starts it one before the first step. So update `t` (from 0)
runs at the rate of scheduler step `k = t - 1`, and the first update at the rate of `k = -1`, the start. Every
function here takes `t`, as optax does, and applies that lag. Formulas: deepspeed/runtime/lr_schedules.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from zeroj.config.load import Loaded
from zeroj.config.scheduler_rows import (
    LRRangeTestParams,
    OneCycleParams,
    ScheduleParams,
    WarmupCosineLRParams,
    WarmupDecayLRParams,
    WarmupLRParams,
    WarmupType,
)

_Formula = Callable[[jax.Array], jax.Array]


def make_schedule(loaded: Loaded) -> optax.Schedule | None:
    """The learning rate schedule of a file; see `Config.make_schedule`."""
    if loaded.scheduler is None:
        return None
    base = loaded.optimizer.base_lr if loaded.optimizer is not None else None
    return build_schedule(loaded.scheduler, base)


def build_schedule(params: ScheduleParams, base_lr: float | None = None) -> optax.Schedule:
    """The schedule that `params` describe.

    Args:
        params: checked params of one of DeepSpeed's schedules.
        base_lr: the optimizer's lr; used by WarmupLR without warmup_max_lr, and by WarmupCosineLR.

    Returns:
        A jittable function from an int32 count of updates to an fp32 learning rate.

    Example:
        >>> params = WarmupLRParams(warmup_max_lr=1.0, warmup_num_steps=4, warmup_type="linear")
        >>> schedule = build_schedule(params)
        >>> [round(float(schedule(t)), 2) for t in range(7)]
        [0.0, 0.0, 0.25, 0.5, 0.75, 1.0, 1.0]
    """
    match params:
        case WarmupLRParams():
            top = params.warmup_max_lr if params.warmup_max_lr is not None else base_lr
            assert top is not None, "checked when the config was loaded"
            return _lagged(_between(params.warmup_min_lr, top, _warmup(params, lambda k: jnp.ones_like(k))))
        case WarmupDecayLRParams():
            return _lagged(
                _between(params.warmup_min_lr, params.warmup_max_lr, _warmup(params, _linear(params)))
            )
        case WarmupCosineLRParams():
            assert base_lr is not None, "checked when the config was loaded"
            return _lagged(_cosine(params, base_lr))
        case LRRangeTestParams():
            return _lagged(_range_test(params))
        case OneCycleParams():
            return _lagged(_one_cycle_lr(params))
    raise AssertionError(f"no formula for {type(params).__name__}")


def build_momentum_schedule(params: ScheduleParams | None) -> optax.Schedule | None:
    """The first beta by update, where `params` are those of a OneCycle that cycles momentum; else None."""
    if isinstance(params, OneCycleParams) and params.cycle_momentum:
        return _lagged(_one_cycle_momentum(params))
    return None


def describe_schedule(kind: str, params: ScheduleParams) -> str:
    """The schedule in words: its type and every param."""
    shown = {f.removeprefix("lr_range_test_"): getattr(params, f) for f in type(params).model_fields}
    shown.pop("last_batch_iteration")
    return f"{kind}({', '.join(f'{name}={value}' for name, value in shown.items())})"


def _lagged(formula: _Formula) -> optax.Schedule:
    """Turn a formula in scheduler steps `k` (-1 at the start) into a schedule in updates `t = k + 1`."""

    def schedule(count: jax.typing.ArrayLike) -> jax.Array:
        return formula(jnp.asarray(count, jnp.int32) - 1).astype(jnp.float32)

    return schedule


def _between(low: float, high: float, gamma: _Formula) -> _Formula:
    return lambda k: low + (high - low) * gamma(k)


def _rise(kind: WarmupType, steps: int) -> _Formula:
    """The warm-up's share: 0 before the first step, then log(k + 1) / log(steps) or k / steps."""
    if kind == "log":
        return lambda k: jnp.log(jnp.maximum(k, 0) + 1.0) / math.log(steps)
    return lambda k: jnp.maximum(k, 0) / steps


def _warmup(params: WarmupLRParams | WarmupDecayLRParams, after: _Formula) -> _Formula:
    steps = max(2, params.warmup_num_steps)
    rise = _rise(params.warmup_type, steps)
    return lambda k: jnp.where(k < steps, rise(k), after(k.astype(jnp.float32)))


def _linear(params: WarmupDecayLRParams) -> _Formula:
    steps, total = max(2, params.warmup_num_steps), params.total_num_steps
    return lambda k: jnp.maximum(0.0, (total - k) / max(1.0, total - steps))


def _cosine(params: WarmupCosineLRParams, base_lr: float) -> _Formula:
    steps = max(2, params.warmup_num_steps)
    decay_steps = max(1, params.total_num_steps - steps)
    low, floor = params.warmup_min_ratio, params.cos_min_ratio
    rise = _rise(params.warmup_type, steps)

    def formula(k: jax.Array) -> jax.Array:
        progress = jnp.clip((k - steps + 1) / decay_steps, 0.0, 1.0)
        fall = floor + (1.0 - floor) * (1.0 + jnp.cos(math.pi * progress)) / 2.0
        ratio = jnp.where(k < steps, low + (1.0 - low) * rise(k), fall)
        return base_lr * jnp.where(k < 0, 0.0, ratio)  # the start is zero, whatever the smallest ratio

    return formula


def _range_test(params: LRRangeTestParams) -> _Formula:
    low, rate, size = (
        params.lr_range_test_min_lr,
        params.lr_range_test_step_rate,
        params.lr_range_test_step_size,
    )

    def formula(k: jax.Array) -> jax.Array:
        interval = (k + 1) // size if params.lr_range_test_staircase else (k + 1) / size
        return low * (1.0 + rate * interval)

    return formula


@dataclasses.dataclass(frozen=True)
class _Cycle:
    """The shape of one cycle: where it rises, where it falls, in how many stairs."""

    first: int
    second: int
    first_stairs: int
    second_stairs: int

    @property
    def total(self) -> int:
        return self.first + self.second

    def scale(self, position: jax.Array) -> jax.Array:
        """How far up the cycle update `position` (0 to `total`) stands, from 0 to 1; floored to a stair."""
        rising = position <= self.first
        up = _stairs(position, self.first, self.first_stairs)
        down = _stairs(self.total - position, self.second, self.second_stairs)
        return jnp.where(rising, up, down)


def _stairs(position: jax.Array, length: int, stairs: int) -> jax.Array:
    """`position / length`, floored to one of `stairs`; in whole numbers, so that none is rounded away."""
    if stairs == 0:
        return position / length
    return (position * stairs // length) / stairs


def _shape_of(params: OneCycleParams) -> _Cycle:
    second = params.cycle_second_step_size
    stairs = params.cycle_second_stair_count
    return _Cycle(
        params.cycle_first_step_size,
        params.cycle_first_step_size if second is None else second,
        params.cycle_first_stair_count,
        params.cycle_first_stair_count if stairs is None else stairs,
    )


def _one_cycle(params: OneCycleParams, start: float, cycle: _Formula, decay: _Formula) -> _Formula:
    """`start` before the first step, `cycle` of the scale in the cycle, `decay` of decay steps after it."""
    shape = _shape_of(params)

    def formula(k: jax.Array) -> jax.Array:
        within = cycle(shape.scale((k + 1) % shape.total))
        after = (k - shape.total + 1).astype(jnp.float32)
        intervals = after / params.decay_step_size if params.decay_step_size else jnp.zeros_like(after)
        return jnp.where(k < 0, start, jnp.where(k < shape.total, within, decay(intervals)))

    return formula


def _one_cycle_lr(params: OneCycleParams) -> _Formula:
    low, high = params.cycle_min_lr, params.cycle_max_lr
    return _one_cycle(
        params,
        low,
        lambda scale: low + (high - low) * scale,
        lambda i: low / (1.0 + params.decay_lr_rate * i),
    )


def _one_cycle_momentum(params: OneCycleParams) -> _Formula:
    low, high = params.cycle_min_mom, params.cycle_max_mom
    return _one_cycle(
        params,
        low,
        lambda scale: high - (high - low) * scale,
        lambda i: high * (1.0 + params.decay_mom_rate * i),
    )
