"""Placements of leaves of any shape over any axes."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import zeroj as zj
from tests import oracle
from zeroj.plan.rules import PADDING_TOLERANCE, WHOLE_LIMIT, WHOLE_SHARE, auto_threshold, place

SHAPES = st.lists(st.integers(1, 70), max_size=4).map(tuple)
AXES = st.one_of(
    st.builds(lambda n: {"data": n}, st.integers(1, 9)),
    st.builds(lambda a, b: {"node": a, "local": b}, st.integers(1, 4), st.integers(1, 8)),
)


@given(SHAPES, AXES, st.integers(0, 200), st.sets(st.integers(0, 3)))
@settings(max_examples=300, deadline=None)
def test_a_placement_is_whole_or_uses_every_axis_once(
    shape: tuple[int, ...], axes: Mapping[str, int], threshold: int, scanned: set[int]
) -> None:
    found = place(shape, axes, threshold=threshold, scanned=scanned)
    degree, size = math.prod(axes.values()), math.prod(shape)
    assert found.shape == shape and len(found.padded) == len(shape)
    assert len(tuple(found.spec)) == len(shape)
    if not found.sharded:
        assert found.padded == shape and found.note
        free = set(range(len(shape))) - scanned
        assert degree == 1 or size < degree or size <= threshold or not free
        return
    assert size >= degree > 1 and size > threshold
    assert sorted(found.axes) == sorted(axis for axis, n in axes.items() if n > 1)
    for dim, (real, stored) in enumerate(zip(shape, found.padded, strict=True)):
        factor = math.prod(axes[axis] for axis in dict(found.dims).get(dim, ()))
        assert stored % factor == 0 and 0 <= stored - real < factor
        assert factor == 1 or dim not in scanned
    assert ("padded" in found.note) == (found.padded != shape)


@given(SHAPES, st.integers(2, 9))
@settings(max_examples=200, deadline=None)
def test_a_dim_that_divides_is_never_passed_over_for_padding_beyond_the_tolerance(
    shape: tuple[int, ...], degree: int
) -> None:
    found = place(shape, {"data": degree}, threshold=0)
    if found.sharded and any(n % degree == 0 for n in shape):
        assert math.prod(found.padded) <= (1 + PADDING_TOLERANCE) * math.prod(shape)
        assert found.padded == shape, "one split dim either way: no padding is better than some"


@given(SHAPES.filter(bool), AXES, st.randoms())
@settings(max_examples=150, deadline=None)
def test_transposing_a_placement_and_back_changes_nothing(
    shape: tuple[int, ...], axes: Mapping[str, int], random: object
) -> None:
    found = place(shape, axes, threshold=0)
    order = list(range(len(shape)))
    random.shuffle(order)  # type: ignore[attr-defined]
    back = [order.index(dim) for dim in range(len(shape))]
    turned = found.transposed(order)
    assert turned.shape == tuple(shape[dim] for dim in order)
    again = turned.transposed(back)
    assert (again.shape, again.padded, dict(again.dims)) == (found.shape, found.padded, dict(found.dims))


@given(st.lists(st.integers(1, 300_000), min_size=1, max_size=40), st.integers(1, 512))
@settings(max_examples=200, deadline=None)
def test_what_stays_whole_costs_at_most_its_share_and_the_threshold_is_the_largest_such(
    sizes: list[int], degree: int
) -> None:
    threshold = auto_threshold(sizes, degree)
    cost = lambda limit: sum(n for n in sizes if n <= limit)  # noqa: E731
    allowed = WHOLE_SHARE * sum(sizes) / degree
    assert cost(threshold) <= allowed and threshold <= WHOLE_LIMIT
    larger = [n for n in sizes if n > threshold]
    if larger:
        assert min(larger) > WHOLE_LIMIT or cost(min(larger)) > allowed


def scan_model(stacked: bool) -> tuple[oracle.Model, tuple[str, ...]]:
    m = oracle.model("scan" if stacked else "gpt")
    return m, zj.find_scanned(m.loss, m.params, m.batches[0])


def test_stacks_are_found_from_the_traced_loss() -> None:
    m, found = scan_model(True)
    assert set(found) == {f"blocks/{name}" for name in m.params["blocks"]}
    assert scan_model(False)[1] == ()
    cast = lambda p, b: m.loss(jax.tree.map(lambda x: -(-x).astype(jnp.bfloat16), p), b)  # noqa: E731
    assert set(zj.find_scanned(jax.jit(cast), m.params, m.batches[0])) == set(found)
    remat = oracle.model("scan-remat")
    assert set(zj.find_scanned(remat.loss, remat.params, remat.batches[0])) == set(found)


def test_a_stack_sharded_on_the_scanned_dim_is_warned_of_and_a_plan_that_knows_is_not() -> None:
    m, found = scan_model(True)
    tx, mesh = optax.sgd(0.1), zj.make_mesh(node=1, local=2, devices=jax.devices()[:2])
    zero = zj.Zero(stage=3, stage3_param_persistence_threshold=0)
    knowing = zj.make_plan(m.params, tx, mesh, zero, scanned=found)
    for leaf in knowing.leaves:
        if leaf.path in found:
            assert leaf.placement.sharded and all(dim > 0 for dim, _ in leaf.placement.dims), leaf.path
    batch = jax.tree.map(lambda x: x[:8], m.batches[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.eval_shape(zj.value_and_grad(m.loss, knowing), knowing.params_struct(), batch)
    dims = {leaf.path: leaf for leaf in knowing.leaves}
    careless = [
        place(dims[path].shape, {"local": 2}, threshold=0, scanned=range(1, len(dims[path].shape)))
        for path in found
    ]
    assert all(p.dims == ((0, ("local",)),) for p in careless), "2 layers over 2 devices"
    leaves = tuple(
        dataclasses.replace(leaf, placement=careless[found.index(leaf.path)]) if leaf.path in found else leaf
        for leaf in knowing.leaves
    )
    plan = dataclasses.replace(knowing, leaves=leaves)
    with pytest.warns(UserWarning, match="runs over dim 0 of blocks/bias.*which is sharded.*find_scanned"):
        jax.eval_shape(zj.value_and_grad(m.loss, plan), zj.shard_params(plan, m.params), batch)


def test_an_optimizer_with_a_typed_key_in_its_state_is_refused_by_the_name_of_the_leaf() -> None:
    tx = optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(0.1))
    with pytest.raises(zj.PlanError, match=r"typed random key.*rng_key.*key_data"):
        zj.make_plan({"w": jnp.ones((8, 8))}, tx, zj.make_mesh(), zj.Zero(stage=2))
