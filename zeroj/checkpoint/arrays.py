"""What of a sharded array is stored where: pieces in the user's shape, without padding and without a mesh.

A chunk of a stored array is a divisor of one device's shard, so every chunk is written once, by one process,
and the padding of a shard is cut off simply because it lies outside the array. A reader asks for any slice:
what lies beyond the array is zero, which is the padding of the plan it reads for. Nobody ever holds a whole
leaf.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from zeroj.spill.tier import SpilledArray

#: Chunks are split until they are no larger: it bounds what a reader of a small slice must read beside it.
CHUNK_BYTES = 32 * 2**20

Index = tuple[slice, ...]


@dataclass(frozen=True)
class ArraySpec:
    """One stored array: its name, its shape (the user's), its dtype, and the shape of its chunks."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    chunk: tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """One process's part of an array: where it goes, and how to get it on the host."""

    spec: ArraySpec
    index: Index
    fetch: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        """Bytes to write."""
        return math.prod(i.stop - i.start for i in self.index) * self.spec.dtype.itemsize


@dataclass(frozen=True)
class Target:
    """Where a stored array shall go: name, user shape; padded shape, dtype and sharding of the result.

    ``into`` is the array in files that it shall become, or None: then it goes to the devices.
    """

    name: str
    shape: tuple[int, ...]
    padded: tuple[int, ...]
    dtype: np.dtype
    sharding: Sharding
    into: SpilledArray | None = None


def array_spec(name: str, value: Any, shape: Sequence[int]) -> ArraySpec:
    """Describes how ``value``, padded or not, is stored as an array of the user's ``shape``."""
    spilled = isinstance(value, SpilledArray)
    shard = value.piece_shape if spilled else value.sharding.shard_shape(value.shape)
    return ArraySpec(name, tuple(shape), np.dtype(value.dtype), chunk_shape(shard, value.dtype.itemsize))


def chunk_shape(shard: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """A divisor of a shard, split along its first dims until it has at most ``CHUNK_BYTES``.

    Args:
        shard: shape of one device's part.
        itemsize: bytes per element.
    """
    chunk = [max(int(n), 1) for n in shard]
    for dim in range(len(chunk)):
        while chunk[dim] > 1 and math.prod(chunk) * itemsize > CHUNK_BYTES:
            chunk[dim] //= _smallest_factor(chunk[dim])
    return tuple(chunk)


def pieces(spec: ArraySpec, value: Any, *, copy: bool) -> list[Piece]:
    """This process's parts of ``value``; each element is in exactly one part of one process.

    Args:
        spec: from :func:`array_spec`.
        value: the array, on the devices or in files.
        copy: whether to copy the data to the host now, so that ``value`` may be donated or deleted at once.
    """
    found = []
    for shard in value.addressable_shards:
        index = clip(shard.index, spec.shape)
        if shard.replica_id == 0 and all(i.stop > i.start for i in index):
            fetch = _fetcher(shard.data, tuple(slice(0, i.stop - i.start) for i in index))
            if copy:
                fetch = _constant(np.array(fetch(), copy=True))
            found.append(Piece(spec, index, fetch))
    return found


def place(value: np.ndarray, target: Target) -> Any:
    """Brings a host array in the user's shape to its target; every device is sent its own slice alone."""

    def piece(index: Any) -> np.ndarray:
        bounds = [i.indices(n)[:2] for i, n in zip(index, target.padded, strict=True)]
        inside = clip([slice(*b) for b in bounds], target.shape)
        return padded(value[inside], tuple(b - a for a, b in bounds), target.dtype)

    placed = jax.make_array_from_callback(target.padded, target.sharding, piece)
    if target.into is None:
        return placed
    target.into.write(placed)
    return target.into


def clip(index: Sequence[slice], shape: Sequence[int]) -> Index:
    """The part of an index that lies inside an array of ``shape``."""
    bounds = [
        (i.start or 0, n if i.stop is None else min(i.stop, n)) for i, n in zip(index, shape, strict=True)
    ]
    return tuple(slice(min(a, b), b) for a, b in bounds)


def padded(data: np.ndarray | None, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """The data cast, with zeros after it up to ``shape``; None is no data at all."""
    if data is not None and data.shape == shape:
        return data.astype(dtype, copy=False)
    whole = np.zeros(shape, dtype)
    if data is not None:
        whole[tuple(slice(0, n) for n in data.shape)] = data
    return whole


def _fetcher(data: Any, inside: Index) -> Callable[[], np.ndarray]:
    return lambda: np.asarray(data)[inside]


def _constant(value: np.ndarray) -> Callable[[], np.ndarray]:
    return lambda: value


def _smallest_factor(n: int) -> int:
    return next((f for f in range(2, math.isqrt(n) + 1) if n % f == 0), n)
