"""What the programs of a step with state in files hold, read from XLA:GPU's own for 8 H100s.

A program that asks the host for params in files cannot be compiled for GPUs that are not there, so here params are in
host memory; gradients take the same way. Eight CPU devices stand for the GPUs: where state lies in files, the update
asks which devices are this process's own.
"""

from __future__ import annotations

import functools
import math
import pathlib
import sys
from typing import Any

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "benchmarks"))

import clusters
import jax
import jax.numpy as jnp
import optax

import zeroj as zj
from zeroj.optimizer.norms import Unfinished

pytestmark = pytest.mark.slow

TARGET = zj.aot.Target("h100", nodes=1, gpus_per_node=8)
SHAPE = clusters.Shape(layers=4, width=256, vocab=0, sequence=128)


@functools.cache
def planned(params: str = "cpu") -> tuple[Any, Any, Any]:
    """A plan with params on ``params`` and state in files, its step, and the folder's name, which nobody makes."""
    files = {"device": "nvme", "nvme_path": "nowhere"}
    zero: dict[str, Any] = {"stage": 3, "offload_optimizer": files}
    if params != "none":
        zero["offload_param"] = {"device": params}
    tx, mesh = optax.adamw(1e-3), zj.make_mesh(node=1, local=8)
    plan = zj.make_plan(
        SHAPE.params, tx, mesh, zero, precision="bf16", scanned=["blocks"], aio={"block_size": 4096}
    )
    return tx, plan, zj.make_train_step(clusters.make_loss(SHAPE), tx, plan, clip_norm=1.0)


def compiled(params: str) -> zj.aot.Report:
    tx, plan, step = planned(params)
    return TARGET.compile(step, zj.abstract_state(tx, plan), SHAPE.batch(plan.mesh, plan.zero_axes))


def test_gradients_end_in_host_memory() -> None:
    """All but those of leaves that are small; none is held in the device's memory until the end."""
    memory = planned("cpu")[1].memory()
    waiting = memory.host["grads"] // 8
    assert memory.device["grads"] < 0.02 * waiting
    away, here = compiled("cpu"), compiled("none")
    assert away.host.outputs == waiting
    assert away.device.outputs < 0.02 * waiting + 4096
    assert here.host.outputs == 0 and here.device.outputs >= 2 * waiting, "fp32, with params on the device"
    assert sum(c.nbytes * c.times for c in away.copies if c.direction == "d2h") == waiting


def test_results_for_files_leave_the_device_in_page_locked_memory() -> None:
    _, _, step = planned("cpu")
    update = step.update
    layout, update.rooms = update.layout, None  # rooms are for CPU devices
    values: list[Any] = [None] * len(layout.owners)
    for index in (i for i, owner in enumerate(layout.owners) if owner is None):
        struct = layout.struct(index)
        values[index] = jnp.zeros(struct.shape, struct.dtype)
    left = Unfinished(None, jnp.float32(1), jnp.float32(1))
    shared, _ = update.shared(values, left)
    part = max(update.parts, key=lambda p: bytes_of(update.room(p)))
    jitted, structs = update.jitted(part, shared, left)
    report = TARGET.compile(jitted, *structs)
    written = bytes_of(update.room(part)) // 8
    assert report.host.outputs == written > 0, "master and moments"
    assert 0 <= report.device.outputs - written // 6 < 4096, "the param in bf16, and scalars"


def bytes_of(structs: list[jax.ShapeDtypeStruct]) -> int:
    return sum(math.prod(s.shape) * s.dtype.itemsize for s in structs)
