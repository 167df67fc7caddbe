"""Checkpoints of state in files: self-contained, for any tier, and what a killed run goes on from."""

from __future__ import annotations

import pathlib
import random
import shutil
import signal
import time
from typing import Any

import jax
import numpy as np
import pytest

import zeroj as zj
from tests.checkpoint.child import digest
from tests.checkpoint.processes import child, said
from tests.checkpoint.toy import BATCHES, PARAMS, TX, assert_same, flat, noisy_loss, plan_of, train
from zeroj.spill.folder import NAME
from zeroj.spill.tier import is_spilled

TIERS = ("none", "cpu", "nvme", "all nvme")


def plan_on(tier: str, path: pathlib.Path, precision: str = "bf16", stage: int = 3) -> Any:
    if tier == "nvme":
        return plan_of(stage, precision=precision, nvme=str(path / "nvme"))
    if tier == "all nvme":
        both = {"nvme": str(path / "nvme"), "nvme_params": str(path / "params")}
        return plan_of(stage, precision=precision, **both)
    return plan_of(stage, precision=precision, tier=tier)


@pytest.mark.parametrize("there", TIERS)
def test_from_files_onto_every_tier_and_back(there: str, tmp_path: pathlib.Path) -> None:
    """F3: the same numbers whatever the tier, and training goes on with them."""
    files, other = plan_on("nvme", tmp_path), plan_on(there, tmp_path / "other")
    state, _ = train(zj.init_state(PARAMS, TX, files), files, 0, 2)
    expected = flat(state, files)
    with zj.Checkpointer(tmp_path / "saved") as checkpoints:
        checkpoints.save(state, files, step=1)
        moved, _ = checkpoints.restore(other)
        assert_same(flat(moved, other), expected)
        assert any(map(is_spilled, jax.tree.leaves(moved.opt_state))) == (there in TIERS[2:])
        assert any(map(is_spilled, jax.tree.leaves(moved.params))) == (there == TIERS[3])
        checkpoints.save(moved, other, step=2, wait=True)
        back, _ = checkpoints.restore(files, step=2)
    assert_same(flat(back, files), expected)
    state, losses = train(state, files, 2, 4)
    back, again = train(back, files, 2, 4)
    moved, elsewhere = train(moved, other, 2, 4)
    assert losses == again
    assert losses == pytest.approx(elsewhere, rel=1e-4)
    assert_same(flat(back, files), flat(state, files))


@pytest.mark.parametrize(("stage", "tier"), [(1, "nvme"), (3, "nvme"), (3, "all nvme")])
def test_a_checkpoint_needs_nothing_of_the_files(stage: int, tier: str, tmp_path: pathlib.Path) -> None:
    """F3: delete the files' folder, restore, go on: as if nothing had happened. Reads pass no device."""
    plan = plan_on(tier, tmp_path, "fp32", stage)
    state, _ = train(zj.init_state(PARAMS, TX, plan), plan, 0, 2)
    with zj.Checkpointer(tmp_path / "saved") as checkpoints:
        checkpoints.save(state, plan)
        state, expected = train(state, plan, 2, 4)
        wanted = flat(state, plan)
        del state
        shutil.rmtree(tmp_path / "nvme")
        shutil.rmtree(tmp_path / "params", ignore_errors=True)
        state, _ = checkpoints.restore(plan)
    state, losses = train(state, plan, 2, 4)
    assert losses == expected
    assert_same(flat(state, plan), wanted)


def test_starting_anew_from_the_weights_of_a_checkpoint(tmp_path: pathlib.Path) -> None:
    """F7: this way in makes the files, too."""
    plan = plan_on("nvme", tmp_path)
    state, _ = train(zj.init_state(PARAMS, TX, plan), plan, 0, 2)
    with zj.Checkpointer(tmp_path / "saved") as checkpoints:
        checkpoints.save(state, plan)
        fresh, _ = checkpoints.restore(plan, tx=TX, weights_only=True)
    jax.tree.map(np.testing.assert_array_equal, zj.full_params(fresh, plan), zj.full_params(state, plan))
    moments = [x for x in jax.tree.leaves(fresh.opt_state.inner) if is_spilled(x)]
    assert moments and not any(np.asarray(x).any() for x in moments)
    train(fresh, plan, 2, 3)


def undisturbed(path: pathlib.Path, last: int) -> str:
    plan = plan_of(3, nvme=str(path / "undisturbed"))
    state, step = zj.init_state(PARAMS, TX, plan, rng=7), zj.make_train_step(noisy_loss, TX, plan)
    for i in range(last):
        state, _ = step(state, BATCHES[i % len(BATCHES)])
    return digest(state, plan)


def kill_at_random(tmp_path: pathlib.Path, kills: int) -> None:
    """Starts a run again and again, kills it each time, and lets the last one end."""
    nvme, saved = tmp_path / "nvme", tmp_path / "saved"
    chance, sizes = random.Random(kills), []
    for _ in range(kills):
        run = child(saved, "steady", "--nvme", nvme, "--last", 10**6)
        assert run.stdout is not None
        run.stdout.readline()  # it is about to train
        for _ in range(chance.randint(0, 2)):
            run.stdout.readline()
        time.sleep(chance.random() * 0.3)
        run.send_signal(signal.SIGKILL)
        run.communicate()
        (left,) = [p for p in (nvme / NAME).iterdir() if p.is_dir()]
        sizes.append(sum(p.stat().st_blocks for p in left.iterdir()))
    with zj.Checkpointer(saved) as checkpoints:
        reached = checkpoints.latest_step() or 0
    lines = said(child(saved, "steady", "--nvme", nvme, "--last", reached + 2))
    assert lines[0]["first"] == reached
    assert lines[-1]["digest"] == undisturbed(tmp_path, reached + 2)
    assert len(set(sizes)) == 1, f"disk use grew: {sizes}"
    assert not [p for p in (nvme / NAME).iterdir() if p.is_dir()], "the run that ended left its files"


@pytest.mark.slow
def test_a_killed_run_goes_on_bit_by_bit(tmp_path: pathlib.Path) -> None:
    kill_at_random(tmp_path, 3)


@pytest.mark.full
def test_thirty_kills(tmp_path: pathlib.Path) -> None:
    kill_at_random(tmp_path, 30)
