"""What a monitor writes, and where to: the writers that a config asks for."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import jax

from zeroj.config.config import Config
from zeroj.monitor.csv_files import CsvWriter
from zeroj.monitor.tensorboard import TensorBoardWriter
from zeroj.monitor.weights_biases import WandbWriter


class Event(NamedTuple):
    """One scalar.

    Attributes:
        name: such as "Train/Samples/train_loss", as DeepSpeed names them.
        value: the scalar.
        step: its place on the horizontal axis; for the engine's events the examples seen so far.
    """

    name: str
    value: float
    step: int


class Writer(Protocol):
    """Takes scalars to one place. Made on process 0 alone."""

    def write(self, events: Sequence[Event]) -> None:
        """Writes scalars."""

    def close(self) -> None:
        """Writes out what is held back."""


def make_writers(config: Config) -> list[Writer]:
    """The writers that "tensorboard", "wandb" and "csv_monitor" ask for; none on processes other than 0.

    Raises:
        ConfigError: a package that a section needs is not installed.
    """
    if jax.process_index() != 0:
        return []
    file, writers = config.loaded.file, list[Writer]()
    if file.tensorboard.enabled:
        writers.append(
            TensorBoardWriter(pathlib.Path(file.tensorboard.output_path) / file.tensorboard.job_name)
        )
    if file.csv_monitor.enabled:
        writers.append(CsvWriter(pathlib.Path(file.csv_monitor.output_path) / file.csv_monitor.job_name))
    if file.wandb.enabled:
        wandb = file.wandb
        writers.append(WandbWriter(wandb.project, group=wandb.group, team=wandb.team))
    return writers
