"""Where the gradient of each trained leaf goes, and how it is summed on the way."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from zeroj.gather import host_sums
from zeroj.gather.reductions import Reduction, slot_of
from zeroj.gather.renewals import Renewing
from zeroj.gather.sinks import Taking, specs_of
from zeroj.gather.views import View
from zeroj.plan.plan import Plan


@dataclass(frozen=True)
class Moves:
    """What becomes of single leaves in a pass over a batch.

    Attributes:
        taking: what takes gradients where they arise, or None.
        renewing: what renews params before they are used, or None; then nothing is taken.
        leaving: paths of the leaves whose gradients leave for host memory as they are made.
    """

    taking: Taking | None
    renewing: Renewing | None
    leaving: Sequence[str]

    @property
    def beside(self) -> Taking | Renewing | None:
        """What brings arrays of its own into the program."""
        return self.renewing or self.taking

    @property
    def sunk(self) -> list[str]:
        """Paths of the leaves whose gradients go into a sink."""
        return [*(self.taking.values if self.taking else ()), *self.leaving]

    def specs(self, plan: Plan) -> list[Any]:
        """Where what is made of each trained leaf's gradient lives, over the ZeRO axes; then, what is renewed."""
        return [
            *specs_of(plan, self.taking, self.leaving),
            self.renewing.out_specs if self.renewing else {},
        ]


def moves_of(plan: Plan, taking: Taking | None, renewing: Renewing | None, leaves: bool) -> Moves:
    """The moves of a pass; ``leaves``: whether gradients that are kept in host memory go there at once."""
    taken = taking.values if taking else ()
    live = (leaf for leaf in plan.leaves if leaf.trainable and leaf.path not in taken)
    return Moves(taking, renewing, [x.path for x in live if leaves and plan.gradient_memory(x)])


def empty_sums(plan: Plan, reductions: Sequence[Reduction]) -> dict[str, jax.Array]:
    """Path -> nothing yet, for each leaf whose gradients are summed in host memory."""
    live = [leaf for leaf in plan.leaves if leaf.trainable]
    return {
        r.into: host_sums.zeros(r, plan.precision.accumulator(x.dtype))
        for r, x in zip(reductions, live, strict=True)
        if r.into
    }


def reductions_of(
    plan: Plan,
    view: View,
    later: tuple[str, ...],
    host: bool,
    accumulation: int,
    fed: Collection[str],
    sunk: Collection[str],
) -> list[Reduction]:
    """How the gradient of each trained leaf is summed over devices; with feedback for the leaves in ``fed``."""
    found = []
    for leaf in (leaf for leaf in plan.leaves if leaf.trainable):
        reduction = view.reduction(leaf, later)
        if leaf.path in sunk:
            reduction = replace(reduction, into=leaf.path, part_of=leaf.path)
        elif host:
            kind = plan.gradient_memory(leaf) if accumulation == 1 else plan.accumulator_memory(leaf)
            into = leaf.path if kind and accumulation > 1 else ""
            reduction = replace(reduction, placement=reduction.placement.at(kind), into=into)
        if leaf.path in fed:
            reduction = replace(reduction, feedback=slot_of(leaf.path, leaf.shape))
        found.append(reduction)
    return found
