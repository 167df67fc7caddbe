"""The three batch sizes: deepspeed.md 1a, behaviours A3 and A4."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroj.config import Batch, BatchSizes, Config
from zeroj.errors import ConfigError


@pytest.mark.parametrize(
    ("batch", "world", "sizes"),
    [
        ((32, 16, 1), 2, (32, 16, 1)),
        ((32, 8, 2), 2, (32, 8, 2)),
        ((32, 8, None), 2, (32, 8, 2)),
        ((32, None, 2), 2, (32, 8, 2)),
        ((None, 8, 2), 2, (32, 8, 2)),
        ((32, None, None), 2, (32, 16, 1)),
        ((None, 16, None), 2, (32, 16, 1)),
        ((16, 1, None), 8, (16, 1, 2)),
        ((1, None, None), 1, (1, 1, 1)),
    ],
)
def test_inference(batch: tuple, world: int, sizes: tuple) -> None:
    assert Batch(*batch).resolve(world, "data") == BatchSizes(*sizes)


@pytest.mark.parametrize(
    ("batch", "world", "said"),
    [
        ((33, 17, 2), 2, ("33", "17", "2", "68", "2 devices", "data=2")),
        ((32, 18, 1), 2, ("32", "18", "36", "2 devices", "data=2")),
        ((16, 1, 8), 8, ("train_batch_size=16", "per_gpu=1", "steps=8", "= 64", "8 devices", "data=8")),
        ((20, 2, None), 8, ("20", "20/16", "not a whole number", "8 devices", "data=8")),
        ((20, None, 3), 4, ("20/12", "not a whole number")),
        ((9, None, None), 8, ("9/8", "not a whole number")),
        ((None, None, None), 8, ("train_batch_size", "train_micro_batch_size_per_gpu", "none of the three")),
        ((None, None, 4), 8, ("gradient_accumulation_steps=4", "train_batch_size")),
    ],
)
def test_what_does_not_fit_prints_every_number(batch: tuple, world: int, said: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as error:
        Batch(*batch).resolve(world, f"data={world}")
    for text in said:
        assert text in str(error.value)


@pytest.mark.parametrize("batch", [(1, None, None), (1, 1, None), (1, 1, 1), (7, None, 1)])
def test_less_than_one_example_for_each_device(batch: tuple) -> None:
    with pytest.raises(ConfigError) as error:
        Batch(*batch).resolve(8, "node=2 x local=4")
    for text in ("less than one example", "at least 8", "node=2 x local=4", "further axis for the model"):
        assert text in str(error.value)
    assert Batch(*batch).resolve(1, "local=1").train == batch[0]


def test_nothing_is_counted_before_the_mesh_and_all_again_on_another() -> None:
    config = Config.load({"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2})
    assert config.batch.resolve(8, "local=8").accumulation == 1
    assert config.batch.resolve(4, "local=4").accumulation == 2
    with pytest.raises(ConfigError, match="16/6"):
        config.batch.resolve(3, "local=3")


@pytest.mark.parametrize("value", [0, -1, 2.5, "8", True])
def test_sizes_are_positive_whole_numbers(value: object) -> None:
    with pytest.raises(ConfigError, match="train_batch_size: "):
        Config.load({"train_batch_size": value})


_SIZE = st.none() | st.integers(1, 40)


@given(_SIZE, _SIZE, _SIZE, st.integers(1, 16))
def test_either_the_sizes_agree_with_what_is_given_or_config_error(
    train: int | None, micro: int | None, accumulation: int | None, world: int
) -> None:
    try:
        sizes = Batch(train, micro, accumulation).resolve(world, f"local={world}")
    except ConfigError:
        wanted = [micro or 1, accumulation or 1]
        assert train is None or train % (wanted[0] * wanted[1] * world) or None not in (micro, accumulation)
        return
    assert sizes.train == sizes.micro * sizes.accumulation * world
    assert train in (None, sizes.train)
    assert micro in (None, sizes.micro)
    assert accumulation in (None, sizes.accumulation)
