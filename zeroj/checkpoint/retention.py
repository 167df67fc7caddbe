"""Which checkpoints are kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zeroj.checkpoint.manifest import Manifest
from zeroj.errors import CheckpointError


def step_tag(step: int) -> str:
    """The tag that DeepSpeed gives a checkpoint to which the user gives none."""
    return f"global_step{step}"


@dataclass(frozen=True)
class Retention:
    """Rules for what is kept; a checkpoint stays if any of them says so.

    Attributes:
        keep: the last so many, in the order of saving; None keeps all.
        keep_every: also every checkpoint whose step is a multiple of this.
        best: also the one with the best value of this metric.
        best_mode: "min" or "max".
    """

    keep: int | None = 3
    keep_every: int | None = None
    best: str | None = None
    best_mode: str = "min"

    def __post_init__(self) -> None:
        faults = []
        if self.keep is not None and self.keep < 1:
            faults.append(f"keep={self.keep} must be at least 1, or None to keep all")
        if self.keep_every is not None and self.keep_every < 1:
            faults.append(f"keep_every={self.keep_every} must be at least 1")
        if self.best_mode not in ("min", "max"):
            faults.append(f"best_mode={self.best_mode!r} must be 'min' or 'max'")
        if faults:
            raise CheckpointError("; ".join(faults) + ".")

    def kept(self, manifests: Mapping[int, Manifest]) -> set[int]:
        """The steps to keep. A tag keeps its newest checkpoint, unless it says no more than the step's number.

        Args:
            manifests: step -> manifest, of all complete checkpoints.
        """
        order = sorted(manifests, key=lambda step: manifests[step].serial)
        if self.keep is None:
            return set(order)
        kept = set(order[-self.keep :])
        kept |= {step for step in order if self.keep_every and step % self.keep_every == 0}
        tagged = {tag: s for s in order for tag in manifests[s].tags if tag != step_tag(s)}
        kept |= set(tagged.values())
        best = self.best_step(manifests)
        return kept if best is None else kept | {best}

    def best_step(self, manifests: Mapping[int, Manifest]) -> int | None:
        """The step with the best value of the metric, the later of two equals; None where none has one."""
        scored = {
            s: m.metrics[self.best] for s, m in manifests.items() if self.best and self.best in m.metrics
        }
        numbers = {s: v for s, v in scored.items() if v == v}
        if not numbers:
            return None
        sign = 1 if self.best_mode == "max" else -1
        return max(numbers, key=lambda s: (sign * numbers[s], manifests[s].serial))


class KeepManifests:
    """A preservation policy of Orbax that asks :class:`Retention`. Steps it does not know stay."""

    def __init__(self, retention: Retention, manifests: Mapping[int, Manifest]) -> None:
        self._retention, self._manifests = retention, manifests

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """For each of Orbax's checkpoints whether it stays."""
        kept = self._retention.kept(self._manifests)
        return [info.step in kept or info.step not in self._manifests for info in checkpoints]
