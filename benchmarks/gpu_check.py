"""``make gpu-check``: on this machine's GPUs, does a step do what plain optax does, and what the planner predicted?

1. Parity: losses and params after a few steps at stages 0 to 3, against plain JAX and optax on one GPU.
2. Memory: the compiled program's bytes, predicted for this GPU before it runs, against ``memory_stats()``'s peak.
3. Time: the timeline's predicted step against the measured one; for information.

Writes results/gpu_check.json. Exits with 1 where a check fails, or where there is no GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import jax
import numpy as np
import optax
import progress
from figure import Figure, show
from workload import Workload, small_gpt

import zeroj as zj
from zeroj.aot import hardware
from zeroj.aot.hlo import parse
from zeroj.aot.timeline import simulate
from zeroj.aot.traffic import Cluster

STEPS = 4
CLOSE = 1e-4
"""Largest relative difference of losses and of the norm of params in fp32: GPU kernels add in another order."""
PEAK = 1.05


@dataclasses.dataclass(frozen=True)
class Run:
    """Losses, the final params as one vector, median seconds of a step, predicted and measured peak bytes,
    and the compiled program's text."""

    losses: list[float]
    params: np.ndarray
    seconds: float
    predicted_bytes: int
    peak_bytes: int | None
    hlo: str


def vector(tree: Any) -> np.ndarray:
    """All leaves of a tree as one fp64 vector on the host."""
    return np.concatenate([np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(jax.device_get(tree))])


def plain_run(work: Workload, steps: int) -> tuple[list[float], np.ndarray]:
    """Losses and params of plain JAX and optax on one device."""
    device = jax.devices()[0]
    params = jax.device_put(jax.jit(work.init_fn)(), device)
    state = jax.jit(work.tx.init)(params)
    batch = jax.device_put(work.batch, device)

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
        loss, grads = jax.value_and_grad(work.loss_fn)(params, batch)
        updates, state = work.tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    losses = []
    for _ in range(steps):
        params, state, loss = step(params, state, batch)
        losses.append(float(loss))
    return losses, vector(params)


def stage_run(work: Workload, stage: int, steps: int) -> Run:
    """The same at a ZeRO stage on all devices, with predicted and measured bytes.

    ``peak_bytes`` is None where the device keeps no memory statistics (a CPU).
    """
    plan = zj.make_plan(jax.eval_shape(work.init_fn), work.tx, zj.make_mesh(), zj.Zero(stage=stage))
    step = zj.make_train_step(work.loss_fn, work.tx, plan)
    state = zj.init_state(work.init_fn, work.tx, plan)
    batch = zj.shard_batch(plan, work.batch)
    compiled = step.trace(state, batch).lower().compile()
    found = compiled.memory_analysis()
    predicted = (
        found.argument_size_in_bytes
        + found.output_size_in_bytes
        - found.alias_size_in_bytes
        + found.temp_size_in_bytes
    )
    losses, seconds = [], []
    for _ in range(steps):
        start = time.perf_counter()
        state, metrics = compiled(state, batch)
        losses.append(float(metrics["loss"]))
        seconds.append(time.perf_counter() - start)
    stats = jax.local_devices()[0].memory_stats() or {}
    params = vector(zj.full_params(state, plan))
    peak = stats.get("peak_bytes_in_use")
    return Run(losses, params, statistics.median(seconds), predicted, peak, compiled.as_text())


def parity(work: Workload, runs: dict[int, Run], steps: int) -> list[Figure]:
    """How far each stage is from plain optax: the larger of losses' and params' relative difference."""
    losses, params = plain_run(work, steps)
    found = []
    for stage, run in runs.items():
        by_loss = np.max(np.abs(np.subtract(run.losses, losses)) / np.abs(losses))
        by_params = np.linalg.norm(run.params - params) / np.linalg.norm(params)
        distance = float(max(by_loss, by_params))
        found.append(
            Figure(f"distance from plain optax, stage {stage}", distance, "", target=CLOSE, of="value")
        )
    return found


def predictions(runs: dict[int, Run]) -> list[Figure]:
    """Predicted against measured: peak bytes, where the device counts them, and step time."""
    found = []
    for stage, run in runs.items():
        if run.peak_bytes:
            error = max(run.peak_bytes / run.predicted_bytes, run.predicted_bytes / run.peak_bytes)
            note = f"predicted {run.predicted_bytes:,}, peak {run.peak_bytes:,}"
            name = f"peak memory, off by a factor, stage {stage}"
            found.append(Figure(name, error, "", target=PEAK, of="value", note=note))
        predicted = 1e3 * predicted_seconds(run.hlo)
        note = "by hand: the prediction"
        found.append(Figure(f"step time, stage {stage}", 1e3 * run.seconds, "ms", predicted, note=note))
    return found


def predicted_seconds(hlo: str) -> float:
    """The timeline of a program that XLA compiled here, with the rates of this kind of GPU, else an H100's."""
    kind = jax.devices()[0].device_kind
    known = next((g for g in hardware.table().values() if g.description == kind), hardware.find("h100"))
    cluster = Cluster(jax.device_count(), jax.local_device_count())
    return simulate(parse(hlo), cluster, known).seconds


def gpu_workload() -> Workload:
    """A GPT that keeps a GPU busy for some milliseconds: 8 sequences of 512 tokens per GPU."""
    return small_gpt(batch_size=8 * jax.device_count(), width=512, layers=8, heads=8, context=512)


def run_apart(stage: int) -> Run:
    """Runs a stage in a process of its own, as ``memory_stats`` keeps the peak since the process began."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "run.pickle"
        subprocess.run([sys.executable, __file__, "--stage", str(stage), "--to", str(path)], check=True)
        return pickle.loads(path.read_bytes())


def main() -> int:
    """Check, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stage", type=int, help="run only this stage, and write what it gave to --to")
    parser.add_argument("--to", type=pathlib.Path)
    args = parser.parse_args()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # two processes share the GPUs
    devices = jax.devices()
    if devices[0].platform != "gpu":
        print(f"gpu-check: no GPU here, JAX finds {len(devices)} x {devices[0].device_kind}; nothing checked")
        return 1
    if args.stage is not None:
        args.to.write_bytes(pickle.dumps(stage_run(gpu_workload(), args.stage, STEPS)))
        return 0
    runs = {stage: run_apart(stage) for stage in range(4)}
    figures = [*parity(gpu_workload(), runs, STEPS), *predictions(runs)]
    about = f"{len(devices)} x {devices[0].device_kind}, jax {jax.__version__}"
    show(figures, about)
    progress.RESULTS.mkdir(exist_ok=True)
    content = {"devices": about, "figures": [figure.as_dict() for figure in figures]}
    (progress.RESULTS / "gpu_check.json").write_text(json.dumps(content, indent=1) + "\n")
    return 1 if any(figure.met is False for figure in figures) else 0


if __name__ == "__main__":
    sys.exit(main())
