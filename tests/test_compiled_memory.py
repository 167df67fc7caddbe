"""Memory and communication under accumulation, read from XLA:GPU's own program for H100s.

A higher stage never takes more, accumulating never takes less than not to, and where the gradient is accumulated
whole it is reduced once a step.
"""

from __future__ import annotations

import functools
import pathlib
import sys
from typing import Any

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "benchmarks"))

import clusters

pytestmark = pytest.mark.slow  # compiles of some seconds

#: 64 matrices in 16 layers.
SHAPE = clusters.Shape(layers=16, width=512, vocab=0, sequence=128)
#: What every device holds whole: the norms' scales.
WHOLE = SHAPE.layers * 2 * SHAPE.width
MICRO = 4


@functools.cache
def compiled(
    stage: int, accumulation: int = MICRO, nodes: int = 1, gpus: int = 8, hpz: int = 1, scan: bool = True
) -> clusters.Compiled:
    shape = clusters.Shape(**{**vars(SHAPE), "scan": scan})
    zero: dict[str, Any] = {"zero_hpz_partition_size": hpz} if hpz > 1 else {}
    return clusters.compile_zeroj(shape, stage, nodes=nodes, gpus=gpus, accumulation=accumulation, **zero)


def peak(case: clusters.Compiled) -> int:
    """Bytes of a device: the state and the batch, and what the step needs beside them."""
    return case.report.device.arguments + case.report.device.temporary


def test_a_higher_stage_never_needs_more() -> None:
    peaks = [peak(compiled(stage)) for stage in (0, 1, 2, 3)]
    assert peaks == sorted(peaks, reverse=True), peaks
    temporary = [compiled(stage).report.device.temporary for stage in (0, 1, 2, 3)]
    assert temporary[3] <= temporary[2] <= temporary[1], temporary


def test_the_accumulator_is_split_from_stage_2_on() -> None:
    """fp32: 4 bytes a param at stage 1, an eighth of them at stage 2."""
    whole, split = (compiled(stage).report.device.temporary for stage in (1, 2))
    assert whole >= 4 * SHAPE.count
    spared = 4 * (SHAPE.count - WHOLE) * 7 / 8
    assert whole - split >= 0.9 * spared, (whole, split, spared)


@pytest.mark.parametrize(("stage", "times"), [(0, 1), (1, 1), (2, MICRO), (3, MICRO)])
def test_how_often_gradients_are_reduced(stage: int, times: int) -> None:
    """In bf16: once a step where they are accumulated whole, else once a micro-batch. Stage 0 gathers them again."""
    rows = compiled(stage).report.collectives
    large = [c for c in rows if c.op in ("reduce-scatter", "all-reduce") and c.payload * c.times > 2**20]
    assert {(c.op, c.dtype) for c in large} == {("reduce-scatter", "bf16")}
    sent = sum(c.payload * c.times for c in large)
    assert sent == pytest.approx(times * 2 * SHAPE.count, rel=0.01), large


@pytest.mark.parametrize("scan", [True, pytest.param(False, marks=pytest.mark.full)])
def test_near_shards_take_no_more_without_accumulation_than_with_it(scan: bool) -> None:
    """Params over a node of four, moments over both nodes: equal micro-batches, and the same compiler flags."""
    one, two, four = (compiled(3, n, nodes=2, gpus=4, hpz=4, scan=scan) for n in (1, 2, 4))
    assert one.plan.memory().device["secondary"] > 0
    assert peak(one) <= 1.01 * peak(two), (peak(one), peak(two))
    assert peak(four) <= 1.1 * peak(two), (peak(four), peak(two))
