"""Killed, told to leave, out of space, half written, damaged, copied: what is complete loads, the rest is named."""

from __future__ import annotations

import json
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
from tests.checkpoint.processes import child, pair, said
from tests.checkpoint.toy import PARAMS, TX, assert_same, flat, normal, plan_of, save_first
from zeroj.checkpoint import database
from zeroj.checkpoint.inspect import damage, inspect


def kill_during_saves(folder: pathlib.Path, times: int, seed: int) -> None:
    """Kills a process that saves at every step, at random moments; after each kill the latest loads."""
    plan, moments, last = plan_of(3, "5"), random.Random(seed), 0
    for _ in range(times):
        process = child(folder, "storm")
        assert process.stdout is not None
        first = json.loads(process.stdout.readline())["first"]
        assert first >= last, "a checkpoint that was complete is gone"
        if moments.random() < 0.8:  # else it may be killed while it starts
            process.stdout.readline()
        time.sleep(moments.uniform(0.0, 1.0))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        if not any(p.name.isdigit() for p in folder.iterdir()):
            continue
        shutil.copytree(folder, folder.with_name("copy"), dirs_exist_ok=False)
        with zj.Checkpointer(folder.with_name("copy")) as checkpoints:
            state, extra = checkpoints.restore(plan)
            assert int(state.step) == checkpoints.latest_step() == extra["seen"][-1] + 1
            last = int(state.step)
        assert not list(damage(checkpoints.folder(last)))
        shutil.rmtree(folder.with_name("copy"))
    assert last > 0


@pytest.mark.slow
def test_the_latest_loads_after_sigkill(tmp_path: pathlib.Path) -> None:
    kill_during_saves(tmp_path / "run", 5, seed=0)


@pytest.mark.full
def test_the_latest_loads_after_fifty_kills(tmp_path: pathlib.Path) -> None:
    kill_during_saves(tmp_path / "run", 50, seed=1)


def test_sigterm_saves_the_last_finished_step_and_leaves_with_the_code(tmp_path: pathlib.Path) -> None:
    process = child(tmp_path, "preempted")
    assert process.stdout is not None
    step = 0
    while step < 3:
        step = json.loads(process.stdout.readline()).get("step", 0)
    process.send_signal(signal.SIGTERM)
    lines = said(process, zj.EXIT_PREEMPTED)
    assert lines[-1]["saved"] == max([step, *(line.get("step", 0) for line in lines)])
    saved = lines[-1]["saved"]
    with zj.Checkpointer(tmp_path) as checkpoints:
        assert checkpoints.latest_step() == saved


@pytest.mark.slow
def test_sigterm_to_one_of_two_processes_saves_on_both(tmp_path: pathlib.Path) -> None:
    save_first(tmp_path)
    processes = pair(tmp_path, "preempted")
    assert processes[1].stdout is not None
    while True:
        line = processes[1].stdout.readline()
        assert line, processes[1].communicate()[1][-3000:]
        if line.startswith("{") and json.loads(line).get("step", 0) >= 3:
            break
    processes[1].send_signal(signal.SIGTERM)
    ends = [said(p, zj.EXIT_PREEMPTED)[-1]["saved"] for p in processes]
    assert ends[0] == ends[1] >= 3
    with zj.Checkpointer(tmp_path) as checkpoints:
        assert checkpoints.latest_step() == ends[0]


def test_a_save_that_failed_in_the_background_stops_the_run(tmp_path: pathlib.Path) -> None:
    process = child(tmp_path, "failing", "--last", 50)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "CheckpointError" in errors and "No space left on device" in errors


@pytest.mark.parametrize("last", (0, 1), ids=("an error", "the end"))
def test_a_program_that_ends_without_closing_has_its_last_save(last: int, tmp_path: pathlib.Path) -> None:
    process = child(tmp_path, "unclosed", "--last", last)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == (0 if last else 1)
    assert ("of the user's own" in errors) != bool(last)
    assert "shutdown" not in errors and "Exception in thread" not in errors, errors
    with zj.Checkpointer(tmp_path) as checkpoints:
        assert checkpoints.latest_step() == 1


