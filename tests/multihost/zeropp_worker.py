"""One of several processes that share eight CPU devices: trains under ZeRO++ and writes what it saw.

Run as ``python -m tests.multihost.zeropp_worker PROCESS PROCESSES PORT FOLDER FORM``. A node is a process.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

STEPS, DEVICES = 3, 8


def train(form: str, nodes: int) -> dict[str, np.ndarray]:
    """Losses and norms of some steps, and the params after them."""
    import zeroj as zj
    from tests.gather import test_zeropp as model

    local = DEVICES // nodes
    zero = {"hpZ": {"zero_hpz_partition_size": local}, "all": model.ALL | {"zero_hpz_partition_size": local}}[
        form
    ]
    mesh = zj.make_mesh() if jax.process_count() > 1 else zj.make_mesh(node=nodes, local=local)
    params = model.first_params(stacked=True)
    plan = model.plan_of(params, mesh, **zero)
    assert dict(plan.mesh.shape) == {"node": nodes, "local": local}
    rows = plan.mesh.devices.reshape(nodes, local)
    if jax.process_count() > 1:
        assert all(len({d.process_index for d in row}) == 1 for row in rows)
    step = zj.make_train_step(model.loss_fn, model.TX, plan, accumulation_steps=2, clip_norm=1.0)
    state, seen = zj.init_state(params, model.TX, plan), []
    for batch in model.batches(STEPS):
        state, metrics = step(state, zj.shard_batch(plan, batch))
        seen.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    whole: Any = zj.full_params(state, plan)
    flat = {jax.tree_util.keystr(k): np.asarray(v) for k, v in jax.tree_util.tree_leaves_with_path(whole)}
    return {"seen": np.array(seen), **flat}


def main() -> None:
    process, processes, port, folder, form = sys.argv[1:]
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES // int(processes))
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_disable_most_optimizations", True)
    jax.distributed.initialize(f"localhost:{port}", int(processes), int(process))
    assert jax.process_count() == int(processes) and len(jax.devices()) == DEVICES
    np.savez(Path(folder) / f"process{process}.npz", **train(form, int(processes)))


if __name__ == "__main__":
    main()
