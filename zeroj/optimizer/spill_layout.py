"""What an update of state in files takes and gives, by number; where each of it lives; what one program updates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from zeroj.plan.cuts import Cut
from zeroj.plan.offload import PINNED
from zeroj.plan.plan import ParamLeaf, Plan
from zeroj.plan.rules import NVME, Placement


@dataclass(frozen=True)
class Part:
    """What is updated by one program.

    Attributes:
        inputs: the update's inputs that it takes: masters, then gradients, then state, of its leaves.
        outputs: the update's outputs that it gives: masters, then state.
        cut: how it is cut into pieces, or None: it is updated at once.
    """

    groups: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    cut: Cut | None = None

    @property
    def pieces(self) -> list[int | None]:
        """The numbers of its pieces; [None] for one that is not cut."""
        return [None] if self.cut is None else list(range(self.cut.count))


class Inputs(NamedTuple):
    """A part's inputs by number.

    Attributes:
        donated: those whose memory its program may reuse.
        kept: other ones.
        free: those of no leaf.
    """

    donated: list[int]
    kept: list[int]
    free: list[int]


class Layout:
    """The inputs of an update by number: masters, gradients, state, the loss; and where each lives."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.numbers = [i for i, leaf in enumerate(plan.leaves) if leaf.trainable]
        self.live = [plan.leaves[i] for i in self.numbers]
        self.count, self.inner_at = len(self.live), 2 * len(self.live)
        self.end = self.inner_at + len(plan.state_leaves)
        names = {leaf.path: j for j, leaf in enumerate(self.live)}
        own = list(range(self.count))
        self.inner_owners = [names.get(s.owner) for s in plan.state_leaves]
        self.owners: list[int | None] = [*own, *own, *self.inner_owners, None]
        self.out_owners: list[int | None] = [*own, *self.inner_owners]

    def struct(self, index: int) -> jax.ShapeDtypeStruct:
        """An input on the device."""
        plan = self.plan
        if index >= self.end:
            return jax.ShapeDtypeStruct((), jax.numpy.float32, sharding=plan.replicated)
        if index >= self.inner_at:
            state = plan.state_leaves[index - self.inner_at]
            return self._struct(state.placement, state.dtype)
        leaf = self.live[index % self.count]
        if index >= self.count:
            return self._struct(plan.grad_placement(leaf), plan.precision.seen(leaf.dtype))
        if plan.has_master:
            return self._struct(plan.master_placement(leaf), plan.master_dtype(leaf))
        return self._struct(plan.param_placement(leaf), plan.param_dtype(leaf))

    def memory(self, index: int) -> str:
        """Where an input lives: "", a memory kind, or NVME."""
        plan = self.plan
        if index >= self.inner_at:
            return plan.state_leaves[index - self.inner_at].placement.memory if index < self.end else ""
        return plan.master_placement(self.live[index]).memory if index < self.count else ""

    def gradient(self, index: int, accumulation: int) -> jax.ShapeDtypeStruct | None:
        """A gradient that waits in host memory, there; None for any other input.

        Args:
            index: of the input.
            accumulation: of how many micro-batches.
        """
        leaf = self._leaf_of_gradient(index)
        kind = self.plan.gradient_memory(leaf) if leaf else ""
        if leaf is None or not kind:
            return None
        placement, precision = self.plan.grad_placement(leaf).at(kind), self.plan.precision
        dtype = self.struct(index).dtype
        if self.as_it_came(index, accumulation):
            dtype = precision.compute(leaf.dtype) if accumulation == 1 else precision.accumulator(leaf.dtype)
        return jax.ShapeDtypeStruct(placement.padded, dtype, sharding=self.plan.sharding(placement))

    def as_it_came(self, index: int, accumulation: int) -> bool:
        """Whether a gradient in host memory is a scaled sum, not clipped: as a whole it was never on the device."""
        leaf = self._leaf_of_gradient(index)
        return leaf is not None and (accumulation == 1 or bool(self.plan.accumulator_memory(leaf)))

    def _leaf_of_gradient(self, index: int) -> ParamLeaf | None:
        return self.live[index - self.count] if self.count <= index < self.inner_at else None

    def param_memory(self, output: int) -> str:
        """Where the stored param of a leaf lives."""
        return self.plan.param_placement(self.live[output]).memory

    def param_struct(self, output: int) -> jax.ShapeDtypeStruct:
        """The stored param of a leaf, on the device."""
        leaf = self.live[output]
        return self._struct(self.plan.param_placement(leaf), self.plan.param_dtype(leaf))

    def out_shardings(self, output: int, away: bool = False) -> list[Any]:
        """Of what a part gives for one output: a master comes with the param that is made from it.

        Args:
            output: its number.
            away: whether what goes into files is to be in host memory.
        """

        def place(sharding: Any, memory: str) -> Any:
            return sharding.with_memory_kind(PINNED) if away and memory == NVME else sharding

        if output >= self.count:
            index = output + self.count
            return [place(self.struct(index).sharding, self.memory(index))]
        param = place(self.param_struct(output).sharding, self.param_memory(output))
        master = place(self.struct(output).sharding, self.memory(output))
        return [param, master] if self.plan.has_master else [param]

    def _struct(self, placement: Placement, dtype: Any) -> jax.ShapeDtypeStruct:
        sharding = self.plan.sharding(placement.at(""))
        return jax.ShapeDtypeStruct(placement.padded, dtype, sharding=sharding)
