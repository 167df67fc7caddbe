"""Data that is iterated over: where an iterator stands, and whether all processes iterate over the same."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from zeroj.errors import PlanError


def tells_place(stream: Any) -> bool:
    """Whether an iterator can say where it stands and go there, as those of grain can."""
    return hasattr(stream, "get_state") and hasattr(stream, "set_state")


def place_of(stream: Any) -> Any:
    """Where an iterator stands, as JSON; None where it cannot tell."""
    if not tells_place(stream):
        return None
    state = stream.get_state()
    if isinstance(state, bytes):  # a grain.DataLoader's
        return {"bytes": base64.b64encode(state).decode()}
    return {"state": json.loads(json.dumps(state, default=_number))}


def go_to(stream: Any, place: Any) -> None:
    """Brings an iterator to where :func:`place_of` found one like it.

    Raises:
        PlanError: it cannot be brought anywhere, since the data are of another kind than they were.
    """
    if not tells_place(stream):
        raise PlanError(
            "The checkpoint says where its data stood, but this iterator cannot go there: pass the same kind of "
            "dataset as before, or set ignore_data_skip=True."
        )
    stream.set_state(base64.b64decode(place["bytes"]) if "bytes" in place else place["state"])


def check_same(examples: Sequence[dict[str, Any]]) -> None:
    """Looks whether all processes have read the same examples, of which each takes its own rows.

    Raises:
        PlanError: they have not, such as those of a loader that gives each process a shard.
    """
    sums = zlib.crc32(repr([sorted(example) for example in examples]).encode())
    for example in examples:
        for name in sorted(example):
            sums = zlib.crc32(np.ascontiguousarray(example[name]).tobytes(), sums)
    found = np.ravel(multihost_utils.process_allgather(np.uint32(sums)))
    if (found != found[0]).any():
        others = [i for i, other in enumerate(found) if other != found[0]]
        raise PlanError(
            f"Processes iterate over different data: those of {others} have not what process 0 has; this is process "
            f"{jax.process_index()}. Each takes its own rows out of one stream: give all of them the same, without "
            "shards (grain.sharding.NoSharding()) and with one seed."
        )


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value.tolist()
