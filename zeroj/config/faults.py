"""Turning everything that is wrong with a config into one message, one bullet each."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import pydantic
from pydantic_core import ErrorDetails

from zeroj.config.names import hint, section_at
from zeroj.config.rows import Section, row_of, shown
from zeroj.errors import ConfigError

Path = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Fault:
    """One thing that is wrong: the key's path in the file, and what is wrong with it."""

    path: Path
    text: str

    def __str__(self) -> str:
        return f"{'.'.join(self.path)}: {self.text}" if self.path else self.text


def raise_faults(title: str, faults: Iterable[Fault]) -> None:
    """Raise one ConfigError that lists all `faults`; return if there is none."""
    lines = list(dict.fromkeys(str(fault) for fault in faults))
    if not lines:
        return
    count = "1 fault" if len(lines) == 1 else f"{len(lines)} faults"
    raise ConfigError(f"{title}: {count}\n" + "\n".join(f"  - {line}" for line in lines))


def faults_of(
    error: pydantic.ValidationError,
    model: type[Section],
    path: Path,
    root: type[Section] | None = None,
) -> list[Fault]:
    """The faults behind a pydantic error.

    Args:
        error: what validating `model` raised.
        model: the section that was validated.
        path: where that section stands in the file.
        root: the section in which a misplaced key's right place is looked for; left out, `model`.

    Returns:
        One fault for each error, with the key's full path.
    """
    return [_fault(details, model, path, root or model) for details in error.errors()]


def _fault(details: ErrorDetails, model: type[Section], path: Path, root: type[Section]) -> Fault:
    local = tuple(
        part for part in details["loc"] if isinstance(part, str) and not part.startswith("function-")
    )
    full = path + local
    value, kind, text = details["input"], details["type"], details["msg"]
    if kind == "extra_forbidden":
        return Fault(full, f"unknown key.{hint(full, root)}")
    if kind in ("refused", "switched_off"):
        section = section_at(model, local[:-1])
        assert section is not None
        row = row_of(section, local[-1])
        return Fault(
            full, f"{shown(value)} is recognised but not supported: {row.text}. Instead: {row.instead}."
        )
    if kind == "missing":
        return Fault(full, "is required here and missing")
    if kind in ("model_type", "dict_type", "model_attributes_type"):
        return Fault(full, f"must be a section {{...}}, got {shown(value)}")
    if kind == "both":
        return Fault(full, text)
    return Fault(full, f"{_lower(text)}, got {shown(value)}")


def _lower(text: str) -> str:
    text = text.replace("Input should be", "must be")
    return text[:1].lower() + text[1:]


def prune(data: Any, faults: Sequence[Fault], path: Path = ()) -> Any:
    """`data` without the keys that are at fault, so that what is left can be checked further."""
    bad = {fault.path for fault in faults}
    if not isinstance(data, dict):
        return data
    return {k: prune(v, faults, path + (k,)) for k, v in data.items() if path + (k,) not in bad}
