"""The loop: epochs of batches, an update for each, and what callbacks ask for in between."""

from __future__ import annotations

import dataclasses
import math
import pathlib
import time
import warnings
from typing import Any

import jax
import numpy as np

from zeroj.trainer import building, saving
from zeroj.trainer.callbacks import improves, metric_name
from zeroj.trainer.data import GlobalBatch, Loader
from zeroj.trainer.state import TrainerState

#: Steps that may be under way on the devices while the host goes on.
IN_FLIGHT = 2
#: Different lengths of a batch after which a warning says that each compiles anew.
MANY_SHAPES = 8


@dataclasses.dataclass
class Progress:
    """What the loop knows beside the state; saved with it.

    Attributes:
        epoch: passes finished.
        in_epoch: updates of the present pass.
        pending: losses since the last log, not yet fetched from the devices.
        total_loss: sum of the losses logged so far.
        last: metrics of the last update.
        shapes: shapes of batches seen.
        tokens: tokens since the last log.
        clock: when the last log was.
        place: where the data stood in the checkpoint that the run goes on from, for iterators that can go there.
        loader: the loader of the present pass.
    """

    epoch: int = 0
    in_epoch: int = 0
    pending: list[Any] = dataclasses.field(default_factory=list)
    total_loss: float = 0.0
    last: dict[str, Any] = dataclasses.field(default_factory=dict)
    shapes: set[Any] = dataclasses.field(default_factory=set)
    tokens: int = 0
    clock: float = dataclasses.field(default_factory=time.perf_counter)
    place: Any = None
    loader: Loader | None = None

    def to_json(self) -> dict[str, Any]:
        """What a resumed run needs."""
        losses = [float(loss) for loss in self.pending]
        return {
            "epoch": self.epoch,
            "in_epoch": self.in_epoch,
            "pending": losses,
            "total_loss": self.total_loss,
            "place": self.loader.place() if self.loader is not None and self.in_epoch else None,
        }


def run(trainer: Any, folder: pathlib.Path | None) -> Any:
    """Trains from the beginning, or from the checkpoint in ``folder``."""
    from zeroj.trainer.trainer import TrainOutput

    started = time.perf_counter()
    progress = _begin(trainer, folder)
    first = trainer.state.global_step
    trainer._call("on_train_begin")
    if trainer.args.eval_on_start and not first:
        trainer.evaluate()
    while trainer.state.global_step < trainer.state.max_steps and not trainer.control.should_training_stop:
        if not _epoch(trainer, progress):
            break
    _fetch(progress)
    metrics = _speeds(trainer, time.perf_counter() - started, trainer.state.global_step - first)
    metrics["train_loss"] = progress.total_loss / max(1, trainer.state.global_step)
    saving.finish(trainer)
    trainer.log(dict(metrics))
    trainer.save_state()
    trainer._call("on_train_end")
    skipped = trainer.engine.skipped_steps
    _say(
        trainer, f"time: {trainer.times.summary()}" + (f"; {skipped} updates were skipped" if skipped else "")
    )
    return TrainOutput(trainer.state.global_step, metrics["train_loss"], metrics)


def _begin(trainer: Any, folder: pathlib.Path | None) -> Progress:
    args, engine = trainer.args, trainer.engine
    progress = Progress()
    if folder is not None:
        trainer.state, saved = saving.load(trainer, folder)
        progress = Progress(saved["epoch"], saved["in_epoch"], list(saved["pending"]), saved["total_loss"])
        progress.place = saved.get("place")
    state: TrainerState = trainer.state
    total, updates = trainer.total_updates(), trainer.epoch_updates()
    state.max_steps = total
    state.num_train_epochs = math.ceil(total / updates) if updates else math.ceil(args.num_train_epochs)
    state.train_batch_size = args.per_device_train_batch_size
    for name in ("logging_steps", "eval_steps", "save_steps"):
        value = getattr(args, name) or 0
        setattr(state, name, max(1, math.ceil(total * value)) if 0 < value < 1 else int(value))
    state.is_world_process_zero = state.is_local_process_zero = jax.process_index() == 0
    trainer.control.should_training_stop = False
    fault = building.schedule_faults(engine.config, total)
    if fault:
        warnings.warn(fault, stacklevel=4)
    _describe(trainer, total, updates)
    return progress


def _describe(trainer: Any, total: int, updates: int | None) -> None:
    sizes = trainer.engine.batch_sizes
    _say(
        trainer,
        f"{trainer.engine.plan}\n{total} updates of {sizes.train} examples ({sizes.micro} a device x {trainer.world} "
        f"devices x {sizes.accumulation} micro-batches)"
        + (f", {updates} an epoch" if updates else "")
        + (f"; from update {trainer.state.global_step}" if trainer.state.global_step else ""),
    )


