"""Which ZeRO choice to take on a cluster, and why, in a sentence; beside it the field's rules of thumb."""

from __future__ import annotations

import dataclasses
import math

from zeroj.aot.choices import Batch, Choice, Machine, choices
from zeroj.aot.closed_form import Estimate, estimate
from zeroj.aot.ratio import Ratio, advise_ratio
from zeroj.aot.sizes import Sizes
from zeroj.aot.text import milliseconds, size, table
from zeroj.plan.host_memory import PINNED_DEFAULT_GB, PINNED_VARIABLE

SIMPLER = 1.05
"""A choice with more parts must be faster by this factor."""

QUANTISED = 1.25
"""ZeRO++ rounds what it sends, so it must be faster by this factor."""

STARVED = 4.0
"""Communication that takes this many times the compute even in the best choice asks for a better network."""


@dataclasses.dataclass(frozen=True)
class Advice:
    """All choices for a model on a machine, and the advised one (None where nothing fits).

    ``reason`` says in a sentence why; ``notes`` say where a rule of thumb would have it otherwise, and why,
    and what else is worth knowing.
    """

    sizes: Sizes
    batch: Batch
    machine: Machine
    estimates: list[Estimate]
    advised: Estimate | None
    reason: str
    notes: list[str]

    def __str__(self) -> str:
        heads = ["choice", "per GPU", "host", "NVMe", "intra", "inter", "step", "fits", "ratio"]
        rows = []
        for e in self.estimates:
            over = ", ".join(f"{place} over by {size(by)}" for place, by in e.over.items())
            mark = "* " if e is self.advised else "  "
            moved = (e.device, e.host, e.nvme, e.intra, e.inter)
            step = milliseconds(e.seconds)
            ratio = self.ratio(e)
            best = f"{ratio.value:.2f}" if ratio else ""
            rows.append([mark + str(e.choice), *map(size, moved), step, over or "yes", best])
        lines = [table(heads, rows), "", self.reason, *(f"note: {n}" for n in self.notes)]
        lines.append(
            "bytes per GPU, host and NVMe bytes per node; intra and inter: bytes that one GPU sends in a step"
            " to its node and to others; ratio: the offload_optimizer.ratio to set, rows are of 1. Closed forms and"
            " a model of the hardware, not a measurement."
        )
        return "\n".join(lines)

    def ratio(self, e: Estimate) -> Ratio | None:
        """The share of the optimizer's state that a choice should offload, where it offloads it to the host."""
        return advise_ratio(e.choice, self.sizes, self.batch, self.machine) if e.fits else None


def advise(sizes: Sizes, batch: Batch, machine: Machine) -> Advice:
    """Weighs every choice and advises one: of those that fit the fastest, of nearly equal ones the simplest.

    Args:
      sizes: the model.
      batch: what one GPU does in a step.
      machine: the cluster, its memory and its disks.
    """
    found = [estimate(choice, sizes, batch, machine) for choice in choices(machine)]
    best = _best([e for e in found if e.fits])
    if best is None:
        return Advice(sizes, batch, machine, found, None, _nothing_fits(found), [])
    reason = _reason(best, found)
    advice = Advice(sizes, batch, machine, found, best, reason, _notes(best, found, sizes, machine))
    advice.notes.extend(_ratio_notes(advice.ratio(best)))
    return advice


def _handicap(e: Estimate) -> float:
    return e.seconds * (QUANTISED if e.choice.zeropp else 1.0)


def _best(fitting: list[Estimate]) -> Estimate | None:
    if not fitting:
        return None
    fastest = min(map(_handicap, fitting))
    near = [e for e in fitting if _handicap(e) <= fastest * SIMPLER]
    return min(near, key=lambda e: (e.choice.complexity, _handicap(e)))


def _nothing_fits(found: list[Estimate]) -> str:
    nearest = min(found, key=lambda e: sum(e.over.values()))
    over = " and ".join(f"{size(by)} of {place} memory" for place, by in nearest.over.items())
    return (
        f"nothing fits: nearest is {nearest.choice}, which lacks {over}. Take more GPUs, or a smaller batch."
    )


def _reason(best: Estimate, found: list[Estimate]) -> str:
    text = f"advised: {best.choice}, {size(best.device)} a GPU, {milliseconds(best.seconds)} a step"
    simpler = [e for e in found if e.choice.complexity < best.choice.complexity]
    if not simpler:
        return f"{text}: the simplest choice fits and is as fast as any."
    small = [e for e in simpler if not e.fits]
    if len(small) == len(simpler):
        last = max(small, key=lambda e: e.choice.complexity)
        over = ", ".join(f"{place} memory by {size(by)}" for place, by in last.over.items())
        return f"{text}: the simplest that fits; {last.choice} is over the {over}."
    rival = min((e for e in simpler if e.fits), key=lambda e: e.seconds)
    return f"{text}: {rival.seconds / best.seconds:.2f} times as fast as {rival.choice}, which fits too."


