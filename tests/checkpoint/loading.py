"""Loads a model from a safetensors file in a process of its own: what it then holds, and what it took at most.

python -m tests.checkpoint.loading FILE [init]
"""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.checkpoint.big import forget_peak, held, status
from zeroj.checkpoint import tensor_file

LEAVES, WIDTH = 12, 2048


def write(file: pathlib.Path, megabytes: int) -> None:
    """A safetensors file of that size, of which leaf i is full of i."""
    shape = (megabytes * 2**20 // (LEAVES * 4 * WIDTH), WIDTH)
    names = [f"w{i:02d}" for i in range(LEAVES)]
    group = [tensor_file.Tensor(name, shape, np.dtype("float32"), lambda: iter(())) for name in names]
    tensor_file.lay_out(file, group, {})
    start = tensor_file.data_start(file)
    for i, tensor in enumerate(group):
        tensor_file.memory_map(file, tensor.dtype, start + i * tensor.nbytes, shape, "r+")[...] = i


def main() -> None:
    file = pathlib.Path(sys.argv[1])
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    import zeroj as zj

    def load(params: Any) -> Any:
        plan = zj.make_plan(jax.eval_shape(lambda: params), optax.sgd(1.0), zj.make_mesh(), zj.Zero(stage=3))
        own = (lambda: {k: jnp.full(x.shape, float(k[1:])) for k, x in params.items()}) if init else params
        return jax.block_until_ready(zj.init_state(own, optax.sgd(1.0), plan))

    init = sys.argv[2:] == ["init"]
    load({"w00": np.ones((8, WIDTH), np.float32)})  # libraries, threads and compilers are there from here on
    before = status("VmRSS")
    forget_peak()
    state = load(tensor_file.read_header(file))
    peak = status("VmHWM")
    means = [float(jnp.mean(x)) for x in jax.tree.leaves(state.params)]
    print(json.dumps({"held": held(state), "before": before, "peak": peak, "means": means}), flush=True)


if __name__ == "__main__":
    main()
