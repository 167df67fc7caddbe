"""A step that is compiled again: which of its arguments has another shape, dtype or place than before."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import numpy as np

from zeroj import _compat
from zeroj.plan import tree

#: How many differing arguments a warning names.
NAMED = 6

Signature = dict[str, tuple[str, Any]]


class CompileWatch:
    """Looks after each call whether the step was compiled anew, and warns of what made it so.

    A batch of another shape is warned of once, since lengths may well differ; the state should never differ.

    Example:
        >>> watch = CompileWatch()
        >>> watch.called(step, state, batch, 1)
    """

    def __init__(self) -> None:
        self._seen: dict[Any, tuple[int, Signature, Signature]] = {}
        self._batch_told = False

    def called(self, step: Any, state: Any, batch: Any, number: int) -> None:
        """To be told of every call.

        Args:
            step: what :func:`zeroj.make_train_step` returned.
            state: the state that it was called with; it may have been donated.
            batch: the batch.
            number: the step's number, for the warning.
        """
        program = getattr(step, "gradients", step)
        count = _compat.compiled_count(program)
        before = self._seen.get(program)
        if before is not None and before[0] == count:
            return  # a larger count may also be a new way of passing the same: see what differs
        now = count, signature("state", state), signature("batch", batch)
        self._seen[program] = now
        if before is None:
            return
        states, batches = differences(before[1], now[1]), differences(before[2], now[2])
        if states or (batches and not self._batch_told):
            self._batch_told |= bool(batches)
            warnings.warn(_text(number, states, batches), stacklevel=3)


def signature(name: str, value: Any) -> Signature:
    """What a program is compiled for, by path of the argument: as text to show, and whole to compare."""
    found = {}
    for keys, leaf in jax.tree_util.tree_leaves_with_path(value):
        path = "/".join(part for part in (name, tree.path_str(keys)) if part)
        shape, dtype = np.shape(leaf), getattr(leaf, "dtype", None) or np.result_type(leaf)
        place = getattr(leaf, "sharding", None)
        weak = bool(getattr(leaf, "weak_type", False))
        where = "" if place is None else f" at {getattr(place, 'spec', place)}"
        where += "" if place is None or place.memory_kind is None else f" in {place.memory_kind}"
        found[path] = f"{shape} {dtype}{' (weak)' if weak else ''}{where}", (shape, dtype, weak, place)
    return found


def differences(before: Signature, after: Signature) -> list[str]:
    """What differs, as lines."""
    lines = [
        f"{path} is {after[path][0]}, was {before[path][0]}"
        for path in after
        if path in before and not _same(before[path][1], after[path][1])
    ]
    lines += [f"{path} is new" for path in after.keys() - before.keys()]
    return lines + [f"{path} is gone" for path in before.keys() - after.keys()]


def _same(before: Any, after: Any) -> bool:
    """Whether a program for one will do for the other; two ways of writing one sharding are the same."""
    if before[:-1] != after[:-1] or (before[-1] is None) != (after[-1] is None):
        return False
    return before[-1] is None or before[-1].is_equivalent_to(after[-1], len(before[0]))


def _text(number: int, states: list[str], batches: list[str]) -> str:
    lines = states + batches
    more = f"\n  - and {len(lines) - NAMED} more" if len(lines) > NAMED else ""
    remedy = (
        "Something put other arrays into the state; the step returns it as it was planned."
        if states
        else "Pad batches to one length, or to few; this is said once."
    )
    return f"Step {number} was compiled anew:\n  - " + "\n  - ".join(lines[:NAMED]) + f"{more}\n{remedy}"
