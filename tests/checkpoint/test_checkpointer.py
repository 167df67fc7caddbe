"""Steps, tags, retention, what is stored beside the arrays, and going back in time."""

from __future__ import annotations

import json
import os
import pathlib
import sys
import threading
from typing import Any

import jax
import numpy as np
import pytest

import zeroj as zj
from tests.checkpoint.toy import PARAMS, TX, assert_in_place, assert_same, flat, plan_of, train
from zeroj.checkpoint import database


@pytest.fixture(scope="module")
def plan() -> Any:
    return plan_of(2)


@pytest.fixture
def state(plan: Any) -> zj.TrainState:
    return zj.init_state(PARAMS, TX, plan)


def test_an_empty_folder(tmp_path: pathlib.Path, plan: Any) -> None:
    with zj.Checkpointer(tmp_path / "new" / "folder") as checkpoints:
        assert checkpoints.latest_step() is None and checkpoints.all_steps() == []
        assert checkpoints.best_step() is None
        with pytest.raises(zj.CheckpointError, match="holds no complete checkpoint. It holds: none"):
            checkpoints.restore(plan)


def test_steps_and_tags_are_found_or_listed(tmp_path: pathlib.Path, plan: Any, state: zj.TrainState) -> None:
    with zj.Checkpointer(tmp_path, keep=None) as checkpoints:
        for step, tag in ((1, None), (2, "best"), (5, None), (7, "best")):
            assert checkpoints.save(state, plan, {"at": step}, step=step, tag=tag) == step
        assert checkpoints.all_steps() == [1, 2, 5, 7] and checkpoints.latest_step() == 7
        assert checkpoints.restore(plan)[1] == {"at": 7}
        assert checkpoints.restore(plan, 5)[1] == {"at": 5}
        assert checkpoints.restore(plan, tag="best")[1] == {"at": 7}
        assert checkpoints.restore(plan, 2, tag="best")[1] == {"at": 2}
        with pytest.raises(zj.CheckpointError, match=r"of step 3. It holds: 1, 2 \(tag 'best'\), 5, 7"):
            checkpoints.restore(plan, 3)
        with pytest.raises(zj.CheckpointError, match="of tag 'worst'"):
            checkpoints.restore(plan, tag="worst")


def test_the_step_of_the_state_is_the_number(tmp_path: pathlib.Path, plan: Any, state: zj.TrainState) -> None:
    state, _ = train(state, plan, 0, 2)
    with zj.Checkpointer(tmp_path) as checkpoints:
        assert checkpoints.save(state, plan) == 2


def test_after_going_back_the_latest_is_what_was_saved_last(
    tmp_path: pathlib.Path, plan: Any, state: zj.TrainState
) -> None:
    """And what is kept is counted in the order of saving: a new branch is not thrown away for an old one."""
    with zj.Checkpointer(tmp_path, keep=2) as checkpoints:
        for step in (10, 20, 30):
            checkpoints.save(state, plan, step=step)
        checkpoints.save(state, plan, {"branch": 2}, step=15)
        assert checkpoints.all_steps() == [30, 15]
    with zj.Checkpointer(tmp_path, keep=2) as checkpoints:
        assert checkpoints.restore(plan)[1] == {"branch": 2}
        checkpoints.save(state, plan, step=16)
        assert checkpoints.all_steps() == [15, 16]


def test_a_step_saved_again_replaces_the_old_one(
    tmp_path: pathlib.Path, plan: Any, state: zj.TrainState
) -> None:
    with zj.Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(state, plan, {"try": 1}, step=4)
        checkpoints.save(state, plan, step=5)
        later, _ = train(state, plan, 0, 1)
        checkpoints.save(later, plan, {"try": 2}, step=4)
        assert checkpoints.all_steps() == [5, 4]
        again, extra = checkpoints.restore(plan)
        assert extra == {"try": 2}
        assert_same(flat(again, plan), flat(later, plan))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["4", "5"]


def test_a_step_keeps_its_tags_within_one_history(
    tmp_path: pathlib.Path, plan: Any, state: zj.TrainState
) -> None:
    with zj.Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(state, plan, step=4, tag="best")
        checkpoints.save(state, plan, step=4, tag="global_step4")
        checkpoints.save(state, plan, step=4, tag="best")
        assert (
            checkpoints.restore(plan, tag="best")[1] == checkpoints.restore(plan, tag="global_step4")[1] == {}
        )
        checkpoints.save(state, plan, {"branch": 2}, step=4, tag="second")
        with pytest.raises(
            zj.CheckpointError, match=r"of tag 'best'. It holds: 4 \(tag 'second'\)$|of tag 'best'"
        ):
            checkpoints.restore(plan, tag="best")
        assert checkpoints.restore(plan, tag="second")[1] == {"branch": 2}


