"""`zj.TrainingArguments`: Hugging Face's names and defaults, as far as they mean something here."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from zeroj.config.config import Config
from zeroj.config.names import nearest
from zeroj.errors import ConfigError
from zeroj.trainer.refused import NO_EFFECT, REFUSED, THEIR_DEFAULTS
from zeroj.trainer.schedules import SCHEDULES

STRATEGIES = ("no", "steps", "epoch")
REPORTERS = ("tensorboard", "wandb", "csv")


@dataclasses.dataclass
class TrainingArguments:
    """What a run does, in Hugging Face's words. A name of theirs that zeroj does not support is refused.

    Batch sizes are per device; a device is one of those that share the batch, the product of the ZeRO axes.
    A number of steps below 1 (logging_steps, eval_steps, save_steps, warmup_steps) is a share of the run.

    Args:
        output_dir: folder for checkpoints, trainer_state.json, plots; left out, "trainer_output".
        deepspeed: a ds_config.json: a path or a dict; its "auto" is filled in from here. Left out: stage 0.
        per_device_train_batch_size: examples of one device in one micro-batch.
        per_device_eval_batch_size: the same for evaluation and prediction.
        gradient_accumulation_steps: micro-batches of one update.
        num_train_epochs: passes over the data; a fraction is allowed.
        max_steps: updates in all; above 0 it overrides num_train_epochs.
        learning_rate: the peak learning rate.
        lr_scheduler_type: which schedule (zeroj/trainer/schedules.py).
        lr_scheduler_kwargs: its further settings, such as {"num_cycles": 2}.
        warmup_steps: updates of linear warm-up.
        warmup_ratio: the same as a share of the run; warmup_steps above 0 wins.
        weight_decay: AdamW's; not applied to biases and norms where the optimizer is not the ds_config's.
        adam_beta1: decay of the first moment.
        adam_beta2: decay of the second moment.
        adam_epsilon: added to the root of the second moment.
        max_grad_norm: the gradient's global norm is clipped to it; 0 for no clipping.
        label_smoothing_factor: of the default loss.
        fp16: whether to compute in fp16 with a dynamic loss scale.
        bf16: whether to compute in bf16.
        gradient_checkpointing: whether the model recomputes activations in the backward pass; it must have
            ``gradient_checkpointing_enable()``, which is called.
        logging_strategy: "no", "steps" or "epoch".
        logging_steps: updates between logs.
        logging_first_step: whether to log the first update too.
        include_num_input_tokens_seen: whether logs carry the number of tokens seen.
        disable_tqdm: whether to print plain lines in place of a progress bar; left out, where there is no terminal.
        report_to: "none", "all", or some of "tensorboard", "wandb", "csv".
        run_name: name of the run for these; left out, output_dir's last part.
        eval_strategy: "no", "steps" or "epoch".
        eval_steps: updates between evaluations; left out, logging_steps.
        eval_delay: no evaluation before this many epochs or steps.
        eval_on_start: whether to evaluate before the first update.
        prediction_loss_only: whether evaluation returns the loss alone, even with compute_metrics.
        save_strategy: "no", "steps", "epoch" or "best".
        save_steps: updates between checkpoints.
        save_total_limit: how many checkpoints to keep; left out, all. The best one always stays.
        load_best_model_at_end: whether train() ends with the best checkpoint's params.
        metric_for_best_model: a key of evaluate()'s metrics; left out, "loss".
        greater_is_better: which way; left out, True unless the metric's name ends in "loss".
        ignore_data_skip: whether a resumed run starts its epoch from the first example.
        seed: seed of the steps' randomness, and of the order where data_seed is left out.
        data_seed: seed of the order of examples.
        dataloader_drop_last: whether to leave out a last micro-batch that is not full.
        remove_unused_columns: whether columns that the model does not take are dropped.
        label_names: columns that are labels; left out, those named "labels", "label" or "label_ids".
        train_sampling_strategy: "random" or "sequential".
        ddp_timeout: seconds after which evaluate, predict, generate and save_model name the processes that never
            called them, in place of waiting for ever.
        resume_from_checkpoint: for scripts, which pass it on to train(); the Trainer does not read it.
        do_train: for scripts; the Trainer does not read it.
        do_eval: for scripts; the Trainer does not read it.
        do_predict: for scripts; the Trainer does not read it.

    Raises:
        ConfigError: values that are wrong or contradict each other; lists all of them.

    Example:
        >>> args = TrainingArguments("out", max_steps=100, per_device_train_batch_size=4)
    """

    output_dir: str | None = None
    deepspeed: str | os.PathLike[str] | Mapping[str, Any] | None = None
    per_device_train_batch_size: int = 8
    per_device_eval_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    num_train_epochs: float = 3.0
    max_steps: int = -1
    learning_rate: float = 5e-5
    lr_scheduler_type: str = "linear"
    lr_scheduler_kwargs: Mapping[str, Any] | None = None
    warmup_steps: float = 0
    warmup_ratio: float = 0.0
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    max_grad_norm: float = 1.0
    label_smoothing_factor: float = 0.0
    fp16: bool = False
    bf16: bool = False
    gradient_checkpointing: bool = False
    logging_strategy: str = "steps"
    logging_steps: float = 500
    logging_first_step: bool = False
    include_num_input_tokens_seen: bool | str = False
    disable_tqdm: bool | None = None
    report_to: str | list[str] | None = "none"
    run_name: str | None = None
    eval_strategy: str = "no"
    eval_steps: float | None = None
    eval_delay: float = 0
    eval_on_start: bool = False
    prediction_loss_only: bool = False
    save_strategy: str = "steps"
    save_steps: float = 500
    save_total_limit: int | None = None
    load_best_model_at_end: bool = False
    metric_for_best_model: str | None = None
    greater_is_better: bool | None = None
    ignore_data_skip: bool = False
    seed: int = 42
    data_seed: int | None = None
    dataloader_drop_last: bool = False
    remove_unused_columns: bool = True
    label_names: list[str] | None = None
    train_sampling_strategy: str = "random"
    ddp_timeout: int = 1800
    resume_from_checkpoint: str | None = None
    do_train: bool = False
    do_eval: bool = False
    do_predict: bool = False

    def __init__(self, output_dir: str | None = None, **given: Any) -> None:
        known = {field.name: field for field in dataclasses.fields(self)}
        given = {"output_dir": output_dir} | given
        _refuse(given, list(known))
        for name, field in known.items():
            setattr(self, name, given.get(name, field.default))
        self.__post_init__()

    def __post_init__(self) -> None:
        self.output_dir = str(self.output_dir or "trainer_output")
        for name in ("lr_scheduler_type", "logging_strategy", "eval_strategy", "save_strategy"):
            setattr(self, name, _plain(getattr(self, name)))
        if self.load_best_model_at_end or self.save_strategy == "best":
            self.metric_for_best_model = self.metric_for_best_model or "loss"
        if self.greater_is_better is None and self.metric_for_best_model:
            self.greater_is_better = not self.metric_for_best_model.endswith("loss")
        if self.eval_strategy == "steps" and self.eval_steps is None:
            self.eval_steps = self.logging_steps
        faults = _faults(self)
        if faults:
            raise ConfigError("TrainingArguments:\n  - " + "\n  - ".join(faults))

    @classmethod
    def of(cls, args: Any) -> TrainingArguments:
        """zeroj's arguments from another library's object, such as transformers.TrainingArguments.

        Args:
            args: an object with these attributes. What it has beyond them must be at its default, or is refused.

        Raises:
            ConfigError: it asks for what zeroj does not support.
        """
        if isinstance(args, cls):
            return args
        values = {n: getattr(args, n) for n in dir(args) if n in THEIR_DEFAULTS} | dict(vars(args))
        own = {field.name for field in dataclasses.fields(cls)}
        given = {name: _plain(value) for name, value in values.items() if name in own}
        for name, value in values.items():
            asked = name in THEIR_DEFAULTS and _plain(value) not in THEIR_DEFAULTS[name]
            if name not in own and asked:
                given[name] = value
        if _plain(values.get("optim", "adamw_torch")) in THEIR_DEFAULTS["optim"]:
            given.pop("optim", None)
        if given.get("include_num_input_tokens_seen") == "no":
            given["include_num_input_tokens_seen"] = False
        given["gradient_checkpointing"] = bool(given.get("gradient_checkpointing"))
        given["disable_tqdm"] = given.get("disable_tqdm") or None  # theirs is False where it was left out
        given["report_to"] = given.get("report_to") or "none"
        return cls(**given)

    @property
    def reporters(self) -> list[str]:
        """The names in ``report_to``."""
        named = self.report_to
        if named is None or named == "none" or named == ["none"] or named == []:
            return []
        if named in ("all", ["all"]):
            return list(REPORTERS)
        return [named] if isinstance(named, str) else list(named)

    def warmup(self, total: int) -> int:
        """Updates of warm-up in a run of ``total`` updates."""
        if self.warmup_steps >= 1:
            return int(self.warmup_steps)
        return -int(-total * (self.warmup_steps or self.warmup_ratio) // 1)

    def auto_values(self, total: int | None, hidden_size: int | None, world: int) -> dict[str, Any]:
        """What "auto" in the ds_config becomes; the arguments of :meth:`zeroj.Config.load`."""
        batch = self.per_device_train_batch_size * self.gradient_accumulation_steps * world
        values: dict[str, Any] = {
            "train_batch_size": batch,
            "per_device_train_batch_size": self.per_device_train_batch_size,
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
            "max_grad_norm": self.max_grad_norm,
            "fp16": self.fp16,
            "bf16": self.bf16,
            "learning_rate": self.learning_rate,
            "adam_beta1": self.adam_beta1,
            "adam_beta2": self.adam_beta2,
            "adam_epsilon": self.adam_epsilon,
            "weight_decay": self.weight_decay,
            "hidden_size": hidden_size,
        }
        if total is not None:
            values |= {"num_training_steps": total, "warmup_steps": self.warmup(total)}
        return values

    def load_config(self, total: int, hidden_size: int | None, world: int, **sections: Any) -> Config:
        """The ds_config with "auto" filled in, held against these arguments.

        Args:
            total: updates of the run.
            hidden_size: the model's width, for "auto" bucket sizes; None where it is not known.
            world: devices that share the batch.
            **sections: sections to add where the file has none.

        Raises:
            ConfigError: every fault and every disagreement, in one message.
        """
        source: Any = self.deepspeed if self.deepspeed is not None else {}
        if not isinstance(source, Mapping):
            from zeroj.config.reader import read

            data, name, faults = read(source)
            if faults:
                return Config.load(source)  # raises with the file's name
            source = data
        source = {**{k: v for k, v in sections.items() if v is not None and k not in source}, **source}
        return Config.load(source, **self.auto_values(total, hidden_size, world))

    def to_dict(self) -> dict[str, Any]:
        """All values, as plain data where they are."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


