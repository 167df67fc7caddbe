"""Arrays read from files into buffers that are used again, on their way to the devices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import jax
import numpy as np

from zeroj.spill.buffers import Arenas, round_up
from zeroj.spill.store import Pending
from zeroj.spill.tier import SpilledArray, on_devices


class Reading:
    """Arrays on their way from files to one buffer in host memory, and from there to the devices."""

    def __init__(self, arrays: Sequence[SpilledArray], arenas: Arenas) -> None:
        self.arrays, self._arenas = list(arrays), arenas
        self._views: list[list[np.ndarray]] = []
        self.pending: list[Pending] = []
        self._arena: np.ndarray | None = arenas.take(arena_bytes(self.arrays))
        start = 0
        for array in self.arrays:
            array.tier.fresh(array)
            self._views.append([])
            for shard in array.shards:
                view = self._arena[start : start + shard.nbytes]
                start += round_up(shard.nbytes)
                self._views[-1].append(view.view(array.dtype).reshape(shard.shape))
                self.pending.append(array.tier.store.read(shard.name, view))

    def to_devices(self) -> list[jax.Array]:
        """Waits for the files, and gives what was read to the devices.

        The buffer may only be released when nothing uses the arrays any more: it is a CPU device's memory of them.

        Raises:
            SpillError: something could not be read, or is not what was written.
        """
        self.wait()
        return [on_devices(a, views) for a, views in zip(self.arrays, self._views, strict=True)]

    def wait(self) -> None:
        """Waits for the files."""
        for each in self.pending:
            each.result()

    def release(self) -> None:
        """Gives the buffer back; nothing may use it any more."""
        self._views.clear()
        if self._arena is not None:
            self._arenas.give_back(self._arena)
            self._arena = None


def arena_bytes(arrays: Iterable[SpilledArray]) -> int:
    """Bytes of the buffer that these arrays are read into: each shard begins on a page."""
    return sum(round_up(shard.nbytes) for array in arrays for shard in array.shards)
