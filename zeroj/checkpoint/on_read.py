"""Arrays on disk of which only the slices that are asked for are read: cast, or stacked, as they are read."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class CastOnRead:
    """An array on disk that is read and cast one slice at a time.

    Args:
        source: the array, such as a memory map.
        dtype: what its slices are cast to.
    """

    source: np.ndarray
    dtype: np.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self.source.shape

    @property
    def ndim(self) -> int:
        """Its number of dims."""
        return self.source.ndim

    def __getitem__(self, index: Any) -> np.ndarray:
        return np.asarray(self.source[index], dtype=self.dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.source, dtype=self.dtype if dtype is None else dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class StackOnRead:
    """Arrays of one shape and dtype as one with a leading dim, of which each slice is read when it is asked for.

    Args:
        sources: the arrays, such as memory maps of each layer's tensor.
    """

    sources: tuple[np.ndarray, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return (len(self.sources), *self.sources[0].shape)

    @property
    def ndim(self) -> int:
        """Its number of dims."""
        return len(self.shape)

    @property
    def dtype(self) -> np.dtype:
        """Its dtype."""
        return self.sources[0].dtype

    def __getitem__(self, index: Any) -> np.ndarray:
        first, *rest = index if isinstance(index, tuple) else (index,)
        if not isinstance(first, slice):
            return np.asarray(self.sources[first][tuple(rest)])
        parts = [np.asarray(source[tuple(rest)]) for source in self.sources[first]]
        return np.stack(parts) if parts else np.asarray(self)[index]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.stack(self.sources).astype(self.dtype if dtype is None else dtype)
