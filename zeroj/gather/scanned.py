"""Which parameters are stacks of layers, that a scan runs over or that are indexed: read off the traced loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from zeroj import _compat
from zeroj.gather import lazy, loss
from zeroj.plan import tree


def find_scanned(
    loss_fn: Callable[..., Any], params: Any, batch: Any, model_state: Any = ()
) -> tuple[str, ...]:
    """Paths of the params that a ``lax.scan`` in the loss runs over, or of which it takes layer by layer by
    index (``p[i]``, of three dims or more): their dim 0 must not be sharded.

    Args:
        loss_fn: ``loss_fn(params, batch)`` or ``(params, batch, rng)``. It is only traced. A loss with
            collectives over the ZeRO axes cannot be traced alone: name its stacks yourself.
        params: the params, or ShapeDtypeStructs of them.
        batch: a batch of any size, or ShapeDtypeStructs of it.
        model_state: what the model carries from step to step, where the loss takes it.

    Returns:
        Paths, for ``make_plan(..., scanned=...)``.

    Example:
        >>> plan = zj.make_plan(params, tx, mesh, zero, scanned=zj.find_scanned(loss_fn, params, batch))
    """
    entries, treedef = tree.flatten(params)
    structs = treedef.unflatten([jax.ShapeDtypeStruct(e.shape, e.dtype) for e in entries.values()])
    key = jax.eval_shape(lambda: jax.random.key(0))
    program, _ = loss.loss_program(loss_fn, structs, batch, key, model_state)
    names: dict[Any, set[str]] = {
        var: {path} for var, path in zip(program.jaxpr.invars, entries, strict=False)
    }
    found: set[str] = set()
    _walk(program.jaxpr, names, found)
    return tuple(path for path in entries if path in found)


def _walk(jaxpr: _compat.Jaxpr, names: dict[Any, set[str]], found: set[str]) -> list[set[str]]:
    """Follows parameters through equations that keep dim 0; returns the names of the outputs."""

    def read(atom: Any) -> set[str]:
        return set() if isinstance(atom, _compat.Literal) else names.get(atom, set())

    for eqn in jaxpr.eqns:
        operands = [read(v) for v in eqn.invars]
        if not any(operands):
            continue
        outs: list[set[str]] = [set() for _ in eqn.outvars]
        called = _compat.called_program(eqn)
        if eqn.primitive.name == "scan":
            layout = _compat.scan_layout(eqn)
            first = layout.num_consts + layout.num_carry
            found.update(*operands[first:])
            inner = dict(zip(layout.body.jaxpr.invars[:first], operands[:first], strict=True))
            _walk(layout.body.jaxpr, inner, found)
        elif called is not None:
            outs = _walk(called.jaxpr, dict(zip(called.jaxpr.invars, operands, strict=True)), found)
        elif eqn.primitive.name in lazy.ELEMENTWISE:
            outs = [operands[0]]
        elif _takes_a_layer(eqn):
            found.update(operands[0])
        names.update(zip(eqn.outvars, outs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _takes_a_layer(eqn: _compat.Eqn) -> bool:
    """Whether an equation takes one matrix, or more, out of a stack: ``p[i]``."""
    if eqn.primitive.name not in ("slice", "dynamic_slice"):
        return False
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    return len(before) > 2 and before[0] > after[0] == 1 and before[1:] == after[1:]
