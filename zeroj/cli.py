"""The command line: ``zeroj plan`` and ``zeroj report``."""

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


if __name__ == "__main__":
    sys.exit(main())
