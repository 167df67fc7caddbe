"""What takes gradients where they arise: it is carried through the loops that make them, and changed layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
from jax.sharding import PartitionSpec


class Sink(Protocol):
    """What takes the gradient of one leaf, or within a loop over layers that of one of its layers."""

    def start(self, first: int) -> Any:
        """What a loop over layers carries of it at first; ``first`` is the layer that it begins with."""

    def layer(self, stack: Any, index: jax.Array) -> Sink:
        """The sink of one layer, where ``stack`` is what the loop carries."""

    def plus(self, addend: jax.Array) -> Any:
        """What is made of a gradient: of the leaf's, or of that of the layer whose sink this is."""

    def put(self, made: Any) -> Any:
        """What the loop carries on, with what was made of the layer whose sink this is."""

    def given(self, made: Any) -> Any:
        """What the loop is to stack of what was made of a layer; None: nothing."""

    def whole(self, carried: Any, given: Any) -> Any:
        """What was made of all layers, from what the loop carried and what it stacked."""


#: Path of a leaf -> what takes its gradient.
Sinks = dict[str, Sink]


class Made(NamedTuple):
    """A leaf that was updated where its gradient arose: what stands in place of the gradient.

    Attributes:
        param: the new stored param.
        squares: fp32, whose sum is that of the squares of the gradient's elements.
        stored: its new master, if it has one of its own, and its new optimizer state.
    """

    param: jax.Array
    squares: jax.Array
    stored: tuple[jax.Array, ...]


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


class NotTaken(Exception):
    """Whether the update is made is not known where the gradients arise."""
