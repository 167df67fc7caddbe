"""Step time at every stage, against a hand-written jitted step with the same shardings, in the same run."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import jax
from baselines import Step, init, jit_step, place_batch, shard_map_step
from figure import Figure, show
from workload import CLIP_NORM, Workload, interleaved_seconds, small_gpt

import zeroj as zj

TARGET = 1.10
ROUNDS = 12


def zeroj_run(work: Workload, plan: zj.Plan) -> Callable[[], Any]:
    """One call = one step of zeroj; the state is kept between calls."""
    step = zj.make_train_step(work.loss_fn, work.tx, plan, clip_norm=CLIP_NORM)
    state = zj.init_state(work.init_fn, work.tx, plan)
    batch = jax.device_put(work.batch, place_batch(plan.mesh))

    def run() -> Any:
        nonlocal state
        state, metrics = step(state, batch)
        return state, metrics

    return run


def by_hand_run(work: Workload, plan: zj.Plan, make_step: Callable[..., Step]) -> Callable[[], Any]:
    """One call = one hand-written step with the plan's shardings."""
    sharding = place_batch(plan.mesh)
    params, grads, opt_state = plan.params, plan.grads, plan.opt_state.inner
    step = make_step(work.loss_fn, work.tx, sharding, params, grads, opt_state, CLIP_NORM)
    values, state = init(work.init_fn, work.tx, params, opt_state)
    batch = jax.device_put(work.batch, sharding)

    def run() -> Any:
        nonlocal values, state
        values, state, loss = step(values, state, batch)
        return values, state, loss

    return run


def stage_figures(work: Workload, stage: int, rounds: int) -> list[Figure]:
    """zeroj against both hand-written steps at one stage."""
    plan = zj.make_plan(jax.eval_shape(work.init_fn), work.tx, zj.make_mesh(), zj.Zero(stage=stage))
    runs = {
        "zeroj": zeroj_run(work, plan),
        "jit": by_hand_run(work, plan, jit_step),
        "shard_map": by_hand_run(work, plan, shard_map_step),
    }
    seconds = interleaved_seconds(runs, rounds)
    milliseconds = {name: 1e3 * statistics.median(times) for name, times in seconds.items()}
    return [
        Figure(
            f"step time, stage {stage}, against {other}",
            milliseconds["zeroj"],
            "ms",
            milliseconds[other],
            TARGET if other == "jit" else None,
            note=note,
        )
        for other, note in (
            ("jit", f"jit with the same shardings; medians of {rounds} interleaved steps"),
            ("shard_map", "collectives written out, params gathered whole at the start"),
        )
    ]


def figures(rounds: int = ROUNDS) -> list[Figure]:
    """All stages."""
    work = small_gpt()
    return [figure for stage in range(4) for figure in stage_figures(work, stage, rounds)]


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    show(figures(), "Step time on simulated devices")
