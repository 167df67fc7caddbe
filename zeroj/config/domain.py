"""What values a key may have, in words, read from its declaration."""

from __future__ import annotations

import json
import types
import typing
from typing import Any

import annotated_types
from pydantic_core import PydanticUndefined

from zeroj.config.names import subsection
from zeroj.config.rows import Section

_WORDS = {int: "whole number", float: "number", bool: "true, false", str: "text"}


def values_text(model: type[Section], name: str) -> str:
    """The legal values of a key, as in "whole number > 0, null"."""
    if subsection(model, name) is not None or name in model.variants:
        return "section"
    kinds, nullable = _kinds(model.model_fields[name].annotation)
    text = "; ".join(_kind_text(kind) for kind in kinds) + _bounds(model, name)
    return text + (", null" if nullable and text != "section" else "")


def literals(model: type[Section], name: str) -> tuple[Any, ...]:
    """The values of a key that has a fixed list of them; empty for others."""
    kinds, _ = _kinds(model.model_fields[name].annotation)
    return tuple(value for kind in kinds for value in _literal(kind))


def kind_of(model: type[Section], name: str) -> Any:
    """The Python type of a key's value, None and bounds left aside: int, float, bool, str, dict or tuple."""
    kinds, _ = _kinds(model.model_fields[name].annotation)
    return typing.get_origin(kinds[0]) or kinds[0]


def default_text(model: type[Section], name: str) -> str:
    """The default of a key as the file would write it."""
    default = model.model_fields[name].default
    if default is PydanticUndefined:
        return "required"
    if default is None or isinstance(default, Section):
        return ""
    return json.dumps(default)


def _kinds(annotation: Any) -> tuple[list[Any], bool]:
    """The alternatives of a type, without None, and whether None is one of them."""
    while typing.get_origin(annotation) is typing.Annotated:
        annotation = typing.get_args(annotation)[0]
    if typing.get_origin(annotation) not in (typing.Union, types.UnionType):
        return [annotation], False
    parts = typing.get_args(annotation)
    kinds = [kind for part in parts if part is not type(None) for kind in _kinds(part)[0]]
    return kinds, type(None) in parts


def _literal(kind: Any) -> tuple[Any, ...]:
    return typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()


def _kind_text(kind: Any) -> str:
    if _literal(kind):
        return ", ".join(json.dumps(value) for value in _literal(kind))
    origin = typing.get_origin(kind)
    if origin is dict:
        return "section"
    if origin is tuple:
        return (
            "list of text" if str in _kinds(typing.get_args(kind)[0])[0] else "two numbers from 0 to below 1"
        )
    return _WORDS[kind]


def _bounds(model: type[Section], name: str) -> str:
    signs = {
        annotated_types.Ge: ">=",
        annotated_types.Gt: ">",
        annotated_types.Le: "<=",
        annotated_types.Lt: "<",
    }
    found = []
    for part in model.model_fields[name].metadata:
        sign = signs.get(type(part))
        if sign:
            found.append(f"{sign} {getattr(part, type(part).__name__.lower()):g}")
    return " " + " and ".join(found) if found else ""
