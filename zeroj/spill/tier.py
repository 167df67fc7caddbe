"""Arrays whose shards lie in files: what stands in a training state in place of spilled leaves.

A :class:`SpilledArray` is immutable in meaning, like a ``jax.Array`` that may be donated: the files hold the
newest write alone, so the handles of an older state raise when they are read.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from zeroj.config.spill import SpillSettings
from zeroj.errors import SpillError
from zeroj.plan.cuts import Cut
from zeroj.spill.buffers import aligned, as_bytes
from zeroj.spill.engines import engine_of
from zeroj.spill.folder import RunFolder
from zeroj.spill.held_store import HeldStore
from zeroj.spill.store import REMEDY, Pending

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
        self.store = HeldStore(engine_of(settings, self.folder.path))
        self.lost = ""
        self._serials: dict[str, int] = {}

    def arrays(
        self,
        structs: dict[str, jax.ShapeDtypeStruct],
        cuts: Mapping[str, Cut] | None = None,
        held: Collection[str] = (),
    ) -> dict[str, SpilledArray]:
        """Makes room for arrays, none of them written yet.

        Args:
            structs: name -> shape, dtype and sharding.
            cuts: name -> how its files are cut; what is not here is not.
            held: names of arrays that stay in host memory.

        Raises:
            SpillError: there is too little space.
        """
        made = {
            name: SpilledArray(
                name, tuple(s.shape), np.dtype(s.dtype), s.sharding, self, 0, (cuts or {}).get(name)
            )
            for name, s in structs.items()
        }
        self.store.hold(shard.name for name in held for shard in made[name].shards)
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
        newer = replace(array, serial=array.serial + 1)
        newer.__dict__["shards"] = array.shards  # which do not change
        return newer


@dataclass(frozen=True)
class Shard:
    """One distinct part of an array that this process holds: its piece, and the devices it belongs to.

    Attributes:
        name: the piece's name.
        bounds: where it lies in the array.
        devices: this process's devices that hold it.
        part: the bounds of the whole of those devices' part; more than ``bounds`` where files are cut.
        first: whether no other process holds it, or this process is the one to save it.
        nbytes: its bytes.
    """

    name: str
    bounds: Bounds
    devices: tuple[jax.Device, ...]
    part: Bounds
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
        cut: how each device's part is cut into files; None: it is one file.
        only: the number of the one piece that this handle is of, or None: of all.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: Sharding
    tier: Tier
    serial: int
    cut: Cut | None = None
    only: int | None = None

    def piece(self, number: int) -> SpilledArray:
        """One piece as an array of its own; the cut's dim is neither sharded nor padded."""
        assert self.cut is not None and self.only is None
        return replace(self, shape=_resized(self.shape, self.cut), only=number)

    @property
    def piece_shape(self) -> tuple[int, ...]:
        """The shape of one file's part."""
        shape = self.shape if self.cut is None or self.only is not None else _resized(self.shape, self.cut)
        return tuple(self.sharding.shard_shape(shape))

    @cached_property
    def shards(self) -> tuple[Shard, ...]:
        """This process's distinct shards, in the order of its devices; of each of them piece by piece."""
        here: dict[Bounds, list[jax.Device]] = {}
        owner: dict[Bounds, Any] = {}
        everywhere: dict[Any, Any] = dict(self.sharding.devices_indices_map(self.shape))
        for device, index in everywhere.items():
            bounds = tuple(i.indices(n)[:2] for i, n in zip(index or (), self.shape, strict=True))
            owner.setdefault(bounds, device)
            if device.process_index == jax.process_index():
                here.setdefault(bounds, []).append(device)
        return tuple(
            Shard(
                f"{self.name}#{number}{suffix}",
                bounds,
                tuple(devices),
                part,
                owner[part].process_index == jax.process_index(),
                math.prod(b - a for a, b in bounds) * self.dtype.itemsize,
            )
            for number, (part, devices) in enumerate(here.items())
            for suffix, bounds in self._pieces(part)
        )

    def _pieces(self, part: Bounds) -> list[tuple[str, Bounds]]:
        """Of one device's part the files' names and bounds."""
        cut = self.cut
        if cut is None:
            return [("", part)]
        if self.only is not None:
            return [(f".{self.only}", part)]

        def bounds(number: int) -> Bounds:
            start = number * cut.size
            return (*part[: cut.dim], (start, start + cut.size), *part[cut.dim + 1 :])

        return [(f".{number}", bounds(number)) for number in range(cut.count)]

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
        for pending, _ in start_writes(self, value):
            pending.result()

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


def on_devices(array: SpilledArray, shards: Sequence[np.ndarray]) -> jax.Array:
    """A global array from this process's shards on the host.

    A CPU device takes aligned memory as it is: the shards must not change as long as the array is used.
    """
    parts: dict[Bounds, tuple[tuple[jax.Device, ...], list[np.ndarray]]] = {}
    for shard, data in zip(array.shards, shards, strict=True):
        parts.setdefault(shard.part, (shard.devices, []))[1].append(data)
    by_device = [
        jax.device_put(whole, SingleDeviceSharding(device))
        for devices, pieces in parts.values()
        for whole in [_joined(array.cut, pieces)]
        for device in devices
    ]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, by_device)


def _joined(cut: Cut | None, pieces: list[np.ndarray]) -> np.ndarray:
    """One device's part."""
    if len(pieces) == 1 or cut is None:
        return pieces[0]
    return np.concatenate(pieces, axis=cut.dim)


def start_writes(array: SpilledArray, value: jax.Array) -> list[tuple[Pending, np.ndarray]]:
    """Begins to write an array from the devices; each write with the memory that must live until it is done."""
    by_device = {s.device: s.data for s in value.addressable_shards}
    begun, parts = [], {}
    for shard in array.shards:
        if shard.part not in parts:
            parts[shard.part] = np.asarray(by_device[shard.devices[0]])
        inside = tuple(
            slice(a - first, b - first) for (a, b), (first, _) in zip(shard.bounds, shard.part, strict=True)
        )
        data = as_bytes(parts[shard.part][inside])
        begun.append((array.tier.store.write(shard.name, data), data))
    return begun


def _resized(shape: tuple[int, ...], cut: Cut) -> tuple[int, ...]:
    return (*shape[: cut.dim], cut.size, *shape[cut.dim + 1 :])


def is_spilled(value: Any) -> bool:
    """Whether a leaf of a state is in files."""
    return isinstance(value, SpilledArray)
