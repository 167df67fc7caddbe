"""One of several processes with four CPU devices each: trains the GPT, saves, restores, and writes what it saw.

Run as ``python worker.py PROCESS PROCESSES PORT FOLDER STAGE``.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

STEPS, BATCH = 4, 32


def train(folder: Path, stage: int) -> dict[str, np.ndarray]:
    """Losses and norms, params after the last step, and the loss of one more step after a restore."""
    import zeroj as zj
    from tests import oracle

    loss = oracle.gpt_loss
    params, tx = oracle.gpt_params(stacked=True), optax.adamw(3e-3)
    batches = oracle.gpt_batches(STEPS + 1, BATCH)
    mesh = zj.make_mesh() if jax.process_count() > 1 else oracle.mesh_of(8)
    zero = zj.Zero(stage=stage, stage3_param_persistence_threshold=0)
    scanned = zj.find_scanned(loss, params, batches[0])
    plan = zj.make_plan(params, tx, mesh, zero, scanned=scanned)
    assert dict(plan.mesh.shape) == {"node": 2, "local": 4}, plan.mesh
    step = zj.make_train_step(loss, tx, plan, accumulation_steps=2, clip_norm=1.0)
    state = zj.init_state(params, tx, plan)
    seen: list[Any] = []
    for batch in batches[:STEPS]:
        state, metrics = step(state, zj.shard_batch(plan, batch))
        seen.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    whole = zj.full_params(state, plan)
    with zj.Checkpointer(folder / "checkpoints") as checkpoints:
        checkpoints.save(state, plan, {"steps": STEPS}, wait=True)
        back, extra = checkpoints.restore(plan)
    assert extra["steps"] == STEPS
    back, metrics = step(back, zj.shard_batch(plan, batches[STEPS]))
    seen.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    with zj.gathered(back, plan, sorted(whole)[0]) as leaves:
        for value in leaves.values():
            value += 1 + jax.process_index()  # what process 0 leaves is what is written
    whole |= {f"written/{path}": zj.get_full(leaves.state, plan, path) for path in leaves}
    tags = [told_of_tags(mode) for mode in ("ignore", "warn", "fail")]
    assert tags == (["", "warned", "raised"] if jax.process_count() > 1 else ["", "", ""]), tags
    flat = {jax.tree_util.keystr(k): np.asarray(v) for k, v in jax.tree_util.tree_leaves_with_path(whole)}
    return {"seen": np.array(seen), "plan": np.array(str(plan)), **flat}


def told_of_tags(validation: str) -> str:
    """What is said of a tag that differs between processes."""
    import zeroj as zj
    from zeroj.checkpoint.together import same_tag

    same_tag("one for all", validation)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            same_tag(f"process {jax.process_index()}", validation)
        except zj.CheckpointError as error:
            assert "those of [1]" in str(error)
            return "raised"
    return "warned" if any("those of [1]" in str(w.message) for w in caught) else ""


def main() -> None:
    process, processes, port, folder, stage = sys.argv[1:]
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_disable_most_optimizations", True)
    jax.distributed.initialize(f"localhost:{port}", int(processes), int(process))
    assert jax.process_count() == int(processes) and len(jax.devices()) == 4 * int(processes)
    np.savez(Path(folder) / f"process{process}.npz", **train(Path(folder), int(stage)))


if __name__ == "__main__":
    main()
