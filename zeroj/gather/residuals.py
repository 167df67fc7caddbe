"""What rematerialised regions keep for the backward pass, in host memory instead of the device's.

A region under ``jax.checkpoint`` keeps its inputs (or what its policy saves) from the forward to the backward pass.
In the traced loss and gradient those are operands of the region's recomputation that are made of the batch and do
not depend on the backward pass's seed. The program is traced again with each of them copied to the host where it is
made and back before the region that needs it; in a loop over layers a slice at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax

from zeroj import _compat
from zeroj.errors import PlanError
from zeroj.gather.uniform import Uniform

#: Values of fewer elements on a device stay there: moving them would save nothing.
SMALLEST = 1024

_INLINED = frozenset({"jit", "pjit", "closed_call", "core_call"})


def offload_residuals(
    program: _compat.Program, params: Sequence[bool], seed: Sequence[bool], smallest: int | None = None
) -> _compat.Program:
    """The same program, with what rematerialised regions keep in host memory between forward and backward.

    Args:
        program: a loss and its gradient.
        params: tells for each input whether it is a parameter; what is made of those alone stays as it is.
        seed: tells for each input whether the backward pass begins from it.
        smallest: values of fewer elements stay on the device; left out, SMALLEST.

    Raises:
        PlanError: no such region keeps anything.
    """
    smallest = SMALLEST if smallest is None else smallest
    flat = _inlined(program)
    level = _Level(
        flat,
        Uniform(flat.jaxpr, lambda: [not s for s in seed], frozenset()),
        Uniform(flat.jaxpr, lambda: list(params), frozenset()),
        smallest,
    )
    if not level.hosted:
        raise PlanError(
            "Activations are to be offloaded (cpu_checkpointing), but the loss has no jax.checkpoint region that "
            f"keeps an activation of at least {smallest} elements on a device for the backward pass. Put "
            "jax.checkpoint around the model's layers, or leave the setting out."
        )
    structs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in flat.jaxpr.invars]
    traced, _ = _compat.trace(lambda *args: level.run(list(args), []), *structs)
    return traced


class _Level:
    """One program of equations, a loop's body for example, and which of its values go to the host.

    Args:
        program: the program, without calls.
        early: the values that do not depend on the backward pass's seed.
        fixed: the values that are made of parameters and constants alone.
        smallest: values of fewer elements stay.
        slices: the inputs of a loop's body that may come from the host, and then nothing else may; left out, any
            value may go there.

    Attributes:
        hosted: variables that some region is to have from the host.
        read: variables that something else reads.
    """

    def __init__(
        self,
        program: _compat.Program,
        early: Uniform,
        fixed: Uniform,
        smallest: int,
        slices: Sequence[Any] | None = None,
    ) -> None:
        self.program, self.early, self.fixed, self.smallest = program, early, fixed, smallest
        self._bodies: dict[int, _Level] = {}
        jaxpr = program.jaxpr
        operands = {id(eqn): self._operands_from_host(eqn) for eqn in jaxpr.eqns}
        uses = [(v, i in operands[id(eqn)]) for eqn in jaxpr.eqns for i, v in enumerate(eqn.invars)]
        self.hosted: set[Any] = {v for v, away in uses if away}
        self.read: set[Any] = {v for v, away in uses if not away and not isinstance(v, _compat.Literal)}
        self.returned: set[Any] = {v for v in jaxpr.outvars if not isinstance(v, _compat.Literal)}
        if slices is not None:
            self.hosted &= set(slices) - self.read - self.returned
        self._from_host = {
            id(eqn): {i for i in operands[id(eqn)] if eqn.invars[i] in self.hosted} for eqn in jaxpr.eqns
        }
        self._regions = [e for e in jaxpr.eqns if _recomputes(e) and self._from_host[id(e)]]

    def _operands_from_host(self, eqn: _compat.Eqn) -> set[int]:
        """The operands that the equation could take from the host."""
        if _recomputes(eqn):
            return {i for i, v in enumerate(eqn.invars) if self._is_residual(v)}
        if eqn.primitive.name != "scan":
            return set()
        layout = _compat.scan_layout(eqn)
        body = _inlined(layout.body)
        early, fixed = (kind.of_scan(eqn).over(body.jaxpr) for kind in (self.early, self.fixed))
        slices = body.jaxpr.invars[layout.num_consts + layout.num_carry :]
        inner = self._bodies[id(eqn)] = _Level(body, early, fixed, self.smallest, slices)
        pairs = enumerate(zip(body.jaxpr.invars, eqn.invars, strict=True))
        return {i for i, (inside, v) in pairs if inside in inner.hosted and self._is_residual(v)}

    def _is_residual(self, v: Any) -> bool:
        if isinstance(v, _compat.Literal) or v not in self.early or v in self.fixed:
            return False
        if jax.dtypes.issubdtype(v.aval.dtype, jax.dtypes.extended) or _compat.is_host_type(v.aval):
            return False
        return math.prod(v.aval.shape) >= self.smallest

    def run(self, args: list[Any], gone: Sequence[int]) -> list[Any]:
        """Evaluates the program. Inputs may be on the host; outputs of the numbers in ``gone`` are left there."""
        jaxpr = self.program.jaxpr
        leaving = {jaxpr.outvars[i] for i in gone} - self.read
        here: dict[Any, Any] = dict(zip(jaxpr.constvars, self.program.consts, strict=True))
        away: dict[Any, Any] = {}

        def define(var: Any, value: Any) -> None:
            here[var] = value
            if var in self.hosted:
                away[var] = _to(jax.memory.Space.Host, value)

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, _compat.Literal) else here[atom]

        for var, value in zip(jaxpr.invars, args, strict=True):
            define(var, value)
        for eqn in jaxpr.eqns:
            from_host = self._from_host[id(eqn)]
            if _recomputes(eqn) and from_host:
                self._in_turn(eqn, here, away)
            operands = [away[v] if i in from_host else read(v) for i, v in enumerate(eqn.invars)]
            if id(eqn) in self._bodies:
                outs = self._scan(eqn, operands, leaving)
            else:
                outs = _compat.bind(eqn, [_back(x) if i in from_host else x for i, x in enumerate(operands)])
            for var, value in zip(eqn.outvars, outs, strict=True):
                define(var, value)
        outs = [read(v) for v in jaxpr.outvars]
        return [_to(jax.memory.Space.Host, x) if i in gone else x for i, x in enumerate(outs)]

    def _in_turn(self, eqn: _compat.Eqn, here: dict[Any, Any], away: dict[Any, Any]) -> None:
        """Lets the next region's values come back when this one is about to start, and not before."""
        at = next(n for n, region in enumerate(self._regions) if region is eqn)
        wanted = self._regions[at + 1 : at + 2] + (self._regions[:1] if at == 0 else [])
        hosts = list({r.invars[i]: None for r in wanted for i in sorted(self._from_host[id(r)])})
        late = [v for v in eqn.invars if not isinstance(v, _compat.Literal) and v not in self.early]
        held, again = jax.lax.optimization_barrier(([away[v] for v in hosts], [here[v] for v in late]))
        away.update(zip(hosts, held, strict=True))
        here.update(zip(late, again, strict=True))

    def _scan(self, eqn: _compat.Eqn, operands: list[Any], leaving: set[Any]) -> list[Any]:
        """The loop, with stacks that no one reads on the device going to the host slice by slice."""
        layout, inner = _compat.scan_layout(eqn), self._bodies[id(eqn)]
        nc, nk = layout.num_consts, layout.num_carry
        away = (self.hosted - self.read - self.returned) | leaving
        hosted = [n for n, v in enumerate(eqn.outvars) if n >= nk and v in away]

        def body(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
            outs = inner.run([*operands[:nc], *carry, *xs], hosted)
            return outs[:nk], outs[nk:]

        with _compat.source_of(eqn):
            carry, ys = jax.lax.scan(
                body,
                operands[nc : nc + nk],
                operands[nc + nk :],
                length=layout.length,
                reverse=layout.reverse,
                unroll=layout.unroll,
            )
        return [*carry, *ys]


def _recomputes(eqn: _compat.Eqn) -> bool:
    return _compat.is_remat(eqn) and bool(eqn.params.get("differentiated"))


def _back(value: Any) -> Any:
    return _to(jax.memory.Space.Device, value)


def _to(space: Any, value: Any) -> Any:
    if _compat.is_on_host(value) == (space == jax.memory.Space.Host):
        return value
    return jax.device_put(value, space)


def _inlined(program: _compat.Program) -> _compat.Program:
    """The program with its calls written out, loops' bodies left as they are."""
    calls = any(eqn.primitive.name in _INLINED for eqn in program.jaxpr.eqns)
    if not calls or any(_compat.is_host_type(v.aval) for v in program.jaxpr.invars):
        return program
    structs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in program.jaxpr.invars]
    flat, _ = _compat.trace(lambda *args: _written_out(program, args), *structs)
    return flat


def _written_out(program: _compat.Program, args: Sequence[Any]) -> list[Any]:
    env = dict(zip(program.jaxpr.constvars, program.consts, strict=True))
    env.update(zip(program.jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, _compat.Literal) else env[atom]

    for eqn in program.jaxpr.eqns:
        operands = [read(v) for v in eqn.invars]
        called = _compat.called_program(eqn) if eqn.primitive.name in _INLINED else None
        outs = _compat.bind(eqn, operands) if called is None else _written_out(called, operands)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(v) for v in program.jaxpr.outvars]
