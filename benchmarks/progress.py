"""Rows of a long table of compiles, kept on disk as they are made, so that a run that was stopped goes on."""

from __future__ import annotations

import hashlib
import json
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

RESULTS = pathlib.Path(__file__).parent / "results"
Row = dict[str, Any]


def collect(name: str, cases: Mapping[str, Callable[[], Row]], again: bool = False) -> list[Row]:
    """Runs the cases that results/NAME.json does not hold yet, writes each when it is done, returns all rows.

    A row counts as held only if it was made by this very source of zeroj and benchmarks, and by this jax.

    Args:
        name: name of the table.
        cases: name of a row -> a function that makes it.
        again: whether rows that are there are made again.
    """
    path = RESULTS / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    maker = {"source": _source(), "jax": jax.__version__}
    held = {} if again or not path.exists() else json.loads(path.read_text())["rows"]
    kept = {case: row for case, row in held.items() if maker.items() <= row.items()}
    for case, make in cases.items():
        if case not in kept:
            begin = time.process_time()
            row = make()
            kept[case] = row | {"cpu_seconds": round(time.process_time() - begin, 1)} | maker
            path.write_text(json.dumps({"name": name, "rows": kept}, indent=1) + "\n")
            print(case, row, flush=True)
    return [{"case": case} | kept[case] for case in cases]


def _source() -> str:
    """A digest of the code that makes a row."""
    root = RESULTS.parent.parent
    files = sorted([*(root / "zeroj").rglob("*.py"), *(root / "benchmarks").glob("*.py")])
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


def show(rows: list[Row], columns: Mapping[str, str], title: str) -> None:
    """Prints rows as a table.

    Args:
        rows: what :func:`collect` returned.
        columns: key of a row -> format of its values, such as ".3f".
        title: what the table is about.
    """
    table = Table("case", *columns, title=title)
    for row in rows:
        values = ["-" if row.get(key) is None else format(row[key], form) for key, form in columns.items()]
        table.add_row(row["case"], *values)
    Console(width=160).print(table)
