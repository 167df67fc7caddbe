"""What a file comes to: the table that `Config.report` prints, and the values of `Config.resolved`."""

from __future__ import annotations

import json
import textwrap
from typing import Any

from zeroj.config.load import Loaded
from zeroj.config.rows import Row, Section, row_of

_DEFAULTS_SHOWN = ("gradient_clipping",)


def report_of(loaded: Loaded, optimizer_text: str) -> str:
    """The report of one file; see `Config.report`."""
    lines = []
    for path, value, row in _present(loaded):
        text = row.text.rstrip(".") + "."
        if row.status == "refused":
            text += f" Instead: {row.instead}."
        origin = loaded.origins.get(path)
        source = f"  [from {origin}]" if origin else ""
        lines.append(f"{_status(row):<12}{path} = {_json(value)}{source}")
        lines += textwrap.wrap(text, 110, initial_indent=" " * 14, subsequent_indent=" " * 14)
    lines.append(f"{'optimizer':<12}{optimizer_text}")
    return "\n".join([*lines, *(f"{'note':<12}{note}" for note in loaded.notes)])


def _status(row: Row) -> str:
    return "off" if row.status == "refused" else row.status


def _present(loaded: Loaded) -> list[tuple[str, Any, Row]]:
    """Every key that the file or an argument gives, and those whose default needs saying."""
    rows = []
    for path, value, row in _rows(loaded):
        if path in loaded.written or path in loaded.origins:
            rows.append((path, value, row))
        elif path in _DEFAULTS_SHOWN:
            rows.append((f"{path} (default)", value, row))
    return rows


def _rows(loaded: Loaded) -> list[tuple[str, Any, Row]]:
    """Every key in force, with its value, sections of params by type; sections themselves left out."""
    found: list[tuple[str, Any, Row]] = []

    def visit(section: Section, path: tuple[str, ...]) -> None:
        model = type(section)
        other = {real: name for name, real in model.aliases.items()}
        for name in model.model_fields:
            value = getattr(section, name)
            if name in model.variants:
                value = loaded.optimizer if path == ("optimizer",) else loaded.scheduler
            if isinstance(value, Section):
                visit(value, (*path, name))
                continue
            dotted = ".".join((*path, name))
            short = ".".join((*path, other.get(name, name)))
            written = short if short in loaded.written else dotted
            found.append((written, value, row_of(model, name)))

    visit(loaded.file, ())
    return found


def resolved_of(loaded: Loaded) -> dict[str, Any]:
    """Every value in force, as plain data; see `Config.resolved`."""
    data = loaded.file.model_dump(mode="json")
    for key, params in (("optimizer", loaded.optimizer), ("scheduler", loaded.scheduler)):
        if params is not None:
            data[key]["params"] = params.model_dump(mode="json")
    return data


def _json(value: Any) -> str:
    return json.dumps(list(value) if isinstance(value, tuple) else value)
