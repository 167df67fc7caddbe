"""The loop behind train_gpt.py: steps, evaluation, checkpoints, and what it shows meanwhile."""

from __future__ import annotations

import dataclasses
import pathlib
import time
from collections.abc import Callable
from typing import Any

import gpt
import jax
import numpy as np
import optax
import text
from charts import Point, loss_curve, memory_by_stage
from rich.console import Console
from rich.live import Live

import zeroj as zj

EVAL_BATCHES = 8
PLAIN_LINE_EVERY = 20  # steps between lines where the output is no terminal


@dataclasses.dataclass(frozen=True)
class Setup:
    """What does not change during a run: the model, the text, and how to make an engine."""

    definition: Any
    init_fn: Callable[[], Any]
    corpus: Any
    config: Any
    context: int
    make_engine: Callable[[], Any]


@dataclasses.dataclass
class Run:
    """One training run: the engine, where it stands in the text, and the losses so far.

    ``Run.fresh`` starts one and ``Run.resume`` goes on from a checkpoint.
    """

    setup: Setup
    out: pathlib.Path
    engine: Any
    batches: text.Batches
    train_losses: list[Point] = dataclasses.field(default_factory=list)
    validation_losses: list[Point] = dataclasses.field(default_factory=list)
    tags: list[str] = dataclasses.field(default_factory=list)

    @classmethod
    def fresh(cls, setup: Setup, out: pathlib.Path) -> Run:
        """A run from the model's initial values."""
        out.mkdir(parents=True, exist_ok=True)
        engine = setup.make_engine()
        batches = text.Batches(setup.corpus.train, engine.batch_sizes.train, setup.context)
        return cls(setup, out, engine, batches)

    @classmethod
    def resume(cls, setup: Setup, out: pathlib.Path, tag: str | None = None) -> Run:
        """A run that goes on from the checkpoint ``tag`` under ``out``; None means the newest."""
        run = cls.fresh(setup, out)
        _, client = run.engine.load_checkpoint(out / "checkpoints", tag=tag)
        run.batches.position = client["position"]
        run.train_losses = [tuple(point) for point in client["train_losses"]]
        run.validation_losses = [tuple(point) for point in client["validation_losses"]]
        return run

    @property
    def step(self) -> int:
        """Steps done."""
        return self.engine.global_steps

    def describe(self) -> None:
        """Print the devices, the text and the plan."""
        corpus, devices = self.setup.corpus, jax.devices()
        print(
            f"{len(devices)} x {devices[0].device_kind}; text: {corpus.files} files of the standard library, "
        )
        print(f"{len(corpus.train):,} bytes to train on, {len(corpus.validation):,} to validate on\n")
        print(self.engine.plan, "\n")

    def train_step(self) -> dict[str, float]:
        """One update; its metrics as numbers."""
        metrics = self.engine.train_batch(next(self.batches))
        found = {name: float(metrics[name]) for name in ("loss", "grad_norm")}
        self.train_losses.append((self.step, found["loss"]))
        return found

    def evaluate(self) -> float:
        """Mean loss over the same validation batches every time."""
        held_out = text.Batches(
            self.setup.corpus.validation, self.engine.batch_sizes.train, self.setup.context
        )
        losses = [float(self.engine.eval_batch(next(held_out))["loss"]) for _ in range(EVAL_BATCHES)]
        self.validation_losses.append((self.step, float(np.mean(losses))))
        return self.validation_losses[-1][1]

    def save(self) -> None:
        """Write a checkpoint with all that a resume needs."""
        self.tags.append(f"step-{self.step}")
        client = {
            "position": self.batches.position,
            "train_losses": self.train_losses,
            "validation_losses": self.validation_losses,
        }
        self.engine.save_checkpoint(self.out / "checkpoints", tag=self.tags[-1], client_state=client)

    def train(self, steps: int, eval_every: int, save_every: int) -> None:
        """Train up to ``steps`` steps in all, evaluating before the first and every so often."""
        console = Console()
        if not self.validation_losses:
            console.print(f"validation loss before training {self.evaluate():.4f}")
        held = f"{bytes_on_first_device(self.engine.state) / 2**20:.2f} MiB/device"
        with Live(console=console, auto_refresh=False) as live:
            while self.step < steps:
                line = f"step {self.step + 1:>3}/{steps}  {self.progress()}  {held}"
                if console.is_terminal:
                    live.update(line, refresh=True)
                elif self.step % PLAIN_LINE_EVERY == 0:
                    print(line, flush=True)
                if self.step % eval_every == 0 or self.step == steps:
                    console.print(f"step {self.step}: validation loss {self.evaluate():.4f}")
                if self.step % save_every == 0 or self.step == steps:
                    self.save()

    def progress(self) -> str:
        """Do a step, and say how it went."""
        started = time.perf_counter()
        metrics = self.train_step()
        rate = self.engine.batch_sizes.train * self.setup.context / (time.perf_counter() - started)
        return (
            f"loss {metrics['loss']:.3f}  lr {self.engine.get_lr()[0]:.1e}  "
            f"norm {metrics['grad_norm']:.2f}  {rate:,.0f} tokens/s"
        )


def bytes_on_first_device(tree: Any) -> int:
    """Bytes that the arrays of a tree hold on the first device, read from their shards."""
    first = jax.devices()[0]
    shards = [s for x in jax.tree.leaves(tree) if isinstance(x, jax.Array) for s in x.addressable_shards]
    return sum(shard.data.nbytes for shard in shards if shard.device == first)


def draw(run: Run) -> None:
    """Write loss.png, and memory.png: the plans of all four stages for this model."""
    plan = run.engine.plan
    title = f"GPT on the Python standard library, ZeRO stage {plan.zero.stage}, {plan.degree} devices"
    loss_curve(run.out / "loss.png", run.train_losses, run.validation_losses, title)
    shapes = jax.eval_shape(run.setup.init_fn)
    tx = optax.adamw(1e-3)
    plans = {
        f"stage {stage}": zj.make_plan(
            shapes, tx, plan.mesh, zj.Zero(stage=stage), precision=plan.precision, zero_axes=plan.zero_axes
        )
        for stage in range(4)
    }
    bars = {label: dict(found.memory().device) for label, found in plans.items()}
    if run.engine.batch_sizes.accumulation == 1:
        for parts in bars.values():
            parts["accumulator"] = 0  # one micro-batch adds up nothing
    count = sum(x.size for x in jax.tree.leaves(shapes)) / 1e6
    title = f"State and gradients by ZeRO stage: {count:.2f} M params, Adam, {plan.degree} devices"
    memory_by_stage(run.out / "memory.png", bars, title)


def write_sample(run: Run, prompt: str) -> None:
    """Print, and write to sample.txt, how the model goes on from a prompt."""
    params = zj.full_params(run.engine.state, run.engine.plan)
    tokens = gpt.generate(run.setup.definition, params, text.encode(prompt)[None], jax.random.key(0))
    sample = text.decode(np.asarray(tokens)[0])
    (run.out / "sample.txt").write_text(sample)
    print(f"\n--- sample ---\n{sample}\n--------------")
