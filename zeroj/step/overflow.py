"""Gradients that will not become finite: which leaves, and when to stop."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from zeroj.errors import ZerojError
from zeroj.plan.plan import Plan

#: After so many updates skipped in a row a warning says which gradients are not finite.
PATIENCE = 20


class OverflowWatch:
    """Looks at the metrics of a run and stops it once the loss scale cannot fall any further.

    The flags of a step are read when the next one has been handed to the devices, which have made them by then:
    a training loop does not wait for them, and an error is one step late.

    Args:
        plan: names the leaves.

    Example:
        >>> watch = zj.OverflowWatch(plan)
        >>> for batch in batches:
        ...     state, metrics = step(state, batch)
        ...     watch.see(metrics)
    """

    def __init__(self, plan: Plan) -> None:
        self._paths = [leaf.path for leaf in plan.leaves if leaf.trainable]
        self._held: Mapping[str, Any] | None = None
        self._in_a_row = 0

    def see(self, metrics: Mapping[str, Any] | None) -> None:
        """Takes the metrics of a step and looks at those of the step before.

        Args:
            metrics: what the step returned; None when there are no more, to look at the last.

        Raises:
            ZerojError: gradients overflow although a dynamic loss scale is at its floor; names their leaves.
        """
        before, self._held = self._held, None
        if metrics is not None and "finite" in metrics:
            self._held = {key: metrics[key] for key in ("finite", "stuck", "applied", "loss_scale")}
        if before is None:
            return
        if bool(before["applied"]):
            self._in_a_row = 0
            return
        self._in_a_row += 1
        if bool(before["stuck"]):
            scale = float(before["loss_scale"])
            raise ZerojError(
                f"Gradients overflow although the loss scale is at its floor, {scale:g}; {self._named(before)} "
                "Look for a division by zero, the logarithm of zero or data that is not finite; or compute in "
                "bf16, which needs no loss scale."
            )
        if self._in_a_row == PATIENCE:
            warnings.warn(
                f"{PATIENCE} updates in a row were skipped, because gradients were not finite or nothing was "
                f"counted; {self._named(before)}",
                stacklevel=3,
            )

    def _named(self, metrics: Mapping[str, Any]) -> str:
        bad = [path for path, ok in zip(self._paths, np.asarray(metrics["finite"]), strict=True) if not ok]
        if not bad:
            return "each gradient is finite, but their norm is not, or nothing was counted."
        more = f" and {len(bad) - 20} more" if len(bad) > 20 else ""
        return f"not finite are {len(bad)} of {len(self._paths)}: {', '.join(bad[:20])}{more}."
