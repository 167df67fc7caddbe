"""Where the time of a run went."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class Times:
    """Seconds by what they were spent on: "compile", "data", "step", "evaluate", "save"."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inside: list[float] = []

    @contextlib.contextmanager
    def of(self, what: str) -> Iterator[None]:
        """Counts the time inside it, less what other names took within."""
        started = time.perf_counter()
        self._inside.append(0.0)
        try:
            yield
        finally:
            taken = time.perf_counter() - started
            within = self._inside.pop()
            self.seconds[what] = self.seconds.get(what, 0.0) + taken - within
            if self._inside:
                self._inside[-1] += taken

    def summary(self) -> str:
        """One line, largest first."""
        total = sum(self.seconds.values()) or 1.0
        parts = sorted(self.seconds.items(), key=lambda item: -item[1])
        return ", ".join(f"{name} {seconds:.1f} s ({seconds / total:.0%})" for name, seconds in parts)
