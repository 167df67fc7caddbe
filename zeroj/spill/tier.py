"""Arrays whose shards lie in files: what stands in a training state in place of spilled leaves.

A :class:`SpilledArray` is immutable in meaning, like a ``jax.Array`` that may be donated: the files hold the
newest write alone, so the handles of an older state raise when they are read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from zeroj.config.spill import SpillSettings
from zeroj.errors import SpillError
from zeroj.spill.buffers import Arenas, aligned, as_bytes, round_up
from zeroj.spill.direct_store import DirectStore
from zeroj.spill.folder import RunFolder
from zeroj.spill.orbax_store import OrbaxStore
from zeroj.spill.store import REMEDY, Pending, Store

Bounds = tuple[tuple[int, int], ...]


class Tier:
    """The files of one state of one process.

    Attributes:
        settings: where and how.
        folder: the locked folder; deleted when nothing refers to this tier any more.
        store: the engine.
        lost: why the state in the files is not whole, or empty.
    """

    def __init__(self, settings: SpillSettings) -> None:
        self.settings = settings
        self.folder = RunFolder(settings.path)
        self.store: Store = _engine(settings, self.folder.path)
        self.lost = ""
        self._serials: dict[str, int] = {}

    def arrays(self, structs: dict[str, jax.ShapeDtypeStruct]) -> dict[str, SpilledArray]:
        """Makes room for arrays, none of them written yet.

        Args:
            structs: name -> shape, dtype and sharding.

        Raises:
            SpillError: there is too little space.
        """
        made = {
            name: SpilledArray(name, tuple(s.shape), np.dtype(s.dtype), s.sharding, self, 0)
            for name, s in structs.items()
        }
        self.store.reserve({shard.name: shard.nbytes for a in made.values() for shard in a.shards})
        self._serials.update(dict.fromkeys(made, 0))
        return made

    def check(self, array: SpilledArray) -> None:
        """Raises where the files do not hold this array.

        Raises:
            SpillError: it was overwritten by a later step, or the files are lost.
        """
        if self.lost:
            raise SpillError(f"The state in {self.folder.path} is lost: {self.lost} {REMEDY}")
        self.fresh(array)

    def fresh(self, array: SpilledArray) -> None:
        """Raises where the array was overwritten by a later step, even while a step is at work.

        Raises:
            SpillError: it was.
        """
        if self._serials[array.name] != array.serial:
            raise SpillError(
                f"Leaf {array.name!r} was overwritten in {self.folder.path} by a later step: like a donated array, "
                "a spilled state can be used once. Use the state that the last step returned."
            )

    def renew(self, array: SpilledArray) -> SpilledArray:
        """The handle of what is about to be written in place of an array."""
        self.fresh(array)
        self._serials[array.name] += 1
        return replace(array, serial=array.serial + 1)


@dataclass(frozen=True)
class Shard:
    """One distinct part of an array that this process holds: its piece, and the devices it belongs to.

    Attributes:
        name: the piece's name.
        bounds: where it lies in the array.
        devices: this process's devices that hold it.
        first: whether no other process holds it, or this process is the one to save it.
        nbytes: its bytes.
    """

    name: str
    bounds: Bounds
    devices: tuple[jax.Device, ...]
    first: bool
    nbytes: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return tuple(b - a for a, b in self.bounds)


@dataclass(frozen=True, eq=False)
class SpilledArray:
    """A global array whose shards lie in files of the processes that own their devices. ``np.asarray`` reads it.

    Attributes:
        name: "params/<path>" for an fp32 master, "opt_state/<path>" for the optimizer's state.
        shape: the stored (padded) global shape.
        dtype: its dtype.
        sharding: how it is sharded when it is on the devices.
        tier: the files.
        serial: which write of it this is.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: Sharding
    tier: Tier
    serial: int

    @cached_property
    def shards(self) -> tuple[Shard, ...]:
        """This process's distinct shards."""
        here: dict[Bounds, list[jax.Device]] = {}
        owner: dict[Bounds, Any] = {}
        everywhere: dict[Any, Any] = dict(self.sharding.devices_indices_map(self.shape))
        for device, index in everywhere.items():
            bounds = tuple(i.indices(n)[:2] for i, n in zip(index or (), self.shape, strict=True))
            owner.setdefault(bounds, device)
            if device.process_index == jax.process_index():
                here.setdefault(bounds, []).append(device)
        size = self.dtype.itemsize
        return tuple(
            Shard(
                f"{self.name}#{number}",
                bounds,
                tuple(devices),
                owner[bounds].process_index == jax.process_index(),
                math.prod(b - a for a, b in bounds) * size,
            )
            for number, (bounds, devices) in enumerate(here.items())
        )

    @property
    def nbytes(self) -> int:
        """Bytes of this process's files."""
        return sum(shard.nbytes for shard in self.shards)

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)

    @property
    def addressable_shards(self) -> list[StoredShard]:
        """This process's shards, each to be read from its file when it is asked for; as of a ``jax.Array``."""
        return [StoredShard(self, shard) for shard in self.shards]

    def read_shard(self, shard: Shard) -> np.ndarray:
        """One shard, on the host.

        Raises:
            SpillError: it cannot be read, or is not what was written.
        """
        self.tier.check(self)
        out = aligned(shard.nbytes)[: shard.nbytes]
        self.tier.store.read(shard.name, out).result()
        return out.view(self.dtype).reshape(shard.shape)

    def write_shard(self, shard: Shard, value: np.ndarray) -> Pending:
        """Begins to write one shard, which must not change until that is done."""
        return self.tier.store.write(shard.name, as_bytes(value))

    def write(self, value: jax.Array) -> None:
        """Writes the array's first or next contents from the devices, and waits."""
        by_device = {s.device: s.data for s in value.addressable_shards}
        pending = [self.write_shard(s, np.asarray(by_device[s.devices[0]])) for s in self.shards]
        for each in pending:
            each.result()

    def to_devices(self) -> jax.Array:
        """The array on the devices.

        Raises:
            SpillError: it cannot be read, or is not what was written.
        """
        return on_devices(self, [self.read_shard(shard) for shard in self.shards])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        whole = np.empty(self.shape, self.dtype)
        if sum(math.prod(s.shape) for s in self.shards) != whole.size:
            raise SpillError(
                f"Leaf {self.name!r} lies in files of several processes: read its shards instead."
            )
        for shard in self.shards:
            whole[tuple(slice(a, b) for a, b in shard.bounds)] = self.read_shard(shard)
        return whole if dtype is None else whole.astype(dtype)


