"""Callbacks with Hugging Face's event names; theirs are taken too."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from typing import Any

from zeroj.errors import ConfigError
from zeroj.trainer.arguments import TrainingArguments
from zeroj.trainer.state import TrainerControl, TrainerState

#: Events in the order of a run.
EVENTS = (
    "on_init_end", "on_train_begin", "on_epoch_begin", "on_step_begin", "on_step_end", "on_log", "on_evaluate",
    "on_prediction_step", "on_predict", "on_save", "on_epoch_end", "on_train_end",
)  # fmt: skip
#: Events of theirs that lie inside a step, which is one compiled program here.
NEVER = ("on_substep_end", "on_pre_optimizer_step", "on_optimizer_step", "on_push_begin")


class TrainerCallback:
    """Base of callbacks: override the events that you need. Every process calls them, in step.

    An event gets ``(args, state, control, **kwargs)``: the arguments, where the run stands, what it does next
    (change it, or return a new one), and ``model``, ``trainer``, ``metrics``, ``logs`` where there are any. What
    all processes must do together, such as ``trainer.save_model``, must not stand behind
    ``if state.is_world_process_zero``.
    """

    def on_init_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """The Trainer has been made."""

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """Before the first step."""

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """After the last step."""

    def on_epoch_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """Before an epoch."""

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """After an epoch."""

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """Before an update."""

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """After an update."""

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """``logs`` have been made."""

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """After an evaluation, with its ``metrics``."""

    def on_prediction_step(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Any:
        """After a batch of an evaluation or a prediction."""

    def on_predict(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """After a prediction, with its ``metrics``."""

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """After a checkpoint."""


class CallbackHandler:
    """Calls the callbacks of a run, in the order they were added."""

    def __init__(self, callbacks: Iterable[Any]) -> None:
        self.callbacks: list[Any] = []
        for callback in callbacks:
            self.add(callback)

    def add(self, callback: Any) -> None:
        """Adds a callback, or a class of one.

        Raises:
            ConfigError: it waits for an event inside a step.
        """
        found = callback() if isinstance(callback, type) else callback
        asked = [name for name in NEVER if _overrides(found, name)]
        if asked:
            raise ConfigError(
                f"{type(found).__name__} waits for {', '.join(asked)}: a step is one compiled program, and nothing "
                "runs inside it. Use on_step_begin or on_step_end."
            )
        self.callbacks.append(found)

    def call(
        self, event: str, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Calls one event on all; returns the control that they leave."""
        for callback in self.callbacks:
            run = getattr(callback, event, None)
            changed = run(args, state, control, **kwargs) if run is not None else None
            control = control if changed is None else changed
        return control


def _overrides(callback: Any, event: str) -> bool:
    """Whether a callback has an event of its own, not the empty one of a class named TrainerCallback."""
    for cls in type(callback).__mro__:
        if event in vars(cls):
            return cls.__name__ != "TrainerCallback"
    return False


class DefaultFlowCallback(TrainerCallback):
    """When to log, evaluate and save, by the arguments."""

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """By number of updates."""
        step = state.global_step
        if args.logging_strategy == "steps" and step % state.logging_steps == 0:
            control.should_log = True
        if step == 1 and args.logging_first_step:
            control.should_log = True
        if args.eval_strategy == "steps" and step % state.eval_steps == 0 and args.eval_delay <= step:
            control.should_evaluate = True
        if args.save_strategy == "steps" and step % state.save_steps == 0:
            control.should_save = True
        if step >= state.max_steps:
            control.should_training_stop = True
            if args.save_strategy == "steps":
                control.should_save = True
        return control

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """By epochs."""
        if args.logging_strategy == "epoch":
            control.should_log = True
        if args.eval_strategy == "epoch" and args.eval_delay <= state.epoch:
            control.should_evaluate = True
        if args.save_strategy == "epoch":
            control.should_save = True
        return control


class EarlyStoppingCallback(TrainerCallback):
    """Stops when metric_for_best_model has not improved for some evaluations.

    Args:
        early_stopping_patience: evaluations in a row without improvement before the run stops.
        early_stopping_threshold: by how much a value must be better to be an improvement.
    """

    def __init__(self, early_stopping_patience: int = 1, early_stopping_threshold: float = 0.0) -> None:
        self.patience = early_stopping_patience
        self.threshold = early_stopping_threshold
        self.waited = 0
        self.best: float | None = None

    def state(self) -> dict[str, Any]:
        """What a resumed run needs."""
        return {"waited": self.waited, "best": self.best}

    def load_state(self, state: dict[str, Any]) -> None:
        """Takes it back."""
        self.waited, self.best = int(state["waited"]), state["best"]

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """Checks that there is something to watch."""
        if args.eval_strategy == "no" or args.metric_for_best_model is None:
            raise ConfigError("EarlyStoppingCallback needs an eval_strategy and metric_for_best_model.")

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """Counts evaluations without improvement."""
        name = metric_name(args.metric_for_best_model)
        value = (kwargs.get("metrics") or {}).get(name)
        if value is None:
            warnings.warn(
                f"EarlyStoppingCallback: evaluation gave no {name!r}; it does nothing.", stacklevel=2
            )
            return
        if improves(value, self.best, bool(args.greater_is_better), self.threshold):
            self.waited, self.best = 0, float(value)
        else:
            self.waited += 1
        if self.waited >= self.patience:
            control.should_training_stop = True


def metric_name(name: str) -> str:
    """The key in evaluate()'s metrics: "loss" is "eval_loss"."""
    return name if name.startswith("eval_") else f"eval_{name}"


def improves(value: float, best: float | None, greater: bool, threshold: float = 0.0) -> bool:
    """Whether a value is better than the best so far; one that is not a number never is."""
    if not math.isfinite(value):
        return False
    return best is None or (value - best if greater else best - value) > threshold
