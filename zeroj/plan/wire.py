"""How the elements of one leaf travel between devices: as they are, or as small integers with a scale a block."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from zeroj.config.zero import Zero

#: Elements that share one fp32 scale. 256: 1.6 % more bytes at int8 and 3.1 % at int4; docs/choices.md has the
#: errors of other sizes.
BLOCK = 256


@dataclass(frozen=True)
class Format:
    """Integers of ``bits`` bits, 8 or 4 (two in a byte), and one fp32 scale for each ``block`` of them."""

    bits: int
    block: int = BLOCK

    @property
    def largest(self) -> int:
        """The integer that stands for the largest magnitude of a block: 127 or 7."""
        return int(2 ** (self.bits - 1)) - 1

    def packed_bytes(self, count: int) -> int:
        """Bytes that ``count`` elements take, scales and padding to whole blocks included."""
        return -(-count // self.block) * (self.block * self.bits // 8 + 4)

    def __str__(self) -> str:
        return f"int{self.bits}"


@dataclass(frozen=True)
class Wire:
    """How one leaf is gathered and its gradient reduced.

    Attributes:
        weights: the format in which the leaf is gathered (qwZ), or None: in its compute dtype.
        hops: (axis, format) for each all-to-all of its gradient, innermost axis first (qgZ). Empty: the gradient
            is reduce-scattered in the dtype in which it arises.
        first: the axes that are gathered over first, nodes before the devices of one: then each device fetches a
            part of what its node needs, once. Empty: all axes are gathered over in one.
        note: why the leaf is not quantised though the config asks for it.
        keeps: whether what the first gather gives, a shard over the other axes alone, is kept for later gathers in
            the same step (hpZ); the whole leaf, if ``first`` is all axes (``reshard_after_forward: false``).
        near_memory: the memory kind in which that waits; empty: the device's own.
        stored: whether a device stores its shard in the format of ``weights``: a frozen param.
    """

    weights: Format | None = None
    hops: tuple[tuple[str, Format], ...] = ()
    first: tuple[str, ...] = ()
    note: str = ""
    keeps: bool = False
    stored: bool = False
    near_memory: str = ""

    @property
    def kept(self) -> tuple[str, ...]:
        """The axes that later gathers of the step need not go over again."""
        return self.first if self.keeps else ()


#: In the compute dtype, in one launch, nothing kept.
PLAIN = Wire()


def wire_of(
    zero: Zero, shape: Sequence[int], axes: Sequence[str], degree: int, trainable: bool, model: bool = False
) -> Wire:
    """How a sharded leaf travels under ZeRO++.

    A leaf is quantised if it has two dims or more and its shard fills a block. A vector would save nothing that
    counts, and its gradient sums over the whole batch what a matrix spreads over many elements.

    Args:
        zero: the section.
        shape: the leaf's shape, without a dim that a scan runs over.
        axes: the axes that split it, outermost first; none for a leaf that is whole or not of floats.
        degree: the number of devices along them.
        trainable: whether it has a gradient.
        model: whether it is also split over axes of the user's own: its stored bytes could not be.
    """
    if not axes or zero.stage < 3:
        return PLAIN
    whole, hpz = not zero.reshard_after_forward, zero.zero_hpz_partition_size > 1
    keeps = whole or hpz
    outer = tuple(axes[:-1]) if hpz or zero.mics_hierarchical_params_gather else ()
    first = tuple(axes) if whole else outer
    stored = zero.zero_quantized_nontrainable_weights and not trainable and not model
    asked = zero.zero_quantized_weights or stored or (zero.zero_quantized_gradients and trainable)
    why = ""
    if len(shape) < 2:
        why = "a vector"
    elif math.prod(shape) // degree < BLOCK:
        why = f"a shard has fewer than {BLOCK} elements"
    if why:
        return Wire(first=first, note=f"not quantised: {why}" if asked else "", keeps=keeps)
    weights = Format(8) if zero.zero_quantized_weights or stored else None
    hops: tuple[tuple[str, Format], ...] = ()
    if zero.zero_quantized_gradients and trainable:
        # Inside a node bytes are cheap: int8 there leaves one lossy hop. The outermost axis is the network.
        inside = [(axis, Format(8)) for axis in reversed(axes[1:])]
        hops = (*inside, (axes[0], Format(zero.zero_quantized_gradients_bits)))
    return Wire(weights, hops, first, "", keeps, stored)
