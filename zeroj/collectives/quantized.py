"""Gathers and reductions whose bytes are quantised: qwZ and qgZ of ZeRO++ (arXiv 2306.10209, sections 3.1, 3.3).

XLA cannot sum small integers without overflow, so a reduction is an all-to-all of quantised pieces, which are
dequantised and summed in fp32 where they arrive: first within a node, then, an eighth of it, across nodes.
For use inside ``shard_map`` over the ZeRO axes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from zeroj.collectives import memory, plain
from zeroj.collectives.quantize import dequantize, quantize
from zeroj.plan.rules import Placement


def pack(shard: jax.Array, placement: Placement) -> jax.Array:
    """This device's shard in the format of its gather: int8 (bytes,)."""
    assert placement.wire.weights is not None
    return quantize(shard.reshape(-1), placement.wire.weights)


def unpack(
    packed: jax.Array, placement: Placement, axes: Sequence[str], shard: Sequence[int], dtype: np.dtype
) -> jax.Array:
    """The leaf in the user's shape from the packed shards of all devices.

    Args:
        packed: int8 (devices along each of ``axes``..., bytes), or of a stack (devices..., layers, bytes).
        placement: how the leaf is sharded.
        axes: the order of the leading dims.
        shard: the shape of a shard.
        dtype: of the result.
    """
    assert placement.wire.weights is not None
    lead = packed.shape[: len(axes)]
    count = math.prod(shard[packed.ndim - len(axes) - 1 :])
    pieces = dequantize(packed, placement.wire.weights, count, dtype)
    return plain.unpad(_merge(pieces.reshape(*lead, *shard), placement, axes), placement)


@dataclass(frozen=True)
class Feedback:
    """What a device lost of all that it sent of a leaf, for each hop, and how that is fed back (LoCo).

    Attributes:
        errors: for each hop a buffer in the layout of what is sent there, in units of ``unit``; on the device or
            in host memory.
        beta: the share of an old error that stays in the running one.
        unit: fp32 scalar, the loss scale: what is reduced is so many times as large as the errors.
        counts: bool scalar: where it is False, the buffers stand for zeros.
        used: whether something was reduced with it, so that the buffers are new.
    """

    errors: Sequence[jax.Array]
    beta: float
    unit: jax.Array
    counts: jax.Array
    used: bool = False

    def layer(self, errors: Sequence[jax.Array], index: jax.Array) -> Feedback:
        """That of one layer of a stack, whose errors are ``errors``; on the device."""
        return replace(self, errors=[memory.layer_of(stack, index) for stack in errors])

    def fetched(self, value: jax.Array) -> tuple[Feedback, jax.Array]:
        """The same on the device, not before ``value`` is made; and ``value``.

        The barriers here and in :meth:`after` also bound what XLA fuses: so errors on the device and errors from the
        host are rounded alike, and a last bit cannot turn a rounding of the quantiser.
        """
        held, value = jax.lax.optimization_barrier((list(self.errors), value))
        return replace(self, errors=[memory.here(error) for error in held]), value

    def after(self, errors: Sequence[jax.Array]) -> Feedback:
        """That of the next reduction: ``errors`` are what this one leaves, and go where its own are."""
        pairs = zip(self.errors, jax.lax.optimization_barrier(list(errors)), strict=True)
        return replace(
            self, errors=[memory.beside(*pair) for pair in pairs], counts=jnp.bool_(True), used=True
        )

    def left(self) -> tuple[jax.Array, ...]:
        """What is owed to the next step: zeros where nothing was reduced and the buffers stood for zeros."""
        if self.used:
            return tuple(self.errors)
        values = [
            jnp.where(self.counts, here := memory.here(error), jnp.zeros_like(here)) for error in self.errors
        ]
        return tuple(memory.beside(old, new) for old, new in zip(self.errors, values, strict=True))


