"""A run that was stopped goes on in a new process as if nothing had happened, bit by bit."""

from __future__ import annotations

import pathlib

import pytest

from tests.checkpoint.processes import child, pair, said


@pytest.mark.parametrize(
    ("stage", "precision"), [(3, "fp16"), pytest.param(1, "bf16", marks=pytest.mark.slow)]
)
def test_a_new_process_goes_on_bit_by_bit(stage: int, precision: str, tmp_path: pathlib.Path) -> None:
    """H6: losses, schedule, counts, key, scale, moments and params; resumed twice, with accumulation."""
    kind = ("--stage", stage, "--precision", precision)
    straight = said(child(tmp_path / "straight", "resume", "--last", 8, *kind))
    parts = [said(child(tmp_path / "parts", "resume", "--last", last, *kind)) for last in (3, 6, 8)]
    assert [p[0]["first"] for p in parts] == [0, 3, 6]
    assert parts[2][0]["seen"] == list(range(6)), "the position in the data comes back"
    losses = [line["loss"] for part in parts for line in part if "loss" in line]
    assert losses == [line["loss"] for line in straight if "loss" in line]
    assert parts[2][-1]["digest"] == straight[-1]["digest"]


def test_two_processes_save_and_one_goes_on(tmp_path: pathlib.Path) -> None:
    """L1: each process saves and reads its own part; two processes or one make no difference."""
    alone = said(child(tmp_path / "alone", "resume", "--last", 4))
    said(child(tmp_path / "two", "resume", "--last", 0))
    first = [said(p) for p in pair(tmp_path / "two", "resume", "--last", 2)]
    losses = [line["loss"] for line in first[0] if "loss" in line]
    assert losses == [line["loss"] for line in first[1] if "loss" in line]
    second = [said(p) for p in pair(tmp_path / "two", "resume", "--last", 3)]
    assert [lines[0]["first"] for lines in second] == [2, 2]
    third = said(child(tmp_path / "two", "resume", "--last", 4))
    both = [
        float.fromhex(line["loss"])
        for part in (first[0], second[0], third)
        for line in part
        if "loss" in line
    ]
    expected = [float.fromhex(line["loss"]) for line in alone if "loss" in line]
    assert both == pytest.approx(expected, rel=1e-6)
