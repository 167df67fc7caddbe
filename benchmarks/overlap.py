"""How much of a step's communication runs beside compute, and the memory that this takes, on XLA:GPU's program.

    python benchmarks/overlap.py            all rows, kept in results/overlap.json as they are made

16 blocks of width 4096, bf16, profile "overlap": 2k tokens per GPU on 8 x H100, and 8k tokens per GPU on 8 nodes of 8
at 400 Gb/s per GPU. Hidden fraction and step time are predictions of zeroj's timeline; temporary bytes are XLA's.
Beside zeroj: FSDP by hand (by_hand.py). "Stage 3, kept" is stage 3 with reshard_after_forward off: stage 2's bytes,
gathered on use. What stage 2 gathers, the new params, exists only at the end of the step, where nothing hides it.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

import progress
from by_hand import FORMS, compile_by_hand, units
from clusters import Shape, compile_zeroj
from figure import Figure

import zeroj as zj
from zeroj.aot.timeline import Wait

NVLINK = Shape(layers=16, width=4096, vocab=0, sequence=256, micro=8, head=128)
NETWORK = dataclasses.replace(NVLINK, micro=32)
HIDDEN = {1: 0.95, 8: 0.90}
TEMPORARY = {True: 4.0e9, False: 2.9e9}
"""Bytes at most at stage 3 on 8 GPUs, by whether the blocks are scanned."""
COLUMNS = {
    "hidden": ".3f",
    "target": ".2f",
    "step_ms": ".1f",
    "kernels_ms": ".1f",
    "temporary_gb": ".2f",
    "at_most_gb": ".1f",
    "total_gb": ".2f",
    "units": ".3f",
    "met": "",
}


#: What the rows call zeroj's programs -> the fields of :class:`zeroj.Zero`.
FORMS_OF_ZERO: dict[str, dict[str, Any]] = {
    "stage 3": {"stage": 3},
    "stage 2": {"stage": 2},
    "stage 3, kept": {"stage": 3, "reshard_after_forward": False},
}


def row(report: zj.aot.Report, shape: Shape, nodes: int, form: str = "") -> progress.Row:
    """The prediction and the bytes of one program beside the targets; ``form`` is left out for those by hand."""
    ours = bool(form)
    temporary = report.device.temporary / 1e9
    limit = TEMPORARY[shape.scan] / 1e9 if form == "stage 3" and nodes == 1 else None
    target = HIDDEN[nodes] if ours else None
    good = ours and report.hidden_fraction >= HIDDEN[nodes] and (limit is None or temporary <= limit)
    return {
        "hidden": report.hidden_fraction,
        "target": target,
        "step_ms": 1e3 * report.step_seconds,
        "kernels_ms": 1e3 * report.timeline.compute_seconds,
        "temporary_gb": temporary,
        "at_most_gb": limit,
        "total_gb": report.device.total / 1e9,
        "units": units(report, shape),
        "met": ("yes" if good else "NO") if ours else "-",
        "longest_waits": [_wait(w) for w in report.timeline.waits[:3]],
    }


def _wait(wait: Wait) -> str:
    return f"{1e3 * wait.seconds:.2f} ms {wait.name} ({wait.source.rsplit('/', 1)[-1]})"


def cases() -> dict[str, Callable[[], progress.Row]]:
    """Name of a row -> what makes it."""
    found: dict[str, Callable[[], progress.Row]] = {}
    for nodes, base, where in ((1, NVLINK, "8 x H100, 2k tokens"), (8, NETWORK, "8 nodes x 8, 8k tokens")):
        for scan in (True, False):
            shape = dataclasses.replace(base, scan=scan)
            what = f"{where}, {'scanned' if scan else 'unrolled'}"
            for name, zero in FORMS_OF_ZERO.items():
                found[f"{what}, {name}"] = lambda s=shape, n=nodes, f=name, z=zero: row(
                    compile_zeroj(s, nodes=n, profile="overlap", **z).report, s, n, f
                )
            for form in FORMS:
                found[f"{what}, stage 3 by hand: {form}"] = lambda s=shape, n=nodes, f=form: row(
                    compile_by_hand(s, f, n, profile="overlap"), s, n
                )
    return found


def figures() -> list[Figure]:
    """zeroj's rows as figures for run.py."""
    found = []
    for r in progress.collect("overlap", cases()):
        if r["target"] is not None:
            name, note = f"communication hidden, {r['case']}", "predicted by the timeline"
            found.append(
                Figure(name, r["hidden"], "", target=r["target"], better="higher", of="value", note=note)
            )
        if r["at_most_gb"] is not None:
            name = f"temporary bytes, {r['case']}"
            found.append(Figure(name, r["temporary_gb"], "GB", target=r["at_most_gb"], of="value"))
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--again", action="store_true", help="make rows anew that are there")
    progress.show(
        progress.collect("overlap", cases(), parser.parse_args().again),
        COLUMNS,
        "Communication hidden (predicted) and temporary bytes (XLA:GPU), 16 blocks of width 4096",
    )