@pytest.mark.parametrize(
    ("rules", "kept"),
    [
        ({"keep": 1}, [2, 6]),
        ({"keep": 2}, [2, 5, 6]),
        ({"keep": None}, [1, 2, 3, 4, 5, 6]),
        ({"keep": 1, "keep_every": 3}, [2, 3, 6]),
        ({"keep": 1, "best": "loss"}, [2, 4, 6]),
        ({"keep": 1, "best": "loss", "best_mode": "max"}, [1, 2, 6]),
    ],
)
def test_what_is_kept(
    rules: dict[str, Any], kept: list[int], tmp_path: pathlib.Path, plan: Any, state: zj.TrainState
) -> None:
    losses = {1: 9.0, 2: 5.0, 3: float("nan"), 4: 1.0, 5: 1.5, 6: 2.0}
    with zj.Checkpointer(tmp_path, **rules) as checkpoints:
        for step, value in losses.items():
            tag = "mine" if step == 2 else None
            checkpoints.save(state, plan, step=step, tag=tag, metrics={"loss": np.float32(value)})
        assert checkpoints.all_steps() == kept
        assert sorted(p.name for p in tmp_path.iterdir()) == [str(step) for step in kept]
        if "best" in rules:
            assert checkpoints.best_step() == (1 if "best_mode" in rules else 4)


def test_rules_that_keep_nothing_are_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(zj.CheckpointError, match=r"keep=0 .*keep_every=0 .*best_mode='least'"):
        zj.Checkpointer(tmp_path, keep=0, keep_every=0, best_mode="least")
    with pytest.raises(zj.CheckpointError, match="no path of a file system"):
        zj.Checkpointer("gs://bucket/run")


def test_plain_data_comes_back_and_other_data_is_refused(
    tmp_path: pathlib.Path, plan: Any, state: zj.TrainState
) -> None:
    extra = {
        "epoch": 3,
        "iterator": b"\x00\xff",
        "loss": np.float32(0.5),
        "names": ["ä", None, True],
        "n": {"k": [1.5]},
    }
    with zj.Checkpointer(tmp_path) as checkpoints:
        with pytest.raises(zj.CheckpointError, match="ndarray"):
            checkpoints.save(state, plan, {"big": np.zeros(3)})
        checkpoints.save(state, plan, extra)
        assert checkpoints.restore(plan)[1] == {**extra, "loss": 0.5}


@pytest.mark.parametrize("kind", ["threefry2x32", "rbg", "untyped"])
def test_keys_of_every_kind_come_back(kind: str, tmp_path: pathlib.Path, plan: Any) -> None:
    key = jax.random.PRNGKey(3) if kind == "untyped" else jax.random.key(3, impl=kind)
    state = zj.init_state(PARAMS, TX, plan, rng=key)
    with zj.Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(state, plan)
        again, _ = checkpoints.restore(plan)
    assert again.rng.dtype == state.rng.dtype
    assert np.array_equal(jax.random.bits(again.rng, (4,)), jax.random.bits(state.rng, (4,)))


def test_a_restored_state_trains_on_and_is_saved_again(
    tmp_path: pathlib.Path, plan: Any, state: zj.TrainState
) -> None:
    """Also: the restored arrays are the run's own, so donation is safe."""
    with zj.Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(state, plan)
        again, _ = checkpoints.restore(plan)
        assert_in_place(again, plan)
        again, _ = train(again, plan, 0, 2)
        state, _ = train(state, plan, 0, 2)
        assert_same(flat(again, plan), flat(state, plan))
        checkpoints.save(again, plan)
        assert checkpoints.all_steps() == [0, 2]


@pytest.mark.parametrize("wait", [False, True])
def test_both_ways_of_saving_write_the_same(
    wait: bool, tmp_path: pathlib.Path, plan: Any, state: zj.TrainState
) -> None:
    with zj.Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(state, plan, wait=wait)
        assert_same(flat(checkpoints.restore(plan)[0], plan), flat(state, plan))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a priority for each thread")
@pytest.mark.parametrize("wait", [False, True])
def test_a_background_save_gives_way_to_training(
    wait: bool, tmp_path: pathlib.Path, plan: Any, state: zj.TrainState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread, from which TensorStore's workers inherit, runs behind the others; a save waited for does not."""
    seen, write = [], database.write

    def watched(*args: Any) -> Any:
        seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return write(*args)

    monkeypatch.setattr(database, "write", watched)
    before = os.getpriority(os.PRIO_PROCESS, 0)
    with zj.Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(state, plan, wait=wait)
    assert seen == [before if wait else max(before, database.BACKGROUND_NICE)]
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


def test_a_manifest_of_a_newer_zeroj_is_refused(
    tmp_path: pathlib.Path, plan: Any, state: zj.TrainState
) -> None:
    with zj.Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(state, plan, step=1, wait=True)
        file = pathlib.Path(checkpoints.folder(1)) / "manifest.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "format": 99}))
        with pytest.raises(zj.CheckpointError, match="format 99"):
            checkpoints.restore(plan)
    with pytest.warns(UserWarning, match="format 99"), zj.Checkpointer(tmp_path) as checkpoints:
        assert checkpoints.all_steps() == []
