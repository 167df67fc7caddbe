"""What the papers promise of a step, read from XLA:GPU's own program for 8 H100s: collectives and bytes.

The benchmarks' tables hold the large cases; these are the same claims at a size that compiles in seconds.
"""

from __future__ import annotations

import functools
import math
import pathlib
import sys

import jax
import optax
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "benchmarks"))

import clusters

import zeroj as zj
from zeroj.step.state import birth

pytestmark = pytest.mark.slow  # four compiles of some seconds

SMALL = clusters.Shape(layers=4, width=256, vocab=0, sequence=128)
MATRICES, NORMS = 4, 2
#: The part of a layer in the last bucket of gathers: its "down", 4 of 12 width^2.
LAST = 1 / 3
FORMULA = {1: 2.0, 2: 2.0, 3: 3.0}


@functools.cache
def compiled(stage: int, scan: bool, vocab: int = 0) -> clusters.Compiled:
    shape = clusters.Shape(**{**vars(SMALL), "scan": scan, "vocab": vocab})
    return clusters.compile_zeroj(shape, stage, nodes=1)


CASES = [(1, False), (2, True), (3, True), (3, False)]


@pytest.mark.parametrize(("stage", "scan"), CASES)
def test_bytes_on_the_wire_are_the_formula(stage: int, scan: bool) -> None:
    """But for the last bucket, unrolled: it is at hand where the forward pass turns into the backward pass."""
    case = compiled(stage, scan)
    spared = LAST / SMALL.layers if stage == 3 and not scan else 0
    assert case.units() == pytest.approx(FORMULA[stage] - spared, rel=5e-3)
    assert case.units("all-gather") == pytest.approx(FORMULA[stage] - 1 - spared, rel=5e-3)
    assert case.units("reduce-scatter") == pytest.approx(1, rel=5e-3)


@pytest.mark.parametrize(("stage", "scan"), CASES)
def test_what_moves_is_bf16_among_all_devices_of_the_node(stage: int, scan: bool) -> None:
    rows = compiled(stage, scan).report.collectives
    large = [row for row in rows if row.payload > 1024]
    assert large and {row.dtype for row in large} == {"bf16"}
    assert {(row.group_size, row.nodes, row.reach) for row in large} == {(8, 1, "intra")}
    assert {row.op for row in rows} == {"all-gather", "reduce-scatter", "all-reduce"}


@pytest.mark.parametrize(("stage", "scan"), CASES)
def test_no_gradient_that_is_sharded_is_all_reduced(stage: int, scan: bool) -> None:
    """Only the norms' scales, which stay whole, and scalars are all-reduced."""
    case = compiled(stage, scan)
    whole = sum(math.prod(leaf.shape) for leaf in case.plan.leaves if not leaf.placement.sharded)
    reduced = sum(r.payload * r.times for r in case.report.collectives if r.op == "all-reduce")
    assert whole == SMALL.layers * NORMS * SMALL.width
    assert reduced < 2 * whole + 1024  # scalars; the smallest sharded gradient has 131,072 bytes


@pytest.mark.parametrize("scan", [True, False])
def test_stage_3_gathers_each_matrix_once_forward_and_once_backward(scan: bool) -> None:
    """By payload, as XLA may combine collectives: one layer's matrices, once a pass; the last bucket once."""
    rows = compiled(3, scan).report.collectives
    layer = 2 * 12 * SMALL.width**2
    gathered = sum(r.payload * r.times for r in rows if r.op == "all-gather")
    scattered = sum(r.payload * r.times for r in rows if r.op == "reduce-scatter")
    assert gathered == 2 * SMALL.layers * layer - (0 if scan else round(LAST * layer))
    assert scattered == SMALL.layers * layer
    assert sum(r.times for r in rows if r.op == "all-gather") <= 2 * SMALL.layers * MATRICES


@pytest.mark.parametrize(("stage", "scan"), CASES)
def test_the_state_in_the_program_is_the_plan_s_to_the_byte(stage: int, scan: bool) -> None:
    """The arguments are the plan's state, the batch and 32 bytes of counters, loss scale and key."""
    case = compiled(stage, scan)
    assert case.report.device.arguments == case.plan.memory().resident + case.batch_bytes + 32


def test_the_new_state_takes_the_place_of_the_old_one() -> None:
    device = compiled(3, True).report.device
    assert device.aliased > 0.999 * device.outputs - 1024


def test_a_leaf_of_half_a_gigabyte_is_born_in_shards() -> None:
    """Output and temporaries of the compiled init are at most three shards of 64 MiB; nothing is ever whole."""
    target = zj.aot.Target("h100", nodes=1, gpus_per_node=8)

    def init() -> dict[str, jax.Array]:
        return {"w": jax.random.normal(jax.random.key(0), (16384, 8192))}

    plan = zj.make_plan(jax.eval_shape(init), optax.adamw(1e-3), target.mesh(), zj.Zero(stage=3))
    needs = target.compile(birth(plan, init)).device
    assert needs.outputs == 64 * 2**20
    assert needs.outputs + needs.temporary <= 3 * 64 * 2**20
