"""Every example once an epoch, in an order that does not depend on who reads it; padding that does not count."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import zeroj as zj
from tests.trainer import toy
from zeroj.trainer.collate import rounded_up
from zeroj.trainer.data import Loader, Shape, kept_columns, order_of
from zeroj.trainer.steps import REAL


class FakePlan:
    """A plan is only asked for its axes when there are several processes."""


def loader(rows: Any, shape: Shape, weigh: bool, updates: bool = True) -> Loader:
    kept = partial(kept_columns, names=None, labels=())
    return Loader(rows, zj.PaddingCollator(), FakePlan(), shape, kept, weigh, updates)  # type: ignore[arg-type]


def counted(batch: Any) -> list[int]:
    """Ids of the rows of a batch that count."""
    arrays = batch.arrays
    if batch.weighted:
        return arrays["input_ids"][arrays[REAL] > 0, 0].tolist()
    return arrays["input_ids"][(arrays["labels"] != -100).any(-1), 0].tolist()


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(1, 90),
    micro=st.integers(1, 3),
    accumulation=st.integers(1, 4),
    world=st.sampled_from([1, 2, 4, 8]),
    weigh=st.booleans(),
    drop=st.booleans(),
    updates=st.booleans(),
    sized=st.booleans(),
)
def test_every_example_once(
    count: int, micro: int, accumulation: int, world: int, weigh: bool, drop: bool, updates: bool, sized: bool
) -> None:
    rows = [{"input_ids": [i], "labels": [i]} for i in range(count)]
    shape = Shape(micro, accumulation if updates else 1, world)

    class Stream:
        def __iter__(self) -> Any:
            return iter(rows)

    data = loader(rows if sized else Stream(), shape, weigh, updates)
    batches = list(data.epoch(3, 7 if sized else None, drop_last=drop))
    seen = [i for batch in batches for i in counted(batch)]
    kept = count - count % (micro * world) if drop else count
    order = order_of(count, 3, 7 if sized else None)[:kept]
    assert seen == order.tolist()
    for batch in batches:
        size = len(batch.arrays["input_ids"])
        assert size % (world * batch.accumulation) == 0
        assert not batch.weighted or size == world * batch.accumulation
        assert batch.real == len(counted(batch))
    if updates and not drop:
        assert len(batches) == -(-count // shape.rows)


def test_skipping_gives_the_rest_of_the_same_epoch() -> None:
    rows, shape = toy.text(50), Shape(1, 2, 4)
    whole = list(loader(rows, shape, True).epoch(1, 5))
    rest = list(loader(rows, shape, True).epoch(1, 5, skip=4))
    assert len(rest) == len(whole) - 4
    for a, b in zip(rest, whole[4:], strict=True):
        np.testing.assert_array_equal(a.arrays["input_ids"], b.arrays["input_ids"])
    assert order_of(50, 0, 5).tolist() != order_of(50, 1, 5).tolist()


def test_padding() -> None:
    collate = zj.PaddingCollator(pad_token_id=9)
    rows = [
        {"input_ids": [1, 2, 3], "labels": [1, 2, 3], "label_ids": 5},
        {"input_ids": [4], "labels": [4], "label_ids": 6},
    ]
    rows = [{k: v for k, v in row.items() if k != "label_ids"} for row in rows]
    batch = collate(rows)
    assert batch["input_ids"].shape == (2, 16) and batch["input_ids"].dtype == np.int32
    np.testing.assert_array_equal(batch["input_ids"][:, :4], [[1, 2, 3, 9], [4, 9, 9, 9]])
    np.testing.assert_array_equal(batch["labels"][:, :4], [[1, 2, 3, -100], [4, -100, -100, -100]])
    np.testing.assert_array_equal(batch["attention_mask"][:, :4], [[1, 1, 1, 0], [1, 0, 0, 0]])
    vectors = collate([{"x": np.ones(5), "label": 1}, {"x": np.zeros(5), "label": 0}])
    assert vectors["x"].shape == (2, 5) and vectors["x"].dtype == np.float32
    np.testing.assert_array_equal(vectors["labels"], [1, 0])
    assert zj.PaddingCollator(pad_to=8)(rows)["input_ids"].shape == (2, 8)
    assert zj.PaddingCollator(pad_to_multiple_of=5)(rows)["input_ids"].shape == (2, 5)
    with pytest.raises(zj.PlanError, match="pad_to=2"):
        zj.PaddingCollator(pad_to=2)(rows)
    with pytest.raises(zj.PlanError, match="'name'"):
        collate([{"name": "a"}])


def test_lengths_are_few_and_close() -> None:
    sizes = {rounded_up(n) for n in range(1, 4097)}
    assert len(sizes) == 17 and max(rounded_up(n) / n for n in range(17, 4097)) < 1.5
    assert all(rounded_up(n) >= n for n in range(4097))


def test_columns_that_the_model_does_not_take() -> None:
    example = {"input_ids": [1], "labels": [1], "name": "x", "other": 2}
    assert set(kept_columns(example, frozenset({"input_ids"}), ())) == {"input_ids", "labels"}
    assert set(kept_columns(example, None, ())) == {"input_ids", "labels", "other"}
    with pytest.raises(zj.PlanError, match="takes"):
        kept_columns({"text": "a"}, frozenset({"input_ids"}), ())
