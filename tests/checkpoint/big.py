"""Saves or restores a large state in a process of its own, and says what it held and what it took at most.

python -m tests.checkpoint.big FOLDER save|restore MEGABYTES [PORT PROCESS]
"""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import optax


def status(key: str) -> int:
    """Bytes of a line of /proc/self/status: VmRSS now, VmHWM at most since the last :func:`forget_peak`."""
    text = pathlib.Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in text.splitlines() if line.startswith(key))) * 1024


def forget_peak() -> None:
    pathlib.Path("/proc/self/clear_refs").write_text("5")


def held(state: Any) -> int:
    """Bytes of the state that this process's devices hold."""
    arrays = [x for x in jax.tree.leaves(state) if not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)]
    return sum(shard.data.nbytes for x in arrays for shard in x.addressable_shards)


def main() -> None:
    folder, mode, megabytes, *rest = sys.argv[1:]
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4 if rest else 8)
    if rest:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"localhost:{rest[0]}", 2, int(rest[1]))
    import zeroj as zj

    leaves, rows = 12, int(megabytes) * 2**20 // (12 * 3 * 4 * 2048)  # params and two moments, fp32
    tx = optax.adam(1e-3)

    def make() -> Any:
        return {f"w{i}": jnp.full((rows, 2048), float(i)) for i in range(leaves)}

    plan = zj.make_plan(jax.eval_shape(make), tx, zj.make_mesh(), zj.Zero(stage=3))
    with zj.Checkpointer(folder, timeout=300) as checkpoints:
        if mode == "save":
            state = zj.init_state(make, tx, plan)
            jax.block_until_ready(state)
            before = status("VmRSS") - held(state)
            forget_peak()
            checkpoints.save(state, plan, wait=True)
        else:
            before = status("VmRSS")
            forget_peak()
            state, _ = checkpoints.restore(plan)
            jax.block_until_ready(state)
        peak = status("VmHWM")
        sums = {name: float(jnp.mean(x)) for name, x in state.params.items()}
    print(json.dumps({"held": held(state), "before": before, "peak": peak, "means": sums}), flush=True)


if __name__ == "__main__":
    main()
