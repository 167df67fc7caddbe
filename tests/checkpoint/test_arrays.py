"""Any array, in any layout, comes back in any other layout, through the files."""

from __future__ import annotations

import asyncio
import tempfile
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import zeroj as zj
from tests.checkpoint.toy import mesh_of
from zeroj.checkpoint import arrays, database
from zeroj.checkpoint.arrays import Target
from zeroj.plan.rules import Placement, place

DTYPES = [np.float32, np.float16, jnp.bfloat16, np.int8, np.uint32, np.bool_, np.complex64, jnp.float8_e4m3fn]


def layout(shape: tuple[int, ...], mesh: str) -> tuple[Placement, NamedSharding]:
    on = mesh_of(mesh)
    placement = place(shape, dict(on.shape), threshold=0)
    return placement, NamedSharding(on, placement.spec)


def to_device(value: np.ndarray, mesh: str) -> jax.Array:
    placement, sharding = layout(value.shape, mesh)
    return arrays.place(value, Target("x", value.shape, placement.padded, value.dtype, sharding))


@hypothesis.settings(max_examples=30, deadline=None, derandomize=True)
@hypothesis.given(
    shapes=st.lists(st.lists(st.integers(0, 23), max_size=3).map(tuple), min_size=1, max_size=3),
    dtype=st.sampled_from(DTYPES),
    before=st.sampled_from(["1", "5", "8", "2x4"]),
    after=st.sampled_from(["1", "2", "5", "8r", "2x4"]),
    small=st.booleans(),
)
def test_any_layout_to_any_other(shapes: Any, dtype: Any, before: str, after: str, small: bool) -> None:
    rng = np.random.default_rng(0)
    values = {f"a/{i}": (rng.normal(size=s) * 50).astype(dtype) for i, s in enumerate(shapes)}
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrays, "CHUNK_BYTES", 64 if small else 2**25)
        patch.setattr(database, "IN_FLIGHT_BYTES", 100 if small else 2**28)
        placed = {name: to_device(value, before) for name, value in values.items()}
        specs = [arrays.array_spec(name, placed[name], values[name].shape) for name in values]
        parts = [p for spec in specs for p in arrays.pieces(spec, placed[spec.name], copy=small)]
        asyncio.run(database.write(folder, 0, specs, parts))
        assert not parts, "host copies are let go of"
        database.merge(folder, [0])
        targets = []
        for name, value in values.items():
            placement, sharding = layout(value.shape, after)
            targets.append(Target(name, value.shape, placement.padded, value.dtype, sharding))
        for target, found in zip(targets, database.read(folder, targets), strict=True):
            assert found.sharding == target.sharding and found.dtype == target.dtype
            whole = np.asarray(found)
            inside = tuple(slice(0, n) for n in target.shape)
            assert whole[inside].tobytes() == values[target.name].tobytes()
            assert np.count_nonzero(whole) == np.count_nonzero(whole[inside]), "the padding is zero"
            stored = database.StoredArray(folder, target.name)
            again = np.zeros(stored.shape, stored.dtype)
            for index in stored.chunks():
                again[index] = stored.read(index)
            assert again.tobytes() == values[target.name].tobytes()


def test_values_are_cast_on_the_way() -> None:
    value = np.linspace(0, 1, 13, dtype=np.float32)
    placement, sharding = layout((13,), "8")
    target = Target("x", (13,), placement.padded, np.dtype(jnp.bfloat16), sharding)
    assert np.array_equal(np.asarray(arrays.place(value, target))[:13], value.astype(jnp.bfloat16))


def test_an_array_that_is_not_there_is_named() -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        pytest.raises(zj.CheckpointError, match="'params/w'.*missing"),
    ):
        database.StoredArray(folder, "params/w")


def test_every_element_is_written_by_exactly_one_piece() -> None:
    for mesh in ("5", "8", "2x4"):
        value = np.zeros((13, 7), np.int32)
        placed = to_device(value, mesh)
        for piece in arrays.pieces(arrays.array_spec("x", placed, value.shape), placed, copy=False):
            value[piece.index] += 1
        assert (value == 1).all()
