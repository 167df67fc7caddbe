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
    """The shards among a program's inputs, each once, by the first equation that reads them."""
    of = {v: lazy.shards_of(value) for v, value in zip(jaxpr.invars, operands, strict=True)}
    made_of: dict[Any, list[lazy.Shard]] = {v: shards for v, shards in of.items() if shards}
    found: dict[lazy.Shard, None] = {}
    for eqn in jaxpr.eqns:
        read = [made_of[v] for v in eqn.invars if not isinstance(v, _compat.Literal) and v in made_of]
        if read and len(read) == len(eqn.invars):  # of params alone: it waits for its own use
            made_of |= {v: [s for shards in read for s in shards] for v in eqn.outvars}
            continue
        found |= {shard: None for shards in read for shard in shards}
    found |= {shard: None for shards in of.values() for shard in shards}
    return list(found)
