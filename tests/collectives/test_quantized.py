"""Quantised gathers and reductions against plain ones, for leaves of any shape over any axes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from tests.collectives.test_plain import mesh_of, run
from zeroj.collectives import fetch, plain, quantized
from zeroj.plan.rules import Placement, place
from zeroj.plan.wire import Format, Wire

pytestmark = pytest.mark.usefixtures("compile_fast")
AXES = ("node", "local")
CASES = st.tuples(
    st.lists(st.integers(1, 20), min_size=1, max_size=3).map(tuple), st.sampled_from(((2, 4), (4, 2), (2, 3)))
)


def placed(shape: tuple[int, ...], sizes: tuple[int, int], bits: int, kept: bool = False) -> Placement:
    """Sharded over both axes, the inner one first, as plans with hpZ are."""
    placement = place(shape, {"local": sizes[1], "node": sizes[0]}, threshold=0)
    fmt = Format(bits, 64)
    wire = Wire(fmt, (("local", fmt), ("node", fmt)), ("node",) if kept else (), keeps=kept)
    return replace(placement, wire=wire if placement.sharded else Wire())


@given(CASES, st.booleans())
@settings(max_examples=8, deadline=None)
def test_a_quantised_gather_is_the_quantised_leaf(case: Any, kept: bool) -> None:
    """Integers that a block represents exactly come back in their places, padding cut off."""
    shape, sizes = case
    placement = placed(shape, sizes, 8, kept)
    whole = np.random.default_rng(0).integers(-1, 2, shape).astype(np.float32) * 127

    def gather(x: jax.Array) -> jax.Array:
        return fetch.whole(fetch.near(x, placement), placement, np.dtype(np.float32))

    stored = plain.pad(jnp.asarray(whole), placement)
    found = run(mesh_of(sizes), gather, placement.zero_spec, PartitionSpec(), stored)
    np.testing.assert_array_equal(found, whole)


@given(CASES, st.sampled_from((4, 8)))
@settings(max_examples=8, deadline=None)
def test_a_quantised_reduction_is_within_the_bound_of_its_hops(case: Any, bits: int) -> None:
    """Half a step of the largest addend at each hop, for each addend that a hop sums."""
    shape, sizes = case
    count = math.prod(sizes)
    placement = placed(shape, sizes, bits)
    each = np.random.default_rng(1).normal(size=(count, *shape)).astype(np.float32)

    def reduce(x: jax.Array) -> jax.Array:
        if not placement.wire.hops:
            return plain.reduce_scatter(x[0], placement, AXES)
        return quantized.reduce(x[0], placement, AXES)

    found = run(mesh_of(sizes), reduce, PartitionSpec(AXES), placement.zero_spec, jnp.asarray(each))
    half = 0.5 / Format(bits).largest
    first = count * half * np.abs(each).max()
    within = each.reshape(*sizes, *shape).sum(1)
    second = sizes[0] * half * (np.abs(within).max() + sizes[1] * half * np.abs(each).max())
    cut = found[tuple(slice(n) for n in shape)]
    assert np.abs(cut - each.sum(0)).max() <= (first + second) * 1.0001
    assert np.abs(found).sum() == pytest.approx(np.abs(cut).sum(), rel=1e-6), "the padding is not zero"


@pytest.mark.parametrize("bits", [4, 8])
def test_magnitudes_far_apart_zeros_and_an_overflow(bits: int) -> None:
    """1e-6, 1e3 and one outlier of 1e4 in a block; a block of zeros; an infinity on one device alone."""
    sizes = (2, 4)
    placement = placed((136, 256), sizes, bits)
    each = np.zeros((8, 136, 256), np.float32)
    each[:, 0, :100], each[:, 0, 100:200], each[3, 0, 7] = 1e-6, 1e3, 1e4
    each[5, 6, 9] = np.inf

    def reduce(x: jax.Array) -> jax.Array:
        return quantized.reduce(x[0], placement, AXES)

    found = run(mesh_of(sizes), reduce, PartitionSpec(AXES), placement.zero_spec, jnp.asarray(each))
    wanted = each.sum(0)
    bound = 3 * 8 * 1e4 / (2 * Format(bits).largest)
    assert np.abs(found[0] - wanted[0]).max() <= bound
    assert (found[[1, 2, 3, 4, 5, *range(7, 136)]] == 0).all()
    assert not np.isfinite(found[6]).all() and not np.isfinite(found[6, 9])


def test_a_value_on_every_device_is_its_multiple() -> None:
    """The sum of eight equal addends, exact through both hops at any value."""
    placement = placed((16, 130), (2, 4), 4)
    each = np.full((8, 16, 130), 0.1, np.float32)
    found = run(
        mesh_of((2, 4)),
        lambda x: quantized.reduce(x[0], placement, AXES),
        PartitionSpec(AXES),
        placement.zero_spec,
        jnp.asarray(each),
    )
    np.testing.assert_allclose(found[:16, :130], np.float32(0.8), rtol=2e-7)
