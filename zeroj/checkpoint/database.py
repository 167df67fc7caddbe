"""Arrays on disk: one zarr3 array per leaf inside an OCDBT database, through TensorStore.

OCDBT packs all leaves and shards of a process into a few large files, whatever their number. Every chunk
carries a CRC-32C, which each read checks; so does every node of the database's index.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import tensorstore as ts
from jax.sharding import SingleDeviceSharding

from zeroj import _compat
from zeroj.checkpoint.arrays import ArraySpec, Piece, Target, clip, padded
from zeroj.errors import CheckpointError
from zeroj.spill.tier import SpilledArray

#: Bytes of reads or writes in flight at once, per process.
IN_FLIGHT_BYTES = 64 * 2**20
#: Priority of the threads that write in the background, as ``nice`` counts.
BACKGROUND_NICE = 19
#: Each process writes a database of its own here; they are merged, by reference, when all have finished.
PROCESS_FOLDER = "process_"


async def write(folder: str, process: int, specs: Sequence[ArraySpec], parts: list[Piece]) -> None:
    """Writes this process's parts into its own database below ``folder``.

    Args:
        folder: the folder of the arrays.
        process: this process's index.
        specs: arrays whose description this process writes even if it has no part of them.
        parts: the parts; emptied on the way, so that host copies are freed as they are written.
    """
    context = _background()
    base = f"{folder}/{PROCESS_FOLDER}{process}"
    mine = {spec.name: spec for spec in [*specs, *(part.spec for part in parts)]}
    opening = {name: ts.open(_create(base, spec), context=context) for name, spec in mine.items()}
    stores = {name: await store for name, store in opening.items()}
    parts.reverse()
    pending: deque[tuple[int, Any]] = deque()
    in_flight = 0
    while parts:
        piece = parts.pop()
        pending.append((piece.nbytes, stores[piece.spec.name][piece.index].write(piece.fetch())))
        in_flight += piece.nbytes
        while pending and in_flight > IN_FLIGHT_BYTES:
            nbytes, future = pending.popleft()
            await future
            in_flight -= nbytes
    for _, future in pending:
        await future


def give_way() -> None:
    """Lets training have the cores first: this thread, and the pool's that it starts, run when others do not.

    Only Linux knows a priority for each thread; elsewhere nothing happens.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # forbidden in some sandboxes, and no reason to lose a save
            thread = threading.get_native_id()
            nice = max(BACKGROUND_NICE, os.getpriority(os.PRIO_PROCESS, thread))
            os.setpriority(os.PRIO_PROCESS, thread, nice)


def merge(folder: str, processes: Iterable[int]) -> None:
    """Joins the databases of all processes into the one of ``folder``, which refers to their files."""
    context = _context()
    whole = ts.KvStore.open(_database(folder), context=context).result()
    transaction = ts.Transaction(atomic=True)
    copies = []
    for i in processes:
        part = ts.KvStore.open(_database(f"{folder}/{PROCESS_FOLDER}{i}"), context=context).result()
        copies.append(part.experimental_copy_range_to(whole.with_transaction(transaction)))
    for copy in copies:
        copy.result()
    transaction.commit_async().result()


def read(folder: str, targets: Sequence[Target]) -> Iterator[Any]:
    """Reads arrays onto this process's devices, slice by slice, padded with zeros.

    Args:
        folder: the folder of the arrays.
        targets: what to read; the results come in this order.

    Yields:
        Arrays with exactly the sharding and dtype of their target, in files where that says so.

    Raises:
        CheckpointError: an array or a part of it is missing or damaged; names both leaf and file.
    """
    context = _context()
    remaining, waiting = deque(targets), deque[_Reading]()
    in_flight = freed = 0
    while remaining or waiting:
        while remaining and (not waiting or in_flight < IN_FLIGHT_BYTES):
            waiting.append(_Reading(folder, remaining.popleft(), context))
            in_flight += waiting[-1].nbytes
        reading = waiting.popleft()
        in_flight -= reading.nbytes
        placed = reading.result()
        freed += reading.nbytes
        del reading
        if (
            freed > IN_FLIGHT_BYTES
        ):  # buffers of many sizes come and go: glibc would keep a third of a large state
            _compat.give_back_memory()
            freed = 0
        yield placed


