"""What every process has to call: waiting for all of them, and saying which of them never came."""

from __future__ import annotations

import collections
import warnings
import zlib

import jax
import numpy as np
from jax.experimental import multihost_utils

from zeroj._compat import ProcessesMissing, wait_for_processes
from zeroj.errors import CheckpointError, ZerojError

_times: collections.Counter[str] = collections.Counter()


def arrive(what: str, timeout: int = 1200, error: type[ZerojError] = CheckpointError) -> None:
    """Waits until every process has come here; with one process it does nothing.

    Args:
        what: what is about to be done, the same text on all processes.
        timeout: seconds.
        error: what is raised.

    Raises:
        ZerojError: some processes did not come in time; names them, and where each was last.
    """
    _times[what] += 1
    try:
        wait_for_processes(f"zeroj:{what}:{_times[what]}", timeout)
    except ProcessesMissing as found:
        late = ", ".join(f"{i} ({_whereabouts(found.last.get(i))})" for i in found.missing)
        raise error(
            f"The {what} is collective: every process has to call it, but after {timeout} seconds process "
            f"{late} had not. Do not put it under `if jax.process_index() == 0`."
        ) from found


def _whereabouts(name: str | None) -> str:
    """Where a process was last, from the name of a barrier."""
    return (
        "which came to nothing before"
        if name is None
        else f"last at the {name.split(':', 1)[1].rsplit(':', 1)[0]}"
    )


def same_tag(tag: str, validation: str) -> None:
    """Looks whether all processes save under one tag; that of process 0 is stored. Every process must call it.

    Args:
        tag: this process's.
        validation: "ignore", "warn" or "fail", as checkpoint.tag_validation has it.

    Raises:
        CheckpointError: the tags differ, and validation is "fail".
    """
    if validation == "ignore" or jax.process_count() == 1:
        return
    found = np.ravel(multihost_utils.process_allgather(np.uint32(zlib.crc32(tag.encode()))))
    others = [i for i, other in enumerate(found) if other != found[0]]
    if not others:
        return
    text = (
        f"Processes save under different tags: those of {others} are not that of process 0, "
        f"which is the one that is stored; here, in process {jax.process_index()}, it is {tag!r}."
    )
    if validation == "fail":
        raise CheckpointError(text + " Make the tag from what all processes share, such as the step.")
    warnings.warn(text, stacklevel=3)
