"""Where in a traced program a gradient is reduced: right where it arises, not at the end.

A reduction is linear, so it may move from the program's output back through transposes and sums to the
equation that makes the gradient, and into the bodies of loops and calls. Then the full gradient of a layer
lives only until it is reduced.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zeroj import _compat
from zeroj.collectives import plain, quantized
from zeroj.collectives.fetch import shard_shape
from zeroj.collectives.quantized import Feedback
from zeroj.gather.uniform import Uniform
from zeroj.plan.rules import Placement

#: Elements whose sum over devices takes its latency rather than its bytes.
SMALL = 2**16


@dataclass(frozen=True)
class Slot:
    """Whose errors belong to a gradient that is quantised with feedback.

    Attributes:
        path: the leaf's path.
        dims: dim of the gradient -> dim of the leaf, or of the leaf's slice within a loop.
    """

    path: str
    dims: tuple[int, ...]


def slot_of(path: str, shape: Sequence[int]) -> Slot:
    """The slot of a gradient that is laid out as its leaf."""
    return Slot(path, tuple(range(len(shape))))


@dataclass(frozen=True)
class Reduction:
    """How one gradient is summed over devices.

    Attributes:
        placement: where the sum lives.
        dtype: the dtype on the wire, where the placement does not say that it is quantised.
        axes: the ZeRO axes.
        whole: whether every device gets the whole sum. It is then scattered and gathered rather than
            all-reduced: the same bytes, and in half precision the same rounding as at the sharded stages.
        feedback: whose errors are fed back, or None.
        into: the path of the leaf whose sink takes the result (see :mod:`zeroj.gather.sinks`), or empty.
        part_of: that path too where the result is still worked on before the sink takes it, or empty.
    """

    placement: Placement
    dtype: np.dtype
    axes: tuple[str, ...]
    whole: bool = False
    feedback: Slot | None = None
    into: str = ""
    part_of: str = ""

    def with_feedback(
        self, value: jax.Array, slot: Slot, feedback: Feedback
    ) -> tuple[jax.Array, list[jax.Array]]:
        """Sums ``value`` over the devices, with what was lost before; and what is lost now."""
        turned = [jnp.transpose(error, slot.dims) for error in feedback.errors]
        reduced, errors = quantized.reduce_with_feedback(
            value, self.placement, self.axes, replace(feedback, errors=turned)
        )
        back = [slot.dims.index(dim) for dim in range(len(slot.dims))]
        return reduced.astype(value.dtype), [jnp.transpose(error, back) for error in errors]

    def __call__(self, value: jax.Array) -> jax.Array:
        """Sums ``value`` over the devices."""
        if self.placement.wire.hops:
            reduced = quantized.reduce(value, self.placement, self.axes)
        else:
            reduced = plain.reduce_scatter(value.astype(self.dtype), self.placement, self.axes)
        if self.whole:
            reduced = plain.gather(reduced, self.placement)
        return reduced.astype(value.dtype)

    def small(self, elements: int) -> bool:
        """Whether summing so many elements takes its latency rather than its bytes, and gives what is whole anyway."""
        return elements <= SMALL and not self.placement.sharded and not self.whole

    def of_stack(self, elements: int) -> bool:
        """Whether a loop leaves its slices of so many elements unsummed, for one sum of their stack after it.

        What is quantised, alone or with errors fed back, is quantised slice by slice.
        """
        plain_sum = self.feedback is None and not self.placement.wire.hops
        return elements <= SMALL and plain_sum and not self.whole

    def zero(self, dtype: Any) -> jax.Array:
        """The sum of zeros, without any communication."""
        if self.whole:
            return jnp.zeros(self.placement.shape, dtype)
        return jnp.zeros(shard_shape(self.placement), dtype)

    def away(self, value: Any) -> Any:
        """A sum in the memory where it is kept: on the host, it leaves the device as soon as it is made."""
        if not self.placement.memory or not isinstance(value, jax.Array) or _compat.is_on_host(value):
            return value
        return jax.device_put(value, jax.memory.Space.Host)


Reductions = Sequence[Reduction | None]


@dataclass(frozen=True)
class ReductionPlan:
    """Where the reductions of one program's outputs happen.

    Attributes:
        at: variable -> reduction to apply as soon as it is computed.
        inside: id of a call or scan equation -> reductions of its sub-program's outputs; that of a scan's carry
            is the reduction of its first value too.
        at_exit: per output, the reduction that could not move into the program.
        uniform: the values that are the same on every device.
    """

    at: dict[Any, Reduction]
    inside: dict[int, list[Reduction | None]]
    at_exit: list[Reduction | None]
    uniform: Uniform

    def taken_inside(self, jaxpr: _compat.Jaxpr) -> set[Any]:
        """The outputs of calls and scans that sinks took inside them."""
        pairs = ((eqn, self.inside[id(eqn)]) for eqn in jaxpr.eqns if id(eqn) in self.inside)
        return {
            var for eqn, found in pairs for var, r in zip(eqn.outvars, found, strict=True) if r and r.into
        }


def place_reductions(
    jaxpr: _compat.Jaxpr,
    wanted: Reductions,
    reduced: Collection[Any] = (),
    uniform: Uniform | None = None,
) -> ReductionPlan:
    """Moves the reductions of a program's outputs as far towards its inputs as they can go.

    Args:
        jaxpr: the program.
        wanted: per output its reduction or None.
        reduced: inputs that are reduced before they come in: carries of a scan.
        uniform: the program's uniform values; left out, no input is uniform.
    """
    uniform = Uniform(jaxpr) if uniform is None else uniform
    uses = _uses(jaxpr)
    inputs = {*jaxpr.invars, *jaxpr.constvars}
    blocked = inputs - set(reduced)
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
            _move(eqn, found, uses, blocked, uniform, pending, inside)
    return ReductionPlan(pending, inside, at_exit, uniform)


def _move(
    eqn: _compat.Eqn,
    found: list[Reduction | None],
    uses: Counter,
    blocked: Collection[Any],
    uniform: Uniform,
    pending: dict[Any, Reduction],
    inside: dict[int, list[Reduction | None]],
) -> None:
    """Moves the reductions of one equation's outputs to its operands, or into its sub-program."""
    name = eqn.primitive.name
    if name == "scan":
        inner = _inside_scan(eqn, found, uses, blocked, uniform, pending)
        taken = [r is not None for r in inner]
    elif _compat.called_program(eqn) is not None:
        inner, taken = found, [r is not None for r in found]
    else:
        operands = _through(eqn, found[0], uniform) if len(found) == 1 else None
        free = operands and all(
            not isinstance(v, _compat.Literal) and uses[v] == 1 and v not in pending and v not in blocked
            for v in operands
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


def _inside_scan(
    eqn: _compat.Eqn,
    found: list[Reduction | None],
    uses: Counter,
    blocked: Collection[Any],
    uniform: Uniform,
    pending: dict[Any, Reduction],
) -> list[Reduction | None]:
    """The reductions that move into a loop's body: of stacked outputs, and of sums of slices.

    Slices whose sum would take its latency rather than its bytes stay outside: their stack is summed at once.

    A carry moves if the body only adds to it what is smaller than it, as when it sums the gradients of slices
    of a stack: then no more is sent than at the end. Its first value is then reduced as well.
    """
    layout = _compat.scan_layout(eqn)
    inner: list[Reduction | None] = []
    for index, reduction in enumerate(found):
        if reduction is None:
            inner.append(None)
        elif index >= layout.num_carry:
            free = all(dim > 0 for dim, _ in reduction.placement.dims)
            small = reduction.of_stack(math.prod(eqn.outvars[index].aval.shape[1:]))
            if reduction.feedback is not None:  # its errors are cut along the leaf's first dim
                free = free and reduction.feedback.dims[0] == 0
            inner.append(_of_slice(reduction) if free and not small else None)
        else:
            first = eqn.invars[layout.num_consts + index]
            movable = not isinstance(first, _compat.Literal) and uses[first] == 1 and first not in blocked
            body = uniform.of_scan(eqn)
            moves = movable and _adds_slices(layout, index, reduction, body)
            inner.append(_here(reduction) if moves else None)
            if inner[-1] is not None:
                pending[first] = _here(reduction)
    return inner


def _here(reduction: Reduction) -> Reduction:
    """The same, its result kept on the device."""
    return replace(reduction, placement=reduction.placement.at(""), into="")


def _adds_slices(layout: _compat.ScanLayout, index: int, reduction: Reduction, uniform: Uniform) -> bool:
    """Whether a loop's body does nothing with a carry but add to it what has fewer elements."""
    jaxpr = layout.body.jaxpr
    carry = jaxpr.invars[layout.num_consts + index]
    wanted: list[Reduction | None] = [None] * len(jaxpr.outvars)
    wanted[index] = reduction
    placed = place_reductions(jaxpr, wanted, [carry], uniform)
    if carry not in placed.at or placed.at_exit[index] is not None or placed.inside:
        return False
    made_by = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    sent = [var for var in placed.at if var in made_by and not is_zero(made_by[var])]
    return sum(math.prod(var.aval.shape) for var in sent) < math.prod(carry.aval.shape)


def is_zero(eqn: _compat.Eqn) -> bool:
    """Whether an equation makes zeros and nothing else."""
    if eqn.primitive.name != "broadcast_in_dim" or not isinstance(eqn.invars[0], _compat.Literal):
        return False
    return not np.any(np.asarray(eqn.invars[0].val))


def _through(eqn: _compat.Eqn, reduction: Reduction | None, uniform: Uniform) -> dict[Any, Reduction] | None:
    """The reductions of the operands that together equal the reduction of the result, where there are any."""
    if reduction is None:
        return None
    reduction = _here(reduction)  # what is still worked on stays on the device
    name = eqn.primitive.name
    if name == "transpose":
        inverse = np.argsort(eqn.params["permutation"])
        moved = reduction.placement.transposed([int(i) for i in inverse])
        slot = reduction.feedback
        if slot is not None:
            slot = replace(slot, dims=tuple(slot.dims[i] for i in inverse))
        return {eqn.invars[0]: replace(reduction, placement=moved, feedback=slot)}
    if name == "add_any":
        return {var: reduction for var in eqn.invars}
    if name == "convert_element_type" and eqn.invars[0].aval.dtype == reduction.dtype:
        return {eqn.invars[0]: reduction}
    if name == "pad" and _pads_whole_dims(eqn, reduction):
        return _resized(reduction, eqn.invars[:1])
    if name == "dynamic_update_slice" and all(v in uniform for v in eqn.invars[2:]):
        return _resized(reduction, eqn.invars[:2])
    return None


def _resized(reduction: Reduction, operands: Sequence[Any]) -> dict[Any, Reduction] | None:
    """The reduction for operands that differ in size from the result, where no split dim differs."""
    if reduction.whole or reduction.feedback is not None:  # errors are those of the leaf, not of a piece
        return None
    found: dict[Any, Reduction] = {}
    for var in operands:
        placement = reduction.placement.resized(var.aval.shape)
        if placement is None or var in found:
            return None
        found[var] = replace(reduction, placement=placement)
    return found


def _pads_whole_dims(eqn: _compat.Eqn, reduction: Reduction) -> bool:
    """Whether a pad appends zeros, and along dims that the reduction does not split."""
    filling = eqn.invars[1]
    if not isinstance(filling, _compat.Literal) or np.any(np.asarray(filling.val)):
        return False
    return not any(any(eqn.params["padding_config"][dim]) for dim, _ in reduction.placement.dims)


def _of_slice(reduction: Reduction | None) -> Reduction | None:
    if reduction is None:
        return None
    slot = reduction.feedback
    if slot is not None:
        slot = replace(slot, dims=tuple(dim - 1 for dim in slot.dims[1:]))
    return replace(reduction, placement=reduction.placement.without_dim0(), feedback=slot)


def _uses(jaxpr: _compat.Jaxpr) -> Counter:
    """How often each variable is read, the program's outputs included."""
    atoms = [v for eqn in jaxpr.eqns for v in eqn.invars] + list(jaxpr.outvars)
    return Counter(v for v in atoms if not isinstance(v, _compat.Literal))
