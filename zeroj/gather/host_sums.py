"""Sums of gradients over micro-batches in host memory: each addend is added where it is made.

A sum is carried through the loops over micro-batches and over layers, and changed in place a layer at a time: its
slice comes to the device, the gradient of the layer is added, and it goes back. So the device holds slices alone,
and both copies run beside the backward pass of the layers around.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax

from zeroj import _compat
from zeroj.collectives import memory
from zeroj.collectives.plain import total
from zeroj.gather.reductions import Reduction
from zeroj.gather.sinks import ReadsNothing

#: A stack of at most so many slices is zeroed slice by slice.
MOST_SLICES = 1024


@dataclass(frozen=True)
class HostSum(ReadsNothing):
    """The sum of one leaf's gradients over the micro-batches so far.

    Attributes:
        value: this device's shard, in host memory; of a slice that a loop's body works on, on the device.
        weight: fp32 scalar by which the next addend counts, or None for 1.
        within: of the sum of one slice: the stack, and the slice's index.
    """

    value: jax.Array
    weight: jax.Array | None
    within: tuple[jax.Array, jax.Array] | None = None

    def plus(self, addend: jax.Array) -> jax.Array:
        """The sum with one more addend, in the memory where the sum is.

        Args:
            addend: of the sum's shape, on the device, in any floating dtype.
        """
        wide = addend.astype(self.value.dtype)
        if self.weight is not None:
            wide = wide * self.weight.astype(wide.dtype)
        return memory.beside(self.value, memory.here(self.value) + wide)

    def layer(self, stack: jax.Array, index: jax.Array) -> HostSum:
        """The sum of one slice of ``stack``, on the device."""
        return replace(self, value=memory.layer_of(stack, index), within=(stack, index))

    def start(self, first: int, step: int) -> jax.Array:
        """The sum so far."""
        del first, step
        return self.value

    def put(self, made: jax.Array) -> jax.Array:
        """The stack with one slice's new sum in its place."""
        assert self.within is not None
        stack, index = self.within
        return memory.put_layer(stack, made, index)

    def given(self, made: jax.Array) -> None:
        """Nothing: the loop carries the sum."""

    def whole(self, carried: jax.Array, given: None) -> jax.Array:
        """The sum that the loop carried."""
        return carried


def zeros(reduction: Reduction, dtype: Any) -> jax.Array:
    """A sum of nothing in host memory; of a stack made slice by slice, so that the device never holds it whole.

    Args:
        reduction: how the gradient is summed over devices.
        dtype: of the sum.
    """
    placement = reduction.placement
    rows = placement.padded[0] if len(placement.padded) > 1 else 0
    if not 0 < rows <= MOST_SLICES or any(dim == 0 for dim, _ in placement.dims):
        return jax.device_put(reduction.zero(dtype), jax.memory.Space.Host)
    one = replace(reduction, placement=placement.without_dim0())

    def body(carry: None, _: None) -> tuple[None, jax.Array]:
        return None, jax.device_put(one.zero(dtype), jax.memory.Space.Host)

    return jax.lax.scan(body, None, length=rows)[1]


def count_ahead(
    traced: _compat.Program, params: int, output: int, axes: tuple[str, ...]
) -> Callable[[list[Any]], jax.Array] | None:
    """What gives the count of a micro-batch before its gradients are made; None where it depends on the params.

    Args:
        traced: a loss and its gradient, whose first inputs are the params.
        params: how many.
        output: the number of the output that is this device's count.
        axes: the axes over which counts are summed.

    Returns:
        A function of the program's inputs.
    """
    part, used = _compat.only(traced, [index == output for index in range(len(traced.jaxpr.outvars))])
    if any(used[:params]):
        return None
    return lambda values: total(_compat.evaluate(part, *values)[0], axes)
