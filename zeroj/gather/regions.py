"""Layers that are alike are walked once: their region becomes a function that the others call.

An unrolled model recomputes as many regions as it has layers, and all but the values in them is the same. Walking
each of them anew, and lowering it, would take as long as everything else together. What decides how a region is
walked is gathered in a key; regions of one key share one jitted function, which JAX traces and lowers once. XLA
inlines it before it does anything else, so the compiled program is that of regions walked one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from zeroj import _compat
from zeroj.gather import fingerprint
from zeroj.gather.lazy import Expr, Shard, is_lazy, shards_of, substitute
from zeroj.gather.reductions import Reductions
from zeroj.gather.tokens import Gathers, Progress, Tokens
from zeroj.plan.rules import Placement
from zeroj.plan.wire import PLAIN

#: Walks a region: (its arrays, tokens before it) -> (outputs, the gathers as they are after it).
Walk = Callable[[list[jax.Array], Tokens], tuple[list[Any], Gathers]]


class NotAlike(Exception):
    """Something in a region is not decided by the key, so that it must be walked by itself."""


class Regions:
    """The regions that were walked, by what decides how; kept for the length of one trace."""

    def __init__(self) -> None:
        self._walked: dict[Hashable, _Walked | None] = {}
        self._programs: dict[int, Hashable] = {}

    def call(
        self, key: Hashable, walk: Walk, arrays: list[jax.Array], tokens: Tokens
    ) -> tuple[list[Any], Tokens, Progress]:
        """Walks a region, or calls the function of one that was walked under the same key.

        Args:
            key: from :meth:`key`.
            walk: walks it; the arrays that it is given stand for ``arrays``.
            arrays: the arrays that the region works on.
            tokens: the tokens before it.

        Returns:
            Its outputs, and the tokens and the progress of the gathers after it.

        Raises:
            NotAlike: an output is not an array yet.
        """
        walked = self._walked.setdefault(key, _Walked(walk))
        if walked is None:
            raise NotAlike
        try:
            outs, tokens = walked.function(arrays, tokens)
        except NotAlike:
            self._walked[key] = None
            raise
        assert walked.progress is not None
        return outs, tokens, walked.progress

    def key(
        self, eqn: _compat.Eqn, operands: Operands, wanted: Reductions, same: Sequence[bool], state: Hashable
    ) -> Hashable:
        """What decides how the region of an equation is walked.

        Args:
            eqn: the equation that calls the region.
            operands: its operands, taken apart.
            wanted: per output its reduction.
            same: per input whether it is the same on every device.
            state: what else the walk depends on.

        Raises:
            NotAlike: there is more to it than can be put into a key.
        """
        called = _compat.called_program(eqn)
        assert called is not None
        if called.consts or called.jaxpr.effects:
            raise NotAlike
        for reduction in wanted:
            if reduction is not None:
                _check(reduction.placement)
                if reduction.into:  # what takes it is the loop's
                    raise NotAlike
        program = self._programs.get(id(called.jaxpr))
        if program is None:
            program = self._programs.setdefault(id(called.jaxpr), fingerprint.of_program(called.jaxpr))
        flags = bool(eqn.params.get("differentiated"))
        return program, flags, operands.structure, tuple(wanted), tuple(same), state


class _Walked:
    """A region as a function, and where its gathers stop: known once it is traced."""

    def __init__(self, walk: Walk) -> None:
        self.progress: Progress | None = None

        def layer(arrays: list[jax.Array], tokens: Tokens) -> tuple[list[Any], Tokens]:
            outs, gathers = walk(arrays, tokens)
            if any(is_lazy(out) for out in outs):
                raise NotAlike
            self.progress = gathers.progress()
            return outs, gathers.tokens()

        self.function = jax.jit(layer)


class Operands:
    """The operands of a region: the arrays in them, each once, and how the values are made of these.

    Args:
        values: lazy values, arrays and literals.

    Raises:
        NotAlike: a value is of a kind that is not told apart by its structure.
    """

    def __init__(self, values: Sequence[Any]) -> None:
        self.arrays: list[jax.Array] = []
        self._index: dict[int, int] = {}
        self._values = list(values)
        self.structure: Hashable = tuple(self._describe(value) for value in values)

    def rebuilt(self, arrays: Sequence[jax.Array]) -> list[Any]:
        """The same values, made of other arrays."""
        parts = {
            shard: replace(shard, array=arrays[self._index[id(shard.array)]])
            for value in self._values
            for shard in shards_of(value)
        }
        return [
            arrays[self._index[id(value)]] if isinstance(value, jax.Array) else substitute(value, parts)
            for value in self._values
        ]

    def _describe(self, value: Any) -> Hashable:
        if isinstance(value, Shard):
            _check(value.placement)
            return "shard", self._at(value.array), value.placement, str(value.dtype)
        if isinstance(value, Expr):
            if any(isinstance(operand, jax.Array) for operand in value.operands):
                raise NotAlike
            operands = tuple(self._describe(operand) for operand in value.operands)
            return "expr", fingerprint.of_equation(value.eqn), value.index, operands
        if is_lazy(value):
            raise NotAlike
        if isinstance(value, jax.Array):
            return "array", self._at(value)
        if np.size(value) != 1:
            raise NotAlike
        return "literal", type(value).__name__, str(np.asarray(value).dtype), np.asarray(value).tobytes()

    def _at(self, array: jax.Array) -> int:
        if id(array) not in self._index:
            self._index[id(array)] = len(self.arrays)
            self.arrays.append(array)
        return self._index[id(array)]


def _check(placement: Placement) -> None:
    """Host memory, and what ZeRO++ keeps or sends, belong to the walk as a whole."""
    if placement.memory or placement.wire != PLAIN:
        raise NotAlike
