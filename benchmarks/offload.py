"""Host offload on XLA:GPU's own program: bytes on the device and the host, crossings, and the largest models.

Each case is compiled for H100s that are not here. ``python benchmarks/run.py offload`` takes some minutes.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import clusters
from figure import Figure

import zeroj as zj

CPU = {"device": "cpu"}
OPTIMIZER: dict[str, Any] = {"offload_optimizer": CPU}
BOTH: dict[str, Any] = {**OPTIMIZER, "offload_param": CPU}
GIB = 2**30
#: The GPU's memory, less what CUDA and fragments take.
ROOM = 80e9 * 0.95


@dataclasses.dataclass(frozen=True)
class Large:
    """A model trained with everything offloaded: sequence 2048, one sequence a GPU, bf16, AdamW.

    Args:
        name: what to call it.
        shape: the model.
        gpus: GPUs of the one node.
        piece: elements of a device's shard in one piece of the update.
    """

    name: str
    shape: clusters.Shape
    gpus: int
    piece: int


LARGEST = (
    Large("13B on 1 GPU", clusters.SIZES["13b"], 1, 1_000_000_000),
    Large("40B on 1 GPU", clusters.Shape(64, 7168, sequence=2048, head=128), 1, 1_000_000_000),
    Large("205B on 8 GPUs", clusters.Shape(96, 13312, sequence=2048, head=128), 8, 1_000_000_000),
)
"""Beside them: 13B on a V100 (ZeRO-Offload, arXiv 2101.06840) and 40B on a V100 of 32 GB (ZeRO-3 Offload, 2021)."""


def figures() -> list[Figure]:
    """The step of 1.3B on 8 GPUs in three ways, then the largest models."""
    shape = clusters.SIZES["1.3b"]
    plain = clusters.compile_zeroj(shape, 3, nodes=1)
    state = clusters.compile_zeroj(shape, 3, nodes=1, **OPTIMIZER)
    both = clusters.compile_zeroj(shape, 3, nodes=1, **BOTH)
    found = [
        *_step("optimizer offloaded", state, plain),
        *_step("optimizer and params offloaded", both, plain),
    ]
    for large in LARGEST:
        case = clusters.compile_zeroj(
            large.shape, 3, nodes=1, gpus=large.gpus, sub_group_size=large.piece, **BOTH
        )
        found += _large(large, case)
    return found


def _step(name: str, case: clusters.Compiled, plain: clusters.Compiled) -> list[Figure]:
    report, without = case.report, plain.report
    held = sum(case.plan.memory().host.get(part, 0) for part in ("master", "opt_state")) / 8
    params = case.plan.memory().host.get("params", 0) / 8
    waits = case.plan.memory().host.get("grads", 0) / 8
    read = held + 2 * (params + waits)  # params by both passes, gradients by the norm and the update
    state = report.device.arguments / GIB
    before = without.device.arguments / GIB
    return [
        Figure(f"1.3B, 8 GPUs, {name}: state on the device", state, "GiB", before, note="beside no offload"),
        Figure(
            f"1.3B, 8 GPUs, {name}: temporaries",
            report.device.temporary / GIB,
            "GiB",
            without.device.temporary / GIB,
            note="beside no offload",
        ),
        Figure(f"1.3B, 8 GPUs, {name}: to the device", _moved(case, "h2d") / GIB, "GiB", read / GIB, 1.001),
        Figure(
            f"1.3B, 8 GPUs, {name}: to the host",
            _moved(case, "d2h") / GIB,
            "GiB",
            (held + params + waits) / GIB,
            1.001,
        ),
        Figure(
            f"1.3B, 8 GPUs, {name}: step",
            report.step_seconds * 1e3,
            "ms",
            without.step_seconds * 1e3,
            note="predicted; beside no offload",
        ),
    ]


def _moved(case: clusters.Compiled, direction: str) -> int:
    return sum(c.nbytes * c.times for c in case.report.copies if c.direction == direction)


def _large(large: Large, case: clusters.Compiled) -> list[Figure]:
    report: zj.aot.Report = case.report
    host = (report.host.arguments + report.host.temporary) * large.gpus / 1e9
    count = f"{large.name} ({large.shape.count / 1e9:.1f}e9 params)"
    return [
        Figure(f"{count}: device", report.device.total / 1e9, "GB", None, ROOM / 1e9, of="value"),
        Figure(f"{count}: host", host, "GB", note="of the whole node"),
        Figure(f"{count}: step", report.step_seconds, "s", note="predicted, 2048 tokens a GPU"),
    ]
