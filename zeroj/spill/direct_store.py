"""The direct engine: preallocated files, O_DIRECT, page-aligned buffers, several requests in flight."""

from __future__ import annotations

import errno
import os
import re
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from zeroj.errors import SpillError
from zeroj.spill.buffers import PAGE, aligned, copy_summed, digest, is_aligned, page_sums, round_up
from zeroj.spill.store import Pending, check_room, fault, os_fault, reserved

#: Threads of one store at most, whatever queue_depth and threads multiply to.
MOST_THREADS = 64


@dataclass
class _File:
    """One piece's file: ``checksum`` is that of the last write; None before the first."""

    path: str
    nbytes: int
    written: bool = False
    checksum: int | None = None


class DirectStore:
    """Pieces in preallocated files, one each, read and written past the page cache.

    ``queue_depth * threads`` requests of ``block_size`` bytes are in flight at once; a piece larger than a block
    is shared among them. Where the file system has no O_DIRECT (``direct`` is then False) the page cache is used.

    Args:
        folder: an existing folder, this store's own.
        block_size: bytes of one request; rounded up to pages.
        queue_depth: requests in flight per thread of ``threads``.
        threads: see ``queue_depth``.
        verify: whether to keep checksums of what is written and to check them at each read.

    Raises:
        SpillError: the folder cannot be written.
    """

    def __init__(
        self,
        folder: str,
        *,
        block_size: int = 1 << 20,
        queue_depth: int = 8,
        threads: int = 1,
        verify: bool = True,
    ) -> None:
        self.folder, self.block, self.verify = folder, round_up(block_size), verify
        self.direct = supports_direct(folder)
        self._files: dict[str, _File] = {}
        self._workers = ThreadPoolExecutor(
            min(queue_depth * threads, MOST_THREADS), thread_name_prefix="zeroj-spill"
        )
        self._bounce = threading.local()

    def reserve(self, sizes: Mapping[str, int]) -> None:
        """Makes a file of full size for each piece, its space taken; see :class:`Store`."""
        fresh = {n: s for n, s in sizes.items() if n not in self._files or self._files[n].nbytes != s}
        check_room(self.folder, {name: round_up(size) for name, size in fresh.items()})
        made: dict[str, _File] = {}
        try:
            for name, size in fresh.items():
                base = re.sub(r"[^\w.#-]", "_", name)[-100:]
                path = os.path.join(self.folder, f"{len(self._files) + len(made):05d}-{base}.bin")
                made[name] = _File(path, size)
                _allocate(name, path, round_up(size))
        except SpillError:
            for file in made.values():
                _remove(file.path)
            raise
        for name, file in made.items():
            if name in self._files:
                _remove(self._files[name].path)
            self._files[name] = file

    def write(self, name: str, data: np.ndarray) -> Pending:
        """Begins to write a piece; see :class:`Store`."""
        file = reserved(self._files, name, data)
        file.written, file.checksum = False, None  # until this write is whole, there is no data
        return self._start(_Job(self, name, file, data, writing=True))

    def read(self, name: str, out: np.ndarray) -> Pending:
        """Begins to read a piece; see :class:`Store`."""
        file = reserved(self._files, name, out)
        if not file.written:
            raise fault(name, file.path, f"{file.nbytes} bytes", "nothing: the piece was never written whole")
        return self._start(_Job(self, name, file, out, writing=False))

    def path(self, name: str) -> str:
        """The file of a piece."""
        return self._files[name].path

    def tuned(self, **options: Any) -> DirectStore:
        """Another store of the same files with other options; only one of the two may be at work."""
        other = DirectStore(self.folder, **options)
        other._files = self._files
        return other

    def close(self) -> None:
        """Waits, and ends the threads; see :class:`Store`."""
        self._workers.shutdown(wait=True)

    def _start(self, job: _Job) -> Pending:
        share = max(1, min(job.blocks, self._workers._max_workers))
        job.running = share
        for _ in range(share):
            self._workers.submit(job.run)
        return job.future

    def bounce(self) -> np.ndarray:
        """This thread's own page-aligned buffer of one block."""
        if not hasattr(self._bounce, "buffer"):
            self._bounce.buffer = aligned(self.block)
        return self._bounce.buffer


