"""``zeroj plan``: from sizes by closed form, or from a step by the real compiler."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import pathlib
import re
import sys
from typing import Any

from zeroj.aot import calibrate, deepspeed_estimate, sizes
from zeroj.aot.advise import Advice, advise
from zeroj.aot.choices import Batch, Machine
from zeroj.aot.closed_form import Estimate
from zeroj.aot.hardware import Gpu, find, load, table
from zeroj.aot.plan_files import ds_config, plot
from zeroj.aot.target import Target
from zeroj.errors import PlanError

_UNITS = {
    "": 1.0,
    "k": 1e3,
    "m": 1e6,
    "g": 1e9,
    "t": 1e12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}
_AMOUNT = re.compile(r"([\d.]+(?:e[+-]?\d+)?)\s*([kmgt]i?)?(b(?:it)?(?:/?p?s)?)?", re.IGNORECASE)


def amount(text: str) -> float:
    """Reads an amount with a decimal or binary unit: "80GB", "1.5TiB", "100Gbps" (bits), "4e12"."""
    match = _AMOUNT.fullmatch(text.strip())
    if not match:
        raise PlanError(f"{text!r} is no amount: write for example 80GB, 1.5TiB, 100Gbps")
    return float(match.group(1)) * _UNITS[(match.group(2) or "").lower()]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``zeroj plan`` to a parser."""
    parser.add_argument(
        "model",
        nargs="?",
        help="a Hugging Face config.json or its directory, or module:function, called with the zj.aot.Target"
        " and returning a jitted step and its abstract arguments; left out: --params, --layers, --hidden",
    )
    model = parser.add_argument_group("model")
    model.add_argument("--params", type=float, help="number of parameters, 13e9")
    model.add_argument("--layers", type=int)
    model.add_argument("--hidden", type=int, help="width of the residual stream")
    model.add_argument("--vocab", type=int, default=50257)
    model.add_argument("--batch", type=int, default=1, help="sequences of a micro-batch of one GPU (1)")
    model.add_argument("--sequence", type=int, default=2048, help="tokens of a sequence (2048)")
    model.add_argument("--accumulation", type=int, default=1, help="micro-batches of a step (1)")
    model.add_argument("--no-remat", action="store_true", help="keep all activations, recompute none")
    cluster = parser.add_argument_group("cluster")
    cluster.add_argument("--gpu", default="h100", help=f"{', '.join(table())} (h100)")
    cluster.add_argument(
        "--hardware", metavar="FILE", help="rates that --calibrate measured, in place of --gpu"
    )
    cluster.add_argument(
        "--calibrate", metavar="FILE", help="measure this machine's GPUs, write the rates, and plan nothing"
    )
    cluster.add_argument("--nodes", type=int, default=1)
    cluster.add_argument("--gpus", type=int, default=8, help="GPUs of a node (8)")
    cluster.add_argument("--gpu-memory", help="bytes of a GPU, 80GB; left out: the GPU's own")
    cluster.add_argument("--host-memory", default="1TB", help="bytes of a node (1TB)")
    cluster.add_argument("--nvme", default="0", help="bytes of a node's disks, 4TB; 0: none (0)")
    cluster.add_argument("--nvme-rate", default="10GB", help="bytes a second of a node's disks (10GB)")
    cluster.add_argument(
        "--network", help="bits a second of a node to others, 100Gbps; left out: the GPU's own"
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--profile", default="default", help="compiler flags, for module:function: default, overlap"
    )
    output.add_argument("--json", action="store_true", help="print JSON")
    output.add_argument("--ds-config", metavar="FILE", help="write the advised ds_config.json")
    output.add_argument("--plot", metavar="FILE", help="write stacked bars of the memory as PNG")
    output.add_argument(
        "--deepspeed-estimate", action="store_true", help="print DeepSpeed's own estimate beside"
    )


