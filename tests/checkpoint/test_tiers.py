"""Checkpoints between device and host memory: saved from one, restored onto the other, on any stage and mesh."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import pytest

import zeroj as zj
from tests.checkpoint.toy import PARAMS, TX, assert_in_place, assert_same, flat, mesh_of, train

CPU = {"device": "cpu"}
TIERS: dict[str, dict[str, Any]] = {
    "none": {},
    "optimizer": {"offload_optimizer": CPU},
    "both": {"offload_optimizer": CPU, "offload_param": CPU},
}
#: (saved stage, saved tier, restored stage, mesh, restored tier)
SOME = [
    (3, "optimizer", 3, "8", "optimizer"),
    (1, "none", 2, "5", "optimizer"),
    (3, "both", 1, "2x4", "none"),
]
FULL = [
    (stage, tier, onto, mesh, other)
    for stage in (1, 2, 3)
    for tier in TIERS
    for onto in (0, 1, 2, 3)
    for mesh in ("1", "2", "4", "5", "8", "2x4")
    for other in TIERS
    if (stage == 3 or tier != "both") and (onto == 3 or other != "both") and (onto or other == "none")
]


def plan_on(stage: int, mesh: str, tier: str, precision: str) -> zj.Plan:
    zero = zj.Zero(stage=stage, stage3_param_persistence_threshold=0, **TIERS[tier])
    return zj.make_plan(PARAMS, TX, mesh_of(mesh), zero, precision=precision)


def check(folder: pathlib.Path, row: tuple[int, str, int, str, str], precision: str) -> None:
    stage, tier, onto, mesh, other = row
    before, after = plan_on(stage, "8", tier, precision), plan_on(onto, mesh, other, precision)
    state, _ = train(zj.init_state(PARAMS, TX, before), before, 0, 2)
    with zj.Checkpointer(folder) as checkpoints:
        checkpoints.save(state, before)  # in the background, and read again at once
        expected = flat(state, before)
        again, _ = checkpoints.restore(after)
    assert_in_place(again, after)  # shardings hold memory kinds
    assert_same(flat(again, after), expected)
    kinds = {x.sharding.memory_kind for x in jax.tree.leaves(again.opt_state) if x.ndim}
    assert ("pinned_host" in kinds) == (other != "none")
    tolerance = 2e-6 if precision == "fp32" else 2e-2
    wanted = train(state, before, 2, 7)[1]
    assert train(again, after, 2, 7)[1] == pytest.approx(wanted, rel=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("row", SOME, ids=str)
def test_every_leaf_comes_back_in_its_memory(row: Any, tmp_path: pathlib.Path) -> None:
    """H2, and five further steps."""
    check(tmp_path, row, "bf16" if row[0] == 3 else "fp32")


@pytest.mark.full
@pytest.mark.parametrize("precision", ("fp32", "bf16"))
@pytest.mark.parametrize("row", FULL, ids=str)
def test_the_whole_table(row: Any, precision: str, tmp_path: pathlib.Path) -> None:
    check(tmp_path, row, precision)
