"""How long the parts of a step take, on the wall."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

#: The parts, in their order: the wait for the caller's next batch, its way to the devices, making the program,
#: running it.
PHASES = ("data", "transfer", "compile", "step")


class Clock:
    """Adds up the seconds of each phase. Switched off it measures nothing and waits for nothing.

    Measuring makes the host wait for the devices at the end of a phase, so that work is counted where it was
    asked for; a run that is measured does not run ahead of its devices.

    Args:
        on: whether to measure.
    """

    def __init__(self, on: bool) -> None:
        self.on = on
        self.last: dict[str, float] = {}
        self._sums: dict[str, float] = {}
        self._steps = 0
        self._ended: float | None = None

    def batch_arrived(self) -> None:
        """Counts the time since the last step under "data": the caller was making the batch."""
        self.last = {}
        if self.on and self._ended is not None:
            self._add("data", time.perf_counter() - self._ended)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[Callable[[Any], Any]]:
        """Counts a block under ``name``. What is yielded waits for the arrays that the block made."""
        if not self.on:
            yield lambda made: made
            return
        begin = time.perf_counter()
        yield jax.block_until_ready
        self._add(name, time.perf_counter() - begin)

    def step_ended(self) -> None:
        """Closes one step."""
        self._steps += 1
        self._ended = time.perf_counter()

    def take(self) -> dict[str, float]:
        """Mean seconds of each phase over the steps since the last call; "compile" is a sum: it happens once."""
        steps = max(self._steps, 1)
        means = {name: total / (1 if name == "compile" else steps) for name, total in self._sums.items()}
        self._sums, self._steps = {}, 0
        return {name: means[name] for name in PHASES if name in means}

    def _add(self, name: str, seconds: float) -> None:
        self.last[name] = self.last.get(name, 0.0) + seconds
        self._sums[name] = self._sums.get(name, 0.0) + seconds
