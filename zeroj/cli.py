"""The command line: ``zeroj plan``, ``report``, ``inspect``, ``convert`` and ``bench-io``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from zeroj.errors import ZerojError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
      argv: the words after ``zeroj``; left out: those of the process.

    Returns:
      The exit status: 0, or 2 after a message on stderr for what zeroj refuses.
    """
    parser = argparse.ArgumentParser(prog="zeroj", description="ZeRO for JAX: plan, inspect, convert.")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_plan(commands)
    _add_report(commands)
    _add_inspect(commands)
    _add_convert(commands)
    _add_bench_io(commands)
    args = parser.parse_args(argv)
    try:
        print(args.run(args))
    except ZerojError as error:
        print(f"zeroj {args.command}: {error}", file=sys.stderr)
        return 2
    return 0


def _add_plan(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from zeroj.aot import plan_command

    parser = commands.add_parser(
        "plan",
        help="memory, traffic, time and advice for a model on a cluster",
        description="What a model needs on a cluster, for every ZeRO stage, offload and ZeRO++ choice.",
    )
    plan_command.add_arguments(parser)
    parser.set_defaults(run=plan_command.run)


def _add_report(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "report",
        help="this machine: devices, memory, limits, versions",
        description="This machine: devices, memory kinds, host memory, limits, disk, versions, flags.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_report)


def _report(args: argparse.Namespace) -> str:
    from zeroj.aot import machine_report

    found = machine_report.machine()
    return json.dumps(found, indent=2) if args.json else machine_report.text(found)


def _add_inspect(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from zeroj.checkpoint.inspect import inspect

    parser = commands.add_parser(
        "inspect",
        help="what is in a folder of checkpoints",
        description="Tree, shapes, dtypes, sizes, step and versions of a checkpoint, without its devices.",
    )
    _add_checkpoint(parser)
    parser.add_argument("--verify", action="store_true", help="read every array and check its checksums")
    parser.set_defaults(run=lambda a: inspect(a.directory, a.verify, step=a.step, tag=a.tag))


def _add_convert(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from zeroj.checkpoint.inspect import convert

    parser = commands.add_parser(
        "convert",
        help="a checkpoint to safetensors",
        description="Writes the params of a checkpoint as safetensors, on any machine.",
    )
    _add_checkpoint(parser)
    parser.add_argument("out", help="the folder to write to")
    parser.add_argument("--dtype", help="such as bfloat16; left out, the params' own dtypes")
    parser.add_argument("--without-frozen", action="store_true", help="leave out leaves that do not train")

    def run(args: argparse.Namespace) -> str:
        files = convert(
            args.directory,
            args.out,
            step=args.step,
            tag=args.tag,
            dtype=args.dtype,
            frozen=not args.without_frozen,
        )
        return "\n".join(str(file) for file in files)

    parser.set_defaults(run=run)


def _add_bench_io(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from zeroj.aot.plan_command import amount
    from zeroj.spill import bench

    parser = commands.add_parser(
        "bench-io",
        help="how fast a disk reads and writes, and the best aio section for it",
        description="Sweeps block size, depth and threads of the direct engine; prints a table and a section.",
    )
    parser.add_argument("path", help="the folder that is to be nvme_path; a subfolder is made and deleted")
    parser.add_argument("--size", default="1GB", help="bytes of all files (1GB)")
    parser.add_argument("--piece", default="64MB", help="bytes of one file, as of one shard (64MB)")
    parser.add_argument("--blocks", nargs="+", help="block sizes, such as 1MB 4MB")
    parser.add_argument("--depths", nargs="+", type=int, default=bench.DEPTHS, help="queue depths")
    parser.add_argument("--threads", nargs="+", type=int, default=bench.THREADS, help="intra_op_parallelism")
    parser.add_argument("--rounds", type=int, default=2, help="of each setting; the best counts (2)")
    parser.add_argument("--checksums", action="store_true", help="with checksums, as training has them")

    def run(args: argparse.Namespace) -> str:
        found = bench.sweep(
            args.path,
            size=int(amount(args.size)),
            piece=int(amount(args.piece)),
            blocks=[int(amount(b)) for b in args.blocks] if args.blocks else bench.BLOCKS,
            depths=args.depths,
            threads=args.threads,
            rounds=args.rounds,
            verify=args.checksums,
        )
        return bench.table(args.path, found)

    parser.set_defaults(run=run)


def _add_checkpoint(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", help="the folder of checkpoints")
    parser.add_argument("--step", type=int, help="which checkpoint; left out, the latest")
    parser.add_argument("--tag", help="the tag that it was saved with")


if __name__ == "__main__":
    sys.exit(main())
