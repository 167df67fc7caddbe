"""An optimizer's update as a list of operations, with the leaf that owns each value.

An owner is the leaf whose arrays a value is made from. Where values of two leaves meet, the small ones are
exported, for every leaf to read; large ones that meet make their leaves one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from zeroj import _compat
from zeroj.errors import PlanError

#: Gives the value of input ``i`` of the program.
Read = Callable[[int], Any]


@dataclass(frozen=True)
class Const:
    """An operand that is known when the program is traced."""

    value: Any


@dataclass(frozen=True)
class Op:
    """One equation of the program, its calls walked into: operands are numbers of values, or constants."""

    name: str
    run: Callable[[list[Any]], list[Any]]
    operands: tuple[int | Const, ...]
    outputs: tuple[int, ...]


class Flow:
    """The program as a list of operations, with the owner of every value.

    Args:
        program: the traced update.
        owner: for each input the group that it belongs to, or None.
        small: values of at most this many elements may be shared.

    Attributes:
        merges: pairs of groups of which large values mix.
        exported: values with an owner that other groups read too.
    """

    def __init__(self, program: _compat.Program, owner: Sequence[int | None], small: int) -> None:
        self.num_inputs = len(owner)
        self.ops: list[Op] = []
        self.merges: set[tuple[int, int]] = set()
        self.exported: set[int] = set()
        self._small = small
        self._collected: set[int] = set()
        self._owner: list[int | None] = list(owner)
        self._sources: list[frozenset[int]] = [frozenset() if k is None else frozenset((k,)) for k in owner]
        self._shape: list[tuple[int, ...]] = [tuple(v.aval.shape) for v in program.jaxpr.invars]
        self._made_by: dict[int, int] = {}
        self.outs = self._walk(program, list(range(self.num_inputs)))

    # -- reading -----------------------------------------------------------------------------------

    def values(self, outputs: Iterable[int]) -> list[int]:
        """The values of these outputs, constants left out."""
        return [v for i in outputs if isinstance(v := self.outs[i], int)]

    def owner_of(self, value: int | Const) -> int | None:
        """The group that alone can make ``value``, or None where every part can."""
        return None if isinstance(value, Const) or value in self.exported else self._owner[value]

    def made_from(self, value: int) -> frozenset[int]:
        """The groups whose inputs ``value`` is made from."""
        return self._sources[value]

    def shape(self, operand: int | Const) -> tuple[int, ...]:
        """The shape of a value."""
        return tuple(np.shape(operand.value)) if isinstance(operand, Const) else self._shape[operand]

    def is_small(self, value: int) -> bool:
        """Whether ``value`` may be shared."""
        return math.prod(self._shape[value]) <= self._small or value in self._collected

    def shareable(self, value: int) -> bool:
        """Whether the shared phase makes ``value``: parts take it from there."""
        mixed = value >= self.num_inputs and self._owner[value] is None and bool(self._sources[value])
        return value in self.exported or (mixed and self.is_small(value))

    def closure(self, targets: Iterable[int], known: dict[int, Any] | set[int]) -> list[Op]:
        """The operations that make ``targets`` from inputs and what is known, in order."""
        needed: set[int] = set()
        stack = [t for t in targets if t not in known]
        while stack:
            index = self._made_by.get(stack.pop())
            if index is None or index in needed:
                continue
            needed.add(index)
            stack += [v for v in self.ops[index].operands if isinstance(v, int) and v not in known]
        return [self.ops[i] for i in sorted(needed)]

    def frontier(self, targets: Iterable[int]) -> set[int]:
        """The inputs and shared values that a part needs to make ``targets``."""
        found: set[int] = set()
        seen: set[int] = set()
        stack = list(targets)
        while stack:
            value = stack.pop()
            if value in seen:
                continue
            seen.add(value)
            if value < self.num_inputs or self.shareable(value):
                found.add(value)
            else:
                stack += self._operands(value)
        return found

    def sources(self, value: int) -> set[int]:
        """The inputs and other shared values from which a shared value is made."""
        return {value} if value < self.num_inputs else self.frontier(self._operands(value))

    def with_sources(self, wanted: Iterable[int]) -> tuple[int, ...]:
        """``wanted`` and every shared value that they are made from, in the order in which they are made."""
        found: set[int] = set()
        stack = list(wanted)
        while stack:
            value = stack.pop()
            if value not in found:
                found.add(value)
                stack += [v for v in self.sources(value) if self.shareable(v)]
        return tuple(sorted(found, key=lambda v: (self._made_by.get(v, -1), v)))

    def _operands(self, value: int) -> list[int]:
        return [v for v in self.ops[self._made_by[value]].operands if isinstance(v, int)]

    # -- building ----------------------------------------------------------------------------------

    def _walk(self, program: _compat.Program, args: Sequence[int | Const]) -> list[int | Const]:
        jaxpr = program.jaxpr
        env: dict[Any, int | Const] = dict(zip(jaxpr.constvars, map(Const, program.consts), strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))

        def read(atom: Any) -> int | Const:
            return Const(atom.val) if isinstance(atom, _compat.Literal) else env[atom]

        for eqn in jaxpr.eqns:
            operands = [read(v) for v in eqn.invars]
            called = _compat.called_program(eqn)
            if called is not None:
                outs = self._walk(called, operands)
            elif eqn.effects:
                raise PlanError(
                    f"The optimizer has a side effect ({eqn.primitive.name}, {_compat.source_line(eqn)}), and "
                    "cannot be taken apart leaf by leaf: take callbacks and prints out of it, or leave out offload."
                )
            elif eqn.primitive.name == "cond" and len(self._owners(operands)) > 1:
                outs = self._cond(eqn, operands)
            else:
                outs = self._op(eqn.primitive.name, _binder(eqn), operands, [v.aval for v in eqn.outvars])
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _cond(self, eqn: _compat.Eqn, operands: list[int | Const]) -> list[int | Const]:
        """Branches over several leaves: all are taken, and each leaf selects its own results."""
        index, rest = operands[0], operands[1:]
        branches = [self._walk(_compat.program(b), rest) for b in eqn.params["branches"]]
        outs: list[int | Const] = []
        for var, cases in zip(eqn.outvars, zip(*branches, strict=True), strict=True):
            if isinstance(cases[0], int) and all(case == cases[0] for case in cases[1:]):
                outs.append(cases[0])
            else:
                outs += self._op("select_n", _select, [index, *cases], [var.aval])
        return outs

    def _op(
        self,
        name: str,
        run: Callable[[list[Any]], list[Any]],
        operands: Sequence[int | Const],
        avals: Sequence[Any],
    ) -> list[int | Const]:
        """Adds an operation and decides who owns its results."""
        values = [v for v in operands if isinstance(v, int)]
        shapes = [tuple(getattr(aval, "shape", ())) for aval in avals]
        size = max(map(math.prod, shapes), default=0)
        collects = size <= len(values)  # one number of each leaf, stacked
        owner = self._decide(values, 0 if collects else size)
        sources = frozenset().union(*(self._sources[v] for v in values))
        outs = tuple(range(len(self._owner), len(self._owner) + len(avals)))
        self._owner += [owner] * len(outs)
        self._sources += [sources] * len(outs)
        self._shape += shapes
        self._collected |= set(outs) if collects else set()
        self._made_by.update(dict.fromkeys(outs, len(self.ops)))
        self.ops.append(Op(name, run, tuple(operands), outs))
        return list(outs)

    def _decide(self, values: list[int], size: int) -> int | None:
        """The owner of what is made from ``values``; exports those that another group owns."""
        owners = self._owners(values)
        if len(owners) <= 1:
            return next(iter(owners), None)
        large = {k for v in values if (k := self.owner_of(v)) is not None and not self.is_small(v)}
        if len(large) > 1 or (not large and size > self._small):
            first, *others = sorted(large or owners)
            self.merges |= {(first, other) for other in others}
            return first
        # a value of one leaf alone says more about whose the result is than one that leaves were mixed into
        single = {
            k for v in values if (k := self.owner_of(v)) is not None and self._sources[v] == frozenset((k,))
        }
        owner = next(iter(large or (single if len(single) == 1 else ())), None)
        self.exported |= {v for v in values if self.owner_of(v) not in (None, owner)}
        return owner

    def _owners(self, values: Iterable[int | Const]) -> set[int]:
        return {k for v in values if (k := self.owner_of(v)) is not None}


def _binder(eqn: _compat.Eqn) -> Callable[[list[Any]], list[Any]]:
    return lambda args: _compat.bind(eqn, args)


def _select(args: list[Any]) -> list[Any]:
    return [jax.lax.select_n(args[0], *args[1:])]


def value_of(operand: int | Const, known: dict[int, Any], read: Read) -> Any:
    """An operand's value: the constant, what is known, or the input, which is known from then on."""
    if isinstance(operand, Const):
        return operand.value
    if operand not in known:
        known[operand] = read(operand)
    return known[operand]


def run_op(op: Op, known: dict[int, Any], read: Read) -> dict[int, Any]:
    """The operation's results by value."""
    return dict(zip(op.outputs, op.run([value_of(v, known, read) for v in op.operands]), strict=True))
