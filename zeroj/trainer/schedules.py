"""Hugging Face's learning rate schedules, as optax schedules: update ``t`` (from 0) runs at rate ``f(t)``.

Formulas: transformers/optimization.py.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from zeroj.errors import ConfigError

#: From (progress after the warm-up, count, warm-up, total, settings) to a factor of the peak rate.
Decay = Callable[..., jax.Array]


def make_schedule(
    kind: str, peak: float, warmup: int, total: int, settings: Mapping[str, Any] | None = None
) -> optax.Schedule:
    """The schedule named ``kind``.

    Args:
        kind: one of ``SCHEDULES``.
        peak: the learning rate after the warm-up.
        warmup: updates of linear warm-up, from 0.
        total: updates of the run.
        settings: Hugging Face's lr_scheduler_kwargs.

    Returns:
        A jittable function from an int32 count of updates to an fp32 learning rate.

    Raises:
        ConfigError: settings that the schedule does not take.

    Example:
        >>> float(make_schedule("linear", 1.0, 0, 4)(1))
        0.75
    """
    decay, settings = SCHEDULES[kind], dict(settings or {})
    known = [
        name for name in inspect.signature(decay).parameters if name not in ("t", "warmup", "total", "peak")
    ]
    wrong = sorted(set(settings) - set(known))
    if wrong:
        raise ConfigError(
            f"lr_scheduler_kwargs: the schedule {kind!r} does not take {', '.join(wrong)}; it takes "
            f"{', '.join(known) or 'nothing'}."
        )

    def schedule(count: jax.typing.ArrayLike) -> jax.Array:
        t = jnp.asarray(count, jnp.float32)
        rise = t / max(1, warmup)
        after = decay(t, warmup=warmup, total=total, peak=peak, **settings)
        rising = t < (0 if kind == "constant" else warmup)
        return (peak * jnp.where(rising, rise, after)).astype(jnp.float32)

    return schedule


def _progress(t: jax.Array, warmup: int, total: int) -> jax.Array:
    return (t - warmup) / max(1, total - warmup)


def _linear(t: jax.Array, warmup: int, total: int, peak: float) -> jax.Array:
    return jnp.maximum(0.0, 1.0 - _progress(t, warmup, total))


def _constant(t: jax.Array, warmup: int, total: int, peak: float) -> jax.Array:
    return jnp.ones_like(t)


def _cosine(t: jax.Array, warmup: int, total: int, peak: float, num_cycles: float = 0.5) -> jax.Array:
    wave = jnp.cos(math.pi * num_cycles * 2.0 * _progress(t, warmup, total))
    return jnp.maximum(0.0, 0.5 * (1.0 + wave))


def _restarts(t: jax.Array, warmup: int, total: int, peak: float, num_cycles: int = 1) -> jax.Array:
    progress = _progress(t, warmup, total)
    wave = 0.5 * (1.0 + jnp.cos(math.pi * ((num_cycles * progress) % 1.0)))
    return jnp.where(progress >= 1.0, 0.0, jnp.maximum(0.0, wave))


def _polynomial(
    t: jax.Array, warmup: int, total: int, peak: float, lr_end: float = 1e-7, power: float = 1.0
) -> jax.Array:
    left = jnp.clip(1.0 - _progress(t, warmup, total), 0.0, 1.0)
    return jnp.where(t > total, lr_end, (peak - lr_end) * left**power + lr_end) / peak


def _inverse_sqrt(
    t: jax.Array, warmup: int, total: int, peak: float, timescale: int | None = None
) -> jax.Array:
    scale = timescale or warmup or 10_000
    return 1.0 / jnp.sqrt(jnp.maximum(t + (scale - warmup), 1.0) / scale)


def _cosine_min(
    t: jax.Array,
    warmup: int,
    total: int,
    peak: float,
    num_cycles: float = 0.5,
    min_lr: float | None = None,
    min_lr_rate: float | None = None,
) -> jax.Array:
    if (min_lr is None) == (min_lr_rate is None):
        raise ConfigError("lr_scheduler_kwargs: give one of min_lr and min_lr_rate for 'cosine_with_min_lr'.")
    floor = min_lr / peak if min_lr is not None else float(min_lr_rate or 0.0)
    wave = 0.5 * (1.0 + jnp.cos(math.pi * num_cycles * 2.0 * _progress(t, warmup, total)))
    return jnp.maximum(0.0, wave * (1.0 - floor) + floor)


SCHEDULES: dict[str, Decay] = {
    "linear": _linear,
    "constant": _constant,
    "constant_with_warmup": _constant,
    "cosine": _cosine,
    "cosine_with_restarts": _restarts,
    "polynomial": _polynomial,
    "inverse_sqrt": _inverse_sqrt,
    "cosine_with_min_lr": _cosine_min,
}
