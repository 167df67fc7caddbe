"""Datasets, loaders and iterators of the package grain: every example once, and resumed exactly, without rereading."""

from __future__ import annotations

import pathlib
from typing import Any

import grain
import jax
import numpy as np
import pytest

import zeroj as zj
from tests.trainer import toy

pytestmark = pytest.mark.usefixtures("compile_fast")
COUNT, UPDATES = 40, 5
#: Nothing is read ahead, so that it can be seen what is read.
AT_ONCE = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)


class Source:
    """Examples by index, and which of them were read."""

    def __init__(self) -> None:
        self.rows = toy.plain_rows(COUNT)
        self.read: list[int] = []

    def __repr__(self) -> str:  # a grain.DataLoader goes on from its place in a source of the same name alone
        return f"Source of {COUNT}"

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: Any) -> Any:
        self.read.append(int(index))
        return self.rows[int(index)]


def loader(source: Source) -> grain.DataLoader:
    sampler = grain.samplers.IndexSampler(
        num_records=COUNT, shard_options=grain.sharding.NoSharding(), shuffle=True, num_epochs=1, seed=4
    )
    return grain.DataLoader(data_source=source, sampler=sampler, worker_count=0, read_options=AT_ONCE)


def dataset(source: Source) -> grain.IterDataset:
    return grain.MapDataset.source(source).shuffle(seed=4).to_iter_dataset(AT_ONCE)


FORMS = {
    "map": lambda source: grain.MapDataset.source(source).shuffle(seed=4),
    "iter": dataset,
    "loader": loader,
    "iterator": lambda source: iter(dataset(source)),
}


def trainer(data: Any, folder: pathlib.Path, steps: int, **given: Any) -> zj.Trainer:
    base: dict[str, Any] = {
        "deepspeed": {"zero_optimization": {"stage": 3}},
        "per_device_train_batch_size": 1,
        "max_steps": steps,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "save_steps": 3,
        "disable_tqdm": True,
    }
    args = zj.TrainingArguments(str(folder), **base | given)
    return zj.Trainer(toy.plain_loss, args, train_dataset=data, params=toy.plain_params())


def params_of(run: zj.Trainer) -> list[np.ndarray]:
    return jax.tree.leaves(zj.full_params(run.engine.state, run.engine.plan))


@pytest.mark.parametrize(
    "form", ("map", "iter", *(pytest.param(form, marks=pytest.mark.full) for form in ("loader", "iterator")))
)
def test_every_example_once_and_resumed_exactly(form: str, tmp_path: pathlib.Path) -> None:
    source = Source()
    whole = trainer(FORMS[form](source), tmp_path / "whole", UPDATES)
    whole.train()
    assert sorted(source.read[1:]) == list(range(COUNT))  # the first was looked at, for its shapes
    assert len({tuple(source.read[1:][i : i + 8]) for i in range(0, COUNT, 8)}) == UPDATES
    trainer(FORMS[form](Source()), tmp_path / "part", 3).train()
    again = Source()
    rest = trainer(FORMS[form](again), tmp_path / "part", UPDATES)
    rest.train(resume_from_checkpoint=True)
    for a, b in zip(params_of(rest), params_of(whole), strict=True):
        np.testing.assert_array_equal(a, b)
    assert again.read[1:] == source.read[25:]  # the first 24 were not read again


def test_a_map_with_holes_names_the_remedy_and_an_endless_one_is_iterated_over(
    tmp_path: pathlib.Path,
) -> None:
    rows = grain.MapDataset.source(Source())
    holes = rows.filter(lambda row: row is not None and float(np.sum(row["x"])) > 1e9)
    with pytest.raises(zj.PlanError, match="no example at some of its indices.*to_iter_dataset"):
        trainer(holes, tmp_path, 1).train()
    assert trainer(rows.repeat(), tmp_path, UPDATES + 2).train().global_step == UPDATES + 2
