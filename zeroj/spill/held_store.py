"""A store some of whose pieces stay in host memory ("max_in_cpu"): they are written and read there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from zeroj.spill.store import Pending, Store, reserved


class HeldStore:
    """Another store, and pieces in memory beside it; see :class:`zeroj.spill.store.Store`.

    Args:
        files: the store of all other pieces.
    """

    def __init__(self, files: Store) -> None:
        self.files = files
        self._names: set[str] = set()
        self._memory: dict[str, np.ndarray] = {}

    def hold(self, names: Iterable[str]) -> None:
        """Names pieces that are to stay in memory; before they are reserved."""
        self._names.update(names)

    def held(self, name: str) -> np.ndarray | None:
        """The bytes of a piece in memory, not to be changed; None where it is in files."""
        return self._memory.get(name)

    def reserve(self, sizes: Mapping[str, int]) -> None:
        """Makes room for pieces; see :class:`Store`."""
        self.files.reserve({name: size for name, size in sizes.items() if name not in self._names})
        self._memory |= {name: np.empty(sizes[name], np.uint8) for name in self._names & sizes.keys()}

    def write(self, name: str, data: np.ndarray) -> Pending:
        """Begins to write a piece; see :class:`Store`."""
        if name not in self._memory:
            return self.files.write(name, data)
        reserved(self._memory, name, data)[:] = data
        return _DONE

    def read(self, name: str, out: np.ndarray) -> Pending:
        """Begins to read a piece; see :class:`Store`."""
        if name not in self._memory:
            return self.files.read(name, out)
        out[:] = reserved(self._memory, name, out)
        return _DONE

    def path(self, name: str) -> str:
        """The file of a piece."""
        return self.files.path(name)

    def close(self) -> None:
        """Closes the files, and frees the memory; see :class:`Store`."""
        self.files.close()
        self._memory.clear()


class _Done:
    def result(self) -> None:
        """There is nothing to wait for."""


_DONE = _Done()