def _epoch(trainer: Any, progress: Progress) -> bool:
    """One pass over the data; whether it had any."""
    args, state = trainer.args, trainer.state
    seed = args.seed if args.data_seed is None else args.data_seed
    order = seed if args.train_sampling_strategy == "random" else None
    skip = 0 if args.ignore_data_skip else progress.in_epoch
    loader = trainer.loader(trainer.train_dataset, trainer.train_shape)
    place, progress.place, progress.loader = progress.place if skip else None, None, loader
    batches = loader.epoch(progress.epoch, order, drop_last=args.dataloader_drop_last, skip=skip, place=place)
    updates, seen = trainer.epoch_updates(), 0
    trainer._call("on_epoch_begin")
    while True:
        with trainer.times.of("data"):
            batch = next(batches, None)
        if batch is None:
            break
        seen += 1
        _update(trainer, progress, batch, updates)
        if trainer.control.should_training_stop or trainer.control.should_epoch_stop:
            break
    if not seen and not skip:
        warnings.warn(
            f"The data ended after {state.global_step} of {state.max_steps} updates, and gives no further example.",
            stacklevel=4,
        )
        trainer.control.should_training_stop = True
    whole = updates is None or progress.in_epoch >= updates
    if (seen or skip) and whole:
        progress.epoch, progress.in_epoch = progress.epoch + 1, 0
        state.epoch = float(progress.epoch)
    trainer.control.should_epoch_stop = False
    trainer.control.new_step()
    trainer._call("on_epoch_end")
    _act(trainer, progress)
    return bool(seen or skip)


def _update(trainer: Any, progress: Progress, batch: GlobalBatch, updates: int | None) -> None:
    """One update, and what is to be done after it."""
    state = trainer.state
    trainer.control.new_step()
    trainer._call("on_step_begin")
    shape = (batch.accumulation, *((name, np.shape(x)) for name, x in sorted(batch.arrays.items())))
    new = shape not in progress.shapes
    progress.shapes.add(shape)
    if new and len(progress.shapes) == MANY_SHAPES:
        warnings.warn(
            f"Batches of {MANY_SHAPES} different shapes so far, and each compiles the step anew: pad to one length "
            "with data_collator=zj.PaddingCollator(pad_to=...).",
            stacklevel=5,
        )
    usual = batch.accumulation == trainer.train_shape.accumulation and not batch.weighted
    started = time.perf_counter()
    with trainer.times.of("compile" if new else "step"):
        steps = None if usual else batch.accumulation
        progress.last = trainer.engine.train_batch(batch.arrays, accumulation_steps=steps)
        progress.pending.append(progress.last["loss"])
        if new or len(progress.pending) >= IN_FLIGHT:
            jax.block_until_ready(progress.pending[-1 if new else -IN_FLIGHT])
    if new:  # speeds are those of a step that is compiled
        progress.clock += time.perf_counter() - started
    else:
        progress.tokens += batch.tokens
    state.global_step += 1
    progress.in_epoch += 1
    state.num_input_tokens_seen += batch.tokens
    state.epoch = progress.epoch + (progress.in_epoch / updates if updates else 0.0)
    trainer._call("on_step_end")
    _act(trainer, progress)


def _act(trainer: Any, progress: Progress) -> None:
    """Logs, evaluates and saves, as the control says."""
    control = trainer.control
    if control.should_log and progress.pending:
        trainer.log(_logs(trainer, progress))
    if control.should_evaluate:
        metrics = trainer.evaluate()
        progress.clock = time.perf_counter()
        _keep_best(trainer, metrics)
    if trainer.control.should_save:
        with trainer.times.of("save"):
            saving.save(trainer, progress.to_json())
        trainer._call("on_save")
    trainer.control.new_step()


def _fetch(progress: Progress) -> float:
    """The mean of the losses since the last log."""
    losses = [float(loss) for loss in progress.pending]
    progress.pending = []
    progress.total_loss += sum(losses)
    return sum(losses) / max(1, len(losses))


def _logs(trainer: Any, progress: Progress) -> dict[str, Any]:
    last, count = progress.last, len(progress.pending)
    with trainer.times.of("step"):  # fetching waits for the devices
        logs: dict[str, Any] = {"loss": _fetch(progress), "grad_norm": float(last["grad_norm"])}
    if trainer.schedule is not None:
        logs["learning_rate"] = float(trainer.schedule(max(0, int(last["step"]) - int(last["applied"]))))
    if trainer.engine.plan.precision.name == "fp16":
        logs |= {"loss_scale": float(last["loss_scale"]), "skipped": int(last["skipped"])}
    now = time.perf_counter()
    if progress.tokens and count:
        logs["tokens_per_second"] = progress.tokens / max(1e-9, now - progress.clock)
    progress.tokens, progress.clock = 0, now
    if trainer.args.include_num_input_tokens_seen:
        logs["num_input_tokens_seen"] = trainer.state.num_input_tokens_seen
    return logs


def _keep_best(trainer: Any, metrics: dict[str, float]) -> None:
    args, state = trainer.args, trainer.state
    if args.metric_for_best_model is None:
        return
    name = metric_name(args.metric_for_best_model)
    if name not in metrics:
        raise KeyError(f"metric_for_best_model: evaluation gave no {name!r}; it gave {sorted(metrics)}.")
    if improves(metrics[name], state.best_metric, bool(args.greater_is_better)):
        state.best_metric, state.best_global_step = float(metrics[name]), state.global_step
        if args.save_strategy == "best":
            trainer.control.should_save = True


def _speeds(trainer: Any, seconds: float, updates: int) -> dict[str, float]:
    examples = updates * trainer.train_shape.rows
    return {
        "train_runtime": seconds,
        "train_samples_per_second": examples / max(1e-9, seconds),
        "train_steps_per_second": updates / max(1e-9, seconds),
    }


def _say(trainer: Any, text: str) -> None:
    if trainer.is_world_process_zero():
        print(text, flush=True)
