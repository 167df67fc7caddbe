"""The Orbax engine: pieces as the zarr3 arrays that Orbax and TensorStore read, one uncompressed chunk each.

Orbax's own handlers make a new array, and sync it, at every save. That is right for a checkpoint and twice too
slow for state that is rewritten at every step: here TensorStore's arrays stay open, and nothing is synced.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorstore as ts

from zeroj.errors import SpillError
from zeroj.spill.store import REMEDY, Pending, check_room, fault, leaf_of, reserved

#: Files read or written at once by one store.
CONCURRENCY = 16
#: Bytes that TensorStore's checksum adds to a chunk.
CRC_BYTES = 4


@dataclass
class _Array:
    """One piece: its array, and whether it was written whole."""

    path: str
    nbytes: int
    store: Any
    written: bool = False


class OrbaxStore:
    """Pieces as zarr3 arrays of bytes. A piece is written to a new file that then takes the old one's place.

    Args:
        folder: an existing folder, this store's own.
        verify: whether each chunk carries a CRC-32C, checked at each read.
        concurrency: files read or written at once.
    """

    def __init__(self, folder: str, *, verify: bool = True, concurrency: int = CONCURRENCY) -> None:
        self.folder, self.verify = folder, verify
        self._arrays: dict[str, _Array] = {}
        self._context = ts.Context(
            {
                "cache_pool": {"total_bytes_limit": 0},
                "file_io_concurrency": {"limit": concurrency},
                "data_copy_concurrency": {"limit": concurrency},
                "file_io_sync": False,
            }
        )

    def reserve(self, sizes: Mapping[str, int]) -> None:
        """Describes each piece's array, after a look at the free space; see :class:`Store`."""
        fresh = {n: s for n, s in sizes.items() if n not in self._arrays or self._arrays[n].nbytes != s}
        spare = max(fresh.values(), default=0)  # a chunk stands beside the one that it replaces
        check_room(self.folder, {name: size + CRC_BYTES for name, size in fresh.items()}, spare)
        made: dict[str, _Array] = {}
        try:
            for name, size in fresh.items():
                base = re.sub(r"[^\w.#-]", "_", name)[-100:]
                path = os.path.join(self.folder, f"{len(self._arrays) + len(made):05d}-{base}")
                made[name] = _Array(path, size, None)
                made[name].store = self._create(name, path, size)
        except SpillError:
            for array in made.values():
                shutil.rmtree(array.path, ignore_errors=True)
            raise
        for name, array in made.items():
            if name in self._arrays:
                shutil.rmtree(self._arrays[name].path, ignore_errors=True)
            self._arrays[name] = array

    def write(self, name: str, data: np.ndarray) -> Pending:
        """Begins to write a piece; see :class:`Store`."""
        array = reserved(self._arrays, name, data)
        array.written = False
        future = array.store.write(data, can_reference_source_data_indefinitely=True)
        return _Moving(self, name, array, future, writing=True)

    def read(self, name: str, out: np.ndarray) -> Pending:
        """Begins to read a piece; see :class:`Store`."""
        array = reserved(self._arrays, name, out)
        if not array.written:
            raise fault(
                name, array.path, f"{array.nbytes} bytes", "nothing: the piece was never written whole"
            )
        self.check_size(name, array)
        target = ts.array(out, copy=False, write=True, context=self._context)
        return _Moving(self, name, array, target.write(array.store), writing=False)

    def path(self, name: str) -> str:
        """The file of a piece's bytes."""
        return os.path.join(self._arrays[name].path, "c", "0")

    def close(self) -> None:
        """Frees the arrays; see :class:`Store`. What is on its way ends by itself."""
        self._arrays.clear()

    def check_size(self, name: str, array: _Array) -> None:
        """Compares a chunk's size with that of what was written.

        Raises:
            SpillError: it differs, or the file is gone.
        """
        path = os.path.join(array.path, "c", "0")
        expected = array.nbytes + (CRC_BYTES if self.verify else 0)
        found = f"{os.stat(path).st_size} bytes" if os.path.exists(path) else "no file"
        if found != f"{expected} bytes":
            raise fault(name, path, f"{expected} bytes", found)

    def _create(self, name: str, path: str, nbytes: int) -> Any:
        checksum = [{"name": "crc32c"}] if self.verify else []
        metadata = {
            "shape": [nbytes],
            "data_type": "uint8",
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [max(nbytes, 1)]}},
            "codecs": [{"name": "bytes"}, *checksum],
        }
        spec = {
            "driver": "zarr3",
            "kvstore": {"driver": "file", "path": f"{path}/"},
            "metadata": metadata,
            "store_data_equal_to_fill_value": True,
            "fill_missing_data_reads": False,
            "create": True,
        }
        try:
            return ts.open(ts.Spec(spec), context=self._context).result()
        except Exception as error:
            raise SpillError(f"Making leaf {leaf_of(name)!r} in {path} failed: {_cause(error)}") from error


@dataclass
class _Moving:
    """A read or write of TensorStore's, its errors put in zeroj's words."""

    owner: OrbaxStore
    name: str
    array: _Array
    future: Any
    writing: bool

    def result(self) -> None:
        """Waits; see :class:`Pending`."""
        try:
            self.future.result()
        except Exception as error:
            path = os.path.join(self.array.path, "c", "0")
            doing = "Writing" if self.writing else "Reading"
            raise SpillError(
                f"{doing} leaf {leaf_of(self.name)!r} in {path} failed; expected {self.array.nbytes} bytes as they "
                f"were written, found: {_cause(error)}. {REMEDY}"
            ) from error
        if self.writing:
            self.owner.check_size(self.name, self.array)
            self.array.written = True


def _cause(error: Exception) -> str:
    return str(error).split(" [tensorstore_spec=")[0].split(" [source locations=")[0]
