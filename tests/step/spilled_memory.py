"""A training run in a process of its own whose optimizer state is larger than the memory it takes; says how much.

python -m tests.step.spilled_memory FOLDER LAYERS MOMENTS; prints JSON: bytes of state on disk, of params, of
buffers; the resident memory before the first step; the peak of the process.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.checkpoint.big import status

#: Each layer is a matrix of 1 MiB, updated in four pieces.
WIDTH = 512


def resident() -> int:
    return status("VmRSS")


def main() -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    import zeroj as zj  # after the devices are set up

    folder, layers, moments = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    tx = optax.chain(*(optax.trace(0.5 + 0.01 * i) for i in range(moments)), optax.scale(-1e-3))
    params = {f"w{i:03d}": jax.ShapeDtypeStruct((WIDTH, WIDTH), np.float32) for i in range(layers)}
    offload = {"device": "nvme", "nvme_path": folder, "pipeline_read": True, "pipeline_write": True}
    zero = zj.Zero(stage=3, offload_optimizer=offload, sub_group_size=WIDTH * WIDTH // 4)
    plan = zj.make_plan(params, tx, zj.make_mesh(local=1), zero, aio={"block_size": 1 << 20})

    def loss(params: Any, batch: Any) -> jax.Array:
        x = batch
        for name in sorted(params):
            x = jnp.tanh(x @ params[name])
        return jnp.mean(x**2)

    rng = np.random.default_rng(0)
    state = zj.init_state(
        {k: np.asarray(rng.normal(size=v.shape, scale=0.03), v.dtype) for k, v in params.items()}, tx, plan
    )
    step = zj.make_train_step(loss, tx, plan)
    base = resident()
    losses = []
    for _ in range(2):
        state, metrics = step(state, rng.normal(size=(8, WIDTH)).astype(np.float32))
        losses.append(float(metrics["loss"]))
    peak = status("VmHWM")  # not ru_maxrss, which counts the process that this one was forked from
    memory = plan.memory()
    said = {
        "on_disk": sum(memory.nvme.values()),
        "params": memory.device["params"],
        "base": base,
        "peak": peak,
    }
    print(json.dumps(said | {"buffers": step.update.buffer_bytes, "losses": losses}))


if __name__ == "__main__":
    main()