def reduce(value: jax.Array, placement: Placement, axes: Sequence[str]) -> jax.Array:
    """Sums a leaf over ``axes`` and keeps this device's shard of the sum, in fp32.

    Args:
        value: this device's addend, in the user's shape.
        placement: how the result is sharded, and in its ``wire`` the hops.
        axes: the ZeRO axes; over those that do not split the leaf the sum is whole.
    """
    return reduce_with_feedback(value, placement, axes, None)[0]


def reduce_with_feedback(
    value: jax.Array, placement: Placement, axes: Sequence[str], feedback: Feedback | None
) -> tuple[jax.Array, list[jax.Array]]:
    """The same, and what is lost at each hop is kept and added to what is sent there the next time.

    With e the running error and q what arrives of x + e, the next error is beta e + (1 - beta) (x + e - q). So the
    sum of all q differs from the sum of all x by an error over (1 - beta), however many they are.

    Args:
        value: as for :func:`reduce`.
        placement: as for :func:`reduce`.
        axes: as for :func:`reduce`.
        feedback: the errors so far, on the device; None: without.

    Returns:
        The shard of the sum, and the new errors. An element that is not finite leaves none.
    """
    hops, kept = placement.wire.hops, []
    pieces = _split(plain.pad(value, placement), placement, [axis for axis, _ in hops])
    for index, (axis, fmt) in enumerate(hops):
        flat = pieces.reshape(pieces.shape[0], -1)
        if feedback is None:
            packed = quantize(flat, fmt)
        else:
            order = [axis for axis, _ in hops[index:]]
            part = placement.over(order)
            owed = _split(feedback.errors[index], part, order).reshape(flat.shape).astype(jnp.float32)
            owed = jnp.where(feedback.counts, owed, 0.0)
            sent = flat.astype(jnp.float32) + owed * feedback.unit
            packed = quantize(sent, fmt)
            lost = (sent - dequantize(packed, fmt, flat.shape[1], np.dtype(np.float32))) / feedback.unit
            error = feedback.beta * owed + (1 - feedback.beta) * lost
            error = jnp.where(jnp.isfinite(error), error, 0.0).reshape(pieces.shape)
            kept.append(_merge(error, part, order).astype(feedback.errors[index].dtype))
        arrived = jax.lax.all_to_all(packed, axis, split_axis=0, concat_axis=0, tiled=True)
        addends = dequantize(arrived, fmt, flat.shape[1], np.dtype(np.float32))
        pieces = _sum(addends).reshape(pieces.shape[1:])
    rest = tuple(axis for axis in axes if axis not in placement.axes)
    return plain.total(pieces, rest), kept


def _sum(addends: jax.Array) -> jax.Array:
    """The sum over the first dim, term by term: XLA:CPU takes four times as long for a reduction over it."""
    return functools.reduce(jnp.add, [addends[i] for i in range(addends.shape[0])])


def _split(value: jax.Array, placement: Placement, order: Sequence[str]) -> jax.Array:
    """(devices along each axis of ``order``..., shard): every device's piece of a whole leaf."""
    shape: list[int] = []
    where: dict[str, int] = {}
    entries = dict(placement.dims)
    for dim, size in enumerate(value.shape):
        axes = entries.get(dim, ())
        counts = [jax.lax.axis_size(axis) for axis in axes]
        where |= {axis: len(shape) + i for i, axis in enumerate(axes)}
        shape += [*counts, size // math.prod(counts)]
    front = [where[axis] for axis in order]
    back = [i for i in range(len(shape)) if i not in where.values()]
    return jnp.transpose(value.reshape(shape), front + back)


def _merge(pieces: jax.Array, placement: Placement, order: Sequence[str]) -> jax.Array:
    """Undoes :func:`_split`."""
    entries = dict(placement.dims)
    lead = len(order)
    permutation, shape = [], []
    for dim, size in enumerate(pieces.shape[lead:]):
        axes = entries.get(dim, ())
        permutation += [*(list(order).index(axis) for axis in axes), lead + dim]
        shape.append(math.prod(pieces.shape[list(order).index(axis)] for axis in axes) * size)
    return jnp.transpose(pieces, permutation).reshape(shape)
