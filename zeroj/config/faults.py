"""Turning everything that is wrong with a config into one message, one bullet each."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pydantic
from pydantic_core import ErrorDetails

from zeroj.config.names import hint, names_in, subsection
from zeroj.config.rows import Row, Section, row_of, shown
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
    data: Mapping[str, Any],
    path: Path = (),
    root: type[Section] | None = None,
) -> list[Fault]:
    """The faults behind a pydantic error.

    Args:
        error: what validating `data` by `model` raised.
        model: the section that was validated.
        data: what was given for it.
        path: where that section stands in the file; left out, at the top.
        root: the section in which a misplaced key's right place is looked for; left out, `model`.

    Returns:
        One fault for each error, with the key's full path, as it was written, and its value.
    """
    return [_fault(details, model, data, path, root or model) for details in error.errors()]


def _fault(details: ErrorDetails, model: type[Section], data: Any, path: Path, root: type[Section]) -> Fault:
    kind, text = details["type"], details["msg"]
    location = tuple(part for part in details["loc"] if isinstance(part, str))
    local, value, row, section = _written(model, data, location)
    full = path + local
    if kind == "extra_forbidden":
        assert section is not None
        return Fault(full, f"unknown key.{hint(full, names_in(section), root)}")
    if kind in ("refused", "switched_off"):
        assert row is not None
        return Fault(
            full, f"{shown(value)} is recognised but not supported: {row.text}. Instead: {row.instead}."
        )
    if kind == "missing":
        return Fault(full, "is required here and missing")
    if kind in ("model_type", "dict_type", "model_attributes_type"):
        return Fault(full, f"must be a section {{...}}, got {shown(value)}")
    if kind == "both":
        return Fault(full, text)
    if isinstance(value, str) and value == "auto":
        hope = f"Write a value ({_lower(text)}), or leave it out"
        return Fault(full, f'cannot be "auto": no argument decides it. {hope}')
    return Fault(full, f"{_lower(text)}, got {shown(value)}")


def _written(
    model: type[Section], data: Any, location: Path
) -> tuple[Path, Any, Row | None, type[Section] | None]:
    """The path to `location` as the file spells it, the value there, its key's row, and its section."""
    path: list[str] = []
    section: type[Section] | None = None
    below: type[Section] | None = model
    row: Row | None = None
    for name in location:
        spelling, section = name, below
        if section is not None and name in section.model_fields:
            row = row_of(section, name)
            if isinstance(data, Mapping) and name not in data:
                spelling = next((a for a, b in section.aliases.items() if b == name and a in data), name)
            below = subsection(section, name)
        data = data.get(spelling) if isinstance(data, Mapping) else getattr(data, spelling, None)
        path.append(spelling)
    return tuple(path), data, row, section


def _lower(text: str) -> str:
    text = text.replace("Input should be", "must be")
    return text[:1].lower() + text[1:]


def prune(data: Any, faults: Sequence[Fault], path: Path = ()) -> Any:
    """`data` without the keys that are at fault, so that what is left can be checked further."""
    bad = {fault.path for fault in faults}
    if not isinstance(data, dict):
        return data
    return {k: prune(v, faults, path + (k,)) for k, v in data.items() if path + (k,) not in bad}