def _plain(value: Any) -> Any:
    """The value of an enum, as Hugging Face's strategies are."""
    return getattr(value, "value", value)


def _refuse(given: Mapping[str, Any], known: list[str]) -> None:
    faults = []
    for name, value in given.items():
        if name in known:
            continue
        if name in NO_EFFECT or (name in THEIR_DEFAULTS and _plain(value) in THEIR_DEFAULTS[name]):
            continue
        if name in REFUSED:
            faults.append(f"{name}={value!r} is not supported: {REFUSED[name]}.")
        else:
            near = nearest(name, known)
            faults.append(f"unknown argument {name!r}." + (f" Did you mean {near!r}?" if near else ""))
    if faults:
        raise ConfigError("TrainingArguments:\n  - " + "\n  - ".join(faults))


def _faults(a: TrainingArguments) -> list[str]:
    """What is wrong with the values, all of it."""
    faults = [
        f"{name} must be a whole number of at least 1, got {getattr(a, name)!r}."
        for name in (
            "per_device_train_batch_size",
            "per_device_eval_batch_size",
            "gradient_accumulation_steps",
            "ddp_timeout",
        )
        if type(getattr(a, name)) is not int or getattr(a, name) < 1
    ]
    for name, allowed in (
        ("lr_scheduler_type", tuple(SCHEDULES)),
        ("logging_strategy", STRATEGIES),
        ("eval_strategy", STRATEGIES),
        ("save_strategy", (*STRATEGIES, "best")),
        ("train_sampling_strategy", ("random", "sequential")),
    ):
        if getattr(a, name) not in allowed:
            faults.append(f"{name}={getattr(a, name)!r} is none of {', '.join(allowed)}.")
    faults += [
        f"report_to: {name!r} is none of {', '.join(REPORTERS)}."
        for name in a.reporters
        if name not in REPORTERS
    ]
    for name, strategy in (("logging_steps", "logging"), ("eval_steps", "eval"), ("save_steps", "save")):
        value = getattr(a, name)
        if getattr(a, f"{strategy}_strategy") == "steps" and (
            not value or value < 0 or (value > 1 and value != int(value))
        ):
            faults.append(
                f"{name} must be a whole number of updates, or a share of the run below 1; got {value!r}."
            )
    if a.fp16 and a.bf16:
        faults.append("fp16 and bf16 are both True: a step computes in one of them.")
    if a.max_steps <= 0 and a.num_train_epochs <= 0:
        faults.append("max_steps or num_train_epochs must be above 0.")
    faults += _best_faults(a)
    return faults


def _best_faults(a: TrainingArguments) -> list[str]:
    if a.save_strategy == "best" and a.eval_strategy == "no":
        return ['save_strategy="best" needs an eval_strategy.']
    if not a.load_best_model_at_end or a.save_strategy == "best":
        return []
    if a.eval_strategy != a.save_strategy:
        return [
            f"load_best_model_at_end needs eval_strategy and save_strategy to be the same; they are "
            f"{a.eval_strategy!r} and {a.save_strategy!r}."
        ]
    if a.eval_strategy == "steps" and a.save_steps % (a.eval_steps or 1):
        return [
            f"load_best_model_at_end needs save_steps to be a multiple of eval_steps; they are {a.save_steps} and "
            f"{a.eval_steps}."
        ]
    return []
