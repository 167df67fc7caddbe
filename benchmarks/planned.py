"""The planner's predictions beside XLA:GPU's buffer assignment, for GPTs of 125M, 1.3B and 13B params.

    python benchmarks/planned.py            all rows, kept in results/planned.json as they are made

State: ``plan.memory()`` and the closed form from sizes alone, against the program's arguments without the batch, within
3 %. Whole step (state, activations, temporaries): the closed form against arguments + outputs - aliased + temporary,
within 10 %. bf16, adamw, rematerialized blocks, attention by XLA (it holds the score matrix), on N H100s.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import progress
from clusters import SIZES, compile_zeroj
from figure import Figure

from zeroj.aot.choices import Batch, Choice, Machine
from zeroj.aot.closed_form import estimate
from zeroj.aot.hardware import find
from zeroj.aot.sizes import Sizes

STATE, STEP = 0.03, 0.10
LIMITS = {"plan_ratio": STATE, "closed_ratio": STATE, "step_ratio": STEP}
COLUMNS = {
    "state_gb": ".4f",
    "plan_ratio": ".5f",
    "closed_ratio": ".5f",
    "step_gb": ".3f",
    "closed_step_gb": ".3f",
    "step_ratio": ".3f",
    "met": "",
}


def compiled_row(size: str, nodes: int, stage: int) -> progress.Row:
    """Bytes of one program as XLA assigned its buffers, and what ``plan.memory()`` says of its state."""
    case = compile_zeroj(SIZES[size], stage, nodes)
    device = case.report.device
    return {
        "arguments": device.arguments,
        "total": device.total,
        "batch": case.batch_bytes,
        "planned": case.plan.memory().resident,
        "params": case.shape.count,
    }


def judged(row: progress.Row) -> progress.Row:
    """A compiled row with the closed form beside it, computed now, and whether the targets are met."""
    size, n, stage = (part.strip() for part in row["case"].split(","))
    shape = SIZES[size]
    nodes, stage_number = int(n.removeprefix("N=")) // 8, int(stage.removeprefix("stage "))
    sizes = Sizes(row["params"], shape.layers, shape.width, shape.vocab, heads=shape.width // shape.head)
    batch = Batch(shape.micro, shape.sequence, fused_attention=False)
    found = estimate(Choice(stage_number), sizes, batch, Machine(find("h100"), nodes, 8, 1e12, 0))
    state = row["arguments"] - row["batch"]
    closed = sum(found.parts[part] for part in ("params", "master", "moments"))
    ratios = {
        "plan_ratio": row["planned"] / state,
        "closed_ratio": closed / state,
        "step_ratio": found.device / row["total"],
    }
    good = all(abs(ratios[name] - 1) <= limit for name, limit in LIMITS.items())
    gigabytes = {"state_gb": state / 1e9, "step_gb": row["total"] / 1e9, "closed_step_gb": found.device / 1e9}
    return row | gigabytes | ratios | {"met": "yes" if good else "NO"}


def cases() -> dict[str, Callable[[], progress.Row]]:
    """Name of a row -> what makes it; the small ones first."""
    return {
        f"{size}, N={8 * nodes}, stage {stage}": lambda s=size, n=nodes, g=stage: compiled_row(s, n, g)
        for nodes in (1, 8)
        for size in SIZES
        for stage in range(4)
    }


def rows(again: bool = False) -> list[progress.Row]:
    """All rows, judged."""
    return [judged(row) for row in progress.collect("planned", cases(), again)]


def figures() -> list[Figure]:
    """The rows as figures for run.py: how far each prediction is off, as a part of what was compiled."""
    found = []
    for row in rows():
        for name, limit in LIMITS.items():
            what = f"{name.removesuffix('_ratio')} off from XLA:GPU, {row['case']}"
            found.append(Figure(what, abs(row[name] - 1), "", target=limit, of="value"))
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--again", action="store_true", help="make rows anew that are there")
    progress.show(
        rows(parser.parse_args().again), COLUMNS, "Planned bytes per GPU against XLA:GPU's buffer assignment"
    )
