"""Which values of a program are the same on every device: those made of constants and loop counters alone.

A slice may be taken of a shard, before it is gathered, only at an index that every device agrees on; the same
holds for a gradient that is reduced before it is put into its place in a stack.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

from zeroj import _compat

#: Primitives whose result differs between devices though their operands do not.
DIFFERING = frozenset({"axis_index", "ppermute", "all_to_all", "psum_scatter", "reduce_scatter"})


class Uniform:
    """The uniform values of one program, found when first asked for.

    Args:
        jaxpr: the program.
        inputs: tells for each of its inputs whether it is uniform; left out, none is.
        differing: primitives whose result is never uniform.
    """

    def __init__(
        self,
        jaxpr: _compat.Jaxpr,
        inputs: Callable[[], Sequence[bool]] | None = None,
        differing: frozenset[str] = DIFFERING,
    ) -> None:
        self.jaxpr = jaxpr
        self._inputs = inputs
        self._differing = differing

    def __contains__(self, atom: Any) -> bool:
        return isinstance(atom, _compat.Literal) or atom in self._found

    def of_call(self, eqn: _compat.Eqn, called: _compat.Jaxpr) -> Uniform:
        """The values of a program that an equation of this one calls."""
        return Uniform(called, lambda: [v in self for v in eqn.invars], self._differing)

    def of_scan(self, eqn: _compat.Eqn) -> Uniform:
        """The values of the body of a scan in this program."""
        layout = _compat.scan_layout(eqn)
        same = partial(self._scan_inputs, layout, [v in self for v in eqn.invars])
        return Uniform(layout.body.jaxpr, same, self._differing)

    def over(self, jaxpr: _compat.Jaxpr) -> Uniform:
        """The values of another program with the same inputs."""
        return Uniform(jaxpr, self._inputs, self._differing)

    def inputs(self) -> list[bool]:
        """For each input whether it is uniform."""
        return [False] * len(self.jaxpr.invars) if self._inputs is None else list(self._inputs())

    def outputs(self) -> list[bool]:
        """For each output whether it is uniform."""
        return [v in self for v in self.jaxpr.outvars]

    @cached_property
    def _found(self) -> set[Any]:
        found = set(self.jaxpr.constvars)
        if self._inputs is not None:
            found |= {v for v, same in zip(self.jaxpr.invars, self._inputs(), strict=True) if same}
        for eqn in self.jaxpr.eqns:
            same = [isinstance(v, _compat.Literal) or v in found for v in eqn.invars]
            found |= {v for v, out in zip(eqn.outvars, self._outputs(eqn, same), strict=True) if out}
        return found

    def _outputs(self, eqn: _compat.Eqn, same: list[bool]) -> list[bool]:
        called = _compat.called_program(eqn)
        if not any(same) and eqn.invars:
            return [False] * len(eqn.outvars)
        if eqn.primitive.name == "scan":
            layout = _compat.scan_layout(eqn)
            inputs = partial(self._scan_inputs, layout, same)
            return Uniform(layout.body.jaxpr, inputs, self._differing).outputs()
        if called is not None:
            return Uniform(called.jaxpr, lambda: same, self._differing).outputs()
        alike = all(same) and not eqn.effects and eqn.primitive.name not in self._differing
        return [alike] * len(eqn.outvars)

    def _scan_inputs(self, layout: _compat.ScanLayout, same: list[bool]) -> list[bool]:
        """The body's inputs; a carry is uniform if it begins so and every iteration keeps it so."""
        first, last = layout.num_consts, layout.num_consts + layout.num_carry
        same = list(same)
        while True:
            body = Uniform(layout.body.jaxpr, partial(list, same), self._differing)
            kept = body.outputs()[: layout.num_carry]
            carry = [a and b for a, b in zip(same[first:last], kept, strict=True)]
            if carry == same[first:last]:
                return same
            same = [*same[:first], *carry, *same[last:]]
