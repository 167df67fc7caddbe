"""What a store of pieces is: a piece is one leaf's shard on one device, as bytes in one file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Protocol, TypeVar

import numpy as np

from zeroj.errors import SpillError
from zeroj.plan.memory import show_bytes

#: What to do about a damaged or lost file, at the end of every message.
REMEDY = "The state in memory is not whole any more: go on from the last checkpoint."


class Pending(Protocol):
    """A read or write on its way."""

    def result(self) -> None:
        """Waits until it is done.

        Raises:
            SpillError: it failed, or what was read is not what was written.
        """


class Store(Protocol):
    """Pieces in files of one folder. Both engines have these guarantees.

    A piece is read only as this object wrote it: sizes and, unless that is switched off, checksums are kept in
    memory and compared at each read, so that no other file can be taken for data. Nothing is synced to the
    medium: after a crash the files are worthless, and a run goes on from its last checkpoint.

    One piece may be read or written by one request at a time; different pieces at once.
    """

    def reserve(self, sizes: Mapping[str, int]) -> None:
        """Makes room for pieces.

        Args:
            sizes: name of a piece -> its bytes. Names are leaf paths, with ``#`` and the device where needed.

        Raises:
            SpillError: there is no room; what was reserved and written before stays readable.
        """

    def write(self, name: str, data: np.ndarray) -> Pending:
        """Begins to write a piece; ``data`` (flat bytes) must not change until it is done."""

    def read(self, name: str, out: np.ndarray) -> Pending:
        """Begins to read a piece into ``out``: flat bytes of exactly the piece's size."""

    def path(self, name: str) -> str:
        """The file of a piece."""

    def close(self) -> None:
        """Waits for what is on its way, and frees threads and memory. The files stay."""


def leaf_of(name: str) -> str:
    """The leaf that a piece belongs to."""
    return name.split("#")[0]


class Reserved(Protocol):
    """What a store keeps of a piece: at least its size."""

    @property
    def nbytes(self) -> int:
        """Bytes that were reserved."""


R = TypeVar("R", bound=Reserved)


def reserved(pieces: Mapping[str, R], name: str, data: np.ndarray) -> R:
    """The store's entry for a piece that ``data`` is to be read into or written from.

    Raises:
        SpillError: no room was reserved for it, or ``data`` is not flat bytes of its size.
    """
    if name not in pieces:
        raise SpillError(f"No room was reserved for leaf {leaf_of(name)!r} (piece {name!r}).")
    piece = pieces[name]
    if data.nbytes != piece.nbytes or data.dtype != np.uint8:
        raise SpillError(
            f"Leaf {leaf_of(name)!r} (piece {name!r}): reserved {piece.nbytes} bytes, given {data.nbytes}."
        )
    return piece


def fault(name: str, path: str, expected: str, found: str) -> SpillError:
    """The error of one piece: leaf, path, expected, found, and what to do."""
    return SpillError(f"Leaf {leaf_of(name)!r} in {path}: expected {expected}, found {found}. {REMEDY}")


def os_fault(doing: str, name: str, path: str, nbytes: int, error: OSError) -> SpillError:
    """The error of one piece that the operating system refused to read or write."""
    said = error.strerror or str(error)
    return SpillError(
        f"{doing} leaf {leaf_of(name)!r} ({nbytes} bytes) in {path} failed: {said} (errno {error.errno}). {REMEDY}"
    )


def check_room(folder: str, sizes: Mapping[str, int], extra: int = 0) -> None:
    """Compares what is to be written with the free space.

    Args:
        folder: where.
        sizes: name of a piece -> bytes, of pieces for which there is no room yet.
        extra: bytes needed beside them for a while.

    Raises:
        SpillError: it does not fit; names the largest leaves.
    """
    need = sum(sizes.values()) + extra
    found = os.statvfs(folder)
    free = found.f_bavail * found.f_frsize
    if need <= free:
        return
    largest = sorted(sizes, key=lambda name: -sizes[name])[:5]
    listed = ", ".join(f"{leaf_of(name)} ({show_bytes(sizes[name])})" for name in largest)
    raise SpillError(
        f"Not enough space in {folder}: {len(sizes)} pieces of state need {need} bytes ({show_bytes(need)}), "
        f"{free} bytes ({show_bytes(free)}) are free. The largest: {listed}. Free space, choose another "
        "nvme_path, or use more devices."
    )
