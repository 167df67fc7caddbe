"""Which integers of a loop's body run through 0, 1, 2, ... as its iterations do: indices that take every layer in turn.

Where the body takes ``p[i]`` by such an index, and runs as often as ``p`` has layers, what it keeps of its gathers is a
whole stack, as if the loop ran over ``p`` itself. So any later ``p[j]`` can start from there, whatever ``j`` is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from zeroj import _compat

#: Equations on integers that indices are made of: ``p[i]`` adds the length to a negative ``i``.
ARITHMETIC: Mapping[str, Callable[..., Any]] = {
    "convert_element_type": lambda x: x,
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "lt": np.less,
    "ge": np.greater_equal,
    "select_n": lambda which, *cases: np.where(which, cases[1], cases[0]) if len(cases) == 2 else None,
}


class Counted(NamedTuple):
    """Variables of a loop's body that count its iterations from 0, and how many there are."""

    variables: frozenset[Any] = frozenset()
    length: int = 0

    def takes_all(self, index: Any, layers: int) -> bool:
        """Whether the loop takes each of so many layers in turn by this index."""
        return layers == self.length and not isinstance(index, _compat.Literal) and index in self.variables


def counting(layout: _compat.ScanLayout, eqn: _compat.Eqn, around: _compat.Jaxpr) -> Counted:
    """The variables of a scan's body whose values are 0, 1, 2, ... in the order in which outputs are stacked.

    Args:
        layout: the scan's.
        eqn: the scan.
        around: the program that it stands in.
    """
    if layout.reverse:
        return Counted()
    steps = np.arange(layout.length)
    body = layout.body.jaxpr
    values: dict[Any, Any] = {}
    first = layout.num_consts
    for index in range(layout.num_carry):
        var, start = body.invars[first + index], eqn.invars[first + index]
        if isinstance(start, _compat.Literal) and _counts_on(body, var, body.outvars[index]):
            values[var] = steps + int(start.val)
    made = {var: e for e in around.eqns for var in e.outvars}
    first += layout.num_carry
    for var, given in zip(body.invars[first:], eqn.invars[first:], strict=True):
        source = None if isinstance(given, _compat.Literal) else made.get(given)
        if source is not None and source.primitive.name == "iota" and given.aval.shape == steps.shape:
            values[var] = steps
    if not values:
        return Counted()
    for inner in body.eqns:
        operands = [_value(v, values) for v in inner.invars]
        act = ARITHMETIC.get(inner.primitive.name)
        if act is not None and len(inner.outvars) == 1 and all(x is not None for x in operands):
            values[inner.outvars[0]] = act(*operands)
    found = frozenset(v for v, x in values.items() if x is not None and np.array_equal(x, steps))
    return Counted(found, layout.length)


def _value(atom: Any, values: Mapping[Any, Any]) -> Any:
    if not isinstance(atom, _compat.Literal):
        return values.get(atom)
    number = np.asarray(atom.val)
    return number if number.ndim == 0 and number.dtype.kind in "iub" else None


def _counts_on(body: _compat.Jaxpr, var: Any, out: Any) -> bool:
    """Whether an integer scalar's next value is itself plus one."""
    if var.aval.shape != () or np.dtype(var.aval.dtype).kind not in "iu":
        return False
    made = [e for e in body.eqns if out in e.outvars]
    if len(made) != 1 or made[0].primitive.name != "add":
        return False
    one = [v for v in made[0].invars if isinstance(v, _compat.Literal)]
    return len(one) == 1 and int(one[0].val) == 1 and any(v is var for v in made[0].invars)
