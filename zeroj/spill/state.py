"""The spilled leaves of a plan: which they are, and their files."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from zeroj.config.spill import SpillSettings
from zeroj.plan.cuts import Cut, held_params
from zeroj.plan.plan import Plan
from zeroj.plan.rules import NVME, Placement
from zeroj.spill.tier import SpilledArray, Tier


@dataclass(frozen=True)
class Spilled:
    """Handles of a plan's spilled leaves.

    Attributes:
        params: index into the plan's leaves -> the stored param.
        masters: index into the plan's leaves -> the fp32 master, where it is not the param.
        inner: index into the plan's state leaves -> the array.
        updated: index into the plan's leaves -> what a checkpoint holds of it: the master, or the param itself.
    """

    params: dict[int, SpilledArray]
    masters: dict[int, SpilledArray]
    inner: dict[int, SpilledArray]
    updated: dict[int, SpilledArray]


@dataclass(frozen=True)
class _Row:
    """One array that lies in files."""

    name: str
    placement: Placement
    dtype: np.dtype
    cut: Cut | None
    held: bool = False


def spill_to_files(plan: Plan) -> Spilled:
    """Makes folders and files for a plan's spilled leaves; their space is taken, and nothing is written yet.

    Params and state lie in folders of their own: their paths may differ.

    Raises:
        SpillError: a path cannot be used, or has too little space.
    """
    cuts = plan.file_cuts
    held = held_params(plan)
    params = {
        i: _Row(
            f"params/{x.path}", plan.param_placement(x), plan.param_dtype(x), cuts[x.path], x.path in held
        )
        for i, x in enumerate(plan.leaves)
        if x.param_memory == NVME
    }
    masters = {
        i: _Row(f"params/{x.path}", plan.master_placement(x), plan.master_dtype(x), cuts[x.path])
        for i, x in enumerate(plan.leaves)
        if plan.has_master and x.trainable and x.state_memory == NVME
    }
    inner = {
        i: _Row(f"opt_state/{s.path}", s.placement, s.dtype, cuts.get(s.of))
        for i, s in enumerate(plan.state_leaves)
        if s.placement.memory == NVME
    }
    in_state = _files(plan, plan.spill, [*masters.values(), *inner.values()])
    stored = _files(plan, plan.spill_params, params.values())
    kept = {i: stored[row.name] for i, row in params.items()}
    own = {i: array for i, array in kept.items() if not (plan.has_master and plan.leaves[i].trainable)}
    masters_kept = {i: in_state[row.name] for i, row in masters.items()}
    return Spilled(
        kept, masters_kept, {i: in_state[row.name] for i, row in inner.items()}, own | masters_kept
    )


def _files(plan: Plan, settings: SpillSettings | None, rows: Iterable[_Row]) -> dict[str, SpilledArray]:
    rows = list(rows)
    if settings is None or not rows:
        return {}
    structs: dict[str, Any] = {
        row.name: jax.ShapeDtypeStruct(
            row.placement.padded, row.dtype, sharding=plan.sharding(row.placement.at(""))
        )
        for row in rows
    }
    cuts = {row.name: row.cut for row in rows if row.cut is not None}
    return Tier(settings).arrays(structs, cuts, [row.name for row in rows if row.held])
