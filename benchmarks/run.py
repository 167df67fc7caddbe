"""Run every benchmark beside this file: one table, and one JSON under results/.

    python benchmarks/run.py              all of them
    python benchmarks/run.py step_time    only these

A benchmark is a module with a function ``figures() -> list[Figure]``. Exits with 1 if one raised or a target
was missed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pathlib
import platform
import sys
import time
import traceback
from typing import Any

import jax
from figure import Figure, show

HERE = pathlib.Path(__file__).parent


def benchmarks() -> list[str]:
    """Names of the modules here that define ``figures``."""
    return sorted(path.stem for path in HERE.glob("*.py") if "\ndef figures(" in path.read_text())


def environment() -> dict[str, Any]:
    """What a reader needs to judge the figures by."""
    devices = jax.devices()
    return {
        "date": time.strftime("%Y-%m-%d"),
        "devices": f"{len(devices)} x {devices[0].device_kind}",
        "cpu_cores": os.cpu_count(),
        "load_at_start": os.getloadavg()[0],
        "python": platform.python_version(),
        "jax": jax.__version__,
    }


def main() -> int:
    """Run, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "only", nargs="*", choices=[*benchmarks(), []], help="benchmarks to run; none means all"
    )
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "results", help="folder of the JSON")
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    about, results, failed = environment(), {}, []
    for name in args.only or benchmarks():
        try:
            results[name] = importlib.import_module(name).figures()
        except Exception:
            traceback.print_exc()
            failed.append(name)
    everything: list[Figure] = [figure for found in results.values() for figure in found]
    show(everything, f"{about['devices']}, jax {about['jax']}, {about['date']}")
    args.out.mkdir(parents=True, exist_ok=True)
    target = args.out / f"{'_'.join(args.only) or 'all'}.json"
    content = {
        **about,
        "failed": failed,
        "figures": {k: [f.as_dict() for f in v] for k, v in results.items()},
    }
    target.write_text(json.dumps(content, indent=1) + "\n")
    missed = [figure.name for figure in everything if figure.met is False]
    print(f"wrote {target.name}; raised: {failed or 'none'}; targets missed: {missed or 'none'}")
    return 1 if failed or missed else 0


if __name__ == "__main__":
    sys.exit(main())
