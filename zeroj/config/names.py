"""The names of the schema: walking them, and finding the one that was meant."""

from __future__ import annotations

import difflib
import functools
import typing
from collections.abc import Iterator

from zeroj.config.rows import Row, Section, row_of

Path = tuple[str, ...]


@functools.cache
def subsection(model: type[Section], name: str) -> type[Section] | None:
    """The section that the key `name` of a section holds, if it holds one."""
    field = model.model_fields.get(model.aliases.get(name, name))
    if field is None:
        return None
    for part in (field.annotation, *typing.get_args(field.annotation)):
        if isinstance(part, type) and issubclass(part, Section):
            return part
    return None


def walk(model: type[Section], path: Path = ()) -> Iterator[tuple[Path, type[Section], str, Row]]:
    """Every key of the schema below `model`: its path, the section that declares it, its name, its row."""
    for name in model.model_fields:
        yield (*path, name), model, name, row_of(model, name)
        below = subsection(model, name)
        if below is not None:
            yield from walk(below, (*path, name))
        for variant in model.variants.get(name, {}).values():
            yield from walk(variant, (*path, name))


@functools.cache
def legal_paths(root: type[Section]) -> tuple[Path, ...]:
    """The path of every legal spelling, once."""
    found: dict[Path, None] = {}
    for path, model, name, row in walk(root):
        found[path] = None
        found.update({(*path, key): None for key in row.keys})
        found.update({(*path[:-1], other): None for other, real in model.aliases.items() if real == name})
    return tuple(found)


def names_in(model: type[Section]) -> list[str]:
    """Every legal spelling in a section."""
    return [*model.model_fields, *model.aliases]


def hint(path: Path, here: list[str], root: type[Section]) -> str:
    """What an unknown key may have been meant to be.

    Args:
        path: the key's path.
        here: the names that are legal where it stands.
        root: the whole schema.

    Returns:
        One sentence with a space before it.
    """
    name = path[-1]
    legal = legal_paths(root)
    near = nearest(name, here)
    if near:
        return f' Did you mean "{near}"?'
    if path in legal:
        return ' It belongs to another "type".'
    elsewhere = [p for p in legal if p[-1] == name]
    if elsewhere:
        return f" It belongs to {_places(elsewhere)}."
    near = nearest(name, [p[-1] for p in legal])
    if near:
        return f' Did you mean "{near}", which belongs to {_places([p for p in legal if p[-1] == near])}?'
    return " Keys that start with an underscore are taken as comments."


def nearest(name: str, legal: list[str]) -> str | None:
    """The legal name nearest to `name`, if one is near."""
    lowered = {other.lower(): other for other in legal}
    found = difflib.get_close_matches(name.lower(), list(lowered), n=1, cutoff=0.65)
    return lowered[found[0]] if found else None


def _places(paths: list[Path]) -> str:
    above = ['"' + ".".join(p[:-1]) + '"' if p[:-1] else "the top level" for p in paths]
    return " or ".join(dict.fromkeys(above))
