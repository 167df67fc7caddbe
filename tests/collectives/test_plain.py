"""Gathering undoes sharding, and reduce-scattering is a sum, for leaves of any shape over any axes."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec

from zeroj.collectives import plain
from zeroj.plan.rules import place

pytestmark = pytest.mark.usefixtures("compile_fast")
SIZES = ((2, 4), (4, 2), (1, 8), (3, 2), (5, 1))
CASES = st.tuples(
    st.lists(st.integers(1, 11), min_size=1, max_size=3).map(tuple),
    st.sampled_from(SIZES),
    st.sampled_from((0, 20)),
)


def mesh_of(sizes: tuple[int, int]) -> Mesh:
    return Mesh(np.array(jax.devices()[: math.prod(sizes)]).reshape(sizes), ("node", "local"))


def run(mesh: Mesh, fun: Any, in_spec: Any, out_spec: Any, value: jax.Array) -> np.ndarray:
    mapped = jax.shard_map(fun, mesh=mesh, in_specs=in_spec, out_specs=out_spec, check_vma=False)
    return np.asarray(jax.jit(mapped)(value))


@given(CASES)
@settings(max_examples=12, deadline=None)
def test_gathering_a_sharded_leaf_gives_it_back(case: Any) -> None:
    shape, sizes, threshold = case
    mesh = mesh_of(sizes)
    placement = place(shape, dict(mesh.shape), threshold=threshold)
    whole = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    stored = plain.pad(jnp.asarray(whole), placement)
    assert stored.shape == placement.padded
    out = PartitionSpec()
    found = run(mesh, lambda x: plain.gather(x, placement), placement.zero_spec, out, stored)
    np.testing.assert_array_equal(found, whole)


@given(CASES)
@settings(max_examples=12, deadline=None)
def test_reduce_scattering_sums_over_all_devices_and_pads_with_zeros(case: Any) -> None:
    shape, sizes, threshold = case
    mesh, count = mesh_of(sizes), math.prod(sizes)
    placement = place(shape, dict(mesh.shape), threshold=threshold)
    each = np.random.default_rng(0).integers(-9, 9, (count, *shape)).astype(np.float32)

    def reduce(x: jax.Array) -> jax.Array:
        return plain.reduce_scatter(x[0], placement, ("node", "local"))

    spec = PartitionSpec(("node", "local"))
    found = run(mesh, reduce, spec, placement.zero_spec, jnp.asarray(each))
    assert found.shape == placement.padded
    np.testing.assert_array_equal(found[tuple(slice(0, n) for n in shape)], each.sum(0))
    assert found.sum() == each.sum(), "the padding is not zero"


def test_axes_of_one_device_are_left_out_of_sums() -> None:
    mesh = mesh_of((1, 8))
    fun = lambda x: plain.total(x.sum(), ("node", "local"))  # noqa: E731
    mapped = jax.shard_map(
        fun, mesh=mesh, in_specs=PartitionSpec("local"), out_specs=PartitionSpec(), check_vma=False
    )
    program = str(jax.make_jaxpr(mapped)(jnp.ones(8)))
    assert "axes=('local',)" in program and "'node', 'local'" not in program.split("psum")[1][:60]
    assert float(mapped(jnp.ones(8))) == 8
