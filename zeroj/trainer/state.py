"""`trainer_state.json`: where a run stands, under Hugging Face's names."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from typing import Any

#: The file's name, in a checkpoint and in the output folder.
STATE_FILE = "trainer_state.json"


@dataclasses.dataclass
class TrainerState:
    """Where a run stands.

    Attributes:
        epoch: passes over the data so far, as a fraction.
        global_step: updates so far, skipped ones included.
        max_steps: updates of the whole run.
        num_train_epochs: passes of the whole run, rounded up.
        logging_steps: updates between logs.
        eval_steps: updates between evaluations.
        save_steps: updates between checkpoints.
        train_batch_size: examples of one device in one micro-batch.
        num_input_tokens_seen: elements of "input_ids" so far, padding included.
        total_flos: always 0: the count is not kept.
        log_history: every log, with its step.
        best_metric: the best value of metric_for_best_model so far.
        best_global_step: its step.
        best_model_checkpoint: its checkpoint's folder.
        is_world_process_zero: whether this process writes logs.
        is_local_process_zero: the same, as there is one process a host.
        stateful_callbacks: state of callbacks that have ``state()``.
    """

    epoch: float = 0.0
    global_step: int = 0
    max_steps: int = 0
    num_train_epochs: int = 0
    logging_steps: int = 0
    eval_steps: int = 0
    save_steps: int = 0
    train_batch_size: int = 0
    num_input_tokens_seen: int = 0
    total_flos: int = 0
    log_history: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    best_metric: float | None = None
    best_global_step: int | None = None
    best_model_checkpoint: str | None = None
    is_world_process_zero: bool = True
    is_local_process_zero: bool = True
    stateful_callbacks: dict[str, Any] = dataclasses.field(default_factory=dict)

    def save_to_json(self, path: str | os.PathLike[str]) -> None:
        """Writes it; the file appears whole or not at all."""
        file = pathlib.Path(path)
        unfinished = file.with_suffix(".part")
        unfinished.write_text(json.dumps(dataclasses.asdict(self), indent=2, sort_keys=True) + "\n")
        os.replace(unfinished, file)

    @classmethod
    def load_from_json(cls, path: str | os.PathLike[str]) -> TrainerState:
        """Reads what :meth:`save_to_json` wrote; names it does not know are left out."""
        data = json.loads(pathlib.Path(path).read_text())
        known = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in data.items() if name in known})


@dataclasses.dataclass
class TrainerControl:
    """What the loop is to do next; callbacks set it.

    Attributes:
        should_training_stop: stop after this step.
        should_epoch_stop: go on with the next epoch.
        should_save: save a checkpoint after this step.
        should_evaluate: evaluate after this step.
        should_log: log after this step.
    """

    should_training_stop: bool = False
    should_epoch_stop: bool = False
    should_save: bool = False
    should_evaluate: bool = False
    should_log: bool = False

    def new_step(self) -> None:
        """Forgets what was asked for one step alone."""
        self.should_save = self.should_evaluate = self.should_log = False