def run(args: argparse.Namespace) -> str:
    """Runs ``zeroj plan``; returns what it prints.

    Raises:
      PlanError: for sizes that are missing or impossible, an unknown GPU, a model that cannot be read.
    """
    if args.calibrate:
        return calibrate.run(args.calibrate, args.gpu)
    gpu = _gpu(args)
    if args.model and ":" in args.model and not pathlib.Path(args.model).exists():
        return _compiled(args, Target(gpu, args.nodes, args.gpus))
    Target(gpu, args.nodes, args.gpus)  # refuses a cluster of no GPUs
    batch = Batch(args.batch, args.sequence, args.accumulation, not args.no_remat)
    rate = amount(args.nvme_rate)
    machine = Machine(gpu, args.nodes, args.gpus, amount(args.host_memory), amount(args.nvme), rate)
    found = advise(_sizes(args), batch, machine)
    if args.ds_config:
        pathlib.Path(args.ds_config).write_text(json.dumps(ds_config(found), indent=2) + "\n")
    if args.plot:
        plot(found, args.plot)
    if args.json:
        return json.dumps(_as_data(found), indent=2)
    return "\n\n".join([str(found), *([_deepspeed(found)] if args.deepspeed_estimate else [])])


def _gpu(args: argparse.Namespace) -> Gpu:
    gpu = load(args.hardware) if args.hardware else find(args.gpu)
    if args.gpu_memory:
        gpu = dataclasses.replace(gpu, memory_bytes=int(amount(args.gpu_memory)))
    if args.network:
        gpu = gpu.with_network(amount(args.network) / 1e9, max(1, args.gpus))
    return gpu


def _sizes(args: argparse.Namespace) -> sizes.Sizes:
    if args.model:
        return sizes.from_hugging_face(args.model)
    missing = [f"--{n}" for n in ("params", "layers", "hidden") if getattr(args, n) is None]
    if missing:
        raise PlanError(f"name a config.json or module:function, or give {', '.join(missing)} as well")
    return sizes.from_numbers(args.params, args.layers, args.hidden, args.vocab)


def _compiled(args: argparse.Namespace, target: Target) -> str:
    """Calls module:function with the target and compiles the step that it returns."""
    module, _, function = args.model.partition(":")
    sys.path.insert(0, str(pathlib.Path.cwd()))
    try:
        build = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise PlanError(f"no function {function!r} in a module {module!r}: {error}") from error
    finally:
        sys.path.pop(0)
    step, *arguments = build(target)
    report = target.compile(step, *arguments, profile=args.profile)
    return json.dumps(report.as_data(), indent=2) if args.json else str(report)


def _as_data(found: Advice) -> dict[str, Any]:
    def row(e: Estimate) -> dict[str, Any]:
        ratio = found.ratio(e)
        return {
            **dataclasses.asdict(e),
            "device": e.device,
            "fits": e.fits,
            "advised": e is found.advised,
            "ratio": ratio.value if ratio else None,
        }

    return {
        "model": dataclasses.asdict(found.sizes),
        "batch": dataclasses.asdict(found.batch),
        "machine": dataclasses.asdict(found.machine),
        "choices": [row(e) for e in found.estimates],
        "reason": found.reason,
        "notes": found.notes,
    }


def _deepspeed(found: Advice) -> str:
    """DeepSpeed's table and beside it what zeroj computes for the same options."""
    m, s = found.machine, found.sizes
    needed = {str(e.choice): e for e in found.estimates}
    lines = [
        "DeepSpeed's estimate (model states only), in GiB as DeepSpeed prints it; beside it what is needed:"
    ]
    lines.append("  per CPU |   per GPU | options")
    rows = [("2", r) for r in deepspeed_estimate.zero2(s.params, m.gpus_per_node, m.nodes)]
    rows += [("3", r) for r in deepspeed_estimate.zero3(s.params, s.gathered, m.gpus_per_node, m.nodes)]
    for stage, row in rows:
        choice = f"stage {stage}"
        choice += " + optimizer on cpu" if "offload_optimizer=cpu" in row.options else ""
        choice += " + params on cpu" if "offload_param=cpu" in row.options else ""
        e = needed[choice]
        real = (
            f"{e.host / deepspeed_estimate.GIB:.2f} per node, {e.device / deepspeed_estimate.GIB:.2f} per GPU"
        )
        lines.append(f"{row}, stage {stage}  [needed: {real}, activations included]")
    return "\n".join(lines)
