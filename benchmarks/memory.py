"""Bytes of state per device at every stage, read from the shards, beside the formula's and plain optax's."""

from __future__ import annotations

import jax
from figure import Figure, show
from workload import Workload, bytes_on_first_device, small_gpt

import zeroj as zj

TARGET = 1.05  # of what the stage table says, for leaves that do not divide and small ones that stay whole


def formula(count: int, degree: int, stage: int) -> float:
    """Bytes per device of fp32 params and Adam's two moments: the stage table of docs/architecture.md.

    Args:
        count: number of params.
        degree: number of devices.
        stage: 0 to 3.
    """
    params = 4 * count / (degree if stage == 3 else 1)
    return params + 8 * count / (degree if stage else 1)


def stage_figures(work: Workload, stage: int) -> list[Figure]:
    """The state's bytes on the first device after one step, beside the formula's and beside plain optax's."""
    mesh = zj.make_mesh()
    plan = zj.make_plan(jax.eval_shape(work.init_fn), work.tx, mesh, zj.Zero(stage=stage))
    state = zj.init_state(work.init_fn, work.tx, plan)
    state, _ = zj.make_train_step(work.loss_fn, work.tx, plan)(state, work.batch)
    measured = bytes_on_first_device((state.params, state.opt_state))
    count = sum(x.size for x in jax.tree.leaves(jax.eval_shape(work.init_fn)))
    params = jax.jit(work.init_fn)()
    plain = bytes_on_first_device((params, jax.jit(work.tx.init)(params)))
    return [
        Figure(
            f"state per device, stage {stage}, against the formula",
            measured,
            "bytes",
            formula(count, mesh.size, stage),
            TARGET,
            note=f"{count:,} fp32 params, adamw, N = {mesh.size}; addressable_shards after a step",
        ),
        Figure(f"state per device, stage {stage}, against plain optax", measured, "bytes", plain),
    ]


def figures() -> list[Figure]:
    """All stages."""
    work = small_gpt()
    return [figure for stage in range(4) for figure in stage_figures(work, stage)]


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    show(figures(), "State per device on simulated devices")
