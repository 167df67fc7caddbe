"""Combinations that cannot be honoured, as a table: which keys, when, and why."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from zeroj.config.faults import Fault, Path


@dataclasses.dataclass(frozen=True)
class Rule:
    """One impossible combination.

    Args:
        keys: dotted paths of the keys involved; the fault is shown at the first.
        broken: whether a section (of valid values) breaks the rule.
        text: the reason; `{0}` is the section.
    """

    keys: tuple[str, ...]
    broken: Callable[[Any], bool]
    text: str


def _on(section: Any) -> bool:
    return section is not None and section.device != "none"


def _nvme(section: Any) -> bool:
    return section is not None and section.device == "nvme"


def _stage3(key: str, asked: Callable[[Any], bool], why: str) -> Rule:
    return Rule(
        (key, "stage"), lambda z: asked(z) and z.stage < 3, why + ", so it needs stage 3, not {0.stage}"
    )


ZERO_RULES: tuple[Rule, ...] = (
    _stage3(
        "offload_param.device",
        lambda z: _on(z.offload_param),
        "below stage 3 every device holds the params whole",
    ),
    Rule(
        ("offload_optimizer.device", "stage"),
        lambda z: _on(z.offload_optimizer) and z.stage == 0,
        "at stage 0 no state is sharded, and every device would stream all of it; use stage 1, 2 or 3",
    ),
    _stage3(
        "offload_optimizer.device",
        lambda z: _nvme(z.offload_optimizer) and z.stage > 0,
        '"nvme" keeps the fp32 master in files, which is the params themselves at stage 3 only',
    ),
    Rule(
        ("offload_optimizer.nvme_path", "offload_optimizer.device"),
        lambda z: _nvme(z.offload_optimizer) and not z.offload_optimizer.nvme_path,
        'is required when offload_optimizer.device is "nvme"',
    ),
    Rule(
        ("offload_param.nvme_path", "offload_param.device"),
        lambda z: _nvme(z.offload_param) and not z.offload_param.nvme_path,
        'is required when offload_param.device is "nvme"',
    ),
    _stage3(
        "zero_hpz_partition_size",
        lambda z: z.zero_hpz_partition_size > 1,
        "hpZ keeps a second shard of params",
    ),
    _stage3(
        "zero_quantized_weights", lambda z: z.zero_quantized_weights, "qwZ quantises the gather of params"
    ),
    _stage3(
        "zero_quantized_nontrainable_weights",
        lambda z: z.zero_quantized_nontrainable_weights,
        "frozen params are quantised in their shards",
    ),
    _stage3(
        "zero_quantized_gradients",
        lambda z: z.zero_quantized_gradients,
        "qgZ reduces gradients straight into the shards of the params",
    ),
    Rule(
        ("zeropp_loco_param", "zero_quantized_gradients"),
        lambda z: z.zeropp_loco_param is not None and not z.zero_quantized_gradients,
        "feeds back the error of quantised gradients, so it needs zero_quantized_gradients",
    ),
    _stage3("mics_shard_size", lambda z: z.mics_shard_size > 0, "MiCS shards the params within a group"),
    Rule(
        ("mics_shard_size",),
        lambda z: z.mics_shard_size == 0,
        "0 is neither off (-1) nor the size of a group (1 or more)",
    ),
    Rule(
        ("mics_shard_size", "zero_hpz_partition_size"),
        lambda z: z.mics_shard_size > 0 and z.zero_hpz_partition_size > 1,
        "MiCS and hpZ (zero_hpz_partition_size) each define the group that gathers params; choose one",
    ),
    Rule(
        ("mics_hierarchical_params_gather", "mics_shard_size"),
        lambda z: z.mics_hierarchical_params_gather and z.mics_shard_size <= 0,
        "is a gather of MiCS, so it needs mics_shard_size",
    ),
    _stage3(
        "reshard_after_forward",
        lambda z: not z.reshard_after_forward,
        "only gathered params can be kept or freed",
    ),
)


def broken_rules(rules: Sequence[Rule], section: Any, path: Path, skip: Sequence[Path] = ()) -> list[Fault]:
    """The faults of `section` against `rules`.

    Args:
        rules: the table.
        section: a section all of whose values are valid by themselves.
        path: where the section stands in the file.
        skip: paths of keys that were at fault before: a rule that involves one of them says nothing.
    """
    return [
        Fault((*path, *rule.keys[0].split(".")), rule.text.format(section))
        for rule in rules
        if not any(_touches((*path, *key.split(".")), bad) for key in rule.keys for bad in skip)
        and rule.broken(section)
    ]


def _touches(path: Path, bad: Path) -> bool:
    shorter = min(len(path), len(bad))
    return path[:shorter] == bad[:shorter]


def zero_faults(zero: Any, path: Path = (), skip: Sequence[Path] = ()) -> list[Fault]:
    """The impossible combinations within "zero_optimization"."""
    return broken_rules(ZERO_RULES, zero, path, skip)


def _precisions(v: Any) -> list[str]:
    return [name for name in ("fp16", "bf16") if getattr(v.file, name).enabled]


def _low_master(section: str) -> str:
    return f"{section}.{section}_master_weights_and_grads"


ROOT_RULES: tuple[Rule, ...] = (
    Rule(
        ("fp16.enabled", "bf16.enabled"),
        lambda v: len(_precisions(v)) == 2,
        "fp16 and bf16 are both enabled; a step computes in one of them",
    ),
    Rule(
        ("fp16.loss_scale_window", "fp16.loss_scale"),
        lambda v: v.file.fp16.loss_scale == 0 and v.file.fp16.loss_scale_window == 0,
        "must be at least 1 when the loss scale is dynamic (loss_scale 0)",
    ),
    Rule(
        ("fp16.min_loss_scale", "fp16.loss_scale"),
        lambda v: v.file.fp16.loss_scale == 0 and v.file.fp16.min_loss_scale == 0,
        "must be above 0 when the loss scale is dynamic (loss_scale 0)",
    ),
    Rule(
        ("fp16.min_loss_scale", "fp16.initial_scale_power", "fp16.loss_scale"),
        lambda v: (
            v.file.fp16.loss_scale == 0 and v.file.fp16.min_loss_scale > 2.0**v.file.fp16.initial_scale_power
        ),
        "is above the scale of the first step, 2 to the power initial_scale_power",
    ),
    *(
        Rule(
            (_low_master(name), f"{name}.enabled", "zero_optimization.stage"),
            lambda v, name=name: (  # type: ignore[misc]
                getattr(getattr(v.file, name), f"{name}_master_weights_and_grads")
                and (not getattr(v.file, name).enabled or v.file.zero_optimization.stage == 0)
            ),
            f"needs {name}.enabled and a stage from 1 to 3",
        )
        for name in ("fp16", "bf16")
    ),
    Rule(
        ("bf16.bf16_optimizer_states", "bf16.enabled"),
        lambda v: v.file.bf16.bf16_optimizer_states and not v.file.bf16.enabled,
        "needs bf16.enabled",
    ),
    Rule(
        ("data_types.param_dtype", "fp16.enabled", "bf16.enabled"),
        lambda v: v.file.data_types.param_dtype not in (None, *(_precisions(v) or ["fp32"])),
        "has to repeat the precision that is switched on by fp16.enabled or bf16.enabled",
    ),
    Rule(
        ("optimizer.params.adam_w_mode", "optimizer.type"),
        lambda v: (
            v.optimizer is not None
            and v.file.optimizer.type.lower() == "adamw"
            and not getattr(v.optimizer, "adam_w_mode", True)
        ),
        'AdamW is the decoupled form by definition; for decay added to the gradient write "type": "Adam"',
    ),
    Rule(
        ("scheduler.params.warmup_max_lr", "optimizer"),
        lambda v: (
            v.scheduler is not None
            and v.optimizer is None
            and getattr(v.scheduler, "warmup_max_lr", 0) is None
        ),
        "is required where there is no section optimizer whose lr it could take",
    ),
    Rule(
        ("scheduler.type", "optimizer"),
        lambda v: v.scheduler is not None and v.optimizer is None and hasattr(v.scheduler, "cos_min_ratio"),
        "WarmupCosineLR scales the optimizer's lr, so it needs a section optimizer",
    ),
    Rule(
        ("scheduler.params.cycle_momentum", "optimizer"),
        lambda v: v.optimizer is None and getattr(v.scheduler, "cycle_momentum", False),
        "only the momentum of an optimizer in the config can be cycled; write false (it is true when left out)",
    ),
    Rule(
        ("scheduler.params.cycle_max_lr", "scheduler.params.cycle_min_lr"),
        lambda v: getattr(v.scheduler, "cycle_max_lr", 1) < getattr(v.scheduler, "cycle_min_lr", 0),
        "is below cycle_min_lr",
    ),
    Rule(
        ("compile.passes",),
        lambda v: not set(v.file.compile.passes) <= {"z1", "z3"},
        'only "z1" and "z3" ask for nothing beyond ZeRO; shard the model by mesh axes instead of "autosp", "autotp"',
    ),
)


def notes_of(file: Any, optimizer: Any, scheduler: Any, written: frozenset[str]) -> list[str]:
    """What holds but may surprise: one sentence each."""
    zero = file.zero_optimization
    notes = []
    if "gradient_clipping" not in written:
        notes.append(
            "gradient_clipping is left out: gradients are clipped to a global norm of 1.0; write 0 for none"
        )
    if optimizer is not None and file.optimizer.type.lower() == "adam" and optimizer.adam_w_mode:
        notes.append('"Adam" means AdamW here, as in DeepSpeed; write "adam_w_mode": false for L2 decay')
    if zero.stage < 3 and any(key.startswith("zero_optimization.stage3_") for key in written):
        notes.append(f"the stage3_ keys have no effect at stage {zero.stage}")
    for name in ("offload_optimizer", "offload_param"):
        section = getattr(zero, name)
        if section is not None and section.device != "nvme" and section.nvme_path:
            notes.append(f'{name}.nvme_path is not used, since device is "{section.device}"')
    warmup, total = (getattr(scheduler, key, None) for key in ("warmup_num_steps", "total_num_steps"))
    if warmup and total and total < warmup:
        notes.append(f"the schedule ends (total_num_steps {total}) before its warm-up does ({warmup})")
    return notes
