"""The spilled leaves of a plan: which they are, their files, and how much host memory streaming them takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from zeroj.plan.plan import Plan
from zeroj.plan.rules import NVME, Placement
from zeroj.spill.tier import SpilledArray, Tier


@dataclass(frozen=True)
class Spilled:
    """Handles of a plan's spilled leaves.

    Attributes:
        tier: their files.
        masters: index into the plan's leaves -> the fp32 master.
        inner: index into the plan's state leaves -> the array.
    """

    tier: Tier
    masters: dict[int, SpilledArray]
    inner: dict[int, SpilledArray]


def spill_to_files(plan: Plan) -> Spilled:
    """Makes a folder and files for a plan's spilled leaves; their space is taken, and nothing is written yet.

    Raises:
        SpillError: the path cannot be used, or has too little space.
    """
    assert plan.spill is not None
    masters = {
        i: (f"params/{leaf.path}", plan.master_placement(leaf), plan.master_dtype(leaf))
        for i, leaf in enumerate(plan.leaves)
        if plan.has_master and leaf.trainable and plan.master_placement(leaf).memory == NVME
    }
    inner = {
        i: (f"opt_state/{leaf.path}", leaf.placement, leaf.dtype)
        for i, leaf in enumerate(plan.state_leaves)
        if leaf.placement.memory == NVME
    }
    tier = Tier(plan.spill)
    rows = [*masters.values(), *inner.values()]
    made = tier.arrays({name: _struct(plan, placement, dtype) for name, placement, dtype in rows})
    return Spilled(
        tier,
        {i: made[row[0]] for i, row in masters.items()},
        {i: made[row[0]] for i, row in inner.items()},
    )


def _struct(plan: Plan, placement: Placement, dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(placement.padded, dtype, sharding=plan.sharding(placement.at("")))
