"""Params that a compiled step asks for while it runs: read ahead from files, in the order of the step before."""

from __future__ import annotations

import threading
import weakref
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from zeroj.errors import SpillError
from zeroj.plan.cuts import by_layer, param_window, parts_of, ticket_shape
from zeroj.plan.plan import Plan
from zeroj.plan.rules import NVME
from zeroj.spill.buffers import aligned, round_up
from zeroj.spill.store import Pending
from zeroj.spill.tier import Shard, SpilledArray


@dataclass
class _Slot:
    """A file on its way to host memory."""

    data: np.ndarray
    pending: Pending


@dataclass(frozen=True)
class _Asked:
    """What one number of a ticket stands for: files of one array, which make up one block."""

    index: int
    shards: tuple[Shard, ...]


class ParamReader:
    """Reads params for one compiled program, which asks for them by ticket (see :mod:`zeroj.plan.cuts`).

    :meth:`begin` and :meth:`end` stand around each run of the program. Its first run is read as it asks; every
    later one is read ahead in the order of the first. A read that fails gives zeros, so that no device waits for
    another in vain; :meth:`end` raises the error.

    Args:
        plan: the plan, with params in files.

    Attributes:
        window: bytes of host memory that hold what is read ahead, at most.
        ahead: how many reads were asked for ahead of their use in the last run.
        late: how many were not.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.window, _ = param_window(plan)
        self.dtypes: dict[str, np.dtype] = {x.path: plan.param_dtype(x) for x in plan.leaves}
        self.ahead = self.late = 0
        self._numbers: dict[int, _Asked] = {}
        self._tickets: dict[int, jax.Array] = {}
        self._arrays: Mapping[int, SpilledArray] = {}
        self._order: list[int] = []
        self._recording = True
        self._lock = threading.RLock()
        self._pool: dict[int, list[np.ndarray]] = {}
        self._error: Exception | None = None
        self._reset()

    def begin(self, arrays: Mapping[int, SpilledArray]) -> dict[int, jax.Array]:
        """Begins to read for one run of the program.

        Args:
            arrays: index into the plan's leaves -> the param's files, of every param in files.

        Returns:
            Index -> the ticket that stands for it in the program.

        Raises:
            SpillError: an array was overwritten by a later step, or is lost.
        """
        for array in arrays.values():
            array.tier.check(array)
        self._arrays = arrays
        if not self._tickets:
            self._number()
        self._reset()
        self.ahead = self.late = 0
        self._error = None
        self._recording = not self._order
        with self._lock:
            self._read_ahead()
        return self._tickets

    def end(self) -> None:
        """Ends a run: everything that the program made has been made.

        Raises:
            SpillError: a read failed, so that what the program made is worth nothing.
        """
        with self._lock:
            left = [slot for slots in self._slots.values() for slot in slots]
            self._reset()
        for slot in left:
            try:
                slot.pending.result()
            except SpillError:
                continue  # nobody asked for it; who does will be told
            self._give_back(slot.data)
        if self._error is not None:
            raise self._error

    def abandon(self) -> None:
        """Ends a run that failed for another reason, or for a read that did."""
        failed, self._error = self._error, None
        self.end()
        if failed is not None:
            raise failed

    def read(self, ticket: Any, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """What a ticket stands for, on the host; called by the running program.

        Args:
            ticket: numbers of one device's blocks.
            shape: the shape of them together.
            dtype: the dtype in which they lie in the files.
        """
        try:
            numbers = [int(n) for n in np.asarray(ticket).reshape(-1)]
            blocks = [self._block(number, dtype) for number in numbers]
            if len(blocks) == 1:
                return blocks[0].reshape(shape)
            return np.concatenate([b.reshape(1, *b.shape[1:]) for b in blocks]).reshape(shape)
        except Exception as error:
            self._error = self._error or error
            return np.zeros(shape, dtype)

    # -- one block ---------------------------------------------------------------------------------

    def _block(self, number: int, dtype: np.dtype) -> np.ndarray:
        asked = self._numbers[number]
        array = self._arrays[asked.index]
        held = [array.tier.store.held(shard.name) for shard in asked.shards]
        if held[0] is not None:
            found = [h for h in held if h is not None]
        else:
            with self._lock:
                slots = self._take(number)
            for slot in slots:
                slot.pending.result()
            found = [slot.data[: shard.nbytes] for slot, shard in zip(slots, asked.shards, strict=True)]
            with self._lock:
                self._read_ahead()
        parts = [f.view(dtype).reshape(s.shape) for f, s in zip(found, asked.shards, strict=True)]
        if len(parts) == 1:
            return parts[0] if held[0] is not None else self._handed(slots[0], asked.shards[0], dtype)
        assert array.cut is not None
        whole = np.concatenate(parts, axis=array.cut.dim)
        if held[0] is None:
            for slot in slots:
                self._give_back(slot.data)
        return whole

    def _take(self, number: int) -> list[_Slot]:
        """The reads of a block: those that were begun ahead, or new ones."""
        if self._recording:
            self._order.append(number)
        waiting = self._slots.get(number)
        if waiting:
            slots = [waiting.popleft() for _ in self._numbers[number].shards]
            self._bytes -= sum(slot.data.nbytes for slot in slots)
            self.ahead += 1
            return slots
        self._early[number] += 1
        self.late += 1
        return self._start(number)

    def _start(self, number: int) -> list[_Slot]:
        asked = self._numbers[number]
        store = self._arrays[asked.index].tier.store
        slots = []
        for shard in asked.shards:
            data = self._buffer(shard.nbytes)
            slots.append(_Slot(data, store.read(shard.name, data[: shard.nbytes])))
        return slots

    def _read_ahead(self) -> None:
        """Begins the next reads in the order of the first run, while there is room for them."""
        while not self._recording and self._next < len(self._order):
            number = self._order[self._next]
            if self._early[number]:  # it was asked for before its turn
                self._early[number] -= 1
                self._next += 1
                continue
            need = sum(round_up(shard.nbytes) for shard in self._numbers[number].shards)
            if self._bytes + need > self.window:
                return
            self._bytes += need
            self._next += 1
            self._slots.setdefault(number, deque()).extend(self._start(number))

    def _reset(self) -> None:
        self._slots: dict[int, deque[_Slot]] = {}
        self._early: Counter[int] = Counter()
        self._next, self._bytes = 0, 0

    # -- memory ------------------------------------------------------------------------------------

    def _buffer(self, nbytes: int) -> np.ndarray:
        size = round_up(nbytes)
        free = self._pool.get(size)
        return free.pop() if free else aligned(size)

    def _give_back(self, buffer: np.ndarray) -> None:
        self._pool.setdefault(buffer.nbytes, []).append(buffer)

    def _handed(self, slot: _Slot, shard: Shard, dtype: np.dtype) -> np.ndarray:
        """A buffer's data for the program; the buffer comes back when nothing refers to them any more."""
        data = np.frombuffer(slot.data.data[: shard.nbytes], dtype)
        weakref.finalize(data, self._give_back, slot.data)
        return data.reshape(shard.shape)

    # -- tickets -----------------------------------------------------------------------------------

    def _number(self) -> None:
        """Gives numbers to the blocks of all params in files, and makes their tickets."""
        start = 0
        for index, leaf in enumerate(self.plan.leaves):
            if leaf.param_memory != NVME:
                continue
            array = self._arrays[index]
            placement = self.plan.param_placement(leaf)
            parts = parts_of(self.plan, placement)
            shape = ticket_shape(self.plan, leaf)
            grid = np.arange(start, start + int(np.prod(shape)), dtype=np.int32).reshape(shape)
            start += grid.size
            layers = by_layer(self.plan.file_cuts[leaf.path])
            sizes = [n // p for n, p in zip(array.shape, parts, strict=True)]
            blocks: dict[int, list[Shard]] = {}
            for shard in array.shards:
                at = [a // n for (a, _), n in zip(shard.part, sizes, strict=True)]
                if layers:
                    at[0] = shard.bounds[0][0]
                blocks.setdefault(int(grid[tuple(at)]), []).append(shard)
            self._numbers |= {n: _Asked(index, tuple(shards)) for n, shards in blocks.items()}
            sharding = self.plan.sharding(placement.at(""))
            self._tickets[index] = jax.make_array_from_callback(shape, sharding, grid.__getitem__)


def ticket_structs(plan: Plan) -> dict[int, jax.ShapeDtypeStruct]:
    """Index into the plan's leaves -> its ticket's shape and sharding, of every param in files."""
    return {
        i: jax.ShapeDtypeStruct(
            ticket_shape(plan, leaf), np.int32, sharding=plan.sharding(plan.param_placement(leaf).at(""))
        )
        for i, leaf in enumerate(plan.leaves)
        if leaf.param_memory == NVME
    }
