"""Combinations across sections that cannot be honoured, and those that can but may surprise."""

from __future__ import annotations

from typing import Any

from zeroj.config.rules import Rule


def _precisions(v: Any) -> list[str]:
    return [name for name in ("fp16", "bf16") if getattr(v.file, name).enabled]


def _low_master(name: str) -> Rule:
    key = f"{name}_master_weights_and_grads"

    def broken(v: Any) -> bool:
        section = getattr(v.file, name)
        return getattr(section, key) and not (section.enabled and v.file.zero_optimization.stage > 0)

    keys = (f"{name}.{key}", f"{name}.enabled", "zero_optimization.stage")
    return Rule(keys, broken, f"needs {name}.enabled and a stage from 1 to 3")


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
    _low_master("fp16"),
    _low_master("bf16"),
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
        "only a configured optimizer's momentum can be cycled; write false (it is true when left out)",
    ),
    Rule(
        ("scheduler.params.cycle_max_lr", "scheduler.params.cycle_min_lr"),
        lambda v: getattr(v.scheduler, "cycle_max_lr", 1) < getattr(v.scheduler, "cycle_min_lr", 0),
        "is below cycle_min_lr",
    ),
    Rule(
        ("compile.passes",),
        lambda v: not set(v.file.compile.passes) <= {"z1", "z3"},
        'only "z1" and "z3" ask for nothing beyond ZeRO; instead of "autosp" and "autotp" use mesh axes',
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
    if (
        optimizer is not None
        and getattr(scheduler, "cycle_momentum", False)
        and not hasattr(optimizer, "betas")
    ):
        notes.append(f"{file.optimizer.type} has no betas: cycle_momentum has no effect")
    warmup, total = (getattr(scheduler, key, None) for key in ("warmup_num_steps", "total_num_steps"))
    if warmup and total and total < warmup:
        notes.append(f"the schedule ends (total_num_steps {total}) before its warm-up does ({warmup})")
    return notes
