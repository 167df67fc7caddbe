"""What two programs have in common that differ in nothing but the names of their variables and the user's lines."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from zeroj import _compat


def of_program(jaxpr: _compat.Jaxpr) -> Hashable:
    """Equal for two programs that differ in nothing but the names of their variables and the user's lines."""
    return _Fingerprint().of(jaxpr)


def of_equation(eqn: _compat.Eqn) -> Hashable:
    """The same for one equation, whatever its operands are."""
    return _Fingerprint().equation(eqn)


#: Functions by which a call is differentiated: of no account in a program that is differentiated already.
RULES_OF_CALLS = frozenset({"jvp_jaxpr_fun", "jvp_jaxpr_thunk", "fwd_jaxpr_thunk", "fwd", "bwd", "jvp"})


class _Fingerprint:
    """Numbers the variables of a program in the order in which they appear."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}

    def of(self, jaxpr: _compat.Jaxpr) -> Hashable:
        for var in (*jaxpr.constvars, *jaxpr.invars):
            self._numbers[var] = len(self._numbers)
        inputs = tuple(v.aval for v in (*jaxpr.constvars, *jaxpr.invars))
        equations = tuple(
            (self.equation(e), self._atoms(e.invars), self._made(e.outvars)) for e in jaxpr.eqns
        )
        return inputs, equations, self._atoms(jaxpr.outvars)

    def equation(self, eqn: _compat.Eqn) -> Hashable:
        rules = RULES_OF_CALLS if eqn.primitive.name in _compat.CALLS else ()
        params = tuple((key, self._param(value)) for key, value in eqn.params.items() if key not in rules)
        avals = tuple(v.aval for v in (*eqn.invars, *eqn.outvars))
        return eqn.primitive, params, avals, _compat.scope_of(eqn)

    def _made(self, outvars: Sequence[Any]) -> int:
        for var in outvars:
            self._numbers[var] = len(self._numbers)
        return len(outvars)

    def _atoms(self, atoms: Sequence[Any]) -> Hashable:
        return tuple(
            (np.asarray(a.val).tobytes(), str(a.aval)) if isinstance(a, _compat.Literal) else self._numbers[a]
            for a in atoms
        )

    def _param(self, value: Any) -> Hashable:
        if hasattr(value, "eqns") or hasattr(getattr(value, "jaxpr", None), "eqns"):
            inner, consts = _compat.program(value)
            return _Fingerprint().of(inner), tuple(id(const) for const in consts)
        if isinstance(value, (tuple, list)):
            return tuple(self._param(v) for v in value)
        try:
            hash(value)
        except TypeError:
            return id(value)  # the program holds it, so the id stays taken
        return type(value), value
