"""The planner's figures for a GPT of 125M params on 8 H100s, against XLA:GPU's own buffer assignment."""

from __future__ import annotations

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "benchmarks"))

import planned


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_state_is_within_3_percent_and_the_step_within_10(stage: int) -> None:
    case = f"125m, N=8, stage {stage}"
    row = planned.judged({"case": case} | planned.compiled_row("125m", 1, stage))
    assert row["arguments"] == row["planned"] + row["batch"] + 32
    assert row["closed_ratio"] == pytest.approx(1, abs=0.03)
    assert row["step_ratio"] == pytest.approx(1, abs=0.10)


def test_a_row_is_judged_by_every_limit() -> None:
    """The closed form of 125M params at stage 1: 2 + 12/8 bytes a parameter, and its step."""
    count = planned.SIZES["125m"].count
    state = 2 * count + 12 * count // 8
    row = {
        "case": "125m, N=8, stage 1",
        "arguments": state + 10,
        "batch": 10,
        "planned": state,
        "params": count,
    }
    step = planned.judged(row | {"total": 1})["closed_step_gb"] * 1e9
    assert planned.judged(row | {"total": step})["met"] == "yes"
    assert planned.judged(row | {"total": 1.2 * step})["met"] == "NO"
    assert planned.judged(row | {"total": step, "planned": 1.04 * state})["met"] == "NO"
