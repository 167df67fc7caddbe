"""The texts that the fixtures were trained on."""

from __future__ import annotations

import numpy as np

VOCAB = 64


def rows() -> list[dict[str, list[int]]]:
    """Sequences of different lengths that count up."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(150):
        ids = (rng.integers(VOCAB) + rng.integers(1, 4) * np.arange(rng.integers(5, 17))) % VOCAB
        found.append({"input_ids": ids.tolist(), "labels": ids.tolist()})
    return found
