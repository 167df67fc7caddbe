"""Values that are not there yet: a parameter's shard, and what is computed from parameters alone.

A lazy value stands for a whole array of the traced program. It is gathered and evaluated where an equation
with activations consumes it, and let go after that, so no full-size parameter outlives its use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zeroj import _compat
from zeroj.plan.rules import NVME, Placement


@dataclass(frozen=True, eq=False)
class Layer:
    """Which layer of which stack a shard is: ``p[i]``, ``i`` traced.

    Attributes:
        stack: the stack.
        index: int32 scalar, the same on every device.
        alone: whether the stack's first dim is gone.
        in_turn: whether the loop around takes all layers of the stack in their order.
    """

    stack: Shard
    index: jax.Array
    alone: bool = False
    in_turn: bool = False


@dataclass(frozen=True, eq=False)
class Shard:
    """A sharded array seen whole.

    Attributes:
        array: this device's shard.
        placement: how it is sharded.
        dtype: the dtype in which the program sees it; the cast happens before the gather.
        path: the parameter's path, for messages.
        layer: which layer of a stack it is, where it was taken by a traced index.
    """

    array: jax.Array
    placement: Placement
    dtype: np.dtype
    path: str
    layer: Layer | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The whole shape."""
        return self.placement.shape

    @property
    def stack(self) -> Shard | None:
        """The stack that this is a layer of, where the loop around takes all of its layers in their order."""
        layer = self.layer
        return layer.stack if layer and layer.alone and layer.in_turn else None

    @property
    def layered(self) -> bool:
        """Whether the array has the whole's first dim: one that is stored as bytes may have none but theirs."""
        return not self.placement.wire.stored or self.array.ndim > 1

    @property
    def size(self) -> int:
        """Number of elements of the whole."""
        return int(np.prod(self.placement.shape, dtype=np.int64))


@dataclass(frozen=True, eq=False)
class Expr:
    """Output ``index`` of an equation whose operands are lazy values, or values that are at hand."""

    eqn: Any
    operands: tuple[Any, ...]
    index: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The whole shape."""
        return tuple(self.eqn.outvars[self.index].aval.shape)

    @property
    def dtype(self) -> np.dtype:
        """The dtype in which the program sees it."""
        return self.eqn.outvars[self.index].aval.dtype


@dataclass(frozen=True, eq=False)
class Stacked:
    """What a scan stacks when its body returns a lazy value: the body's value over stacks of its shards.

    Attributes:
        value: the lazy value of one iteration.
        stacks: shard of the body -> the stack (itself lazy) that it was a slice of.
        length: the number of iterations.
    """

    value: Lazy
    stacks: Mapping[Shard, Lazy]
    length: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The whole shape."""
        return (self.length, *self.value.shape)

    @property
    def dtype(self) -> np.dtype:
        """The dtype in which the program sees it."""
        return self.value.dtype


Lazy = Shard | Expr | Stacked


def stored(shard: Shard) -> jax.Array:
    """What waits at the gate before a gather: a shard in the dtype that travels, or where it lives on the host."""
    as_it_is = shard.placement.memory or shard.placement.wire.stored
    return shard.array if as_it_is else shard.array.astype(shard.dtype)


def fetched(array: jax.Array, shard: Shard) -> jax.Array:
    """What :func:`stored` gave, on the device and in the dtype that travels between devices."""
    if not shard.placement.memory:
        return array
    return jax.device_put(array, jax.memory.Space.Device).astype(shard.dtype)


def is_lazy(value: Any) -> bool:
    """Whether ``value`` still has to be gathered."""
    return isinstance(value, (Shard, Expr, Stacked))


def shards_of(value: Any) -> list[Shard]:
    """The shards that ``value`` is made from, each once, in order of first use."""
    found: dict[Shard, None] = {}
    _collect(value, found)
    return list(found)


def _collect(value: Any, found: dict[Shard, None]) -> None:
    if isinstance(value, Shard):
        found[value] = None
    elif isinstance(value, Expr):
        for operand in value.operands:
            _collect(operand, found)
    elif isinstance(value, Stacked):
        for stack in value.stacks.values():
            _collect(stack, found)


def evaluate(value: Any, whole: Callable[[Shard], jax.Array]) -> Any:
    """The array that a lazy value stands for.

    Args:
        value: a lazy value; anything else is returned as it is.
        whole: gathers one shard.
    """
    return _evaluate(value, whole, {})


def _evaluate(value: Any, whole: Callable[[Shard], jax.Array], done: dict[int, Any]) -> Any:
    if not is_lazy(value):
        return value
    if id(value) not in done:
        if isinstance(value, Shard):
            done[id(value)] = whole(value)
        elif isinstance(value, Expr):
            operands = [_evaluate(operand, whole, done) for operand in value.operands]
            done[id(value)] = _compat.bind(value.eqn, operands)[value.index]
        else:
            stacks = [_evaluate(stack, whole, done) for stack in value.stacks.values()]
            done[id(value)] = _map(value, stacks)
    return done[id(value)]


def _map(value: Stacked, stacks: list[jax.Array]) -> jax.Array:
    """Evaluates the body's value on every slice."""
    bodies = list(value.stacks)

    def one(slices: list[jax.Array]) -> jax.Array:
        return evaluate(value.value, dict(zip(bodies, slices, strict=True)).__getitem__)

    return jax.lax.map(one, stacks)


#: Equations that act on each element of their operand alone, and so commute with slicing a stack.
ELEMENTWISE = frozenset({"convert_element_type", "neg", "copy", "stop_gradient", "reduce_precision"})


