"""report_to: logs to TensorBoard, Weights & Biases and CSV files, by the writers of `zeroj/monitor`."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

from zeroj.errors import ConfigError
from zeroj.monitor.csv_files import CsvWriter
from zeroj.monitor.events import Event, Writer
from zeroj.monitor.tensorboard import TensorBoardWriter
from zeroj.monitor.weights_biases import WandbWriter
from zeroj.trainer.arguments import TrainingArguments
from zeroj.trainer.callbacks import TrainerCallback
from zeroj.trainer.state import TrainerControl, TrainerState


class ReportCallback(TrainerCallback):
    """Writes every log to the places that ``report_to`` names; process 0 alone.

    TensorBoard's files and CSV files go below output_dir, in "runs/<run_name>" and "csv".
    """

    def __init__(self) -> None:
        self.writers: list[Writer] = []

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """Opens them."""
        if state.is_world_process_zero and not self.writers:
            self.writers = make_writers(args)

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """Writes the numbers: "train/loss", "eval/loss", as Hugging Face names them."""
        logs = kwargs.get("logs") or {}
        events = [
            Event(reported(name), float(value), state.global_step)
            for name, value in logs.items()
            if isinstance(value, int | float)
        ]
        for writer in self.writers:
            writer.write(events)

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """Closes them."""
        for writer in self.writers:
            writer.close()
        self.writers = []


def make_writers(args: TrainingArguments) -> list[Writer]:
    """The writers that ``report_to`` names; with "all", those whose package is installed."""
    folder = pathlib.Path(str(args.output_dir))
    name = args.run_name or folder.name
    makers: dict[str, Callable[[], Writer]] = {
        "tensorboard": lambda: TensorBoardWriter(folder / "runs" / name),
        "wandb": lambda: WandbWriter(name),
        "csv": lambda: CsvWriter(folder / "csv"),
    }
    writers: list[Writer] = []
    for place in args.reporters:
        try:
            writers.append(makers[place]())
        except ConfigError:
            if args.report_to not in ("all", ["all"]):
                raise
    return writers


def reported(name: str) -> str:
    """The name under which a log is reported."""
    for part in ("eval", "test"):
        if name.startswith(f"{part}_"):
            return f"{part}/{name.removeprefix(f'{part}_')}"
    return f"train/{name}"
