"""Scalars for Weights & Biases."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from operator import itemgetter

from zeroj.errors import ConfigError


class WandbWriter:
    """Logs to a run of Weights & Biases.

    Args:
        project: the project.
        group: the group of runs.
        team: the team ("entity").

    Raises:
        ConfigError: wandb is not installed.
    """

    def __init__(self, project: str, *, group: str | None = None, team: str | None = None) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError("wandb.enabled needs wandb: pip install 'zeroj[wandb]'") from error
        self._run = wandb.init(project=project, group=group, entity=team)

    def write(self, events: Iterable[tuple[str, float, int]]) -> None:
        """Logs scalars, those of one step together."""
        for step, group in itertools.groupby(events, key=itemgetter(2)):
            self._run.log({name: value for name, value, _ in group}, step=step)

    def close(self) -> None:
        """Ends the run."""
        self._run.finish()
