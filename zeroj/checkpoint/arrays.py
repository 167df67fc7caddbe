"""Sharded arrays on disk, in the user's shapes.

Each array is one zarr3 array of the user's shape inside an OCDBT database (few large files, whatever the number
of leaves and devices). A chunk is a divisor of one device's shard, so every chunk is written once, by one
process, and the padding of a shard is cut off simply because it lies outside the array. A reader asks for any
slice: what lies beyond the array is zero, which is the padding of the plan it reads for. Nobody ever holds a
whole leaf. Every chunk carries a CRC-32C, checked at each read.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import tensorstore as ts
from jax.sharding import Sharding, SingleDeviceSharding

from zeroj.errors import CheckpointError

#: Chunks are split until they are no larger: it bounds what a reader of a small slice must read beside it.
CHUNK_BYTES = 32 * 2**20
#: Bytes of reads or writes in flight at once, per process.
IN_FLIGHT_BYTES = 256 * 2**20
#: One process writes its own database here; they are merged, by reference, when all have finished.
PROCESS_FOLDER = "process_"

Index = tuple[slice, ...]


@dataclass(frozen=True)
class ArraySpec:
    """One stored array: its name, its shape (the user's), its dtype, and the shape of its chunks."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    chunk: tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """One process's part of an array: where it goes, and how to get it on the host."""

    spec: ArraySpec
    index: Index
    fetch: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        """Bytes to write."""
        return math.prod(i.stop - i.start for i in self.index) * self.spec.dtype.itemsize


@dataclass(frozen=True)
class Target:
    """Where a stored array shall go: its name, the padded shape, dtype and sharding of the result."""

    name: str
    shape: tuple[int, ...]
    padded: tuple[int, ...]
    dtype: np.dtype
    sharding: Sharding


def array_spec(name: str, value: jax.Array, shape: Sequence[int]) -> ArraySpec:
    """Describes how ``value``, padded or not, is stored as an array of the user's ``shape``."""
    chunk = value.sharding.shard_shape(value.shape)
    return ArraySpec(name, tuple(shape), np.dtype(value.dtype), chunk_shape(chunk, value.dtype.itemsize))


def chunk_shape(shard: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """The largest divisor of a shard, split along its first dims, that has at most ``CHUNK_BYTES``."""
    chunk = [max(int(n), 1) for n in shard]
    for dim in range(len(chunk)):
        while chunk[dim] > 1 and math.prod(chunk) * itemsize > CHUNK_BYTES:
            chunk[dim] //= _smallest_factor(chunk[dim])
    return tuple(chunk)


def pieces(spec: ArraySpec, value: jax.Array, *, copy: bool) -> list[Piece]:
    """This process's parts of ``value``, each element of the array in exactly one part of one process.

    Args:
        spec: from :func:`array_spec`.
        value: the array.
        copy: whether to copy the data to the host now, so that ``value`` may be donated or deleted at once.
    """
    found = []
    for shard in value.addressable_shards:
        index = _clip(shard.index, spec.shape)
        if shard.replica_id == 0 and all(i.stop > i.start for i in index):
            fetch = _fetcher(shard.data, tuple(slice(0, i.stop - i.start) for i in index))
            if copy:
                fetch = _constant(np.array(fetch(), copy=True))
            found.append(Piece(spec, index, fetch))
    return found


async def write(folder: str, process: int, specs: Sequence[ArraySpec], parts: list[Piece]) -> None:
    """Writes this process's parts into its own database below ``folder``.

    Args:
        folder: the folder of the arrays.
        process: this process's index.
        specs: arrays whose description this process writes even if it has no part of them.
        parts: the parts; emptied on the way, so that host copies are freed as they are written.
    """
    context = _context()
    base = f"{folder}/{PROCESS_FOLDER}{process}"
    stores: dict[str, Any] = {}
    opening = {spec.name: ts.open(_create(base, spec), context=context) for spec in specs}
    parts.reverse()
    pending: deque[tuple[int, Any]] = deque()
    in_flight = 0
    for name, store in opening.items():
        stores[name] = await store
    while parts:
        piece = parts.pop()
        if piece.spec.name not in stores:
            stores[piece.spec.name] = await ts.open(_create(base, piece.spec), context=context)
        pending.append((piece.nbytes, stores[piece.spec.name][piece.index].write(piece.fetch())))
        in_flight += piece.nbytes
        del piece
        while pending and in_flight > IN_FLIGHT_BYTES:
            nbytes, future = pending.popleft()
            await future
            in_flight -= nbytes
    for _, future in pending:
        await future


def merge(folder: str, processes: Iterable[int]) -> None:
    """Joins the databases of all processes into the one of ``folder``, which refers to their files."""
    context = _context()
    whole = ts.KvStore.open(_database(folder), context=context).result()
    transaction = ts.Transaction(atomic=True)
    parts = [
        ts.KvStore.open(_database(f"{folder}/{PROCESS_FOLDER}{i}"), context=context).result()
        for i in processes
    ]
    for copy in [part.experimental_copy_range_to(whole.with_transaction(transaction)) for part in parts]:
        copy.result()
    transaction.commit_async().result()


def read(folder: str, targets: Sequence[Target]) -> Iterator[jax.Array]:
    """Reads arrays onto this process's devices, slice by slice, padded with zeros.

    Args:
        folder: the folder of the arrays.
        targets: what to read; the results come in this order.

    Yields:
        Arrays with exactly the sharding and dtype of their target.

    Raises:
        CheckpointError: an array or a part of it is missing or damaged; names both leaf and file.
    """
    context = _context()
    waiting: deque[_Reading] = deque()
    remaining = deque(targets)
    in_flight = 0
    while remaining or waiting:
        while remaining and (not waiting or in_flight < IN_FLIGHT_BYTES):
            reading = _Reading(folder, remaining.popleft(), context)
            waiting.append(reading)
            in_flight += reading.nbytes
        reading = waiting.popleft()
        in_flight -= reading.nbytes
        yield reading.result()


def place(value: np.ndarray, target: Target) -> jax.Array:
    """Brings a host array in the user's shape to its target; every device is sent its own slice alone."""

    def piece(index: Index) -> np.ndarray:
        bounds = [i.indices(n)[:2] for i, n in zip(index, target.padded, strict=True)]
        inside = _clip([slice(*b) for b in bounds], target.shape)
        return _padded(value[inside], tuple(b - a for a, b in bounds), target.dtype)

    return jax.make_array_from_callback(target.padded, target.sharding, piece)


def open_array(folder: str, name: str, context: Any = None) -> Any:
    """Opens one stored array for reading; a tensorstore in the user's shape."""
    spec = {"driver": "zarr3", "kvstore": {**_database(folder), "path": f"{name}/"}}
    spec["fill_missing_data_reads"] = False
    try:
        return ts.open(spec, open=True, read=True, context=context or _context()).result()
    except Exception as error:
        raise CheckpointError(_damage(folder, name, error)) from error


class _Reading:
    """The slices of one array on their way to this process's devices."""

    def __init__(self, folder: str, target: Target, context: Any) -> None:
        self._folder, self._target = folder, target
        store = open_array(folder, target.name, context)
        by_index: dict[tuple[tuple[int, int], ...], list[jax.Device]] = {}
        for device, index in target.sharding.addressable_devices_indices_map(target.padded).items():
            assert index is not None
            bounds = tuple(i.indices(n)[:2] for i, n in zip(index, target.padded, strict=True))
            by_index.setdefault(bounds, []).append(device)
        self._slices = []
        for bounds, devices in by_index.items():
            inside = _clip([slice(*b) for b in bounds], target.shape)
            empty = any(i.stop <= i.start for i in inside)
            self._slices.append((bounds, devices, None if empty else store[inside].read()))
        self.nbytes = sum(math.prod(b - a for a, b in bounds) for bounds in by_index) * target.dtype.itemsize

    def result(self) -> jax.Array:
        target = self._target
        kind = target.sharding.memory_kind
        by_device = []
        for bounds, devices, future in self._slices:
            shape = tuple(b - a for a, b in bounds)
            data = _padded(self._wait(future), shape, target.dtype)
            by_device += [jax.device_put(data, SingleDeviceSharding(d, memory_kind=kind)) for d in devices]
        return jax.make_array_from_single_device_arrays(target.padded, target.sharding, by_device)

    def _wait(self, future: Any) -> np.ndarray | None:
        if future is None:
            return None
        try:
            return np.asarray(future.result())
        except Exception as error:
            raise CheckpointError(_damage(self._folder, self._target.name, error)) from error


def _damage(folder: str, name: str, error: Exception) -> str:
    return (
        f"The leaf {name!r} of the checkpoint in {folder} is missing or damaged: {error}\n"
        "Restore an older step, or a copy of this one; `zeroj inspect --verify` lists all damage."
    )


def _context() -> Any:
    return ts.Context({"cache_pool": {"total_bytes_limit": 64 * 2**20}})


def _database(folder: str) -> dict[str, Any]:
    base = f"{folder}/" if "://" in folder else {"driver": "file", "path": f"{folder}/"}
    return {"driver": "ocdbt", "base": base}


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


def _clip(index: Sequence[slice], shape: Sequence[int]) -> Index:
    """The part of an index that lies inside an array of ``shape``."""
    bounds = [
        (i.start or 0, n if i.stop is None else min(i.stop, n)) for i, n in zip(index, shape, strict=True)
    ]
    return tuple(slice(min(a, b), b) for a, b in bounds)


def _padded(data: np.ndarray | None, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """The data cast, with zeros after it up to ``shape``."""
    if data is not None and data.shape == shape:
        return data.astype(dtype, copy=False)
    whole = np.zeros(shape, dtype)
    if data is not None:
        whole[tuple(slice(0, n) for n in data.shape)] = data
    return whole


def _fetcher(data: jax.Array, inside: Index) -> Callable[[], np.ndarray]:
    return lambda: np.asarray(data)[inside]


def _constant(value: np.ndarray) -> Callable[[], np.ndarray]:
    return lambda: value


def _smallest_factor(n: int) -> int:
    return next((f for f in range(2, math.isqrt(n) + 1) if n % f == 0), n)
