"""Everything that a config asks to be told about a run, behind one object that a training loop calls."""

from __future__ import annotations

import contextlib
import json
import math
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from zeroj.config.config import Config
from zeroj.monitor.clock import Clock
from zeroj.monitor.comms import comms_table
from zeroj.monitor.console import say
from zeroj.monitor.events import Event, make_writers
from zeroj.monitor.flops import flops_text
from zeroj.monitor.memory import memory_text
from zeroj.monitor.program import Program, compile_program
from zeroj.plan.plan import Plan

#: The scalars of an event, by metric, under the names that DeepSpeed gives them.
EVENTS = {
    "loss": "train_loss",
    "lr": "lr",
    "loss_scale": "loss_scale",
    "grad_norm": "grad_norm",
    "skipped": "skipped_steps",
}
_TIME = "elapsed_time_ms_"


class RunMonitor:
    """Watches a training run as its config asks: steps_per_print, wall_clock_breakdown, memory_breakdown,
    dump_state, flops_profiler, comms_logger, tensorboard, wandb and csv_monitor.

    What is not asked for costs nothing: without wall_clock_breakdown and flops_profiler no step is waited for,
    and scalars are written one step late, when the devices have long made them.

    Args:
        config: what to watch.
        plan: where everything lives.

    Raises:
        ConfigError: a package that a section needs is not installed.

    Example:
        >>> monitor.batch_arrived()
        >>> with monitor.phase("transfer") as made:
        ...     batch = made(zj.shard_batch(plan, batch))
        >>> monitor.before_step(step, state, batch)
        >>> with monitor.phase("step") as made:
        ...     state, metrics = made(step(state, batch))
        >>> monitor.after_step(1, 32, metrics)
    """

    def __init__(self, config: Config, plan: Plan) -> None:
        self.config, self.plan, self.file = config, plan, config.loaded.file
        self.clock = Clock(self.file.wall_clock_breakdown or self.file.flops_profiler.enabled)
        self.program: Program | None = None
        self._writers = make_writers(config)
        self._held: list[tuple[str, Any, int]] = []
        self._made_for: Any = None
        self._printed = (time.perf_counter(), 0)
        if self.file.dump_state:
            say(json.dumps(config.resolved(), indent=2, sort_keys=True))
            say(str(plan))
        if self.file.memory_breakdown:
            say(memory_text("at the start"))

    @property
    def reads(self) -> bool:
        """Whether scalars of the steps are printed or written at all."""
        return bool(self._writers or self.config.steps_per_print)

    # -- before the step -----------------------------------------------------------------------------

    def batch_arrived(self) -> None:
        """The caller has made a batch."""
        self.clock.batch_arrived()

    def phase(self, name: str) -> contextlib.AbstractContextManager[Callable[[Any], Any]]:
        """A part of the step; see :meth:`Clock.phase`."""
        return self.clock.phase(name)

    def before_step(self, step: Any, state: Any, batch: Any) -> None:
        """Compiles the step where its time, its FLOPs or its collectives are asked for; once for each shape."""
        if not (self.clock.on or self.file.comms_logger.enabled):
            return
        made_for = (step, jax.tree.map(lambda x: (x.shape, x.dtype), batch))
        if made_for == self._made_for:
            return
        mesh = self.plan.mesh
        per_node = sum(d.process_index == mesh.devices.flat[0].process_index for d in mesh.devices.flat)
        if "node" in mesh.shape:
            per_node = mesh.size // mesh.shape["node"]
        with self.phase("compile"):
            self.program = compile_program(step, state, batch, devices=mesh.size, devices_per_node=per_node)
        self._made_for = made_for
        comms = self.file.comms_logger
        if comms.enabled:
            say(comms_table(self.program.collectives, None if comms.prof_all else comms.prof_ops))

    # -- after it --------------------------------------------------------------------------------------

    def after_step(self, step: int, samples: int, metrics: Mapping[str, Any]) -> None:
        """Writes and prints what is due.

        Args:
            step: the step's number, from 1.
            samples: examples seen so far, this step's included.
            metrics: what the step returned, and ``lr``; scalars on the device.
        """
        self.clock.step_ended()
        self._write(samples, metrics)
        if self.file.flops_profiler.enabled and step == self.file.flops_profiler.profile_step:
            self._profile(step)
        if step == 1 and self.file.memory_breakdown:
            say(memory_text("after the first step"))
        every = self.config.steps_per_print
        if every and step % every == 0:
            self._print(step, samples, metrics)
        elif not every and self.file.wall_clock_breakdown:
            self._print_clock(step)

    def close(self) -> None:
        """Writes out everything that is held back."""
        self._flush()
        for writer in self._writers:
            writer.close()
        self._writers = []

    # -- parts -----------------------------------------------------------------------------------------

    def _write(self, samples: int, metrics: Mapping[str, Any]) -> None:
        """Holds this step's scalars and writes those of the step before."""
        if not self._writers:
            return
        self._flush()
        named = [(EVENTS[key], metrics[key]) for key in EVENTS if metrics.get(key) is not None]
        if self.file.wall_clock_breakdown:
            named += [(_TIME + phase, seconds * 1e3) for phase, seconds in self.clock.last.items()]
        self._held = [(f"Train/Samples/{name}", value, samples) for name, value in named]

    def _flush(self) -> None:
        events = [Event(name, float(value), at) for name, value, at in self._held]
        self._held = []
        for writer in self._writers if events else ():
            writer.write(events)

    def _print(self, step: int, samples: int, metrics: Mapping[str, Any]) -> None:
        shown = {key: float(metrics[key]) for key in ("loss", "grad_norm", "loss_scale")}
        lr = metrics.get("lr")
        text = f"step {step}: " + ", ".join(f"{key} {value:.6g}" for key, value in shown.items())
        text += f", lr {float(lr):.4g}" if lr is not None else ""
        now, (then, before) = time.perf_counter(), self._printed
        text += f", skipped {int(metrics['skipped'])}, {(samples - before) / (now - then):.1f} samples/s"
        self._printed = (now, samples)
        say(text)
        if self.file.wall_clock_breakdown:
            self._print_clock(step)
        if self.file.memory_breakdown:
            say(memory_text(f"after step {step}"))

    def _print_clock(self, step: int) -> None:
        phases = ", ".join(f"{name} {seconds * 1e3:.2f}" for name, seconds in self.clock.take().items())
        say(f"step {step}: time in ms: {phases}")

    def _profile(self, step: int) -> None:
        assert self.program is not None
        params = sum(math.prod(leaf.shape) for leaf in self.plan.leaves)
        text = flops_text(self.program, self.clock.last["step"], params, step)
        target = self.file.flops_profiler.output_file
        if target is None:
            say(text)
        elif jax.process_index() == 0:
            pathlib.Path(target).write_text(text + "\n")
