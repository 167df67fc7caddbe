"""Access to leaves by path as methods, for objects that hold a state and its plan."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from zeroj.plan.plan import Plan
from zeroj.step import access, move
from zeroj.step.access import LocalShard
from zeroj.step.state import TrainState


class StateHolder:
    """Something with a ``state`` and a ``plan``, such as the engine.

    Attributes:
        plan: where every array lives.
        state: the current state; what is set below replaces it.
    """

    plan: Plan
    state: TrainState

    def get_full(self, path: str, what: str = "param") -> np.ndarray:
        """One leaf, whole, on the host; see :func:`zeroj.get_full`."""
        return access.get_full(self.state, self.plan, path, what)

    def set_full(self, path: str, value: Any, what: str = "param") -> None:
        """Replaces one leaf; see :func:`zeroj.set_full`."""
        self.state = access.set_full(self.state, self.plan, path, value, what)

    def get_local(self, path: str, what: str = "param") -> list[LocalShard]:
        """What this process's devices hold of one leaf; see :func:`zeroj.get_local`."""
        return access.get_local(self.state, self.plan, path, what)

    def set_local(self, path: str, shards: Sequence[LocalShard], what: str = "param") -> None:
        """Replaces shards of one leaf; see :func:`zeroj.set_local`."""
        self.state = access.set_local(self.state, self.plan, path, shards, what)

    def offload_states(self, include: Collection[str] = move.PARTS) -> None:
        """Moves parts of the state to host memory until :meth:`reload_states`; see :func:`zeroj.offload_states`."""
        self.state = move.offload_states(self.state, include)

    def reload_states(self) -> None:
        """Brings them back; see :func:`zeroj.reload_states`."""
        self.state = move.reload_states(self.state, self.plan)

    @contextlib.contextmanager
    def gathered(self, paths: str | Iterable[str], what: str = "param") -> Iterator[access.Gathered]:
        """Gathers leaves for a block of code, and writes them back at its end; see :func:`zeroj.gathered`."""
        with access.gathered(self.state, self.plan, paths, what) as leaves:
            yield leaves
        self.state = leaves.state
