"""Page-aligned host memory, and the checksum of what passes through it."""

from __future__ import annotations

import mmap
import threading
import zlib
from typing import Any

import numpy as np

#: Alignment of buffers, offsets and lengths that O_DIRECT takes on every file system that has it.
PAGE = 4096
#: Bytes that are copied and summed at a time: whole pages, fewer than a core's cache.
STRETCH = 128 * PAGE


def round_up(nbytes: int) -> int:
    """The next multiple of a page; at least one page."""
    return max(-(-nbytes // PAGE), 1) * PAGE


def aligned(nbytes: int) -> np.ndarray:
    """A page-aligned buffer of bytes, zeroed, of at least ``nbytes`` rounded up to pages."""
    return np.frombuffer(mmap.mmap(-1, round_up(nbytes)), np.uint8)


def as_bytes(value: Any) -> np.ndarray:
    """The bytes of an array, flat; without a copy where it is contiguous."""
    array = np.ascontiguousarray(value)
    return array.reshape(-1).view(np.uint8) if array.size else np.empty(0, np.uint8)


def is_aligned(data: np.ndarray) -> bool:
    """Whether a buffer begins on a page."""
    return bool(data.ctypes.data % PAGE == 0)


def page_sums(data: np.ndarray) -> bytes:
    """The sum of each page's 64-bit words, modulo 2**64, as bytes.

    Any change of one bit, and pages that changed places, change the result. It runs at memory speed, several
    times as fast as a CRC.

    Args:
        data: bytes; what is missing to whole pages counts as zeros.
    """
    whole = data.size // PAGE * PAGE
    sums = [data[:whole].view(np.uint64).reshape(-1, PAGE // 8).sum(axis=1, dtype=np.uint64)]
    if whole < data.size:
        last = np.zeros(PAGE, np.uint8)
        last[: data.size - whole] = data[whole:]
        sums.append(last.view(np.uint64).sum(keepdims=True, dtype=np.uint64))
    return np.concatenate(sums).tobytes()


def copy_summed(out: np.ndarray, data: np.ndarray) -> bytes:
    """Copies bytes, and gives their :func:`page_sums`; a stretch at a time, while the processor's cache has it.

    Args:
        out: as many bytes as ``data``.
        data: bytes.
    """
    sums = []
    for start in range(0, data.size, STRETCH):
        copied = out[start : start + STRETCH]
        copied[:] = data[start : start + STRETCH]
        sums.append(page_sums(copied))
    return b"".join(sums)


def digest(blocks: list[bytes]) -> int:
    """One checksum from the page sums of consecutive blocks: their CRC-32."""
    value = 0
    for block in blocks:
        value = zlib.crc32(block, value)
    return value


class Arenas:
    """Page-aligned buffers that are used again and again, of ``budget`` bytes together; for several threads.

    Attributes:
        budget: bytes; one buffer that is larger is made all the same.
        in_use: bytes of the buffers that are out.
    """

    def __init__(self, budget: int) -> None:
        self.budget, self.in_use = budget, 0
        self._free: list[np.ndarray] = []
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> np.ndarray:
        """A buffer of at least ``nbytes``."""
        with self._lock:
            return self._take(nbytes)

    def give_back(self, arena: np.ndarray) -> None:
        """Takes a buffer back."""
        with self._lock:
            self.in_use -= arena.nbytes
            self._free.append(arena)

    def _take(self, nbytes: int) -> np.ndarray:
        fitting = [a for a in self._free if a.nbytes >= nbytes]
        found = min(fitting, key=lambda a: a.nbytes) if fitting else None
        self._free = [a for a in self._free if a is not found]
        while found is None and self._free and self.in_use + self._pooled() + nbytes > self.budget:
            self._free.pop()
        found = aligned(nbytes) if found is None else found
        self.in_use += found.nbytes
        return found

    def _pooled(self) -> int:
        return sum(a.nbytes for a in self._free)
