"""What goes into a loop slice by slice, and what comes out of it as a lazy stack."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from zeroj import _compat
from zeroj.gather import lazy
from zeroj.gather.uniform import Uniform


@dataclass(frozen=True)
class Restacked:
    """A loop's lazy output, before the loop has run.

    Attributes:
        value: the lazy value of one iteration.
        known: shard of the body -> the stack outside that it is a slice of, be it by index.
        made: shards that the body itself made; the loop stacks their arrays.
    """

    value: lazy.Lazy
    known: Mapping[lazy.Shard, lazy.Shard]
    made: tuple[lazy.Shard, ...]

    def build(self, arrays: Iterator[jax.Array], length: int) -> lazy.Stacked:
        """The lazy stack; takes what the loop stacked for ``made`` from ``arrays``."""
        stacks: dict[lazy.Shard, lazy.Lazy] = dict(self.known)
        for shard in self.made:
            placement = shard.placement.stacked(length)
            stacks[shard] = lazy.Shard(next(arrays), placement, shard.dtype, shard.path)
        return lazy.Stacked(self.value, stacks, length)


def restack(out: Any, origin: Mapping[int, lazy.Shard], outside: Collection[int]) -> Restacked | None:
    """A body's lazy output as a lazy stack; None if it must be stacked for real.

    Args:
        out: the output.
        origin: id of a slice -> the stack that it is a slice of.
        outside: ids of shards that every iteration sees whole.
    """
    if not lazy.is_lazy(out):
        return None
    shards = lazy.shards_of(out)
    if not shards or any(id(s.array) in outside for s in shards):
        return None
    outer = {s: origin.get(id(s.array), s.stack) for s in shards}
    if any(s.placement.wire.stored and outer[s] is None for s in shards):
        return None  # bytes that the body cut anew have no place in a stack
    known = {s: lazy.Shard(o.array, o.placement, s.dtype, s.path) for s, o in outer.items() if o is not None}
    return Restacked(out, known, tuple(shard for shard in shards if shard not in known))


def made_by(outs: Sequence[Restacked | None]) -> list[lazy.Shard]:
    """The shards that a body itself made, in the order of what the loop stacks for them."""
    return [shard for out in outs if out for shard in out.made]


def stacks_of(
    outs: Sequence[Restacked | None], arrays: Sequence[jax.Array], length: int
) -> dict[int, lazy.Shard]:
    """Id of the array of a shard that the body made -> the stack of them."""
    return {
        id(s.array): lazy.Shard(array, s.placement.stacked(length), s.dtype, s.path)
        for s, array in zip(made_by(outs), arrays, strict=True)
    }


def only_sliced(program: Uniform, index: int, value: Any) -> bool:
    """Whether a program takes nothing but smaller slices of an input, the same ones on every device.

    Args:
        program: a loop's body, or a region, with its uniform values.
        index: of the input.
        value: what is passed for it.
    """
    return isinstance(value, lazy.Shard) and _only_sliced(program, program.jaxpr.invars[index], value)


def _only_sliced(program: Uniform, var: Any, value: lazy.Shard) -> bool:
    def slices(eqn: _compat.Eqn) -> bool:
        called = _compat.called_program(eqn)
        if called is not None:
            inner = program.of_call(eqn, called.jaxpr)
            within = [v for v, given in zip(called.jaxpr.invars, eqn.invars, strict=True) if given is var]
            return all(_only_sliced(inner, v, value) for v in within)
        if eqn.primitive.name != "dynamic_slice" or not all(v in program for v in eqn.invars[1:]):
            return False
        shape = eqn.outvars[0].aval.shape
        if value.placement.wire.stored and not (value.layered and shape[1:] == value.shape[1:]):
            return False
        return math.prod(shape) < value.size and value.placement.resized(shape) is not None

    users = [eqn for eqn in program.jaxpr.eqns if any(v is var for v in eqn.invars)]
    return all(v is not var for v in program.jaxpr.outvars) and all(map(slices, users))


def warn_whole(stacks: list[Any], eqn: _compat.Eqn) -> None:
    """Tells of stacks that a loop cannot take slice by slice because their first dim is sharded."""
    shards = [s for x in stacks for s in lazy.shards_of(x)]
    paths = sorted({s.path for s in shards if any(dim == 0 for dim, _ in s.placement.dims)})
    if paths:
        warnings.warn(
            f"The scan at {_compat.source_line(eqn)} runs over dim 0 of {', '.join(paths)}, which is sharded: "
            "they are gathered whole before the loop. Make the plan with scanned=zj.find_scanned(loss_fn, "
            f"params, batch), or scanned={paths}.",
            stacklevel=2,
        )
