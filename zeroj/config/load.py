"""From a file to a checked config: read, modernise, fill, check, all faults in one message."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any

import pydantic

from zeroj.config.auto import check_arguments, fill, variant
from zeroj.config.faults import Fault, Path, faults_of, prune, raise_faults
from zeroj.config.names import nearest
from zeroj.config.old import modernise
from zeroj.config.optimizer_rows import REFUSED_OPTIMIZERS, CommonParams
from zeroj.config.reader import Source, read
from zeroj.config.root_rules import ROOT_RULES, notes_of
from zeroj.config.rows import Section, shown
from zeroj.config.rules import broken_rules, zero_faults
from zeroj.config.scheduler_rows import ScheduleParams
from zeroj.config.schema import DsConfig


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A checked file: its values, the params of its optimizer and scheduler, and how it came to be.

    Args:
        file: every value, defaults included.
        optimizer: params of the optimizer, by type; None without one.
        scheduler: params of the scheduler, by type; None without one.
        written: dotted paths of the keys that the file or an argument gives.
        origins: where a key's value comes from, where it is not the file.
        notes: what the reader of the config should know.
    """

    file: DsConfig
    optimizer: CommonParams | None
    scheduler: ScheduleParams | None
    written: frozenset[str]
    origins: Mapping[str, str]
    notes: tuple[str, ...]


def load(source: Source, arguments: Mapping[str, Any]) -> Loaded:
    """Read and check a config; see `Config.load`."""
    data, name, faults = read(source)
    faults += check_arguments(arguments)
    notes, more = modernise(data)
    for note in notes:
        warnings.warn(f"{name}: {note}", UserWarning, stacklevel=3)
    faults += more
    origins, more = fill(data, DsConfig, arguments)
    faults += more
    more, optimizer, scheduler = _check(data)
    blamed = {fault.path for fault in faults}
    faults += [fault for fault in more if fault.path not in blamed]
    file = _lenient(data, faults)
    skip = [fault.path for fault in faults if fault.path]
    faults += broken_rules(ROOT_RULES, _View(file, optimizer, scheduler), (), skip)
    faults += zero_faults(file.zero_optimization, ("zero_optimization",), skip)
    raise_faults(name, faults)
    written = frozenset(_written(data, ()))
    notes += notes_of(file, optimizer, scheduler, written)
    return Loaded(file, optimizer, scheduler, written, origins, tuple(notes))


@dataclasses.dataclass(frozen=True)
class _View:
    """What rules of the whole file look at."""

    file: DsConfig
    optimizer: CommonParams | None
    scheduler: ScheduleParams | None


def _check(data: dict[str, Any]) -> tuple[list[Fault], Any, Any]:
    faults: list[Fault] = []
    try:
        DsConfig.model_validate(data)
    except pydantic.ValidationError as error:
        faults = faults_of(error, DsConfig, data)
    optimizer = _typed(data, "optimizer", faults)
    scheduler = _typed(data, "scheduler", faults)
    return faults, optimizer, scheduler


def _typed(data: dict[str, Any], key: str, faults: list[Fault]) -> Section | None:
    """The params of the section `key`, checked by its type; adds to `faults`."""
    section = data.get(key)
    if not isinstance(section, dict) or not isinstance(section.get("type"), str):
        return None
    kind, params = section["type"], section.get("params", {})
    holder = DsConfig.model_fields[key].annotation.__args__[0]  # type: ignore[union-attr]
    model = variant(holder, "params", kind)
    if model is None:
        faults.append(Fault((key, "type"), _unknown_type(kind, list(holder.variants["params"]))))
        return None
    if not isinstance(params, dict):
        return None
    try:
        return model.model_validate(params)
    except pydantic.ValidationError as error:
        faults += faults_of(error, model, params, (key, "params"), DsConfig)
        return None


def _unknown_type(kind: str, known: list[str]) -> str:
    for name, (why, instead) in REFUSED_OPTIMIZERS.items():
        if name.lower() == kind.lower():
            return f"{shown(kind)} is recognised but not supported: {why}. Instead: {instead}."
    near = nearest(kind, known)
    return (
        f"{shown(kind)} is none of {', '.join(known)}."
        + (f' Did you mean "{near}"?' if near else "")
        + " Classes of torch are not supported; pass an optax transformation or schedule in Python instead."
    )


def _lenient(data: dict[str, Any], faults: list[Fault]) -> DsConfig:
    """What is left of the file without the keys at fault, so that combinations can be checked as well."""
    rest = prune(data, faults)
    while True:
        try:
            return DsConfig.model_validate(rest)
        except pydantic.ValidationError as error:
            bad = {details["loc"][0] for details in error.errors() if details["loc"]}
            rest = {name: value for name, value in rest.items() if name not in bad} if bad else {}


def _written(data: dict[str, Any], path: Path) -> list[str]:
    found: list[str] = []
    for name, value in data.items():
        found.append(".".join((*path, name)))
        if isinstance(value, dict):
            found += _written(value, (*path, name))
    return found