class StoredArray:
    """One stored array, for reading slices onto the host.

    Attributes:
        shape: the user's shape.
        dtype: its dtype.
    """

    def __init__(self, folder: str, name: str, context: Any = None) -> None:
        self._folder, self._name = folder, name
        spec: dict[str, Any] = {"driver": "zarr3", "kvstore": {**_database(folder), "path": f"{name}/"}}
        # zarr would take a missing chunk for zeros; every chunk is written, so a missing one is a loss
        spec["fill_missing_data_reads"] = False
        opening = ts.open(spec, open=True, read=True, context=context or _context())
        self._store = self.wait(opening)
        self.shape: tuple[int, ...] = tuple(self._store.shape)
        self.dtype = np.dtype(self._store.dtype.numpy_dtype)

    def start(self, index: Any = ...) -> Any:
        """Begins to read a slice; give the result to :meth:`wait`."""
        return self._store[index].read()

    def read(self, index: Any = ...) -> np.ndarray:
        """Reads a slice.

        Raises:
            CheckpointError: a part of it is missing or damaged.
        """
        return np.asarray(self.wait(self.start(index)))

    def chunks(self) -> Iterator[tuple[slice, ...]]:
        """The indices of all chunks, in the order of the array."""
        layout = self._store.chunk_layout.read_chunk.shape or ()
        counts = [-(-n // c) for n, c in zip(self.shape, layout, strict=True)]
        for cell in np.ndindex(*counts):
            yield clip([slice(i * c, (i + 1) * c) for i, c in zip(cell, layout, strict=True)], self.shape)

    def wait(self, future: Any) -> Any:
        """The result of a read.

        Raises:
            CheckpointError: it is missing or damaged.
        """
        try:
            return future.result()
        except Exception as error:
            cause = str(error).split(" [tensorstore_spec=")[0]
            raise CheckpointError(
                f"The leaf {self._name!r} of the checkpoint in {self._folder} is missing or damaged: {cause}"
                f"{_file_named_in(self._folder, cause)}\n"
                "Restore an older step, or another copy of this one; inspect with verify lists all damage."
            ) from error


class _Reading:
    """The slices of one array on their way to this process's devices."""

    def __init__(self, folder: str, target: Target, context: Any) -> None:
        self._target, self._store = target, StoredArray(folder, target.name, context)
        if self._store.shape != target.shape:
            raise CheckpointError(
                f"The leaf {target.name!r} in {folder} has shape {self._store.shape}, but the manifest says "
                f"{target.shape}: one of the two files is damaged."
            )
        by_index: dict[tuple[tuple[int, int], ...], list[jax.Device]] = {}
        everywhere = {} if target.into else target.sharding.addressable_devices_indices_map(target.padded)
        if target.into is not None:
            by_index = {shard.bounds: list(shard.devices) for shard in target.into.shards}
        for device, index in everywhere.items():
            bounds = tuple(i.indices(n)[:2] for i, n in zip(index or (), target.padded, strict=True))
            by_index.setdefault(bounds, []).append(device)
        self._slices = []
        for bounds, devices in by_index.items():
            inside = clip([slice(*b) for b in bounds], target.shape)
            empty = any(i.stop <= i.start for i in inside)
            self._slices.append((bounds, devices, None if empty else self._store.start(inside)))
        self.nbytes = sum(math.prod(b - a for a, b in bounds) for bounds in by_index) * target.dtype.itemsize

    def result(self) -> Any:
        target = self._target
        if target.into is not None:
            return self._to_files(target.into)
        by_device = []
        for bounds, devices, future in self._slices:
            found = None if future is None else np.asarray(self._store.wait(future))
            data = padded(found, tuple(b - a for a, b in bounds), target.dtype)
            by_device += [
                jax.device_put(data, SingleDeviceSharding(d, memory_kind=target.sharding.memory_kind))
                for d in devices
            ]
        return jax.make_array_from_single_device_arrays(target.padded, target.sharding, by_device)

    def _to_files(self, into: SpilledArray) -> SpilledArray:
        """From the checkpoint's files to the state's, without passing through a device."""
        written = []
        shards = {shard.bounds: shard for shard in into.shards}
        for bounds, _, future in self._slices:
            found = None if future is None else np.asarray(self._store.wait(future))
            data = padded(found, tuple(b - a for a, b in bounds), self._target.dtype)
            written.append(
                (into.write_shard(shards[bounds], data), data)
            )  # the data lives until it is written
        for pending, _ in written:
            pending.result()
        return into


def _file_named_in(folder: str, cause: str) -> str:
    """The file that holds the chunk which an error message names, as text to append; best effort."""
    quoted = cause.split('"')[1::2]
    for key in quoted:
        file = _file_of(folder, key.encode())
        if file:
            return f" (file {folder}/{file})"
    return ""


def _file_of(folder: str, key: bytes) -> str:
    base = ts.KvStore.open({"driver": "file", "path": f"{folder}/"}).result()
    try:
        pending = [(b"", ts.ocdbt.dump(base).result()["versions"][-1]["root"]["location"])]
        while pending:
            prefix, node = pending.pop()
            for entry in ts.ocdbt.dump(base, node).result()["entries"]:
                found = prefix + entry.get("key", b"")
                if found == key and "indirect_value" in entry:
                    _, below, file, *_ = str(entry["indirect_value"]).split(":")
                    return below + file
                if "location" in entry:
                    pending.append((prefix + entry.get("subtree_common_prefix", b""), entry["location"]))
    except (ValueError, KeyError, IndexError):
        pass  # the index itself is damaged: the cause names its file already
    return ""


def _context() -> Any:
    return ts.Context({"cache_pool": {"total_bytes_limit": 64 * 2**20}})


def _background() -> Any:
    """Half of the cores at most: a save is written beside a training step, which needs the others."""
    limit = {"limit": max(1, (os.cpu_count() or 2) // 2)}
    return ts.Context(
        {
            "cache_pool": {"total_bytes_limit": 64 * 2**20},
            "data_copy_concurrency": limit,
            "file_io_concurrency": limit,
        }
    )


def _database(folder: str) -> dict[str, Any]:
    return {"driver": "ocdbt", "base": {"driver": "file", "path": f"{folder}/"}}


def _create(folder: str, spec: ArraySpec) -> Any:
    metadata = {
        "shape": list(spec.shape),
        "data_type": spec.dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(spec.chunk)}},
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
    }
    return ts.Spec(
        {
            "driver": "zarr3",
            "kvstore": {**_database(folder), "path": f"{spec.name}/"},
            "metadata": metadata,
            "store_data_equal_to_fill_value": True,
            "create": True,
        }
    )
