"""A training run in a process of its own: resumes from its folder, saves, and may be killed at any moment.

python -m tests.checkpoint.child FOLDER MODE [--last N] [--stage N] ...; with --port and --process it is one of two.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import pathlib
import sys
import time
from typing import Any

import jax
import numpy as np


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument(
        "mode",
        choices="resume storm preempted failing alone export memory unclosed steady".split(),
    )
    parser.add_argument("--last", type=int, default=10)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--nvme")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--process", type=int, default=0)
    return parser.parse_args()


def start(opts: argparse.Namespace) -> None:
    """Eight devices: in one process, or four in each of two."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4 if opts.port else 8)
    if os.environ.get("ZEROJ_TEST_CACHE"):
        jax.config.update("jax_compilation_cache_dir", os.environ["ZEROJ_TEST_CACHE"])
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    if opts.port:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"localhost:{opts.port}", 2, opts.process)


def digest(state: Any, plan: Any) -> str:
    """Of every bit of the state that this process holds, placement included."""
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(state):
        leaf = jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        for shard in leaf.addressable_shards:
            found.update(f"{shard.index}{leaf.dtype}".encode() + np.asarray(shard.data).tobytes())
    return found.hexdigest()


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def main() -> None:
    opts = options()
    start(opts)
    import zeroj as zj  # after the devices are set up
    from tests.checkpoint import toy
    from zeroj.checkpoint import database

    mesh = "2x4" if opts.port else "8"
    plan = toy.plan_of(opts.stage, mesh, opts.precision, nvme=opts.nvme)
    step = zj.make_train_step(
        toy.noisy_loss, toy.TX, plan, accumulation_steps=2 if opts.mode == "resume" else 1
    )
    checkpoints = zj.Checkpointer(opts.folder, timeout=5 if opts.mode == "alone" else 60)
    extra: dict[str, Any] = {"seen": [], "next": 0}
    if checkpoints.latest_step() is None:
        state = zj.init_state(toy.PARAMS, toy.TX, plan, rng=7)
    else:
        state, extra = checkpoints.restore(plan)
    first = extra["next"]
    say(first=first, seen=extra["seen"])
    if opts.mode == "export":
        zj.export_safetensors(state, pathlib.Path(opts.folder) / "exported", plan=plan)
        say(exported=opts.process)
        return
    if opts.mode == "alone":
        if opts.process == 0:
            checkpoints.save(state, plan)
        time.sleep(20)
        return
    if opts.mode == "unclosed":
        checkpoints.save(state, plan, {"seen": [], "next": 1}, step=1)
        if opts.last == 0:
            raise zj.CheckpointError("of the user's own")
        return
    if opts.mode == "failing":

        async def fails(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        database.write = fails  # type: ignore[assignment]
    with zj.Preemption() as preemption:
        for i in range(first, opts.last if opts.mode in ("resume", "failing", "steady") else 10**9):
            state, metrics = step(state, toy.BATCHES[i % len(toy.BATCHES)])
            checkpoints.check()
            extra = {"seen": [*extra["seen"][-20:], i], "next": i + 1}
            if opts.mode in ("storm", "failing", "steady"):
                checkpoints.save(state, plan, extra)
                say(saving=i)
            if opts.mode == "preempted":
                say(step=i + 1)
                time.sleep(0.05)
            if preemption.requested():
                checkpoints.save(state, plan, extra, wait=True)
                say(saved=int(state.step))
                preemption.exit()
            if opts.mode == "resume":
                say(loss=metrics["loss"].item().hex(), step=i + 1)
        checkpoints.save(state, plan, extra, wait=True)
        say(digest=digest(state, plan))
    checkpoints.close()


if __name__ == "__main__":
    sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))
    main()
