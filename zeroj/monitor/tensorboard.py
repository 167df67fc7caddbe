"""Scalars for TensorBoard."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable

from zeroj.errors import ConfigError


class TensorBoardWriter:
    """Writes event files that TensorBoard reads.

    Args:
        folder: made if absent.

    Raises:
        ConfigError: tensorboardX is not installed.
    """

    def __init__(self, folder: str | pathlib.Path) -> None:
        try:
            import tensorboardX
        except ImportError as error:
            raise ConfigError(
                "tensorboard.enabled needs tensorboardX: pip install 'zeroj[tensorboard]'"
            ) from error
        self._writer = tensorboardX.SummaryWriter(str(folder))

    def write(self, events: Iterable[tuple[str, float, int]]) -> None:
        """Adds scalars."""
        for name, value, step in events:
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Writes out what is held back."""
        self._writer.close()
