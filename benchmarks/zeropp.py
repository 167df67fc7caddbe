"""ZeRO++ beside plain stage 3 on 8 nodes of 8 H100s: bytes across nodes, and the step that the timeline predicts.

    python benchmarks/zeropp.py            all rows, kept in results/zeropp.json as they are made
    python benchmarks/zeropp.py --again    make them anew

GPT-3's shapes (and one of 70B), scanned and rematerialised, bf16, 2048 tokens per GPU, compiled by XLA:GPU with
profile "overlap". The same program is then simulated on networks of 100 and 400 Gb/s, shared by the 8 GPUs of a node or
for each of them. Bytes are the program's; times are predictions of zeroj's timeline, not measurements. The paper
(arXiv 2306.10209): 3 -> 0.75 in units of params x 2 bytes across nodes; measured on 384 V100s up to 2.16 x at low
bandwidth (100 Gb/s a node), and 1.24 to 1.36 x at 400 Gb/s.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import progress
from clusters import SIZES, Shape, compile_zeroj
from figure import Figure

import zeroj as zj
from zeroj.aot.timeline import simulate

NODES, GPUS = 8, 8
MODELS = {
    "1.3b": SIZES["1.3b"],
    "13b": SIZES["13b"],
    "70b": Shape(80, 8192, sequence=2048, micro=1, head=128),
}
HPZ = {"zero_hpz_partition_size": GPUS}
QWZ, QGZ = {"zero_quantized_weights": True}, {"zero_quantized_gradients": True}
FORMS: dict[str, dict[str, object]] = {
    "stage 3": {},
    "hpZ": HPZ,
    "qwZ": QWZ,
    "qgZ": QGZ,
    "all three": {**HPZ, **QWZ, **QGZ},
}
NETWORKS = {"100/node": (100, GPUS), "400/node": (400, GPUS), "100/gpu": (100, 1), "400/gpu": (400, 1)}
"""Gb/s of a link, and how many GPUs share it."""
MOST = 0.27
COLUMNS = {
    "across_gb": ".3f",
    "of_stage_3": ".3f",
    "most": ".2f",
    "temporary_gb": ".2f",
    "secondary_gb": ".2f",
    **{f"ms {name}": ".0f" for name in NETWORKS},
    **{f"x {name}": ".2f" for name in NETWORKS},
}


def across(report: zj.aot.Report) -> float:
    """Bytes that one GPU sends to other nodes in a step."""
    return sum(c.across_nodes for c in report.collectives)


def row(shape: Shape, form: str) -> progress.Row:
    """Bytes and predicted step times of one program."""
    case = compile_zeroj(shape, 3, NODES, GPUS, profile="overlap", **FORMS[form])
    report = case.report
    times = {}
    for name, (gigabits, sharing) in NETWORKS.items():
        gpu = report.gpu.with_network(gigabits, sharing)
        times[f"ms {name}"] = 1e3 * simulate(report.module, report.cluster, gpu).seconds
    return {
        "across_gb": across(report) / 1e9,
        "temporary_gb": report.device.temporary / 1e9,
        "secondary_gb": case.plan.memory().device.get("secondary", 0) / 1e9,
        "dtypes": sorted({f"{c.op} {c.dtype} {c.reach}" for c in report.collectives if c.payload > 10**5}),
        **times,
    }


def cases() -> dict[str, Callable[[], progress.Row]]:
    """Name of a row -> what makes it."""
    return {
        f"{model}, {form}": lambda s=shape, f=form: row(s, f)
        for model, shape in MODELS.items()
        for form in FORMS
        if model == "1.3b" or form in ("stage 3", "all three")
    }


def rows(again: bool = False) -> list[progress.Row]:
    """All rows, each beside its model's plain stage 3."""
    found = progress.collect("zeropp", cases(), again)
    plain = {r["case"].split(",")[0]: r for r in found if r["case"].endswith("stage 3")}
    for r in found:
        base = plain[r["case"].split(",")[0]]
        r["of_stage_3"] = r["across_gb"] / base["across_gb"]
        r["most"] = MOST if r["case"].endswith("all three") else None
        for name in NETWORKS:
            r[f"x {name}"] = base[f"ms {name}"] / r[f"ms {name}"]
    return found


def figures() -> list[Figure]:
    """What all three save, as figures for run.py."""
    found = []
    for r in rows():
        if r["most"] is not None:
            model = r["case"].split(",")[0]
            found.append(
                Figure(
                    f"bytes across nodes, ZeRO++, {model}", r["of_stage_3"], "of stage 3", MOST, of="value"
                )
            )
            note = "predicted by the timeline"
            name = f"speed-up of ZeRO++ at 100 Gb/s a node, {model}"
            found.append(
                Figure(name, r["x 100/node"], "x", target=2.0, better="higher", of="value", note=note)
            )
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--again", action="store_true", help="make rows anew that are there")
    progress.show(
        rows(parser.parse_args().again), COLUMNS, "ZeRO++ on 8 x 8 H100: bytes and predicted step time"
    )