def sliceable(value: Any) -> bool:
    """Whether one slice along dim 0 can be had from slices of the shards alone."""
    if isinstance(value, Shard):
        whole = bool(value.shape) and all(dim > 0 for dim, _ in value.placement.dims)
        return whole and value.layered and _has_layers(value)
    if isinstance(value, Stacked):
        return all(sliceable(stack) for stack in value.stacks.values())
    if isinstance(value, Expr):
        return value.eqn.primitive.name in ELEMENTWISE and sliceable(value.operands[0])
    return False


def _has_layers(shard: Shard) -> bool:
    """Whether what stands for the shard in the program has its dim 0; a ticket has it if the files are so cut."""
    return shard.placement.memory != NVME or shard.array.shape[0] == shard.shape[0]


def slice_of(value: Lazy, slices: Mapping[int, jax.Array]) -> Lazy:
    """One slice along dim 0 of a :func:`sliceable` value.

    Args:
        value: the stack.
        slices: id of a shard's array -> the slice of it.
    """
    if isinstance(value, Shard):
        return Shard(slices[id(value.array)], value.placement.without_dim0(), value.dtype, value.path)
    if isinstance(value, Expr):
        return Expr(value.eqn, (slice_of(value.operands[0], slices),), value.index)
    parts = {body: slice_of(stack, slices) for body, stack in value.stacks.items()}
    return substitute(value.value, parts)


def substitute(value: Any, parts: Mapping[Shard, Any]) -> Any:
    """``value`` with its shards replaced."""
    if isinstance(value, Shard):
        return parts.get(value, value)
    if isinstance(value, Expr):
        return Expr(value.eqn, tuple(substitute(o, parts) for o in value.operands), value.index)
    if isinstance(value, Stacked):
        stacks = {body: substitute(stack, parts) for body, stack in value.stacks.items()}
        return Stacked(value.value, stacks, value.length)
    return value


def sliced(eqn: Any, operands: list[Any]) -> Shard | None:
    """What an equation takes out of a shard, as a smaller shard, so that no more is gathered than is used.

    Args:
        eqn: the equation.
        operands: its operands: a lazy value, and for a dynamic slice indices on which every device agrees.

    Returns:
        The smaller shard; None for an equation that does not slice, or that cuts a sharded dim.
    """
    first = operands[0]
    name = eqn.primitive.name
    if not isinstance(first, Shard) or name not in ("slice", "dynamic_slice", "squeeze"):
        return None
    if name == "squeeze":
        gone = eqn.params["dimensions"]
        if any(dim in gone for dim, _ in first.placement.dims) or not _keeps_bytes(first, gone):
            return None
        alone = replace(first.layer, alone=True) if first.layer and tuple(gone) == (0,) else None
        array = jax.lax.squeeze(first.array, gone)
        return Shard(array, first.placement.without(gone), first.dtype, first.path, alone)
    placement = first.placement.resized(eqn.outvars[0].aval.shape)
    if placement is None:
        return None
    array = first.array
    cut = [dim for dim, n in enumerate(first.shape) if n != placement.shape[dim]]
    if not _keeps_bytes(first, cut):
        return None
    if placement.memory == NVME and (any(dim > 0 for dim in cut) or not _has_layers(first)):
        return None  # whole files are read
    for dim in cut:
        if name == "slice":
            strides = eqn.params["strides"] or (1,) * len(first.shape)
            bounds = eqn.params["start_indices"][dim], eqn.params["limit_indices"][dim], strides[dim]
            array = jax.lax.slice_in_dim(array, *bounds, axis=dim)
        else:
            array = jax.lax.dynamic_slice_in_dim(array, operands[1 + dim], placement.shape[dim], axis=dim)
    if name == "dynamic_slice" and placement.memory not in (
        "",
        NVME,
    ):  # XLA lets such a slice leave the host at once, or not at all
        array = jax.device_put(array, jax.memory.Space.Device)
        placement = placement.at("")
    layer = None
    if name == "dynamic_slice" and cut == [0] and placement.shape[0] == 1:
        layer = Layer(first, operands[1])
    return Shard(array, placement, first.dtype, first.path, layer)


def _keeps_bytes(shard: Shard, dims: Sequence[int]) -> bool:
    """Whether these dims can be cut or dropped without taking bytes of a packed shard apart."""
    return not shard.placement.wire.stored or not dims or (tuple(dims) == (0,) and shard.layered)


def apply(eqn: Any, operands: list[Any]) -> list[Lazy]:
    """The lazy outputs of an equation on lazy operands.

    A narrowing cast of a bare shard moves before the gather: the same values, in fewer bytes on the wire.
    """
    (first, *_) = operands
    smaller = sliced(eqn, operands)
    if smaller is not None:
        return [smaller]
    if eqn.primitive.name == "convert_element_type" and isinstance(first, Shard):
        new = np.dtype(eqn.params["new_dtype"])
        floats = jnp.issubdtype(new, jnp.floating) and jnp.issubdtype(first.dtype, jnp.floating)
        kept = first.placement.memory  # the host does not compute, and a ticket is none of the numbers
        here = not kept or (kept != NVME and first.array.dtype == first.dtype)
        here = here and not first.placement.wire.stored
        if here and floats and new.itemsize <= first.dtype.itemsize:
            array = first.array if first.array.dtype == first.dtype else first.array.astype(first.dtype)
            return [Shard(array, first.placement, new, first.path)]
    return [Expr(eqn, tuple(operands), index) for index in range(len(eqn.outvars))]
