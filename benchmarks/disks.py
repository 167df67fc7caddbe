"""What the stores of spilled state are measured beside: the raw disk, TensorStore as it comes, a simulated disk."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import tensorstore as ts

from zeroj.spill.direct_store import supports_direct
from zeroj.spill.folder import RunFolder
from zeroj.spill.store import Pending

PIECE, COUNT, BLOCK, WORKERS = 64 << 20, 16, 4 << 20, 8
NAMES = {f"piece{i}": PIECE for i in range(COUNT)}
#: Bytes per second, each way, of a disk that reads and writes at the same time.
STEADY = 0.5e9


class Raw:
    """Preallocated files, O_DIRECT, a pool of threads, and nothing else."""

    def __init__(self, folder: str) -> None:
        flags = os.O_RDWR | os.O_CREAT | (os.O_DIRECT if supports_direct(folder) else 0)
        self.handles = {name: os.open(f"{folder}/{name}", flags) for name in NAMES}
        for handle in self.handles.values():
            os.posix_fallocate(handle, 0, PIECE)
        self.pool = ThreadPoolExecutor(WORKERS)

    def _blocks(self, move: Callable[..., int], name: str, data: np.ndarray) -> _All:
        handle = self.handles[name]
        jobs = [
            self.pool.submit(move, handle, [data[at : at + BLOCK].data], at) for at in range(0, PIECE, BLOCK)
        ]
        return _All(jobs)

    def write(self, name: str, data: np.ndarray) -> _All:
        """Begins to write a file."""
        return self._blocks(os.pwritev, name, data)

    def read(self, name: str, out: np.ndarray) -> _All:
        """Begins to read a file."""
        return self._blocks(os.preadv, name, out)


class _All:
    def __init__(self, futures: list[Future[int]]) -> None:
        self.futures = futures

    def result(self) -> None:
        """Waits."""
        assert sum(f.result() for f in self.futures) == PIECE


class Bare:
    """TensorStore as it comes: zarr3 arrays of bytes, one chunk each, opened once."""

    def __init__(self, folder: str, sync: bool, mode: str | None, concurrency: int) -> None:
        context: dict[str, Any] = {"file_io_sync": sync, "file_io_concurrency": {"limit": concurrency}}
        if mode:
            context["file_io_mode"] = {"mode": mode}
        made = ts.Context(context)
        self.stores = {name: self._open(f"{folder}/{name}/", made) for name in NAMES}

    def _open(self, path: str, context: Any) -> Any:
        grid = {"name": "regular", "configuration": {"chunk_shape": [PIECE]}}
        metadata = {"shape": [PIECE], "data_type": "uint8", "chunk_grid": grid, "codecs": [{"name": "bytes"}]}
        spec = {
            "driver": "zarr3",
            "kvstore": {"driver": "file", "path": path},
            "metadata": metadata,
            "store_data_equal_to_fill_value": True,  # else all data are compared with zeros first
            "create": True,
        }
        return ts.open(ts.Spec(spec), context=context).result()

    def write(self, name: str, data: np.ndarray) -> Any:
        """Begins to write an array."""
        return self.stores[name].write(data, can_reference_source_data_indefinitely=True)

    def read(self, name: str, out: np.ndarray) -> Any:
        """Begins to read an array into the same buffers as the others, which is faster than into new memory."""
        return ts.array(out, copy=False, write=True).write(self.stores[name])


class Steady:
    """A simulated disk: host memory, at :data:`STEADY` bytes per second each way, reads and writes side by side."""

    def __init__(self) -> None:
        self._memory: dict[str, np.ndarray] = {}
        self._ways = {way: ThreadPoolExecutor(1) for way in ("read", "write")}

    def reserve(self, sizes: Mapping[str, int]) -> None:
        """Makes room."""
        self._memory |= {name: np.zeros(size, np.uint8) for name, size in sizes.items()}

    def write(self, name: str, data: np.ndarray) -> Pending:
        """Begins to write a piece."""
        return self._ways["write"].submit(self._move, self._memory[name], data)

    def read(self, name: str, out: np.ndarray) -> Pending:
        """Begins to read a piece."""
        return self._ways["read"].submit(self._move, out, self._memory[name])

    def _move(self, out: np.ndarray, data: np.ndarray) -> None:
        until = time.perf_counter() + data.nbytes / STEADY
        out[:] = data
        time.sleep(max(0.0, until - time.perf_counter()))


@contextlib.contextmanager
def folders() -> Iterator[Callable[[str], str]]:
    run = RunFolder(os.environ.get("ZEROJ_NVME", os.path.join(tempfile.gettempdir(), "zeroj-bench")))
    with contextlib.closing(run):

        def make(name: str) -> str:
            path = os.path.join(run.path, name)
            os.mkdir(path)
            return path

        yield make
