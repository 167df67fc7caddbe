"""The matrix of checkpoints: any stage, on devices, in host memory or under ZeRO++, opens on any other."""

from __future__ import annotations

from typing import Any

import jax
import pytest

import zeroj as zj
from tests.checkpoint.toy import PARAMS, TX, assert_in_place, assert_same, flat, mesh_of, train

CPU = {"device": "cpu"}
#: Where and how a state lies; the two last are ZeRO++ on two nodes of four: hpZ alone, and all three parts.
TIERS: dict[str, dict[str, Any]] = {
    "none": {},
    "optimizer": {"offload_optimizer": CPU},
    "both": {"offload_optimizer": CPU, "offload_param": CPU},
    "hpz": {"zero_hpz_partition_size": 4},
    "zero++": {
        "zero_hpz_partition_size": 4,
        "zero_quantized_weights": True,
        "zero_quantized_gradients": True,
    },
}
MESHES = ("1", "2", "4", "5", "8", "2x4")


def exists(stage: int, tier: str, mesh: str = "2x4") -> bool:
    """Whether the stage has the tier, and the mesh the axes that it needs."""
    if tier in ("hpz", "zero++"):
        return stage == 3 and mesh == "2x4"
    return stage >= {"none": 0, "optimizer": 1, "both": 3}[tier]


#: (saved stage, saved tier, restored stage, mesh, restored tier)
SOME = [
    (3, "optimizer", 3, "8", "optimizer"),
    (1, "none", 2, "5", "optimizer"),
    (3, "both", 1, "2x4", "none"),
    (3, "zero++", 2, "4", "none"),
    (0, "none", 3, "2x4", "hpz"),
]
FULL = [
    (stage, tier, onto, mesh, other)
    for stage in (0, 1, 2, 3)
    for tier in TIERS
    for onto in (0, 1, 2, 3)
    for mesh in MESHES
    for other in TIERS
    if exists(stage, tier) and exists(onto, other, mesh)
]
#: What rounding of other sums, of bf16, and of int8 weights and gradients may change in a loss, relative to it.
TOLERANCE = {"fp32": 2e-6, "bf16": 2e-2}
QUANTIZED = 5e-2


def plan_on(stage: int, mesh: str, tier: str, precision: str) -> zj.Plan:
    zero = zj.Zero(stage=stage, stage3_param_persistence_threshold=0, **TIERS[tier])
    return zj.make_plan(PARAMS, TX, mesh_of(mesh), zero, precision=precision)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """For each stage, tier and precision: the folder of a checkpoint after 2 steps, the state, 5 more losses."""
    made: dict[Any, Any] = {}

    def make(stage: int, tier: str, precision: str) -> Any:
        key = stage, tier, precision
        if key not in made:
            plan = plan_on(stage, "2x4" if tier in ("hpz", "zero++") else "8", tier, precision)
            state, _ = train(zj.init_state(PARAMS, TX, plan), plan, 0, 2)
            folder = tmp_path_factory.mktemp("saved")
            with zj.Checkpointer(folder) as checkpoints:
                checkpoints.save(state, plan)  # in the background, and complete when it closes
                expected = flat(state, plan)
            made[key] = folder, expected, train(state, plan, 2, 7)[1]
        return made[key]

    return make


def check(saved: Any, row: tuple[int, str, int, str, str], precision: str) -> None:
    stage, tier, onto, mesh, other = row
    folder, expected, wanted = saved(stage, tier, precision)
    plan = plan_on(onto, mesh, other, precision)
    with zj.Checkpointer(folder) as checkpoints:
        again, _ = checkpoints.restore(plan)
    assert_in_place(again, plan)  # shardings hold memory kinds
    assert_same(flat(again, plan), expected)
    kinds = {x.sharding.memory_kind for x in jax.tree.leaves(again.opt_state) if x.ndim}
    assert ("pinned_host" in kinds) == (other in ("optimizer", "both"))
    rounded = (tier == "zero++") != (other == "zero++")
    tolerance = QUANTIZED if rounded else TOLERANCE[precision]
    assert train(again, plan, 2, 7)[1] == pytest.approx(wanted, rel=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("row", SOME, ids=str)
def test_every_leaf_comes_back_in_its_memory(saved: Any, row: Any) -> None:
    """H2, and five further steps."""
    check(saved, row, "bf16" if row[0] == 3 else "fp32")


@pytest.mark.full
@pytest.mark.parametrize("precision", ("fp32", "bf16"))
@pytest.mark.parametrize("row", FULL, ids=str)
def test_the_whole_table(saved: Any, row: Any, precision: str) -> None:
    check(saved, row, precision)
