"""What offload promises, read from XLA:GPU's own program for 8 H100s: bytes, crossings, directions.

benchmarks/offload.py holds the large cases; these are the same claims at a size that compiles in seconds.
"""

from __future__ import annotations

import functools
import pathlib
import sys
from collections import defaultdict
from typing import Any

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "benchmarks"))

import clusters

pytestmark = pytest.mark.slow

CPU = {"device": "cpu"}
SMALL = clusters.Shape(layers=6, width=512, vocab=0, sequence=128)
#: Elements of a device's shard in a piece: the four stacks are cut into 2 or 3 pieces each.
GROUP = 4 * 512 * 512 * 2 // 8


@functools.cache
def compiled(*offloaded: str, stage: int = 3) -> clusters.Compiled:
    sections: dict[str, Any] = {name: CPU for name in offloaded}
    return clusters.compile_zeroj(SMALL, stage, nodes=1, sub_group_size=GROUP, **sections)


def crossings(case: clusters.Compiled) -> dict[str, int]:
    found: dict[str, int] = defaultdict(int)
    for copy in case.report.copies:
        found[copy.direction] += copy.nbytes * copy.times
    return found


def on_host(case: clusters.Compiled, *parts: str) -> int:
    """Bytes of these parts in host memory, per device."""
    return sum(case.plan.memory().host.get(part, 0) for part in parts) // 8


@pytest.mark.parametrize("stage", [1, 3])
def test_with_the_optimizer_offloaded_the_device_holds_the_params(stage: int) -> None:
    case = compiled("offload_optimizer", stage=stage)
    memory = case.plan.memory()
    assert case.report.device.arguments == memory.resident + case.batch_bytes + 32
    whole = 2 * SMALL.count  # bytes of bf16
    norms = 2 * SMALL.layers * SMALL.width
    assert memory.resident <= (whole / 8 if stage == 3 else whole) + 14 * norms + 64
    assert case.report.host.arguments == on_host(case, "master", "opt_state")


def test_with_params_offloaded_too_the_device_holds_small_leaves_alone() -> None:
    case = compiled("offload_optimizer", "offload_param")
    norms = 2 * SMALL.layers * SMALL.width
    assert case.plan.memory().resident <= 14 * norms + 64
    assert case.report.device.arguments == case.plan.memory().resident + case.batch_bytes + 32


@pytest.mark.parametrize("offloaded", [("offload_optimizer",), ("offload_optimizer", "offload_param")])
def test_every_leaf_crosses_once_each_way_and_params_once_for_each_gather(offloaded: tuple[str, ...]) -> None:
    case = compiled(*offloaded)
    moved = crossings(case)
    state, params = on_host(case, "master", "opt_state"), on_host(case, "params")
    waiting = on_host(case, "grads")
    # params for the forward and for the backward pass, gradients for the norm and for the update
    assert moved["h2d"] == state + 2 * params + 2 * waiting
    assert moved["d2h"] == state + params + waiting


@pytest.mark.parametrize("offloaded", [("offload_optimizer",), ("offload_optimizer", "offload_param")])
def test_host_memory_is_updated_in_place_by_asynchronous_copies(offloaded: tuple[str, ...]) -> None:
    case = compiled(*offloaded)
    report = case.report
    assert report.host.temporary == on_host(case, "grads")  # what waits for the update, and no copy
    assert report.host.aliased == report.host.outputs == report.host.arguments
    assert all(copy.asynchronous for copy in report.copies)
    assert {copy.direction for copy in report.copies} == {"h2d", "d2h"}


def test_the_update_needs_no_more_than_the_pieces_in_flight() -> None:
    """Temporaries are at most 2 % above the step without offload, plus three pieces of master and moments."""
    with_offload, without = compiled("offload_optimizer").report.device, compiled().report.device
    assert with_offload.temporary <= 1.02 * without.temporary + 3 * 12 * GROUP
