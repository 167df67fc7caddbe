"""Where reports go: standard output of process 0."""

from __future__ import annotations

import jax


def say(text: str) -> None:
    """Prints a report, once for all processes."""
    if jax.process_index() == 0:
        print(text, flush=True)
