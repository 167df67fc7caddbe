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

pytestmark = pytest.mark.slow

#: From jax 0.11 on, XLA:CPU multiplies matrices of the gradients in another order where the update follows without a
#: barrier, as it does on the device: the last bit of a gradient may differ, whatever the optimizer.
NEARLY = 1e-4 if jax.__version_info__ >= (0, 11) else 0.0
EVERY_LEAF = {"block_size": 1}  # shards of a byte or more are spilled


def spilling(path: pathlib.Path, stage: int = 3, **options: Any) -> zj.Zero:
    pipelined = {"pipeline_read": True, "pipeline_write": True}
    return zj.Zero(
        stage=stage, offload_optimizer={"device": "nvme", "nvme_path": str(path), **pipelined, **options}
    )


def leaves(state: Any) -> list[np.ndarray]:
    return [np.asarray(x) for x in jax.tree.leaves(state.opt_state.inner)]


def run(m: Any, tx: Any, plan: Any, **options: Any) -> tuple[list[Any], Any]:
    state = zj.init_state(m.params, tx, plan)
    step = zj.make_train_step(m.loss, tx, plan, **options)
    metrics = []
    for batch in m.batches:
        state, found = step(state, batch)
        metrics.append({k: np.asarray(v) for k, v in found.items()})
    return metrics, state


def assert_same(
    found: tuple[list[Any], Any], wanted: tuple[list[Any], Any], plan: Any, other: Any, rtol: float
) -> None:
    """Bit for bit where ``rtol`` is 0."""

    def same(a: Any, b: Any, err_msg: str = "") -> None:
        np.testing.assert_allclose(
            np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=rtol, atol=rtol / 10, err_msg=err_msg
        )

    for n, (a, b) in enumerate(zip(found[0], wanted[0], strict=True)):
        for key in a:
            same(a[key], b[key], f"{key} of step {n}")
    jax.tree.map(same, zj.full_params(found[1], plan), zj.full_params(wanted[1], other))
    for a, b in zip(leaves(found[1]), leaves(wanted[1]), strict=True):
        same(a, b)


def compare(
    path: pathlib.Path,
    name: str,
    stage: int,
    precision: str,
    *,
    beside: str = "none",
    steps: int = 6,
    orbax: bool = False,
    zero: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[Any, Any]:
    """Trains with state in files, and with the same state on the device ("none") or the host ("cpu")."""
    m, tx, mesh = oracle.model("toy"), optimizer(name), oracle.mesh_of(8)
    m = m._replace(batches=(m.batches * 3)[:steps])
    zero = spilling(path, stage, **(zero or {}))
    spilled = zj.make_plan(m.params, tx, mesh, zero, precision=precision, aio=EVERY_LEAF)
    if orbax:  # its threshold is 1 MiB, which no leaf of the toy has
        spilled = dataclasses.replace(spilled, spill=dataclasses.replace(spilled.spill, direct=False))
    other = zj.Zero(stage=stage, offload_optimizer={"device": beside})
    plain = zj.make_plan(m.params, tx, mesh, other, precision=precision)
    assert spilled.spills and not plain.spills
    found, wanted = run(m, tx, spilled, **options), run(m, tx, plain, **options)
    assert any(is_spilled(x) for x in jax.tree.leaves(found[1].opt_state))
    assert_same(found, wanted, spilled, plain, NEARLY if beside == "none" else 0)
    return found, wanted


@pytest.mark.parametrize("beside", ["none", "cpu"])
def test_fifty_steps_of_adamw(tmp_path: pathlib.Path, beside: str) -> None:
    compare(tmp_path, "adamw", 3, "fp32", beside=beside, steps=50)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_fp32_master_in_files(tmp_path: pathlib.Path, stage: int) -> None:
    found, _ = compare(tmp_path, "adamw", stage, "bf16", beside="cpu")
    assert any(is_spilled(x) for x in jax.tree.leaves(found[1].opt_state.master))


@pytest.mark.parametrize("name", "adafactor lion muon multi_steps".split())
def test_optimizers_equal_the_host_tier(tmp_path: pathlib.Path, name: str) -> None:
    compare(tmp_path, name, 3, "fp32", beside="cpu")


@pytest.mark.full
@pytest.mark.parametrize("name", "sgd lamb schedule_free multi_transform apply_if_finite".split())
def test_further_optimizers_equal_the_host_tier(tmp_path: pathlib.Path, name: str) -> None:
    compare(tmp_path, name, 3, "fp32", beside="cpu")


def test_accumulation_clipping_and_files_one_after_the_other(tmp_path: pathlib.Path) -> None:
    serial = {"pipeline_read": False, "pipeline_write": False, "buffer_count": 1}
    more = {"accumulation_steps": 4, "clip_norm": 0.02}
    compare(tmp_path, "adamw", 2, "bf16", beside="cpu", zero=serial, **more)


def test_the_orbax_engine(tmp_path: pathlib.Path) -> None:
    compare(tmp_path, "adamw", 3, "fp32", orbax=True)
