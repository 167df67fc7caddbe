"""Host offload on XLA:GPU's own program: bytes on the device and the host, crossings, and the largest models.

Each case is compiled for H100s that are not here. ``python benchmarks/run.py offload`` takes some minutes.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import clusters
from figure import Figure

import zeroj as zj
from zeroj.optimizer.pieces import piece_bytes
from zeroj.optimizer.stream import DEFAULT_BUFFERS

CPU = {"device": "cpu"}
OPTIMIZER: dict[str, Any] = {"offload_optimizer": CPU}
BOTH: dict[str, Any] = {**OPTIMIZER, "offload_param": CPU}
GIB = 2**30
#: How steps are clipped: what is not waits for nothing, and what is can wait for the next step.
FORMS: dict[str, dict[str, bool]] = {
    "clipped": {},
    "clipped, rotated": {"rotate": True},
    "not clipped or checked": {"clipped": False},
}
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
    """The step of 1.3B and 13B on 8 GPUs in three ways, offloaded activations, then the largest models."""
    found: list[Figure] = []
    for name in ("1.3b", "13b"):
        shape = clusters.SIZES[name]
        plain = clusters.compile_zeroj(shape, 3, nodes=1)
        for what, sections in (("optimizer offloaded", OPTIMIZER), ("optimizer and params offloaded", BOTH)):
            case = clusters.compile_zeroj(shape, 3, nodes=1, **sections)
            found += _step(f"{name.upper()}, 8 GPUs, {what}", case, plain)
    found += _hidden()
    found += _activations()
    for large in LARGEST:
        case = clusters.compile_zeroj(
            large.shape, 3, nodes=1, gpus=large.gpus, sub_group_size=large.piece, **BOTH
        )
        found += _large(large, case)
    return found


def _step(name: str, case: clusters.Compiled, plain: clusters.Compiled) -> list[Figure]:
    report, memory, without = case.report, case.plan.memory(), plain.report
    held = sum(memory.host.get(part, 0) for part in ("master", "opt_state")) / 8
    params, waits = memory.host.get("params", 0) / 8, memory.host.get("grads", 0) / 8
    read = held + 2 * params + waits  # params by both passes
    written = held + params + waits
    line = report.timeline
    on_device = "params" not in memory.host
    allowed = 1.02 * without.device.temporary + DEFAULT_BUFFERS * piece_bytes(case.plan)
    late = sum(not copy.asynchronous for copy in report.copies)
    shards = 2 * case.shape.count / 8 / GIB
    return [
        Figure(
            f"{name}: state on the device",
            report.device.arguments / GIB,
            "GiB",
            shards if on_device else None,
            1.01 if on_device else 0.01,
            of="ratio" if on_device else "value",
            note="beside the params' shards in bf16; small leaves keep their state here" if on_device else "",
        ),
        Figure(
            f"{name}: temporaries",
            report.device.temporary / GIB,
            "GiB",
            allowed / GIB,
            1.0,
            note="beside 1.02 x no offload and 3 pieces of the update",
        ),
        Figure(f"{name}: to the device", _moved(case, "h2d") / GIB, "GiB", read / GIB, 1.001),
        Figure(f"{name}: to the host", _moved(case, "d2h") / GIB, "GiB", written / GIB, 1.001),
        Figure(f"{name}: copies that are not asynchronous", late, "", None, 0, of="value"),
        Figure(
            f"{name}: copies hidden",
            1 - line.copy_exposed_seconds / line.copy_seconds,
            "",
            note="predicted, 2048 tokens a GPU; what bounds it: docs/choices.md",
        ),
        Figure(
            f"{name}: step",
            report.step_seconds * 1e3,
            "ms",
            without.step_seconds * 1e3,
            note="predicted; beside no offload",
        ),
    ]


def _hidden() -> list[Figure]:
    """What share of the copies hides, under the flags that steps on GPUs run with, at 16,384 tokens a GPU."""
    found = []
    for name in ("1.3b", "13b"):
        shape = dataclasses.replace(clusters.SIZES[name], micro=8)
        for what, sections in (("optimizer offloaded", OPTIMIZER), ("optimizer and params offloaded", BOTH)):
            for how, options in FORMS.items():
                case = clusters.compile_zeroj(shape, 3, 1, profile="overlap", **options, **sections)
                line = case.report.timeline
                wait, busy = line.copy_exposed_seconds, line.copy_seconds
                found.append(
                    Figure(
                        f"{name.upper()}, 8 GPUs, {what}, {how}: hidden",
                        1 - wait / busy,
                        "",
                        target=None if how == "clipped" else 0.9,
                        better="higher",
                        of="value",
                        note=f"predicted; {wait * 1e3:.0f} of {busy * 1e3:.0f} ms wait; "
                        f"step {line.seconds * 1e3:.0f} ms",
                    )
                )
    return found


def _activations() -> list[Figure]:
    """What cpu_checkpointing does to 1.3B with four sequences a GPU."""
    shape = dataclasses.replace(clusters.SIZES["1.3b"], micro=4)
    plain, away = (
        clusters.compile_zeroj(shape, 3, nodes=1, offload_activations=flag).report for flag in (False, True)
    )
    inputs = shape.layers * shape.micro * shape.sequence * shape.width * 2
    name = "1.3B, 8 GPUs, activations offloaded"
    return [
        Figure(
            f"{name}: temporaries saved",
            (plain.device.temporary - away.device.temporary) / GIB,
            "GiB",
            inputs / GIB,
            0.99,
            "higher",
            note="beside the layers' inputs",
        ),
        Figure(f"{name}: on the host", away.host.temporary / GIB, "GiB", inputs / GIB, 1.0),
        Figure(
            f"{name}: step",
            away.step_seconds * 1e3,
            "ms",
            plain.step_seconds * 1e3,
            note="predicted; beside none",
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
