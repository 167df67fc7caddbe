"""Which share of the optimizer's state to offload (twin-flow, ``offload_optimizer.ratio``)."""

from __future__ import annotations

import dataclasses

from zeroj.aot.choices import Batch, Choice, Machine
from zeroj.aot.closed_form import Estimate, estimate, update_seconds, usable_memory
from zeroj.aot.sizes import Sizes

STEPS = 100
"""Ratios are advised in hundredths."""


@dataclasses.dataclass(frozen=True)
class Ratio:
    """The advised ``offload_optimizer.ratio`` of a choice.

    ``hides`` is the largest share whose transfers take no longer than the update's own kernels, ``fits`` the
    smallest with which the GPU's memory is enough; ``value`` is the larger of the two, and ``estimate`` what the
    choice needs with it. What is above ``hides`` is waited for, so no more than ``fits`` is worth it.
    """

    hides: float
    fits: float
    value: float
    estimate: Estimate


def advise_ratio(choice: Choice, sizes: Sizes, batch: Batch, machine: Machine) -> Ratio | None:
    """Returns the ratio to set, or None where no optimizer is in host memory, or the GPU is too small even with all.

    Args:
      choice: stage, and what is offloaded where.
      sizes: the model.
      batch: what one GPU does in a step.
      machine: the cluster; its host link and memory decide.

    Example::

      advise_ratio(Choice(2, "cpu"), from_numbers(13e9, 40, 5120), Batch(), machine).value
    """
    if choice.optimizer != "cpu":
        return None
    ratios = [step / STEPS for step in range(STEPS + 1)]
    needs = {r: estimate(dataclasses.replace(choice, ratio=r), sizes, batch, machine) for r in ratios}
    fits = next((r for r in ratios if needs[r].device <= usable_memory(machine)), None)
    if fits is None:
        return None
    moved = {r: update_seconds(needs[r].choice, sizes, batch, machine) for r in ratios}
    hides = max((r for r in ratios if moved[r][1] <= moved[r][0]), default=0.0)
    value = max(fits, hides)
    return Ratio(hides, fits, value, needs[value])
