"""The two pictures that the demo leaves behind: the loss curve, and memory per device at each ZeRO stage."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

Point = tuple[int, float]  # (step, loss)
_COLOURS = {
    "params": "#31688e",
    "master": "#35b779",
    "opt_state": "#fde725",
    "grads": "#440154",
    "accumulator": "#b5679c",
}


def loss_curve(path: pathlib.Path, train: Sequence[Point], validation: Sequence[Point], title: str) -> None:
    """Draw the loss of every training step and of every evaluation."""
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(*zip(*train), color="#31688e", linewidth=1, alpha=0.7, label="train")
    axes.plot(*zip(*validation), "o-", color="#d1495b", label="validation")
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title=title)
    axes.set_ylim(0, 1.08 * max(loss for _, loss in [*train, *validation]))
    axes.annotate(f"{validation[-1][1]:.2f}", validation[-1], textcoords="offset points", xytext=(-4, 9))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def memory_by_stage(path: pathlib.Path, stages: Mapping[str, Mapping[str, int]], title: str) -> None:
    """Draw bytes per device as one stacked bar a stage.

    Args:
        path: where to write the PNG.
        stages: label of a bar -> part of the state -> bytes per device.
        title: of the figure.
    """
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    labels = list(stages)
    parts = [part for part in _COLOURS if any(bar.get(part) for bar in stages.values())]
    bottom = [0.0] * len(labels)
    for part in parts:
        heights = [stages[label].get(part, 0) / 2**20 for label in labels]
        axes.bar(labels, heights, bottom=bottom, label=part, color=_COLOURS[part], width=0.6)
        bottom = [b + h for b, h in zip(bottom, heights)]
    for index, total in enumerate(bottom):
        axes.text(index, total, f"{total:.2f} MiB", ha="center", va="bottom")
    axes.set(ylabel="MiB per device", title=title)
    axes.margins(y=0.12)
    axes.legend()
    figure.savefig(path, dpi=130)
    plt.close(figure)
