"""Bytes on the wire of a step, read from XLA:GPU's program, in units of params x compute dtype x (N - 1) / N.

    python benchmarks/communication.py            all rows, kept in results/communication.json as they are made
    python benchmarks/communication.py --again    make them anew

The papers' formulas: 2 for stages 1 and 2, 3 for stage 3. Beside zeroj: FSDP by hand (by_hand.py). The model is 4
blocks of width 256, bf16, compiled for N H100s; "tied" adds an embedding that is the head too, whose two gradients
may be reduced apart.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
from collections.abc import Callable

import progress
from by_hand import FORMS, compile_by_hand, units
from clusters import Shape, compile_zeroj
from figure import Figure

import zeroj as zj

WANTED = {1: 2.0, 2: 2.0, 3: 3.0}
WITHIN = 1.005
NODES = (1, 8, 64)
SMALL = Shape(layers=4, width=1024, vocab=0, sequence=256)
COLUMNS = {
    "units": ".4f",
    "wanted": ".2f",
    "all_gather": ".3f",
    "reduce_scatter": ".3f",
    "all_reduce": ".4f",
    "other": ".4f",
    "collectives": "d",
    "dtypes": "",
    "met": "",
}


def row(report: zj.aot.Report, shape: Shape, wanted: float | None) -> progress.Row:
    """What a program sends, by op, in units; how many collectives a step runs; whether the target is met."""
    sent = units(report, shape)
    by_op = {op: units(report, shape, op) for op in ("all-gather", "reduce-scatter", "all-reduce")}
    counts: dict[str, int] = collections.Counter()
    for each in report.collectives:
        counts[each.dtype] += each.times
    return {
        "units": sent,
        "wanted": wanted,
        **{op.replace("-", "_"): value for op, value in by_op.items()},
        "other": sent - sum(by_op.values()),
        "collectives": sum(c.times for c in report.collectives),
        "dtypes": ", ".join(f"{n} {dtype}" for dtype, n in sorted(counts.items())),
        "met": "-" if wanted is None else "yes" if sent <= wanted * WITHIN else "NO",
    }


def cases() -> dict[str, Callable[[], progress.Row]]:
    """Name of a row -> what makes it; the cheap ones first."""
    found: dict[str, Callable[[], progress.Row]] = {}
    for nodes in NODES:
        for scan in (True, False):
            for remat in (True, False):
                shape = dataclasses.replace(SMALL, scan=scan, remat=remat)
                what = f"N={8 * nodes}, {'scanned' if scan else 'unrolled'}, {'remat' if remat else 'kept'}"
                for stage in (1, 2, 3):
                    found[f"{what}, stage {stage}"] = lambda s=shape, n=nodes, g=stage: row(
                        compile_zeroj(s, g, n).report, s, WANTED[g]
                    )
                if nodes == 1:
                    for form in FORMS:
                        found[f"{what}, stage 3 by hand: {form}"] = lambda s=shape, f=form: row(
                            compile_by_hand(s, f, 1), s, None
                        )
    for stage in (1, 2, 3):
        shape = dataclasses.replace(SMALL, vocab=8192)
        extra = shape.vocab * shape.width / shape.count
        found[f"N=8, scanned, remat, tied, stage {stage}"] = lambda s=shape, g=stage, e=extra: row(
            compile_zeroj(s, g, 1).report, s, WANTED[g] + e
        )
    return found


def figures() -> list[Figure]:
    """zeroj's rows as figures for run.py."""
    rows = progress.collect("communication", cases())
    return [
        Figure(f"bytes on the wire, {r['case']}", r["units"], "units", r["wanted"], WITHIN, note=r["dtypes"])
        for r in rows
        if r["wanted"] is not None
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--again", action="store_true", help="make rows anew that are there")
    progress.show(
        progress.collect("communication", cases(), parser.parse_args().again),
        COLUMNS,
        "Bytes on the wire per device and step, in units of params x 2 bytes x (N - 1) / N",
    )
