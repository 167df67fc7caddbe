"""One update of state in files on its way: reads run ahead, parts are updated on the device, writes run behind."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import jax

from zeroj.optimizer.update import Arrays
from zeroj.spill.tier import Reading, SpilledArray, Tier, arena_bytes, is_spilled, start_writes

if TYPE_CHECKING:
    from zeroj.optimizer.spill import Part, SpilledUpdate


class Pass:
    """One update on its way."""

    def __init__(self, update: SpilledUpdate, arrays: Arrays) -> None:
        self.update, self.arrays = update, arrays
        self.layout, self.settings = update.layout, update.settings
        self.values: list[Any] = [*arrays.masters, *[None] * self.layout.count, *arrays.inner]
        self.tier = _tier(self.values)
        for value in filter(is_spilled, self.values):
            self.tier.check(value)
        self._reads: deque[tuple[list[int], Reading]] = deque()
        self._writes: deque[tuple[int, Future[None]]] = deque()
        self._next, self._writing = 0, 0
        if self.settings.pipeline_read:
            self._read_ahead()

    def cancel(self) -> None:
        """Gives up: nothing is changed."""
        while self._reads:
            _, reading = self._reads.popleft()
            reading.wait()
            reading.release()

    def run(self, grads: list[Any], loss: jax.Array) -> Arrays:
        """Updates everything.

        Args:
            grads: the gradients of trainable leaves; emptied on the way, so that each can be freed after its use.
            loss: the loss.

        Raises:
            SpillError: a read or write failed. The state is lost then, and says so when it is used again.
        """
        update = self.update
        self.values[self.layout.count : self.layout.inner_at] = grads
        grads.clear()
        self.values.append(loss)
        shared, outs = update.shared(self.values)
        for part in [update.resident, *update.parts]:
            update.program(part, shared)  # compiled before anything is changed
        params = list(self.arrays.params)
        self.tier.lost = "a step was interrupted while it updated the files."
        try:
            self._do(update.resident, {}, params, shared)
            for part in update.parts:
                self._read_next()
                indices, reading = self._reads.popleft()
                found = dict(zip(indices, reading.to_devices(), strict=True))
                if self.settings.pipeline_read:
                    self._read_ahead()
                self._do(part, found, params, shared)
                self._finish_writes(0 if not self.settings.pipeline_write else None)
            self._finish_writes(0)
        except BaseException as error:
            self.tier.lost = f"a step was interrupted while it updated the files ({error})."
            self._abandon()
            raise
        self.tier.lost = ""
        for output, value in outs.items():  # only now: the parts read what was there before
            self.values[output + self.layout.count if output >= self.layout.count else output] = value
        masters = self.values[: self.layout.count] if update.plan.has_master else params
        return Arrays(params, masters, self.values[self.layout.inner_at : self.layout.end])

    def _do(self, part: Part, found: dict[int, Any], params: list[Any], shared: list[Any]) -> None:
        """Runs one part's program, and puts its results in their places."""
        update, layout = self.update, self.layout
        donated, kept, free = update.inputs_of(part)
        get = lambda i: found.pop(i) if i in found else self.values[i]  # noqa: E731
        given = [[get(i) for i in some] for some in (donated, kept, free)]
        for i in (*donated, *kept):
            if layout.count <= i < layout.inner_at:
                self.values[i] = None
        if update.plan.has_master and update.donate:
            for output in part.outputs:
                if output < layout.count:
                    params[output].delete()  # its successor comes from the master, and takes its room
        results, _ = update.program(part, shared)(*given, shared)
        made = iter(results)
        pairs: list[tuple[SpilledArray, Any]] = []
        for output in part.outputs:
            index = output
            if output < layout.count:
                params[output] = next(made)
                if not update.plan.has_master:
                    continue
            else:
                index = output + layout.count
            old, new = self.values[index], next(made)
            if is_spilled(old):
                self.values[index] = self.tier.renew(old)
                pairs.append((self.values[index], new))
            else:
                self.values[index] = new
        if pairs:
            nbytes = arena_bytes(array for array, _ in pairs)
            self._writing += nbytes
            self._writes.append((nbytes, update.writers.submit(_write, pairs)))

    def _read_next(self) -> None:
        """Makes sure that the next part's read has begun, whatever has to end first."""
        if self._reads:
            return
        arrays = self._spilled(self.update.parts[self._next])
        need = arena_bytes(arrays.values())
        self._finish_writes(max(self.update.buffer_bytes - self.update.arenas.in_use - need, 0))
        self._start_read(arrays)

    def _read_ahead(self) -> None:
        """Begins further reads while there is room for them beside the largest part's write."""
        reserve = self.update.buffer_bytes // self.settings.buffer_count
        while self._next < len(self.update.parts):
            arrays = self._spilled(self.update.parts[self._next])
            used = self.update.arenas.in_use + self._writing + arena_bytes(arrays.values())
            if used > self.update.buffer_bytes - reserve:
                return
            self._start_read(arrays)

    def _start_read(self, arrays: dict[int, SpilledArray]) -> None:
        self._next += 1
        self._reads.append((list(arrays), Reading(list(arrays.values()), self.update.arenas)))

    def _spilled(self, part: Part) -> dict[int, SpilledArray]:
        return {i: self.values[i] for i in part.inputs if is_spilled(self.values[i])}

    def _finish_writes(self, allowed: int | None) -> None:
        """Waits until at most ``allowed`` bytes are being written; None: until the buffers' bound is kept."""
        if allowed is None:
            allowed = self.update.buffer_bytes - self.update.arenas.in_use
        while self._writes and self._writing > allowed:
            nbytes, write = self._writes.popleft()
            write.result()
            self._writing -= nbytes

    def _abandon(self) -> None:
        """Waits for what is on its way, whose failures do not matter any more."""
        for _, write in self._writes:
            write.exception()
        for _, reading in self._reads:
            for pending in reading.pending:
                _settle(pending)
            reading.release()


def _write(pairs: list[tuple[SpilledArray, Any]]) -> None:
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


def _tier(values: list[Any]) -> Tier:
    return next(value.tier for value in values if is_spilled(value))
