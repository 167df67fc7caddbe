"""A run's results as files and tables; process 0 alone writes them."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any

import jax

from zeroj.trainer.arguments import TrainingArguments
from zeroj.trainer.state import STATE_FILE, TrainerState


class Results:
    """What a Trainer writes about its run.

    Attributes:
        args: the arguments.
        state: where the run stands.
    """

    args: TrainingArguments
    state: TrainerState

    def is_world_process_zero(self) -> bool:
        """Whether this process writes logs."""
        return jax.process_index() == 0

    def save_state(self) -> None:
        """Writes trainer_state.json into output_dir."""
        if self.is_world_process_zero():
            folder = pathlib.Path(str(self.args.output_dir))
            folder.mkdir(parents=True, exist_ok=True)
            self.state.save_to_json(folder / STATE_FILE)

    def log_metrics(self, split: str, metrics: Mapping[str, Any]) -> None:
        """Prints metrics as a table; on process 0."""
        if self.is_world_process_zero():
            print(f"***** {split} metrics *****")
            width = max((len(name) for name in metrics), default=0)
            for name, value in sorted(metrics.items()):
                print(
                    f"  {name:<{width}} = {value:.4f}"
                    if isinstance(value, float)
                    else f"  {name:<{width}} = {value}"
                )

    def save_metrics(self, split: str, metrics: Mapping[str, Any]) -> None:
        """Writes metrics to ``{split}_results.json`` in output_dir; on process 0."""
        if self.is_world_process_zero():
            folder = pathlib.Path(str(self.args.output_dir))
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{split}_results.json").write_text(json.dumps(dict(metrics), indent=2, sort_keys=True))
