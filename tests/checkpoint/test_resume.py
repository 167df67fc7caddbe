"""A run that was stopped goes on in a new process as if nothing had happened, bit by bit."""

from __future__ import annotations

import pathlib

import pytest

import zeroj as zj
from tests.checkpoint.child import digest
from tests.checkpoint.processes import child, pair, said
from tests.checkpoint.toy import PARAMS, TX, noisy_loss, plan_of, save_first, train


@pytest.mark.parametrize(
    ("stage", "precision"), [(3, "fp16"), pytest.param(1, "bf16", marks=pytest.mark.full)]
)
def test_a_new_process_goes_on_bit_by_bit(stage: int, precision: str, tmp_path: pathlib.Path) -> None:
    """H6: losses, schedule, counts, key, scale, moments and params; resumed twice, with accumulation."""
    plan = plan_of(stage, "8", precision)
    state = zj.init_state(PARAMS, TX, plan, rng=7)
    state, expected = train(state, plan, 0, 6, loss_fn=noisy_loss, accumulation_steps=2)
    kind = ("--stage", stage, "--precision", precision)
    parts = [said(child(tmp_path, "resume", "--last", last, *kind)) for last in (2, 4, 6)]
    assert [p[0]["first"] for p in parts] == [0, 2, 4]
    assert parts[2][0]["seen"] == [0, 1, 2, 3], "the position in the data comes back"
    losses = [float.fromhex(line["loss"]) for part in parts for line in part if "loss" in line]
    assert losses == expected
    assert parts[2][-1]["digest"] == digest(state, plan)


def test_two_processes_go_on_where_one_stopped_and_the_reverse(tmp_path: pathlib.Path) -> None:
    """L1: each process saves and reads its own part; two processes or one make no difference."""
    plan = save_first(tmp_path)
    state = zj.init_state(PARAMS, TX, plan, rng=7)
    _, expected = train(state, plan, 0, 3, loss_fn=noisy_loss, accumulation_steps=2)
    both = [said(process) for process in pair(tmp_path, "resume", "--last", 2)]
    losses = [[float.fromhex(line["loss"]) for line in lines if "loss" in line] for lines in both]
    assert losses[0] == losses[1] == pytest.approx(expected[:2], rel=1e-6)
    with zj.Checkpointer(tmp_path) as checkpoints:
        state, extra = checkpoints.restore(plan)
    assert extra["next"] == 2
    _, last = train(state, plan, 2, 3, loss_fn=noisy_loss, accumulation_steps=2)
    assert last == pytest.approx(expected[2:], rel=1e-6)
