"""State in files when something goes wrong: a SpillError says what, and nothing mixed is taken for a state."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import subprocess
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

import zeroj as zj
from tests import oracle
from tests.step.test_spilled import EVERY_LEAF, spilling
from tests.test_contract import optimizer
from zeroj.spill.folder import NAME
from zeroj.spill.tier import SpilledArray, is_spilled
from zeroj.step.precision import default_scaling

pytestmark = pytest.mark.usefixtures("compile_fast")


class Job:
    """A run on the toy with state in files."""

    def __init__(
        self, path: pathlib.Path, precision: str = "fp32", orbax: bool = False, **options: Any
    ) -> None:
        self.m, self.tx = oracle.model("toy"), optimizer("adamw")
        self.plan = zj.make_plan(
            self.m.params, self.tx, oracle.mesh_of(8), spilling(path), precision=precision, aio=EVERY_LEAF
        )
        if orbax:  # its threshold is 1 MiB, which no leaf of the toy has
            spill = dataclasses.replace(self.plan.spill, direct=False)
            self.plan = dataclasses.replace(self.plan, spill=spill)
        self.state = zj.init_state(self.m.params, self.tx, self.plan)
        self.step = zj.make_train_step(self.m.loss, self.tx, self.plan, **options)

    def run(self, first: int, last: int) -> Job:
        for batch in self.m.batches[first:last]:
            self.state, self.metrics = self.step(self.state, batch)
        return self

    @property
    def spilled(self) -> list[SpilledArray]:
        return [x for x in jax.tree.leaves(self.state.opt_state) if is_spilled(x)]

    def path(self, array: SpilledArray, shard: int = 0) -> str:
        store: Any = array.tier.store
        return store.path(array.shards[shard].name)

    def equals(self, other: Job) -> None:
        for a, b in zip(
            jax.tree.leaves(self.state.opt_state), jax.tree.leaves(other.state.opt_state), strict=True
        ):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
        mine, theirs = zj.full_params(self.state, self.plan), zj.full_params(other.state, other.plan)
        jax.tree.map(np.testing.assert_array_equal, mine, theirs)


@pytest.fixture
def job(tmp_path: pathlib.Path) -> Job:
    return Job(tmp_path / "nvme")


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove"])
def test_a_damaged_file_stops_the_step_and_training_goes_on_from_the_checkpoint(
    job: Job, tmp_path: pathlib.Path, damage: str
) -> None:
    job.run(0, 2)
    with zj.Checkpointer(tmp_path / "saved") as checkpoints:
        checkpoints.save(job.state, job.plan)
        job.run(2, 3)
        victim = job.spilled[-1]
        path = job.path(victim)
        if damage == "truncate":
            os.truncate(path, 1)
        elif damage == "remove":
            os.unlink(path)
        else:
            with open(path, "r+b") as file:
                file.write(b"\xff\xff\xff")
        with pytest.raises(zj.SpillError) as error:
            job.run(3, 4)
        assert victim.name in str(error.value) and path in str(error.value)
        with pytest.raises(zj.SpillError, match=r"is lost.*last checkpoint"):
            job.run(3, 4)
        with pytest.raises(zj.CheckpointError, match="is lost"):
            checkpoints.save(job.state, job.plan)
        job.state, _ = checkpoints.restore(job.plan)
    job.run(2, 5)
    job.equals(Job(tmp_path / "other").run(0, 5))


def test_a_failing_write_leaves_no_mixed_state(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.run(0, 1)
    store: Any = job.spilled[0].tier.store
    real, count = store.write, [0]

    def failing(name: str, data: np.ndarray) -> Any:
        count[0] += 1
        if count[0] == 9:
            raise OSError(28, os.strerror(28))
        return real(name, data)

    monkeypatch.setattr(store, "write", failing)
    with pytest.raises(OSError, match="No space"):
        job.run(1, 2)
    monkeypatch.undo()
    assert count[0] > 9 or job.spilled[0].tier.lost
    with pytest.raises(zj.SpillError, match="interrupted while it updated the files"):
        job.run(1, 2)
    with pytest.raises(zj.SpillError, match="interrupted"):
        np.asarray(job.spilled[0])


def test_an_old_state_cannot_be_used_again(job: Job) -> None:
    old = job.state
    job.run(0, 1)
    with pytest.raises(zj.SpillError, match="overwritten.*by a later step"):
        job.step(old, job.m.batches[0])
    job.run(1, 2)  # nothing was harmed


def test_a_skipped_step_touches_no_file(tmp_path: pathlib.Path) -> None:
    """fp16 with overflows: its files keep their times and contents, and training equals that on the device."""
    job = Job(tmp_path, "fp16", loss_scale=_scaling())
    plain = Job(tmp_path / "plain", "fp16", loss_scale=_scaling())
    zero = zj.Zero(stage=3, offload_optimizer={"device": "cpu"})
    plain.plan = zj.make_plan(job.m.params, job.tx, oracle.mesh_of(8), zero, precision="fp16")
    plain.state = zj.init_state(job.m.params, job.tx, plain.plan, loss_scale=_scaling())
    plain.step = zj.make_train_step(job.m.loss, job.tx, plain.plan, loss_scale=_scaling())
    job.state = zj.init_state(job.m.params, job.tx, job.plan, loss_scale=_scaling())
    applied = []
    for n in range(6):
        before = [os.stat(job.path(a)).st_mtime_ns for a in job.spilled]
        job.run(n, n + 1)
        plain.run(n, n + 1)
        after = [os.stat(job.path(a)).st_mtime_ns for a in job.spilled]
        applied.append(bool(job.metrics["applied"]))
        assert applied[-1] or before == after
        assert applied[-1] == bool(plain.metrics["applied"])
    assert not all(applied) and any(applied), applied
    mine, theirs = zj.full_params(job.state, job.plan), zj.full_params(plain.state, plain.plan)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), mine, theirs)


def _scaling() -> Any:
    return dataclasses.replace(default_scaling("fp16"), initial_power=19, hysteresis=1)


def test_the_files_of_a_state_go_with_it(job: Job, tmp_path: pathlib.Path) -> None:
    """Three states one after another use no more of the disk than one."""
    sizes = []
    for _ in range(3):
        job.state = zj.init_state(job.m.params, job.tx, job.plan)
        job.run(0, 1)
        (folder,) = [p for p in (tmp_path / "nvme" / NAME).iterdir() if p.is_dir()]
        sizes.append(sum(p.stat().st_blocks for p in folder.iterdir()))
    assert len(set(sizes)) == 1


def test_two_states_on_one_path(tmp_path: pathlib.Path) -> None:
    one, two, alone = Job(tmp_path), Job(tmp_path, "bf16"), Job(tmp_path / "alone")
    for n in range(3):
        one.run(n, n + 1)
        two.run(n, n + 1)
    one.equals(alone.run(0, 3))


def test_a_state_that_does_not_fit_is_refused_before_the_first_step(tmp_path: pathlib.Path) -> None:
    with small_disk(tmp_path / "disk", "64k") as disk, pytest.raises(zj.SpillError, match="Not enough space"):
        Job(disk)


def test_a_disk_that_others_fill_while_training_goes_on(tmp_path: pathlib.Path) -> None:
    """Of the engine that takes its space as it writes: an error, and then on from the checkpoint, losing nothing."""
    with small_disk(tmp_path / "disk", "4m") as disk, zj.Checkpointer(tmp_path / "saved") as checkpoints:
        job = Job(disk, orbax=True).run(0, 2)
        checkpoints.save(job.state, job.plan)
        filler = disk / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(b"x" * 4096)
        with pytest.raises(
            zj.SpillError, match=r"Writing leaf .*(space|RESOURCE_EXHAUSTED).*last checkpoint"
        ):
            job.run(2, 3)
        filler.unlink()
        with pytest.raises(zj.SpillError, match="is lost"):
            job.run(2, 3)
        job.state, _ = checkpoints.restore(job.plan)
        job.run(2, 4).equals(Job(tmp_path / "other", orbax=True).run(0, 4))


@contextlib.contextmanager
def small_disk(point: pathlib.Path, size: str) -> Iterator[pathlib.Path]:
    point.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(point)], capture_output=True
    )
    if done.returncode:
        pytest.skip(f"cannot mount a small file system here: {done.stderr.decode().strip()}")
    try:
        yield point
    finally:
        subprocess.run(["umount", "-l", str(point)], check=True)


def test_memory_says_what_lies_where(job: Job) -> None:
    report = job.plan.memory()
    on_disk = sum(sum(s.nbytes for s in array.shards) for array in job.spilled)
    assert sum(report.nvme.values()) == on_disk
    assert report.host["spill_buffers"] <= job.step.update.buffer_bytes  # which rounds shards up to pages
    assert "on each nvme" in str(report)


def test_a_step_of_ones_own_is_refused(job: Job) -> None:
    wrapped = zj.wrap_optimizer(job.tx, job.plan)
    with pytest.raises(zj.PlanError, match="make_train_step"):
        wrapped.update(job.state.params, job.state.opt_state, job.state.params)
    with pytest.raises(zj.PlanError, match="init_state"):
        jax.jit(wrapped.init)(job.state.params)


def test_params_in_files_with_axes_of_the_models_own_are_refused(tmp_path: pathlib.Path) -> None:
    mesh = zj.make_mesh(local=4, model=2)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "model"))
    params = {"w": jax.ShapeDtypeStruct((64, 64), np.float32, sharding=sharding)}
    zero = zj.Zero(stage=3, offload_param={"device": "nvme", "nvme_path": str(tmp_path)})
    with pytest.raises(zj.PlanError, match="w are sharded on axes of the model's own"):
        zj.make_plan(params, optimizer("adamw"), mesh, zero, aio=EVERY_LEAF)
