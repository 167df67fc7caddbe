"""The stage table, and the leaves of a plan: what is sharded, and where each array lives."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from zeroj.plan.rules import Placement


@dataclass(frozen=True)
class Stage:
    """What one ZeRO stage shards. True: each device holds its part; False: each device holds the whole."""

    params: bool
    grads: bool
    accumulator: bool
    opt_state: bool


#: The stage table of ZeRO (arXiv 1910.02054, section 5). ``grads`` is what leaves the last micro-batch,
#: ``accumulator`` what the micro-batches before it add up in.
STAGES = {
    0: Stage(params=False, grads=False, accumulator=False, opt_state=False),
    1: Stage(params=False, grads=True, accumulator=False, opt_state=True),
    2: Stage(params=False, grads=True, accumulator=True, opt_state=True),
    3: Stage(params=True, grads=True, accumulator=True, opt_state=True),
}


@dataclass(frozen=True)
class ParamLeaf:
    """One leaf of params: the user's view of it, and its shard.

    Attributes:
        path: its path in the user's tree, such as "blocks/0/kernel".
        keys: the same path as JAX key entries.
        dtype: the user's dtype.
        placement: where its shard lives, wherever the stage shards it.
        trainable: whether it has a gradient and optimizer state.
        state_memory: the memory kind of its optimizer state and fp32 master; empty: the device's own.
        param_memory: the memory kind of its stored shard; empty: the device's own.
        error_memory: the memory kind of what quantising lost of its gradient (LoCo); empty: the device's own.
        stack: whether its dim 0 is a stack of layers that a loop runs over, as far as the plan was told.
    """

    path: str
    keys: tuple[Any, ...]
    dtype: np.dtype
    placement: Placement
    trainable: bool
    state_memory: str = ""
    param_memory: str = ""
    error_memory: str = ""
    stack: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The user's shape."""
        return self.placement.shape

    @property
    def packed(self) -> bool:
        """Whether it is stored as int8 (frozen, ``zero_quantized_nontrainable_weights``)."""
        return self.placement.wire.stored

    def stored(self, devices: int) -> Placement:
        """Where the array of a packed leaf lives: (bytes,), split over the leaf's axes.

        A leaf of three dims or more whose first is not split may be a stack of layers: (layers, bytes).

        Args:
            devices: how many devices its axes have.
        """
        fmt, padded = self.placement.wire.weights, self.placement.padded
        assert fmt is not None and self.packed
        stack = padded[:1] if len(padded) > 2 and all(dim > 0 for dim, _ in self.placement.dims) else ()
        count = math.prod(padded[len(stack) :]) // devices
        shape = (*stack, devices * fmt.packed_bytes(count))
        return Placement(shape, shape, ((len(stack), self.placement.axes),))


@dataclass(frozen=True)
class StateLeaf:
    """One leaf of the optimizer's state.

    Attributes:
        path: its path in the optimizer's state.
        dtype: its dtype.
        placement: where it lives.
        of: the path of the param that it mirrors, shape and all, or empty.
        owner: the path of the param that it belongs to, whatever its shape, or empty.
    """

    path: str
    dtype: np.dtype
    placement: Placement
    of: str = ""
    owner: str = ""
