"""Reading a config from a path, from text or from a dict, with comments and trailing commas."""

from __future__ import annotations

import json
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

from zeroj.config.faults import Fault, Path
from zeroj.errors import ConfigError

Source = str | os.PathLike[str] | Mapping[str, Any]

_STRING = r'"(?:\\.|[^"\\\n])*"'
_COMMENT = re.compile(rf"({_STRING})|//[^\n]*|\#[^\n]*|/\*.*?\*/", re.DOTALL)
_TRAILING_COMMA = re.compile(rf"({_STRING})|,(?=\s*[}}\]])")


class _Pairs(dict[str, Any]):
    """A JSON object that remembers the keys that it was given twice."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        names = [name for name, _ in pairs]
        self.twice = sorted({name for name in names if names.count(name) > 1})


def read(source: Source) -> tuple[dict[str, Any], str, list[Fault]]:
    """Read a config.

    Args:
        source: a path, a mapping, or JSON text (any string with a brace in it).

    Returns:
        The data as plain dicts without comment keys, the name to use in messages, and what is wrong with it:
        keys given twice, keys that are not text.

    Raises:
        ConfigError: there is no such file, it is not UTF-8, or the text is not JSON.
    """
    if isinstance(source, Mapping):
        data, name = source, "config"
    elif isinstance(source, str) and "{" in source:
        data, name = _parse(source, "config"), "config"
    elif isinstance(source, str | os.PathLike):
        name = os.fspath(source)
        data = _parse(_text(name), name)
    else:
        raise ConfigError(f"a config is a path, a dict or JSON text, not {type(source).__name__}")
    faults: list[Fault] = []
    return _plain(data, (), faults), name, faults


def _text(name: str) -> str:
    try:
        return pathlib.Path(name).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{name}: {error.strerror or error} (and this is not JSON text either)") from error
    except ValueError as error:
        raise ConfigError(f"{name}: is not text in UTF-8: {error}") from error


def _parse(text: str, name: str) -> _Pairs:
    text = _COMMENT.sub(lambda m: m[1] or re.sub(r"[^\n]", " ", m[0]), text)
    text = _TRAILING_COMMA.sub(lambda m: m[1] or " ", text)
    try:
        data = json.loads(text, object_pairs_hook=_Pairs)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(
            f"{name}: is not JSON: {error}. Comments (# // /* */) and trailing commas are taken; "
            "keys and text need double quotes."
        ) from error
    if not isinstance(data, _Pairs):
        raise ConfigError(f"{name}: a config is one object {{...}}, not {type(data).__name__}")
    return data


def _plain(data: Mapping[Any, Any], path: Path, faults: list[Fault]) -> dict[str, Any]:
    """Copy `data` to plain dicts, leaving out keys that start with an underscore: they are comments."""
    plain: dict[str, Any] = {}
    for twice in getattr(data, "twice", ()):
        if not twice.startswith("_"):
            faults.append(Fault((*path, twice), "duplicate key; it stands twice in the same section"))
    for name, value in data.items():
        if not isinstance(name, str):
            faults.append(Fault(path, f"the key {name!r} is not text"))
        elif not name.startswith("_"):
            plain[name] = _plain(value, (*path, name), faults) if isinstance(value, Mapping) else value
    return plain
