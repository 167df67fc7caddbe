"""Memory that results of an update are made in, used again once they are written.

A CPU device takes page-aligned host memory for an input as it is, but a program may not write its results there,
and new memory for them costs more than the whole update: the system clears every page of it. So there results are
made in the memory of earlier results that are in their files by now. Other devices put them into page-locked
host memory, which JAX uses again by itself.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

import jax


class Rooms:
    """Arrays whose contents nobody needs, to be donated to programs."""

    def __init__(self) -> None:
        self._free: dict[jax.ShapeDtypeStruct, list[jax.Array]] = {}
        self._lock = threading.Lock()

    def take(self, structs: Iterable[jax.ShapeDtypeStruct]) -> list[jax.Array]:
        """An array for each shape, dtype and sharding."""
        return [self._one(s) for s in structs]

    def give_back(self, structs: Iterable[jax.ShapeDtypeStruct], arrays: Iterable[jax.Array]) -> None:
        """Takes what was made in the memory of arrays of these shapes, and is not needed any more."""
        with self._lock:
            for struct, array in zip(structs, arrays, strict=True):
                self._free.setdefault(struct, []).append(array)

    def _one(self, struct: jax.ShapeDtypeStruct) -> jax.Array:
        with self._lock:
            if free := self._free.get(struct):
                return free.pop()
        return jax.numpy.zeros(struct.shape, struct.dtype, device=struct.sharding)
