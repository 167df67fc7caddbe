"""What a program reads where: which values are done with after an equation, and which shards are needed first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zeroj import _compat
from zeroj.gather import lazy


def last_uses(jaxpr: _compat.Jaxpr) -> dict[int, list[Any]]:
    """Equation index -> variables that nothing reads after it."""
    seen = {v for v in jaxpr.outvars if not isinstance(v, _compat.Literal)}
    last: dict[int, list[Any]] = {}
    for index in range(len(jaxpr.eqns) - 1, -1, -1):
        for var in jaxpr.eqns[index].invars:
            if not isinstance(var, _compat.Literal) and var not in seen:
                seen.add(var)
                last.setdefault(index, []).append(var)
    return last


def in_order_of_use(jaxpr: _compat.Jaxpr, operands: Sequence[Any]) -> list[lazy.Shard]:
    """The shards among a program's inputs, each once, by the first equation that reads them, be it in a call."""
    of = {v: lazy.shards_of(value) for v, value in zip(jaxpr.invars, operands, strict=True)}
    found: dict[lazy.Shard, None] = {}
    _find_uses(jaxpr, {v: shards for v, shards in of.items() if shards}, found)
    return list(found | {shard: None for shards in of.values() for shard in shards})


def _find_uses(
    jaxpr: _compat.Jaxpr, made_of: dict[Any, list[lazy.Shard]], found: dict[lazy.Shard, None]
) -> None:
    """Adds to ``found`` what a program reads; ``made_of`` has what its inputs are made of."""
    for eqn in jaxpr.eqns:
        pairs = [
            (i, made_of[v])
            for i, v in enumerate(eqn.invars)
            if not isinstance(v, _compat.Literal) and v in made_of
        ]
        if pairs and len(pairs) == len(eqn.invars):  # of params alone: it waits for its own use
            made_of |= {v: [s for _, shards in pairs for s in shards] for v in eqn.outvars}
            continue
        called = _compat.called_program(eqn) if pairs else None
        if called is not None:
            _find_uses(called.jaxpr, {called.jaxpr.invars[i]: shards for i, shards in pairs}, found)
        found |= {shard: None for _, shards in pairs for shard in shards}
