"""What a benchmark reports: a measured figure, its target, and the same work done by hand-written JAX."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from rich.console import Console
from rich.table import Table


@dataclasses.dataclass(frozen=True)
class Figure:
    """One measured figure.

    Args:
        name: what was measured, such as "step time, stage 3".
        value: what zeroj did, in ``unit``.
        unit: "ms", "bytes", ...
        by_hand: what hand-written JAX did in the same run, in ``unit``; None where there is no such thing.
        target: the bound on ``score``; None where the figure is for information only.
        better: whether ``score`` should be at most ("lower") or at least ("higher") the target.
        of: what the target bounds: the "ratio" of value to by_hand, or the "value" itself.
        note: how it was measured, in a few words.
    """

    name: str
    value: float
    unit: str
    by_hand: float | None = None
    target: float | None = None
    better: Literal["lower", "higher"] = "lower"
    of: Literal["ratio", "value"] = "ratio"
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """Value over by_hand."""
        return None if not self.by_hand else self.value / self.by_hand

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without one."""
        score = self.value if self.of == "value" else self.ratio
        if self.target is None or score is None:
            return None
        return score <= self.target if self.better == "lower" else score >= self.target

    def as_dict(self) -> dict[str, Any]:
        """The figure for JSON, with what follows from it."""
        return {**dataclasses.asdict(self), "ratio": self.ratio, "met": self.met}


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def show(figures: Sequence[Figure], title: str) -> None:
    """Print figures as one table."""
    table = Table("figure", "zeroj", "by hand", "ratio", "target", "met", "how", title=title)
    for figure in figures:
        sign = "<=" if figure.better == "lower" else ">="
        table.add_row(
            figure.name,
            f"{_number(figure.value)} {figure.unit}",
            "-" if figure.by_hand is None else _number(figure.by_hand),
            "-" if figure.ratio is None else f"{figure.ratio:.3f}",
            "-" if figure.target is None else f"{figure.of} {sign} {figure.target:g}",
            {True: "yes", False: "NO", None: "-"}[figure.met],
            figure.note,
        )
    Console(width=150).print(table)
