"""What every process has to call: waiting for all of them, and saying which of them never came."""

from __future__ import annotations

import collections

from zeroj._compat import ProcessesMissing, wait_for_processes
from zeroj.errors import CheckpointError

_times: collections.Counter[str] = collections.Counter()


def arrive(what: str, timeout: int = 1200) -> None:
    """Waits until every process has come here; with one process it does nothing.

    Args:
        what: what is about to be done, the same text on all processes.
        timeout: seconds.

    Raises:
        CheckpointError: some processes did not come in time; names them.
    """
    _times[what] += 1
    try:
        wait_for_processes(f"zeroj:{what}:{_times[what]}", timeout)
    except ProcessesMissing as error:
        late = ", ".join(str(i) for i in error.missing)
        raise CheckpointError(
            f"The {what} is collective: every process has to call it, but after {timeout} seconds process "
            f"{late} had not. Do not put it under `if jax.process_index() == 0`."
        ) from error
