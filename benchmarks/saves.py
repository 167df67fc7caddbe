"""What a save costs the training: how long it holds the step back, and how slow steps are while it is written.

Beside it Orbax's own asynchronous checkpointer with the same arrays, in the same run. Accelerators leave the
host's cores to the writer; simulated devices take all of them. So the target is held against a device that
computes on one core, and eight devices on every core are told beside it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from figure import Figure, show
from step_time import zeroj_run
from workload import small_gpt

import zeroj as zj

#: Of the issue that asked for it: step time during a save, over step time without one.
TARGET = 1.20
SAVES = 4
#: Steps without a save before every one with, and a bound on the steps that one save is watched for.
QUIET, WATCHED = 6, 200


def host_copy_seconds(state: Any) -> float:
    """Seconds in which plain numpy copies what a save must copy: every shard that is no replica."""
    start = time.perf_counter()
    shards = [s for leaf in jax.tree.leaves(state) for s in leaf.addressable_shards if s.replica_id == 0]
    copies = [np.array(shard.data, copy=True) for shard in shards]  # all are held, as a save holds them
    del copies
    return time.perf_counter() - start


class Timed:
    """Seconds of steps without a save, of steps during one, and of the calls that start saves."""

    def __init__(self) -> None:
        self.quiet: list[float] = []
        self.during: list[float] = []
        self.calls: list[float] = []

    def one_save(
        self, step: Callable[[], Any], save: Callable[[int, Any], None], busy: Callable[[], bool], number: int
    ) -> None:
        """Times ``QUIET`` steps, the call, and the steps that begin before the save is complete."""
        for _ in range(QUIET):
            state = timed(step, self.quiet)
        start = time.perf_counter()
        save(number, state)
        self.calls.append(time.perf_counter() - start)
        for _ in range(WATCHED):
            if not busy():
                break
            timed(step, self.during)

    @property
    def slowdown(self) -> float:
        """Mean step during a save over mean step without."""
        return statistics.mean(self.during) / statistics.mean(self.quiet)


def timed(step: Callable[[], Any], into: list[float]) -> Any:
    """One step, waited for; returns its state."""
    start = time.perf_counter()
    state = jax.block_until_ready(step())[0]
    into.append(time.perf_counter() - start)
    return state


def measure(devices: int, saves: int, width: int) -> list[Figure]:
    """Both checkpointers in turn, so that a busy machine slows both alike."""
    work = small_gpt(batch_size=8, width=width, context=32)
    plan = zj.make_plan(jax.eval_shape(work.init_fn), work.tx, zj.make_mesh(), zj.Zero(stage=3))
    step = zeroj_run(work, plan)
    copies, ours, theirs = [], Timed(), Timed()
    with tempfile.TemporaryDirectory(prefix="zeroj-saves-") as folder:
        root = pathlib.Path(folder)
        options = ocp.CheckpointManagerOptions(max_to_keep=1, enable_async_checkpointing=True)
        with (
            ocp.CheckpointManager(root / "orbax", options=options) as plain,
            zj.Checkpointer(root / "zeroj", keep=1) as checkpoints,
        ):

            def save(number: int, state: Any) -> None:
                checkpoints.save(state, plan, step=number)

            def save_plain(number: int, state: Any) -> None:
                plain.save(number, args=ocp.args.StandardSave(arrays_of(state)))

            for number in range(saves):
                arrays = arrays_of(timed(step, []))
                copies.append(host_copy_seconds(arrays))
                ours.one_save(step, save, lambda: checkpoints.saving, number)
                checkpoints.wait()
                theirs.one_save(step, save_plain, plain.is_saving_in_progress, number)
                plain.wait_until_finished()
            nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(arrays_of(timed(step, []))))
    return report(devices, ours, theirs, copies, nbytes)


def arrays_of(state: Any) -> dict[str, Any]:
    """What is large in a state."""
    return {"params": state.params, "opt_state": state.opt_state}


def report(devices: int, ours: Timed, theirs: Timed, copies: list[float], nbytes: int) -> list[Figure]:
    """The figures of one run."""
    steps = f"steps of {1e3 * statistics.mean(ours.quiet):,.0f} ms, {len(ours.during)} of them met a save"
    where = "one core" if devices == 1 else f"{devices} devices on every core"
    return [
        Figure(
            f"step during a save, {where}",
            ours.slowdown,
            "x",
            theirs.slowdown,
            TARGET if devices == 1 else None,
            of="value",
            note=f"{nbytes / 1e6:,.0f} MB of state, {steps}; by hand: Orbax alone",
        ),
        Figure(
            f"save() returns after, {where}",
            1e3 * statistics.median(ours.calls),
            "ms",
            1e3 * statistics.median(copies),
            note=f"by hand: numpy copies the shards; Orbax alone {1e3 * statistics.median(theirs.calls):,.0f} ms",
        ),
    ]


def figures(saves: int = SAVES, width: int = 896) -> list[Figure]:
    """Each number of devices in a process of its own: XLA reads how many cores it may use when it starts."""
    found = []
    for devices in (1, 8):
        flags = "--xla_cpu_multi_thread_eigen=false" if devices == 1 else ""
        command = [sys.executable, __file__, str(devices), str(saves), str(width)]
        run = subprocess.run(
            command,
            env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        found += [Figure(**entry) for entry in json.loads(run.stdout.splitlines()[-1])]
    return found


def child(devices: int, saves: int, width: int) -> None:
    """One run; its figures as the last line."""
    jax.config.update("jax_num_cpu_devices", devices)
    print(json.dumps([dataclasses.asdict(figure) for figure in measure(devices, saves, width)]))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        child(*map(int, sys.argv[1:]))
    else:
        show(figures(), "Saving in the background")
