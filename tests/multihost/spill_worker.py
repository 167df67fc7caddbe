"""One of several processes with two CPU devices each: trains with state and params in files on one shared path.

Run as ``python -m tests.multihost.spill_worker PROCESS PROCESSES PORT FOLDER CASE``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

STEPS = 3


def train(folder: Path) -> dict[str, np.ndarray]:
    """Losses, params and the digest of the state after some steps and a restore."""
    import zeroj as zj
    from tests import oracle

    m, tx = oracle.model("toy"), optax.adamw(1e-2)
    where = {"device": "nvme", "nvme_path": str(folder / "nvme")}
    zero = zj.Zero(
        stage=3,
        stage3_param_persistence_threshold=0,
        offload_optimizer=where | {"pipeline_read": True, "pipeline_write": True},
        offload_param=where | {"max_in_cpu": 0},
    )
    mesh = zj.make_mesh() if jax.process_count() > 1 else oracle.mesh_of(4)
    plan = zj.make_plan(m.params, tx, mesh, zero, aio={"block_size": 1})
    step, state = zj.make_train_step(m.loss, tx, plan), zj.init_state(m.params, tx, plan)
    losses: list[float] = []

    def advance(state: Any, batches: Any) -> Any:
        for batch in batches:
            state, metrics = step(state, zj.shard_batch(plan, batch))
            losses.append(float(metrics["loss"]))
        return state

    state = advance(state, m.batches[:STEPS])
    with zj.Checkpointer(folder / "checkpoints") as checkpoints:
        checkpoints.save(state, plan, wait=True)
        state, _ = checkpoints.restore(plan)
    state = advance(state, m.batches[STEPS : STEPS + 1])
    whole = zj.full_params(state, plan)
    flat = {jax.tree_util.keystr(k): np.asarray(v) for k, v in jax.tree_util.tree_leaves_with_path(whole)}
    return {"losses": np.array(losses), **flat}


def main() -> None:
    process, processes, port, folder, _ = sys.argv[1:]
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_disable_most_optimizations", True)
    jax.distributed.initialize(f"localhost:{port}", int(processes), int(process))
    np.savez(Path(folder) / f"process{process}.npz", **train(Path(folder)))


if __name__ == "__main__":
    main()
