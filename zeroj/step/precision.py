"""The loss scaler of fp16, and the test for non-finite gradients.

The state machine is that of DeepSpeed's dynamic loss scaler, except that gradients are divided by the scale
that they were made with, never by the next one, and that the scale cannot grow to infinity.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from zeroj.config.precision import LossScale


class ScaleState(NamedTuple):
    """State of the loss scaler.

    Attributes:
        scale: fp32 scalar.
        iteration: int32 scalar, steps taken, skipped ones included.
        last_overflow: int32 scalar, the last iteration that overflowed, or -1.
        hysteresis: int32 scalar, overflows left before the scale starts to fall.
    """

    scale: jax.Array
    iteration: jax.Array
    last_overflow: jax.Array
    hysteresis: jax.Array


#: A dynamic scale stops growing here, well below fp32's largest number: from infinity it could never fall again.
MAX_SCALE = 2.0**120

#: No scaling at all: what fp32 and bf16 use.
NO_SCALING = LossScale(dynamic=False, static=1.0)


def default_scaling(precision: str) -> LossScale:
    """Dynamic scaling for fp16, none for fp32 and bf16."""
    return LossScale() if precision == "fp16" else NO_SCALING


def init_scale(config: LossScale) -> ScaleState:
    """The scaler's first state, as numpy scalars."""
    first = 2.0**config.initial_power if config.dynamic else config.static
    state = (np.float32(first), np.int32(0), np.int32(-1), np.int32(config.hysteresis))
    return ScaleState(*state)  # type: ignore[arg-type]


def next_scale(state: ScaleState, finite: jax.Array, config: LossScale) -> ScaleState:
    """The scaler's state after a step.

    Args:
        state: before the step.
        finite: bool scalar, whether all gradients were finite.
        config: its settings.
    """
    if not config.dynamic:
        return state._replace(iteration=state.iteration + 1)
    falls = state.hysteresis <= 1
    fallen = jnp.where(falls, jnp.maximum(state.scale / 2, config.min_scale), state.scale)
    grown = jnp.minimum(state.scale * 2, jnp.maximum(state.scale, MAX_SCALE))
    since = state.iteration - state.last_overflow - 1
    grows = (since > 0) & (since % config.window == 0)
    refilled = jnp.int32(config.hysteresis)
    refill = grows | config.consecutive_hysteresis
    return ScaleState(
        scale=jnp.where(finite, jnp.where(grows, grown, state.scale), fallen),
        iteration=state.iteration + 1,
        last_overflow=jnp.where(finite, state.last_overflow, state.iteration),
        hysteresis=jnp.where(
            finite,
            jnp.where(refill, refilled, state.hysteresis),
            jnp.where(falls, state.hysteresis, state.hysteresis - 1),
        ),
    )


def is_stuck(state: ScaleState, finite: jax.Array, config: LossScale) -> jax.Array:
    """Bool scalar: the gradients overflow although a dynamic scale has fallen as far as it may.

    Args:
        state: before the step.
        finite: bool scalar, whether all gradients were finite.
        config: the scaler's settings.
    """
    if not config.dynamic:
        return jnp.bool_(False)
    return ~finite & (state.hysteresis <= 1) & (state.scale <= config.min_scale)
