"""Where in a traced program a gradient is reduced: right where it arises, not at the end.

A reduction is linear, so it may move from the program's output back through transposes and sums to the
equation that makes the gradient, and into the bodies of loops and calls. Then the full gradient of a layer
lives only until it is reduced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from zeroj import _compat
from zeroj.collectives import plain, quantized
from zeroj.plan.rules import Placement


@dataclass(frozen=True)
class Reduction:
    """How one gradient is summed over devices.

    Attributes:
        placement: where the sum lives.
        dtype: the dtype on the wire, where the placement does not say that it is quantised.
        axes: the ZeRO axes.
        whole: whether every device gets the whole sum. It is then scattered and gathered rather than
            all-reduced: the same bytes, and in half precision the same rounding as at the sharded stages.
    """

    placement: Placement
    dtype: np.dtype
    axes: tuple[str, ...]
    whole: bool = False

    def __call__(self, value: jax.Array) -> jax.Array:
        """Sums ``value`` over the devices."""
        if self.placement.wire.hops:
            reduced = quantized.reduce(value, self.placement, self.axes)
        else:
            reduced = plain.reduce_scatter(value.astype(self.dtype), self.placement, self.axes)
        if self.whole:
            reduced = plain.gather(reduced, self.placement)
        return reduced.astype(value.dtype)


Reductions = Sequence[Reduction | None]


@dataclass(frozen=True)
class ReductionPlan:
    """Where the reductions of one program's outputs happen.

    Attributes:
        at: variable -> reduction to apply as soon as it is computed.
        inside: id of a call or scan equation -> reductions of its sub-program's outputs.
        at_exit: per output, the reduction that could not move into the program.
    """

    at: dict[Any, Reduction]
    inside: dict[int, list[Reduction | None]]
    at_exit: list[Reduction | None]


def place_reductions(jaxpr: _compat.Jaxpr, wanted: Reductions) -> ReductionPlan:
    """Moves the reductions of a program's outputs as far towards its inputs as they can go."""
    uses = _uses(jaxpr)
    inputs = {*jaxpr.invars, *jaxpr.constvars}
    pending: dict[Any, Reduction] = {}
    at_exit: list[Reduction | None] = []
    for var, reduction in zip(jaxpr.outvars, wanted, strict=True):
        made_here = not isinstance(var, _compat.Literal) and var not in inputs
        if reduction is not None and made_here and uses[var] == 1:
            pending[var] = reduction
            at_exit.append(None)
        else:
            at_exit.append(reduction)
    inside: dict[int, list[Reduction | None]] = {}
    for eqn in reversed(jaxpr.eqns):
        found = [pending.get(var) for var in eqn.outvars]
        if any(found):
            _move(eqn, found, uses, pending, inside)
    return ReductionPlan(pending, inside, at_exit)


def _move(
    eqn: _compat.Eqn,
    found: list[Reduction | None],
    uses: Counter,
    pending: dict[Any, Reduction],
    inside: dict[int, list[Reduction | None]],
) -> None:
    """Moves the reductions of one equation's outputs to its operands, or into its sub-program."""
    name = eqn.primitive.name
    if name == "scan":
        num_carry = _compat.scan_layout(eqn).num_carry
        stacked = [
            r is not None and i >= num_carry and all(dim > 0 for dim, _ in r.placement.dims)
            for i, r in enumerate(found)
        ]
        inner = [_of_slice(r) if go else None for r, go in zip(found, stacked, strict=True)]
        taken = stacked
    elif _compat.called_program(eqn) is not None:
        inner, taken = found, [r is not None for r in found]
    else:
        operands = _through(eqn, found[0]) if len(found) == 1 else None
        free = operands and all(
            not isinstance(v, _compat.Literal) and uses[v] == 1 and v not in pending for v in operands
        )
        if operands and free and len(set(operands)) == len(operands):
            pending.pop(eqn.outvars[0])
            pending.update(operands)
        return
    if any(taken):
        inside[id(eqn)] = inner
        for var, go in zip(eqn.outvars, taken, strict=True):
            if go:
                pending.pop(var)


def _through(eqn: _compat.Eqn, reduction: Reduction | None) -> dict[Any, Reduction] | None:
    """The reductions of the operands that together equal the reduction of the result, where there are any."""
    if reduction is None:
        return None
    name = eqn.primitive.name
    if name == "transpose":
        inverse = np.argsort(eqn.params["permutation"])
        moved = reduction.placement.transposed([int(i) for i in inverse])
        return {eqn.invars[0]: replace(reduction, placement=moved)}
    if name == "add_any":
        return {var: reduction for var in eqn.invars}
    if name == "convert_element_type" and eqn.invars[0].aval.dtype == reduction.dtype:
        return {eqn.invars[0]: reduction}
    return None


def _of_slice(reduction: Reduction | None) -> Reduction | None:
    if reduction is None:
        return None
    return replace(reduction, placement=reduction.placement.without_dim0())


def _uses(jaxpr: _compat.Jaxpr) -> Counter:
    """How often each variable is read, the program's outputs included."""
    atoms = [v for eqn in jaxpr.eqns for v in eqn.invars] + list(jaxpr.outvars)
    return Counter(v for v in atoms if not isinstance(v, _compat.Literal))
