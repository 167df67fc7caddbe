"""One update of state in files on its way: reads run ahead, parts are updated on the device, writes run behind."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from zeroj.optimizer.norms import Unfinished
from zeroj.optimizer.update import Arrays
from zeroj.plan.rules import NVME
from zeroj.spill.reading import Reading, arena_bytes
from zeroj.spill.tier import SpilledArray, is_spilled, start_writes

if TYPE_CHECKING:
    from zeroj.optimizer.spill import Part, SpilledUpdate

#: The files of one read, by the update's inputs.
Read = tuple[list[int], Reading]
#: Files, and what is to be written there.
Written = tuple[SpilledArray, jax.Array]


class Pass:
    """One update on its way.

    What is in flight is counted under a lock: a writer's thread, too, begins further reads, as soon as memory is free.
    """

    def __init__(self, update: SpilledUpdate, arrays: Arrays) -> None:
        self.update, self.arrays = update, arrays
        self.layout, self.settings = update.layout, update.settings
        self.values: list[Any] = [*arrays.masters, *[None] * self.layout.count, *arrays.inner]
        files = [v for v in (*arrays.params, *self.values) if is_spilled(v)]
        self.tiers = list({id(v.tier): v.tier for v in files}.values())
        for value in files:
            value.tier.check(value)
        self._queue = [(part, piece) for part in update.parts for piece in part.pieces]
        self._reads: deque[Read] = deque()
        self._writes: deque[Future[None]] = deque()
        self._lock = threading.RLock()
        self._next, self._writing = 0, 0
        self._largest = update.buffer_bytes // self.settings.buffer_count
        self._read_ahead()

    def cancel(self) -> None:
        """Gives up: nothing is changed."""
        while self._reads:
            _, reading = self._reads.popleft()
            reading.wait()
            reading.release()

    def run(self, grads: list[Any], loss: jax.Array, left: Unfinished) -> Arrays:
        """Updates everything.

        Args:
            grads: the gradients of trainable leaves; emptied on the way, so that each can be freed after its use.
            loss: the loss.
            left: what is left to do to gradients in host memory.

        Raises:
            SpillError: a read or write failed. The state is lost then, and says so when it is used again.
        """
        update, self._left = self.update, left
        self.values[self.layout.count : self.layout.inner_at] = grads
        grads.clear()
        self.values.append(loss)
        shared, outs = update.shared(self.values, left)
        for part in [update.resident, *update.parts]:
            update.program(part, shared, left)  # compiled before anything is changed
        params = list(self.arrays.params)
        self._mark("a step was interrupted while it updated the files.")
        try:
            self._do(update.resident, None, None, params, shared)
            for part, piece in self._queue:
                self._read_next()
                self._do(part, piece, self._reads[0], params, shared)
                if not self.settings.pipeline_write:
                    self._finish_all()
                self._read_ahead()
            self._finish_all()
        except BaseException as error:
            self._mark(f"a step was interrupted while it updated the files ({error}).")
            self._abandon()
            raise
        self._mark("")
        for output, value in outs.items():  # only now: the parts read what was there before
            self.values[output + self.layout.count if output >= self.layout.count else output] = value
        masters = self.values[: self.layout.count] if update.plan.has_master else params
        return Arrays(params, masters, self.values[self.layout.inner_at : self.layout.end])

    def _mark(self, lost: str) -> None:
        for tier in self.tiers:
            tier.lost = lost

    def _do(
        self, part: Part, piece: int | None, read: Read | None, params: list[Any], shared: list[Any]
    ) -> None:
        """Runs the program of a part, or of a piece of it, and puts its results in their places.

        Args:
            part: the part.
            piece: the number of the piece, or None.
            read: what is being read from files for it, by input.
            params: stored params, replaced.
            shared: what parts need of each other.
        """
        update, layout = self.update, self.layout
        first, last = piece in (None, 0), piece in (None, part.pieces[-1])
        found = {} if read is None else dict(zip(read[0], read[1].to_devices(), strict=True))
        if first:
            self._bring(part, params)
        inputs, old = update.inputs_of(part), update.updated_in_place(part)
        get = lambda i: found.pop(i) if i in found else self.values[i]  # noqa: E731
        given = [[get(i) for i in some] for some in inputs]
        if last:
            for i in (*inputs.donated, *inputs.kept):
                if layout.count <= i < layout.inner_at:
                    self.values[i] = None
        start = 0 if part.cut is None or piece is None else piece * part.cut.size
        before = [params[n] for n in old]
        if read is not None:
            self._make_room(self._largest)
        room = [] if update.rooms is None else update.rooms.take(update.room(part))
        program = update.program(part, shared, self._left)
        results, _ = program(*given, shared, before, room, self._left, np.int32(start))
        # A handle is renewed and put in its place before a writer's thread reads its next piece.
        with self._lock:
            pairs = self._keep(part, piece, iter(results), params)
        if read is not None:
            self._finish_later(part, pairs, results)
        if last:
            self._send_back(part, params)

    def _bring(self, part: Part, params: list[Any]) -> None:
        """Brings what is in host memory to the devices, and makes room for params that come from their masters."""
        update, layout = self.update, self.layout
        for i in part.inputs:
            if layout.memory(i) not in ("", NVME):
                self.values[i] = update.to_devices(i, self.values[i])
        if not update.plan.has_master:
            return
        in_place = update.updated_in_place(part)
        for output in part.outputs:
            if output >= layout.count or is_spilled(params[output]):
                continue
            if output in in_place:
                struct = layout.param_struct(output)
                if layout.param_memory(output):
                    params[output] = jax.device_put(params[output], struct.sharding)
                elif not update.donate:
                    params[output] = jax.numpy.copy(params[output])
            elif update.donate:
                params[output].delete()  # its successor comes from the master, and takes its room

    def _keep(self, part: Part, piece: int | None, made: Iterator[Any], params: list[Any]) -> list[Written]:
        """Puts results in their places, and gives those that belong into files, with the files."""
        update, layout = self.update, self.layout
        pairs: list[Written] = []

        def place(old: Any, new: Any) -> Any:
            if not is_spilled(old):
                return new
            handle = old if piece else old.tier.renew(old)
            pairs.append((handle if piece is None else handle.piece(piece), new))
            return handle

        for output in part.outputs:
            if output < layout.count:
                params[output] = place(params[output], next(made))
                if not update.plan.has_master:
                    self.values[output] = params[output]
                    continue
            index = output if output < layout.count else output + layout.count
            self.values[index] = place(self.values[index], next(made))
        return pairs

    def _finish_later(self, part: Part, pairs: list[Written], results: list[Any]) -> None:
        """Has results written, and the buffer of the oldest read given back once they are there."""
        _, reading = self._reads.popleft()
        if not pairs:
            jax.block_until_ready(results)
            reading.release()
            return
        nbytes = arena_bytes(array for array, _ in pairs)
        with self._lock:
            self._writing += nbytes
        self._writes.append(self.update.writers.submit(self._finish, part, pairs, reading, nbytes))

    def _send_back(self, part: Part, params: list[Any]) -> None:
        """Brings back to host memory what lives there."""
        layout, plan = self.layout, self.update.plan
        for i in part.inputs:
            kind = layout.memory(i)
            if kind not in ("", NVME) and not layout.count <= i < layout.inner_at:
                self.values[i] = _to_kind(self.values[i], kind)
        for output in part.outputs:
            if output < layout.count and layout.param_memory(output) not in ("", NVME):
                own = not plan.has_master
                params[output] = (
                    self.values[output] if own else _to_kind(params[output], layout.param_memory(output))
                )

    def _read_next(self) -> None:
        """Makes sure that the next part's read has begun, whatever has to end first."""
        while True:
            with self._lock:
                if self._reads:
                    return
                arrays = self._spilled(*self._queue[self._next])
                need = arena_bytes(arrays.values())
                if not self._writes or self._used() + need <= self.update.buffer_bytes:
                    self._start_read(arrays)
                    return
            self._finish_one()

    def _read_ahead(self) -> None:
        """Begins further reads, if they may run ahead, while there is room for them beside the largest part's write."""
        if not self.settings.pipeline_read:
            return
        with self._lock:
            while self._next < len(self._queue):
                arrays = self._spilled(*self._queue[self._next])
                need = arena_bytes(arrays.values()) + self._largest
                if self._used() + need > self.update.buffer_bytes:
                    return
                self._start_read(arrays)

    def _make_room(self, nbytes: int) -> None:
        """Waits until so many more bytes keep the buffers' bound, or nothing is being written."""
        while self._writes and self._used() + nbytes > self.update.buffer_bytes:
            self._finish_one()

    def _used(self) -> int:
        with self._lock:
            return self.update.arenas.in_use + self._writing

    def _start_read(self, arrays: dict[int, SpilledArray]) -> None:
        reading = Reading(list(arrays.values()), self.update.arenas)
        self._next += 1
        self._reads.append((list(arrays), reading))

    def _spilled(self, part: Part, piece: int | None) -> dict[int, SpilledArray]:
        files = {i: self.values[i] for i in part.inputs if is_spilled(self.values[i])}
        return files if piece is None else {i: array.piece(piece) for i, array in files.items()}

    def _finish_one(self) -> None:
        """Waits for the oldest write."""
        self._writes.popleft().result()

    def _finish_all(self) -> None:
        while self._writes:
            self._finish_one()

    def _finish(self, part: Part, pairs: list[Written], reading: Reading, nbytes: int) -> None:
        """Waits for results, whose inputs' buffer is free then, and writes their ``nbytes``; in a writer's thread."""
        update, values = self.update, [value for _, value in pairs]
        try:
            jax.block_until_ready(values)
        finally:
            reading.release()
        self._read_ahead()
        _write(pairs)
        if update.rooms is not None:
            update.rooms.give_back(update.room(part), values)
        with self._lock:
            self._writing -= nbytes
        self._read_ahead()

    def _abandon(self) -> None:
        """Waits for what is on its way, whose failures do not matter any more."""
        for write in self._writes:
            write.exception()
        for _, reading in self._reads:
            for pending in reading.pending:
                _settle(pending)
            reading.release()


def _write(pairs: list[Written]) -> None:
    begun = [each for array, value in pairs for each in start_writes(array, value)]
    errors = [e for e in (_settle(pending) for pending, _ in begun) if e is not None]
    if errors:
        raise errors[0]


def _settle(pending: Any) -> Exception | None:
    try:
        pending.result()
    except Exception as error:
        return error
    return None


def _to_kind(value: jax.Array, kind: str) -> jax.Array:
    moved = jax.device_put(value, value.sharding.with_memory_kind(kind))
    return moved
