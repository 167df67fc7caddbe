"""A machine that is taken away: save at the next step's end, and leave with a code that says "start me again"."""

from __future__ import annotations

import signal
import types
from typing import Any, NoReturn

import jax
from jax.experimental import multihost_utils

from zeroj.errors import CheckpointError

#: The exit code of a run that was preempted and has saved: EX_TEMPFAIL of sysexits.h, "try again".
EXIT_PREEMPTED = 75


class Preemption:
    """Notices SIGTERM, so that a training loop can save and leave.

    With several processes all of them stop at the same step, whichever was told: JAX's preemption service agrees
    on it, which ``jax.distributed.initialize`` starts. Then call :meth:`requested` once per step on every process.

    Example:
        >>> with zj.Preemption() as preemption:
        ...     for batch in batches:
        ...         state, metrics = step(state, batch)
        ...         if preemption.requested():
        ...             checkpoints.save(state, plan, wait=True)
        ...             preemption.exit()
    """

    def __init__(self) -> None:
        self._told = False
        self._steps = 0
        self._before: Any = None

    def __enter__(self) -> Preemption:
        if jax.process_count() == 1:
            try:
                self._before = signal.signal(signal.SIGTERM, self._note)
            except ValueError as error:
                raise CheckpointError("Enter Preemption in the main thread: only it gets signals.") from error
        return self

    def __exit__(self, *exc: object) -> None:
        if jax.process_count() == 1:
            signal.signal(signal.SIGTERM, self._before if self._before is not None else signal.SIG_DFL)

    def requested(self) -> bool:
        """Whether to save now and leave. Call it once after every step, on every process."""
        self._steps += 1
        if jax.process_count() > 1 and not self._told:
            self._told = bool(multihost_utils.reached_preemption_sync_point(self._steps))
        return self._told

    def exit(self) -> NoReturn:
        """Ends the process with :data:`EXIT_PREEMPTED`."""
        raise SystemExit(EXIT_PREEMPTED)

    def _note(self, number: int, frame: types.FrameType | None) -> None:
        self._told = True
