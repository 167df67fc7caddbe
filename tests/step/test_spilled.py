"""Optimizer state in files: bit for bit the training of the same plan without."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import jax
import numpy as np
import pytest

import zeroj as zj
from tests import oracle
from tests.test_contract import optimizer
from zeroj.spill.tier import is_spilled

EVERY_LEAF = {"block_size": 1}  # shards of a byte or more are spilled


def spilling(path: pathlib.Path, stage: int = 3, **options: Any) -> zj.Zero:
    pipelined = {"pipeline_read": True, "pipeline_write": True}
    return zj.Zero(
        stage=stage, offload_optimizer={"device": "nvme", "nvme_path": str(path), **pipelined, **options}
    )


def leaves(state: Any) -> list[np.ndarray]:
    return [np.asarray(x) for x in jax.tree.leaves(state.opt_state.inner)]


def run(m: Any, tx: Any, plan: Any, steps: int, **options: Any) -> tuple[list[Any], Any]:
    state = zj.init_state(m.params, tx, plan)
    step = zj.make_train_step(m.loss, tx, plan, **options)
    metrics = []
    for batch in m.batches[:steps]:
        state, found = step(state, batch)
        metrics.append({k: np.asarray(v) for k, v in found.items()})
    return metrics, state


def assert_same(found: tuple[list[Any], Any], wanted: tuple[list[Any], Any], plan: Any, other: Any) -> None:
    for n, (a, b) in enumerate(zip(found[0], wanted[0], strict=True)):
        for key in a:
            np.testing.assert_array_equal(a[key], b[key], err_msg=f"{key} of step {n}")
    jax.tree.map(
        np.testing.assert_array_equal, zj.full_params(found[1], plan), zj.full_params(wanted[1], other)
    )
    for a, b in zip(leaves(found[1]), leaves(wanted[1]), strict=True):
        np.testing.assert_array_equal(a, b)


def both(
    tmp_path: pathlib.Path,
    name: str,
    stage: int,
    precision: str,
    m: Any = None,
    steps: int = 50,
    engine: str = "direct",
    zero: Any = None,
    **options: Any,
) -> tuple[Any, Any]:
    m, tx = m or oracle.model("toy"), optimizer(name)
    mesh = oracle.mesh_of(8)
    spilled = zj.make_plan(
        m.params, tx, mesh, zero or spilling(tmp_path, stage), precision=precision, aio=EVERY_LEAF
    )
    if engine == "orbax":  # its threshold is 1 MiB, which no leaf of the toy has
        spilled = dataclasses.replace(spilled, spill=dataclasses.replace(spilled.spill, direct=False))
    plain = zj.make_plan(m.params, tx, mesh, zj.Zero(stage=stage), precision=precision)
    assert spilled.spills and not plain.spills
    found, wanted = run(m, tx, spilled, steps, **options), run(m, tx, plain, steps, **options)
    assert any(is_spilled(x) for x in jax.tree.leaves(found[1].opt_state))
    assert_same(found, wanted, spilled, plain)
    return found, wanted


@pytest.mark.parametrize(("stage", "precision"), [(1, "bf16"), (2, "fp32"), (3, "fp32"), (3, "bf16")])
def test_fifty_steps_of_adamw(tmp_path: pathlib.Path, stage: int, precision: str) -> None:
    m = oracle.model("toy")
    both(tmp_path, "adamw", stage, precision, m._replace(batches=(m.batches * 3)[:50]))


@pytest.mark.parametrize(
    "name", ["adafactor", "lion", "muon", "multi_steps", "lamb", "schedule_free", "apply_if_finite"]
)
def test_any_optimizer(tmp_path: pathlib.Path, name: str) -> None:
    both(tmp_path, name, 3, "fp32", steps=6)


def test_accumulation_clipping_and_serial_files(tmp_path: pathlib.Path) -> None:
    zero = spilling(tmp_path, 2, pipeline_read=False, pipeline_write=False, buffer_count=1)
    both(tmp_path, "adamw", 2, "bf16", steps=6, zero=zero, accumulation_steps=4, clip_norm=0.02)


def test_the_orbax_engine(tmp_path: pathlib.Path) -> None:
    both(tmp_path, "adamw", 3, "fp32", steps=4, engine="orbax")