@dataclass(frozen=True)
class StoredShard:
    """A shard in a file, with the attributes of a ``jax.Array``'s shard."""

    array: SpilledArray
    shard: Shard

    @property
    def index(self) -> tuple[slice, ...]:
        """Where it lies in the array."""
        return tuple(slice(a, b) for a, b in self.shard.bounds)

    @property
    def replica_id(self) -> int:
        """0 where this process is the one to save it."""
        return 0 if self.shard.first else 1

    @property
    def data(self) -> Any:
        """The shard; read when numpy asks for it."""
        return _Unread(self)


@dataclass(frozen=True)
class _Unread:
    stored: StoredShard

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        found = self.stored.array.read_shard(self.stored.shard)
        return found if dtype is None else found.astype(dtype)


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
        """Waits, copies to the devices, and gives the buffer back.

        Raises:
            SpillError: something could not be read, or is not what was written.
        """
        self.wait()
        made = [on_devices(a, views) for a, views in zip(self.arrays, self._views, strict=True)]
        jax.block_until_ready(made)
        self.release()
        return made

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


def on_devices(array: SpilledArray, shards: Sequence[np.ndarray]) -> jax.Array:
    """A global array from this process's shards on the host; they are copied, so that they may be reused."""
    by_device = [
        jax.device_put(_own(data, device), SingleDeviceSharding(device))
        for shard, data in zip(array.shards, shards, strict=True)
        for device in shard.devices
    ]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, by_device)


def _own(data: np.ndarray, device: Any) -> np.ndarray:
    """A copy for a CPU device, which takes aligned memory as it is instead of copying it; else the data itself."""
    if device.platform != "cpu":
        return data
    copy = aligned(data.nbytes)[: data.nbytes]
    copy[:] = as_bytes(data)
    return copy.view(data.dtype).reshape(data.shape)


def start_writes(array: SpilledArray, value: jax.Array) -> list[tuple[Pending, np.ndarray]]:
    """Begins to write an array from the devices; each write with the memory that must live until it is done."""
    by_device = {s.device: s.data for s in value.addressable_shards}
    begun = []
    for shard in array.shards:
        data = np.asarray(by_device[shard.devices[0]])
        begun.append((array.write_shard(shard, data), data))
    return begun


def is_spilled(value: Any) -> bool:
    """Whether a leaf of a state is in files."""
    return isinstance(value, SpilledArray)


def _engine(settings: SpillSettings, folder: str) -> Store:
    if not settings.direct:
        return OrbaxStore(folder, verify=settings.verify)
    return DirectStore(
        folder,
        block_size=settings.block_size,
        queue_depth=settings.queue_depth,
        threads=settings.threads,
        verify=settings.verify,
    )
