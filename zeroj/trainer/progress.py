"""What a person sees: a bar with the time left on a terminal, plain lines elsewhere, and a plot at the end."""

from __future__ import annotations

import math
import pathlib
import sys
import time
from typing import Any

import jax
import rich.progress as bars
from rich.console import Console

from zeroj.monitor.utilization import memory_line, utilization
from zeroj.trainer.callbacks import TrainerCallback
from zeroj.trainer.state import TrainerControl, TrainerState


class ProgressCallback(TrainerCallback):
    """A bar with ETA on a terminal; a line for each log everywhere. Process 0 alone prints.

    Args:
        bar: whether to show the bar; left out, where standard output is a terminal.
    """

    def __init__(self, bar: bool | None = None) -> None:
        self.console = Console(soft_wrap=True)
        self.bar = self.console.is_terminal if bar is None else bar
        self._live: bars.Progress | None = None
        self._task: Any = None
        self._started, self._first = 0.0, 0

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """Starts the bar."""
        self._started, self._first = time.perf_counter(), state.global_step
        if not (self.bar and state.is_world_process_zero):
            return
        columns = (
            bars.BarColumn(),
            bars.MofNCompleteColumn(),
            bars.TimeElapsedColumn(),
            bars.TimeRemainingColumn(),
            bars.TextColumn("{task.fields[last]}"),
        )
        self._live = bars.Progress(*columns, console=self.console)
        self._live.start()
        self._task = self._live.add_task("", total=state.max_steps, completed=state.global_step, last="")

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """Moves it."""
        if self._live is not None:
            self._live.update(self._task, completed=state.global_step)

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """Prints the numbers."""
        if not state.is_world_process_zero:
            return
        logs = kwargs.get("logs") or {}
        text = "  ".join(f"{name} {shown(value)}" for name, value in logs.items())
        text += _hardware(kwargs.get("trainer"), logs)
        line = f"step {state.global_step}/{state.max_steps}  {text}{self._left(state)}"
        if self._live is not None:
            self._live.console.print(line, markup=False, highlight=False)
            if "loss" in logs:
                self._live.update(self._task, last=f"loss {shown(logs['loss'])}")
        else:
            print(line, flush=True)

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """Ends the bar."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _left(self, state: TrainerState) -> str:
        done = state.global_step - self._first
        if self._live is not None or done <= 0 or state.global_step >= state.max_steps:
            return ""
        rest = (time.perf_counter() - self._started) / done * (state.max_steps - state.global_step)
        return f"  eta {int(rest) // 3600}:{int(rest) // 60 % 60:02d}:{int(rest) % 60:02d}"


def _hardware(trainer: Any, logs: dict[str, Any]) -> str:
    """Memory in use, and the share of the peak rate where it is known; beside a training log alone."""
    if trainer is None or "loss" not in logs:
        return ""
    text, plan = f"  {memory_line()}", trainer.engine.plan
    if plan.precision.half and "tokens_per_second" in logs:
        params = sum(math.prod(leaf.shape) for leaf in plan.leaves)
        kind = jax.local_devices()[0].device_kind
        share = utilization(params, logs["tokens_per_second"], plan.mesh.size, kind)
        text += f"  mfu {share:.1%}" if share is not None else ""
    return text


def shown(value: Any) -> str:
    """A number in few characters."""
    if isinstance(value, float):
        return f"{value:.4g}" if value == 0 or 1e-3 <= abs(value) < 1e5 else f"{value:.2e}"
    return str(value)


class PlotCallback(TrainerCallback):
    """Draws loss.png into the output folder at the end, where matplotlib is installed (the extra "plot")."""

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """Draws."""
        if not state.is_world_process_zero:
            return
        try:
            from matplotlib.figure import Figure
        except ImportError:
            print("No loss.png: matplotlib is not installed (pip install 'zeroj[plot]').", file=sys.stderr)
            return
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.subplots()
        for name, label in (("loss", "training"), ("eval_loss", "evaluation")):
            points = [(log["step"], log[name]) for log in state.log_history if name in log]
            if points:
                axes.plot(*zip(*points), marker="." if len(points) < 50 else "", label=label)
        axes.set(
            xlabel="updates", ylabel="loss", title=f"{args.run_name or pathlib.Path(args.output_dir).name}"
        )
        if axes.lines:
            axes.legend()
        axes.grid(alpha=0.3)
        figure.savefig(pathlib.Path(args.output_dir) / "loss.png", dpi=120)