def rule_of_thumb(sizes: Sizes) -> tuple[str, Choice]:
    """Returns the field's rule for a model of this size, as text and as a choice."""
    billions = sizes.params / 1e9
    if billions <= 10:
        return "up to 10B: stage 1", Choice(1)
    if billions < 30:
        return "10B to 30B: stage 2", Choice(2)
    if billions < 100:
        return "30B to 100B: stage 3 + offload", Choice(3, "cpu")
    return "100B and more: ZeRO++ and NVMe", Choice(3, "nvme", "nvme", zeropp=True)


def _notes(best: Estimate, found: list[Estimate], sizes: Sizes, machine: Machine) -> list[str]:
    notes = []
    rule, choice = rule_of_thumb(sizes)
    if choice != best.choice:
        notes.append(f"the rule of thumb ({rule}) differs: {_why_not(choice, best, found)}")
    if machine.nodes > 1:
        notes.extend(_network_notes(best, found, machine))
    if best.host > PINNED_DEFAULT_GB * 2**30:
        enough = math.ceil(1.15 * best.host / 2**30)
        notes.append(
            f"{size(best.host)} of pinned host memory a node are more than the {PINNED_DEFAULT_GB} GiB that a"
            f" process may take: with one process a node set {PINNED_VARIABLE}={enough} before JAX starts"
        )
    return notes


def _ratio_notes(ratio: Ratio | None) -> list[str]:
    """What twin-flow gives of the advised choice."""
    if ratio is None or ratio.value == 1:
        return []
    e = ratio.estimate
    reason = (
        "the GPU holds no more" if ratio.fits >= ratio.hides else "so much moves while the update runs anyway"
    )
    return [
        f'"ratio": {ratio.value:.2f} in offload_optimizer leaves the rest of the state on the GPU ({reason}): '
        f"{size(e.device)} a GPU, {milliseconds(e.seconds)} a step"
    ]


def _why_not(choice: Choice, best: Estimate, found: list[Estimate]) -> str:
    same = next((e for e in found if e.choice == choice), None)
    if same is None:
        return "ZeRO++ is for several nodes" if choice.zeropp else "no NVMe was given"
    if not same.fits:
        over = ", ".join(f"{place} memory by {size(by)}" for place, by in same.over.items())
        return f"{same.choice} is over the {over}"
    if same.seconds > best.seconds * SIMPLER:
        return (
            f"{same.choice} would take {milliseconds(same.seconds)} a step, {best.choice} fits and is faster"
        )
    return f"{best.choice} fits too, is as fast, and has fewer parts"


def _network_notes(best: Estimate, found: list[Estimate], machine: Machine) -> list[str]:
    """What the rules by network would have: 100 Gb/s a node plain, 10 ZeRO++, 1 another network."""
    gigabits = machine.gpu.network.value * machine.gpus_per_node * 8 / 1e9
    ratio = best.communication_seconds / best.compute_seconds
    if ratio > STARVED:
        return [
            f"even so, communication takes {ratio:.0f} times the compute at {gigabits:.0f} Gb/s a node:"
            " get a better network first, or larger batches and accumulation"
        ]
    if best.choice.zeropp and gigabits >= 100:
        exact = [e for e in found if e.fits and not e.choice.zeropp]
        rival = min(exact, key=lambda e: e.seconds, default=None)
        slower = (
            f"{rival.choice} takes {milliseconds(rival.seconds)} a step" if rival else "nothing else fits"
        )
        return [f"the rule of thumb (100 Gb/s a node and more: no ZeRO++) differs: {slower}"]
    if not best.choice.zeropp and gigabits <= 10:
        return [f"the rule of thumb (10 Gb/s a node: ZeRO++) differs: {_why_not_zeropp(found)}"]
    return []


def _why_not_zeropp(found: list[Estimate]) -> str:
    quantised = [e for e in found if e.choice.zeropp]
    if any(e.fits for e in quantised):
        return "without it the step is nearly as fast"
    nearest = min(quantised, key=lambda e: sum(e.over.values()))
    over = ", ".join(f"{place} memory by {size(by)}" for place, by in nearest.over.items())
    return f"its secondary shards do not fit: {nearest.choice} is over the {over}"
