"""The section "scheduler": one set of params for each of DeepSpeed's schedules."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from zeroj.config.rows import Bool, Float, Int, Section, Text, Variants, honoured, refused

WarmupType = Literal["log", "linear"]


class ScheduleParams(Section):
    """What every schedule takes."""

    last_batch_iteration: Int = refused(
        -1,
        "a schedule counts the updates that were made, which a checkpoint restores",
        "restore the checkpoint",
    )


class _Warmup(ScheduleParams):
    warmup_num_steps: Int = honoured(
        1000, "Steps of the warm-up; 0 and 1 count as 2.", auto="warmup_steps", ge=0
    )
    warmup_type: WarmupType = honoured("log", "log: log(k + 1) / log(steps). linear: k / steps.")


class WarmupLRParams(_Warmup):
    """Params of WarmupLR."""

    warmup_min_lr: Float = honoured(0.0, "Learning rate before the warm-up.", auto="warmup_min_lr", ge=0)
    warmup_max_lr: Float | None = honoured(
        None, "Learning rate after it. Left out: the optimizer's lr.", auto="learning_rate", ge=0
    )


class WarmupDecayLRParams(_Warmup):
    """Params of WarmupDecayLR."""

    total_num_steps: Int = honoured(..., "Updates until the rate is zero.", auto="num_training_steps", gt=0)
    warmup_min_lr: Float = honoured(0.0, "Learning rate before the warm-up.", auto="warmup_min_lr", ge=0)
    warmup_max_lr: Float = honoured(1e-3, "Learning rate after it.", auto="learning_rate", ge=0)


class WarmupCosineLRParams(_Warmup):
    """Params of WarmupCosineLR."""

    total_num_steps: Int = honoured(
        ..., "Updates until the rate is at its floor.", auto="num_training_steps", gt=0
    )
    warmup_min_ratio: Float = honoured(0.0, "Share of the optimizer's lr before the warm-up.", ge=0, le=1)
    cos_min_ratio: Float = honoured(1e-4, "Share of the optimizer's lr at the end.", ge=0, le=1)


class LRRangeTestParams(ScheduleParams):
    """Params of LRRangeTest."""

    lr_range_test_min_lr: Float = honoured(1e-3, "Learning rate at the start.", gt=0)
    lr_range_test_step_size: Int = honoured(2000, "Updates of one interval.", gt=0)
    lr_range_test_step_rate: Float = honoured(1.0, "Growth in one interval, as a share of the start.", ge=0)
    lr_range_test_staircase: Bool = honoured(False, "Grow between intervals only.")


class OneCycleParams(ScheduleParams):
    """Params of OneCycle."""

    cycle_min_lr: Float = honoured(..., "Learning rate at both ends of the cycle.", ge=0)
    cycle_max_lr: Float = honoured(..., "Learning rate at its top.", ge=0)
    decay_lr_rate: Float = honoured(0.0, "After the cycle: decay of the rate in one decay step.", ge=0)
    cycle_first_step_size: Int = honoured(2000, "Updates of the rising half.", gt=0)
    cycle_second_step_size: Int | None = honoured(
        None, "Updates of the falling half. Left out: as the first.", gt=0
    )
    cycle_first_stair_count: Int = honoured(0, "Stairs of the rising half; 0: none.", ge=0)
    cycle_second_stair_count: Int | None = honoured(
        None, "Stairs of the falling half. Left out: as the first.", ge=0
    )
    decay_step_size: Int = honoured(0, "Updates of one decay step; 0: no decay.", ge=0)
    cycle_momentum: Bool = honoured(
        True,
        "Also cycle the first beta, against the rate, and set the second to 0.99, where there are betas.",
    )
    cycle_min_mom: Float = honoured(0.8, "Momentum at the top of the rate.", ge=0, lt=1)
    cycle_max_mom: Float = honoured(0.9, "Momentum at the ends of the cycle.", ge=0, lt=1)
    decay_mom_rate: Float = honoured(0.0, "After the cycle: growth of the momentum in one decay step.", ge=0)


SCHEDULES: dict[str, type[ScheduleParams]] = {
    "WarmupLR": WarmupLRParams,
    "WarmupDecayLR": WarmupDecayLRParams,
    "WarmupCosineLR": WarmupCosineLRParams,
    "LRRangeTest": LRRangeTestParams,
    "OneCycle": OneCycleParams,
}


class SchedulerSection(Section):
    """The learning rate schedule that the config describes; left out, the optimizer's own."""

    variants: ClassVar[Variants] = {"params": SCHEDULES}

    type: Text = honoured(..., 'Which schedule: "' + '", "'.join(SCHEDULES) + '".')
    params: dict[str, Any] = honoured({}, "Its params, checked by type.")
