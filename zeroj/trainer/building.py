"""From a Trainer's parts to an engine: which optimizer, which schedule, which program."""

from __future__ import annotations

import itertools
from typing import Any

import jax

from zeroj.config.config import Config
from zeroj.engine import Engine, initialize
from zeroj.errors import ConfigError
from zeroj.trainer.arguments import TrainingArguments
from zeroj.trainer.data import is_sized
from zeroj.trainer.schedules import make_schedule
from zeroj.trainer.streams import tells_place


def make_engine(trainer: Any) -> Engine:
    """The engine of a Trainer's run.

    Optimizer and schedule may each be the ds_config's or the arguments', in all four combinations; an optimizer
    passed to the Trainer takes the place of the ds_config's.
    """
    args: TrainingArguments = trainer.args
    total = trainer.total_updates()
    if args.gradient_checkpointing:
        _enable_checkpointing(trainer.model.source)
    tx, schedule = trainer.optimizers
    sections = {"optimizer": _adamw(args)} if tx is None else {}
    config = args.load_config(total, trainer.model.hidden_size, trainer.world, **sections)
    if tx is None and schedule is None and config.make_schedule() is None:
        schedule = make_schedule(
            args.lr_scheduler_type, args.learning_rate, args.warmup(total), total, args.lr_scheduler_kwargs
        )
    trainer.schedule = schedule or config.make_schedule()
    batch = example_batch(trainer)
    structs = shapes_of(trainer.model.params)
    trainer.losses = trainer.losses.told(structs, shapes_of(trainer.model.carried), batch)
    engine = initialize(
        trainer.losses.train,
        trainer.model.params,
        config,
        tx=tx,
        mesh=trainer.mesh,
        trainable=trainer.trainable,
        example_batch=batch,
        rng=args.seed,
        model_state=trainer.model.carried,
        schedule=None if tx is not None or config.make_schedule() is not None else schedule,
    )
    return engine


def shapes_of(params: Any) -> Any:
    """The params' shapes, with nothing made or read."""
    if callable(params):
        return jax.eval_shape(params)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)


def example_batch(trainer: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes of a batch of one example, to trace with."""
    for name in ("train_dataset", "eval_dataset"):
        dataset = getattr(trainer, name)
        if dataset is None or (is_sized(dataset) and not len(dataset)):
            continue
        if isinstance(dataset, dict):
            dataset = next(iter(dataset.values()))
        example, rest = _first(dataset)
        if rest is not None:
            setattr(trainer, name, rest)
        batch = trainer.data_collator([trainer.kept(example)])
        return {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in batch.items()}
    raise ConfigError(
        "The Trainer has no example to trace the model with: pass train_dataset or eval_dataset."
    )


def _first(dataset: Any) -> tuple[Any, Any]:
    """(the first example, what to iterate over from now on where looking at it used it up)."""
    if is_sized(dataset):
        return dataset[0], None
    stream = iter(dataset)
    start = stream.get_state() if tells_place(stream) else None
    try:
        example = next(stream)
    except StopIteration:
        raise ConfigError("The dataset is empty.") from None
    if start is not None:
        stream.set_state(start)
        return example, None
    return example, itertools.chain([example], stream) if stream is dataset else None


def _adamw(args: TrainingArguments) -> dict[str, Any]:
    return {
        "type": "AdamW",
        "params": {
            "lr": args.learning_rate,
            "betas": [args.adam_beta1, args.adam_beta2],
            "eps": args.adam_epsilon,
            "weight_decay": args.weight_decay,
            "decay_mask": "no_bias_or_norm",
        },
    }


def _enable_checkpointing(model: Any) -> None:
    enable = getattr(model, "gradient_checkpointing_enable", None)
    if enable is None:
        raise ConfigError(
            f"gradient_checkpointing=True, but {type(model).__name__} has no gradient_checkpointing_enable(): put "
            "jax.checkpoint around its layers, or give it one."
        )
    enable()


def schedule_faults(config: Config, total: int) -> str | None:
    """What is odd about the ds_config's schedule for a run of ``total`` updates."""
    section: Any = config.resolved().get("scheduler") or {}
    planned = (section.get("params") or {}).get("total_num_steps")
    if planned is not None and planned > total:
        return (
            f"The ds_config's schedule is made for {planned} updates, the run has {total}: the learning rate will "
            'not come down. Write "auto" for total_num_steps.'
        )
    return None