def test_a_process_that_never_arrives_is_named(tmp_path: pathlib.Path) -> None:
    """J2"""
    save_first(tmp_path)
    processes = pair(tmp_path, "alone")
    _, errors = processes[0].communicate(timeout=120)
    processes[1].kill()
    processes[1].communicate()
    assert processes[0].returncode != 0
    assert (
        "save of step 0" in errors
        and "process 1 (" in errors
        and ") had not" in errors
        and "is collective" in errors
    )


@pytest.fixture
def run(tmp_path: pathlib.Path) -> Any:
    """A folder with two checkpoints whose leaves lie in data files, a plan, and the state."""
    params = {"a": normal(64, 500), "b": normal(64, 501)}
    plan = plan_of(3, params=params)
    state = zj.init_state(params, TX, plan)
    with zj.Checkpointer(tmp_path / "run") as checkpoints:
        for step in (1, 2):
            checkpoints.save(state, plan, {"step": step}, step=step)
    return checkpoints, plan, state


def data_files(checkpoints: zj.Checkpointer, step: int) -> list[pathlib.Path]:
    found = pathlib.Path(checkpoints.folder(step)).rglob("d/*")
    return sorted((p for p in found if p.is_file()), key=lambda p: p.stat().st_size)


def test_failures_are_raised_once_by_the_next_call_and_again_by_close(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H9"""
    plan = plan_of(1)
    state = zj.init_state(PARAMS, TX, plan)
    checkpoints = zj.Checkpointer(tmp_path)
    checkpoints.save(state, plan, step=1, wait=True)

    async def fails(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(database, "write", fails)
        checkpoints.save(state, plan, step=2)
        with pytest.raises(zj.CheckpointError, match="No space left") as error:
            checkpoints.save(state, plan, step=3)
        assert isinstance(error.value.__cause__, OSError)
        checkpoints.save(state, plan, step=1)
        with pytest.raises(zj.CheckpointError, match="No space left"):
            checkpoints.wait()
    assert checkpoints.all_steps() == [1], "what was to be replaced is back"
    assert_same(flat(checkpoints.restore(plan)[0], plan), flat(state, plan))
    with pytest.raises(zj.CheckpointError, match="No space left"):
        checkpoints.close()


def test_a_save_that_works_again_ends_the_failure(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(1)
    state = zj.init_state(PARAMS, TX, plan)

    async def fails(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with zj.Checkpointer(tmp_path) as checkpoints:
        with monkeypatch.context() as patch:
            patch.setattr(database, "write", fails)
            checkpoints.save(state, plan, step=2)
            with pytest.raises(zj.CheckpointError):
                checkpoints.wait()
        checkpoints.save(state, plan, step=2)
        assert checkpoints.all_steps() == [2]


def test_every_damaged_byte_and_missing_file_is_named(run: Any) -> None:
    checkpoints, plan, _ = run
    big = data_files(checkpoints, 2)[-1]
    whole = big.read_bytes()
    big.write_bytes(
        whole[: len(whole) // 2] + bytes([whole[len(whole) // 2] ^ 1]) + whole[len(whole) // 2 + 1 :]
    )
    with pytest.raises(zj.CheckpointError) as error:
        checkpoints.restore(plan)
    assert big.name in str(error.value)
    assert any(f"leaf '{part}" in str(error.value) for part in ("params/", "opt_state/"))
    with pytest.raises(zj.CheckpointError, match=big.name):
        inspect(checkpoints.directory, verify=True)
    assert len(list(damage(checkpoints.folder(2)))) == 1, "one byte damages one chunk"
    big.unlink()
    with pytest.raises(zj.CheckpointError, match=big.name):
        checkpoints.restore(plan)
    assert len(list(damage(checkpoints.folder(2)))) > 1
    state, extra = checkpoints.restore(plan, step=1)
    assert extra == {"step": 1} and int(state.step) == 0
    big.write_bytes(whole)
    assert "every chunk" in inspect(checkpoints.directory, verify=True)


def test_any_missing_or_damaged_file_is_noticed(run: Any) -> None:
    """Whatever file is lost or changed, the checkpoint does not open as if nothing were wrong."""
    checkpoints, plan, state = run
    folder = pathlib.Path(checkpoints.folder(2))
    needed = 0
    for file in sorted(p for p in folder.rglob("*") if p.is_file() and p.stat().st_size):
        content = file.read_bytes()
        for changed in (None, content[: len(content) // 2], content[:-1] + bytes([content[-1] ^ 1])):
            file.unlink() if changed is None else file.write_bytes(changed)
            if list(damage(str(folder))):
                needed += 1
            else:
                with zj.Checkpointer(checkpoints.directory) as again:
                    assert_same(flat(again.restore(plan, step=2)[0], plan), flat(state, plan))
            file.write_bytes(content)
    assert needed >= 9


def test_half_written_folders_are_never_the_latest_and_block_nothing(run: Any) -> None:
    """H11"""
    checkpoints, plan, state = run
    root = checkpoints.directory
    (root / "3.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
    (root / "4" / "state").mkdir(parents=True)
    shutil.copytree(root / "1", root / "0")
    shutil.copytree(root / "2", root / "replaced-9")
    shutil.copytree(root / "1" / "state", root / "deleted" / "7" / "state")
    with pytest.warns(UserWarning, match="Checkpoint 4 is left out"), zj.Checkpointer(root) as again:
        assert again.all_steps() == [1, 0, 2, 9] or again.all_steps() == [0, 1, 2, 9]
        assert again.latest_step() in (2, 9)
        again.save(state, plan, step=3)
        again.save(state, plan, step=4)
        assert again.latest_step() == 4
    assert not (root / "deleted").exists() and not list(root.glob("replaced-*"))


def test_a_copy_of_a_checkpoint_loads(run: Any, tmp_path: pathlib.Path) -> None:
    checkpoints, plan, state = run
    shutil.copytree(checkpoints.directory, tmp_path / "copy")
    shutil.rmtree(checkpoints.directory)
    with zj.Checkpointer(tmp_path / "copy") as again:
        assert_same(flat(again.restore(plan)[0], plan), flat(state, plan))


def test_states_without_data_are_refused_at_save(tmp_path: pathlib.Path) -> None:
    """H13"""
    plan = plan_of(3)
    with zj.Checkpointer(tmp_path) as checkpoints:
        with pytest.raises(zj.CheckpointError, match=r"params/w1 \(ShapeDtypeStruct\).*rng"):
            checkpoints.save(zj.abstract_state(TX, plan), plan)
        state = zj.init_state(PARAMS, TX, plan)
        state.params["w1"].delete()
        with pytest.raises(zj.CheckpointError, match=r"params/w1 \(deleted or donated\)"):
            checkpoints.save(state, plan)
        with pytest.raises(zj.CheckpointError, match="tracer"):
            jax.jit(lambda s: checkpoints.save(s, plan, step=1))(zj.init_state(PARAMS, TX, plan))
        assert checkpoints.all_steps() == []


def test_a_state_may_be_donated_as_soon_as_save_returns(tmp_path: pathlib.Path) -> None:
    """The copy is the checkpoint's own: overwriting every buffer at once does not change it."""
    params = {"w": normal(512, 512)}
    plan = plan_of(3, params=params)
    state = zj.init_state(params, TX, plan)
    expected = flat(state, plan)
    overwrite = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s._replace(rng=None)), donate_argnums=0)
    with zj.Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(state, plan)
        jax.block_until_ready(overwrite(state))
        assert np.all(np.isfinite(flat(checkpoints.restore(plan)[0], plan)["params/w"]))
        assert_same(flat(checkpoints.restore(plan)[0], plan), expected)
