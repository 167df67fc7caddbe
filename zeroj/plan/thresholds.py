"""Up to which size a leaf stays whole."""

from __future__ import annotations

from zeroj.config.zero import Zero
from zeroj.plan.rules import auto_threshold


def threshold_of(zero: Zero, sizes: list[int], degree: int) -> int:
    """The persistence threshold: what the user set, or what keeps whole leaves cheap."""
    given = zero.stage3_param_persistence_threshold
    return auto_threshold(sizes, degree) if given is None else int(given)


def thresholds_within(zero: Zero, sizes: list[int], threshold: int) -> list[int]:
    """The threshold of each leaf: 0 once the leaves that stay whole have used up the model's own limit."""
    limit = zero.stage3_model_persistence_threshold
    left = sum(sizes) if limit is None else int(limit)
    thresholds = []
    for size in sizes:
        stays = size <= threshold and size <= left
        left -= size if stays else 0
        thresholds.append(threshold if stays or size > threshold else 0)
    return thresholds
