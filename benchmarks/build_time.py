"""Seconds to trace and lower, and to compile, the step of a 48-layer unrolled GPT, beside plain ``jit``.

Seconds of CPU time, the best of some rounds in turn, so that other work on the machine counts little.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import optax
from baselines import jit_step, place_batch
from clusters import CLIP_NORM, Shape, make_loss
from figure import Figure, show

import zeroj as zj

SHAPE = Shape(layers=48, width=64, vocab=256, sequence=32, scan=False)
STAGE = 3
ROUNDS = 2
TARGET_LOWERING, TARGET_COMPILE = 1.5, 1.3

Lower = Callable[[], Any]


def zeroj_step(plan: zj.Plan, tx: optax.GradientTransformation, batch: Any) -> Lower:
    """Traces and lowers zeroj's step anew at every call."""

    def lower() -> Any:
        step = zj.make_train_step(make_loss(SHAPE), tx, plan, clip_norm=CLIP_NORM)
        return step.lower(zj.abstract_state(tx, plan), batch)

    return lower


def plain_step(plan: zj.Plan, tx: optax.GradientTransformation, batch: Any) -> Lower:
    """Traces and lowers a hand-written jitted step with the same shardings anew at every call."""
    state = plan.opt_state_struct().inner

    def lower() -> Any:
        step = jit_step(
            make_loss(SHAPE),
            tx,
            place_batch(plan.mesh),
            plan.params,
            plan.grads,
            plan.opt_state.inner,
            CLIP_NORM,
        )
        return step.lower(plan.params_struct(), state, batch)

    return lower


def seconds(make: Callable[[], Any]) -> tuple[float, Any]:
    """CPU seconds of a call, and what it returns."""
    jax.clear_caches()
    start = time.process_time()
    made = make()
    return time.process_time() - start, made


def figures() -> list[Figure]:
    """The two ratios."""
    tx = optax.adamw(1e-3)
    plan = zj.make_plan(SHAPE.params, tx, zj.make_mesh(), zj.Zero(stage=STAGE))
    batch = SHAPE.batch(plan.mesh, plan.zero_axes)
    lowers = {"zeroj": zeroj_step(plan, tx, batch), "plain": plain_step(plan, tx, batch)}
    times: dict[str, list[float]] = {name: [] for name in lowers}
    made: dict[str, Any] = {}
    for _ in range(ROUNDS):
        for name, lower in lowers.items():
            took, made[name] = seconds(lower)
            times[name].append(took)
    best = {name: min(t) for name, t in times.items()}
    compiled = {name: seconds(functools.partial(found.compile))[0] for name, found in made.items()}
    return [
        Figure("trace and lower, 48 layers unrolled", best["zeroj"], "s", best["plain"], TARGET_LOWERING),
        Figure("compile, 48 layers unrolled", compiled["zeroj"], "s", compiled["plain"], TARGET_COMPILE),
    ]


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    show(figures(), "Time to build a step")
