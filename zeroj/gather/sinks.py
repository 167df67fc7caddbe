"""What takes gradients where they arise: it is carried through the loops that make them, and changed layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self

import jax
from jax.sharding import PartitionSpec

from zeroj import _compat
from zeroj.plan.plan import ParamLeaf, Plan

#: Passes arrays on, and has something else wait for them.
Hold = Callable[[Sequence[jax.Array]], list[jax.Array]]


class Sink(Protocol):
    """What takes the gradient of one leaf, or within a loop over layers that of one of its layers."""

    @property
    def shard(self) -> jax.Array | None:
        """The leaf's stored param, or the layer's, if the sink changes it in place; else None."""

    def start(self, first: int, step: int) -> Any:
        """What a loop over layers carries of it at first; it begins with layer ``first`` and goes on by ``step``."""

    def layer(self, stack: Any, index: jax.Array) -> Sink:
        """The sink of one layer, where ``stack`` is what the loop carries."""

    def after(self, value: jax.Array) -> Sink:
        """The same, which reads what is on the host once ``value`` is made: a first gradient, not summed."""

    def due(self, hold: Hold) -> Sink:
        """The same with what it read of a layer passed through ``hold``, which is to wait for it."""

    def plus(self, addend: jax.Array) -> Any:
        """What is made of a gradient: of the leaf's, or of that of the layer whose sink this is."""

    def put(self, made: Any) -> Any:
        """What the loop carries on, with what was made of the layer whose sink this is."""

    def given(self, made: Any) -> Any:
        """What the loop is to stack of what was made of a layer; None: nothing."""

    def whole(self, carried: Any, given: Any) -> Any:
        """What was made of all layers, from what the loop carried and what it stacked."""


class ReadsNothing:
    """A sink that changes no param, and for which nothing comes ahead of a gradient.

    Attributes:
        shard: none.
    """

    shard: None = None

    def after(self, value: jax.Array) -> Self:
        """As it is."""
        del value
        return self

    def due(self, hold: Hold) -> Self:
        """As it is."""
        del hold
        return self


#: Path of a leaf -> what takes its gradient.
Sinks = dict[str, Sink]


class Made(NamedTuple):
    """A leaf that was updated where its gradient arose: what stands in place of the gradient.

    Attributes:
        param: the new stored param.
        squares: fp32 scalar, the sum of the squares of the gradient's elements.
        stored: its new master, if it has one of its own, and its new optimizer state.
    """

    param: Any
    squares: Any
    stored: tuple[Any, ...]


class Measured(NamedTuple):
    """A gradient in host memory: it, and an fp32 scalar, the sum of the squares of its elements."""

    grad: Any
    squares: Any


@dataclass(frozen=True)
class Taking:
    """The leaves whose gradients are taken where they arise.

    Attributes:
        values: path -> global arrays that the leaf's sink carries.
        specs: path -> the PartitionSpec, over the ZeRO axes, of each of them and of the param.
        also: replicated arrays that sinks read.
        make: (path, this device's shards of its values, this device's shard of its param, ``also``, a bool scalar
            where the update may be skipped or None) -> the sink.
    """

    values: Mapping[str, tuple[jax.Array, ...]]
    specs: Mapping[str, PartitionSpec]
    also: Any
    make: Callable[..., Sink]

    @property
    def value_specs(self) -> dict[str, tuple[PartitionSpec, ...]]:
        """Path -> the PartitionSpec of each of ``values``."""
        return {path: (self.specs[path],) * len(arrays) for path, arrays in self.values.items()}


class NotTaken(Exception):
    """Whether the update is made is not known where the gradients arise."""


def specs_of(plan: Plan, taking: Taking | None, leaving: Collection[str]) -> list[Any]:
    """Where what is made of each trained leaf's gradient lives, over the ZeRO axes."""
    stored = taking.value_specs if taking else {}

    def one(leaf: ParamLeaf) -> Any:
        if taking and leaf.path in stored:
            return Made(taking.specs[leaf.path], PartitionSpec(), stored[leaf.path])
        spec = plan.grad_placement(leaf).zero_spec
        return Measured(spec, PartitionSpec()) if leaf.path in leaving else spec

    return [one(leaf) for leaf in plan.leaves if leaf.trainable]


def takers(
    plan: Plan,
    taking: Taking | None,
    taken: dict[str, tuple[jax.Array, ...]],
    params: Sequence[jax.Array],
    also: Any,
    weight: jax.Array | None,
) -> Sinks:
    """What takes gradients where they arise, by path; nothing is updated where the loss counted nothing."""
    if taking is None:
        return {}
    shards = {leaf.path: shard for leaf, shard in zip(plan.leaves, params, strict=True)}
    applied = None if weight is None else weight > 0
    return {path: taking.make(path, values, shards[path], also, applied) for path, values in taken.items()}


@jax.tree_util.register_static
@dataclass(frozen=True)
class Arrival:
    """The trained leaves, by number, in the order in which a program makes their gradients."""

    order: tuple[int, ...]


def arrival_of(traced: _compat.Program, heads: int) -> Arrival:
    """In which order a loss and its gradient make the gradients, which are the outputs after the first ``heads``."""
    made_at = {var: at for at, eqn in enumerate(traced.jaxpr.eqns) for var in eqn.outvars}
    grads = traced.jaxpr.outvars[heads:]
    at = [-1 if isinstance(v, _compat.Literal) else made_at.get(v, -1) for v in grads]
    return Arrival(tuple(sorted(range(len(grads)), key=at.__getitem__)))