@dataclass
class _Job:
    """One piece on its way, its blocks taken by several threads."""

    store: DirectStore
    name: str
    file: _File
    data: np.ndarray
    writing: bool
    future: Future[None] = field(default_factory=Future)
    running: int = 0
    error: Exception | None = None

    def __post_init__(self) -> None:
        self.blocks = -(-self.file.nbytes // self.store.block)
        self.sums: list[bytes] = [b""] * self.blocks
        # Of a read: a write that begins before it ends takes the file's own away.
        self._expected = self.file.checksum
        self._next, self._lock = 0, threading.Lock()

    def run(self) -> None:
        """Takes blocks until none is left; the last thread to end settles the job."""
        try:
            self._blocks()
        except OSError as error:
            doing = "Writing" if self.writing else "Reading"
            self.error = os_fault(doing, self.name, self.file.path, self.file.nbytes, error)
        except Exception as error:
            self.error = error
        with self._lock:
            self.running -= 1
            last = self.running == 0
        if last:
            self._settle()

    def _blocks(self) -> None:
        flags = (os.O_RDWR if self.writing else os.O_RDONLY) | (os.O_DIRECT if self.store.direct else 0)
        handle = os.open(self.file.path, flags)
        try:
            found, expected = os.fstat(handle).st_size, round_up(self.file.nbytes)
            if found != expected:
                raise fault(self.name, self.file.path, f"{expected} bytes", f"{found} bytes")
            while self.error is None and (index := self._take()) < self.blocks:
                self._block(handle, index)
        finally:
            os.close(handle)

    def _take(self) -> int:
        with self._lock:
            self._next += 1
            return self._next - 1

    def _block(self, handle: int, index: int) -> None:
        start = index * self.store.block
        part = self.data[start : start + self.store.block]
        whole = part.nbytes // PAGE * PAGE if is_aligned(part) else 0
        sums = self._pages(handle, part[:whole], start)
        self.sums[index] = sums + self._rest(handle, part[whole:], start + whole)

    def _pages(self, handle: int, data: np.ndarray, start: int) -> bytes:
        """Moves whole, aligned pages; gives their sums."""
        if not data.nbytes:
            return b""
        self._move(handle, data, start)
        return page_sums(data) if self.store.verify else b""

    def _rest(self, handle: int, data: np.ndarray, start: int) -> bytes:
        """Moves other memory by way of an aligned buffer; gives its pages' sums."""
        if not data.nbytes:
            return b""
        buffer = self.store.bounce()[: round_up(data.nbytes)]
        inside = buffer[: data.nbytes]
        if not self.writing:
            self._move(handle, buffer, start)
            return self._copy(data, inside)
        sums = self._copy(inside, data)
        buffer[data.nbytes :] = 0
        self._move(handle, buffer, start)
        return sums

    def _copy(self, out: np.ndarray, data: np.ndarray) -> bytes:
        if self.store.verify:
            return copy_summed(out, data)
        out[:] = data
        return b""

    def _move(self, handle: int, data: np.ndarray, start: int) -> None:
        (self._put if self.writing else self._get)(handle, data, start)

    def _put(self, handle: int, data: np.ndarray, start: int) -> None:
        done = 0
        while done < data.nbytes:
            count = os.pwritev(handle, [data[done:].data], start + done)
            if count <= 0 or (self.store.direct and count % PAGE):
                raise fault(
                    self.name, self.file.path, f"{data.nbytes} bytes written at {start}", f"{done + count}"
                )
            done += count

    def _get(self, handle: int, out: np.ndarray, start: int) -> None:
        done = 0
        while done < out.nbytes:
            count = os.preadv(handle, [out[done:].data], start + done)
            if count <= 0 or (self.store.direct and count % PAGE):
                found = f"{max(start + done + count, 0)} bytes"
                raise fault(self.name, self.file.path, f"{round_up(self.file.nbytes)} bytes", found)
            done += count

    def _settle(self) -> None:
        try:
            self.error = self.error or self._verdict()
        except Exception as error:  # whatever happens, nobody may wait for ever
            self.error = error
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(None)

    def _verdict(self) -> Exception | None:
        checksum = digest(self.sums) if self.store.verify else None
        if self.writing:
            self.file.checksum, self.file.written = checksum, True
        elif self._expected is not None and checksum is not None and checksum != self._expected:
            return fault(self.name, self.file.path, f"checksum {self._expected:#010x}", f"{checksum:#010x}")
        return None


def supports_direct(folder: str) -> bool:
    """Whether files of a folder can be written past the page cache; made sure of by doing it.

    Raises:
        SpillError: nothing can be written there at all.
    """
    path = os.path.join(folder, f".probe-{os.getpid()}-{threading.get_ident()}")
    buffer = aligned(PAGE)
    try:
        for flags in (os.O_DIRECT, 0):
            try:
                handle = os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o600)
                try:
                    os.pwritev(handle, [buffer.data], 0)
                    os.preadv(handle, [buffer.data], 0)
                finally:
                    os.close(handle)
                return bool(flags)
            except OSError as error:
                if not flags or error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP):
                    raise SpillError(f"Nothing can be written in {folder}: {error.strerror}.") from error
    finally:
        _remove(path)
    return False


def _allocate(name: str, path: str, nbytes: int) -> None:
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(handle, 0, nbytes)
        finally:
            os.close(handle)
    except OSError as error:
        raise os_fault("Reserving space for", name, path, nbytes, error) from error


def _remove(path: str) -> None:
    if os.path.exists(path):
        os.unlink(path)
