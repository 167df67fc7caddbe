"""The sections "fp16", "bf16" and "data_types", and the loss scale that they describe."""

from __future__ import annotations

import dataclasses

from zeroj.config.rows import Bool, DType, Float, Int, Section, honoured, not_needed, refused


class FP16(Section):
    """float16 compute with a loss scale."""

    enabled: Bool = honoured(False, "Compute in fp16, with an fp32 master and a loss scale.", auto="fp16")
    auto_cast: Bool = honoured(False, "Cast floating-point leaves of the batch to fp16.")
    loss_scale: Float = honoured(0.0, "0: dynamic. Otherwise the scale itself, fixed.", ge=0)
    initial_scale_power: Int = honoured(16, "A dynamic scale starts at 2 to this power.", ge=0, le=127)
    loss_scale_window: Int = honoured(1000, "Clean steps after which a dynamic scale doubles.", ge=0)
    hysteresis: Int = honoured(2, "Overflows after which a dynamic scale starts to halve.", ge=1)
    consecutive_hysteresis: Bool = honoured(False, "Refill the hysteresis at every clean step.")
    min_loss_scale: Float = honoured(1.0, "A dynamic scale never falls below this.", ge=0)
    fp16_master_weights_and_grads: Bool = honoured(
        False, "Keep the master and the gradients in fp16. Stages 1 to 3."
    )
    fused_mode: Bool = not_needed(True, "XLA fuses the update")


class BF16(Section):
    """bfloat16 compute, without a loss scale."""

    enabled: Bool = honoured(False, "Compute in bf16, with an fp32 master.", auto="bf16")
    check_grad_overflow: Bool = honoured(True, "Skip a step whose gradients are not all finite.")
    bf16_master_weights_and_grads: Bool = honoured(
        False, "Keep the master and the gradients in bf16. Stages 1 to 3."
    )
    bf16_optimizer_states: Bool = honoured(False, "Keep the optimizer's moments in bf16.")
    immediate_grad_update: Bool = not_needed(False, "gradients are accumulated inside one compiled step")


class DataTypes(Section):
    """Which dtype is used for what."""

    grad_accum_dtype: DType | None = honoured(
        None,
        "Dtype in which micro-batches' gradients are added up. Left out: fp32 (DeepSpeed: the model's).",
    )
    param_dtype: DType | None = honoured(None, "Has to repeat the precision that is switched on.")
    buffer_dtype: DType | None = refused(
        None,
        "JAX models have no buffers beside their params and their own state",
        "cast that state in the model",
    )


@dataclasses.dataclass(frozen=True)
class LossScale:
    """The loss scale of fp16.

    Args:
        dynamic: whether the scale moves.
        static: the scale where it does not move.
        initial_power: a dynamic scale starts at `2 ** initial_power`.
        window: clean steps after which it doubles.
        hysteresis: overflows after which it starts to halve.
        consecutive_hysteresis: whether any clean step refills the hysteresis.
        min_scale: it never falls below this.
    """

    dynamic: bool = True
    static: float = 1.0
    initial_power: int = 16
    window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    min_scale: float = 1.0

    @property
    def initial(self) -> float:
        """The scale of the first step."""
        return 2.0**self.initial_power if self.dynamic else self.static


def loss_scale_of(fp16: FP16) -> LossScale:
    """The loss scale that a section "fp16" asks for; the fixed scale 1 where it is not enabled."""
    if not fp16.enabled:
        return LossScale(dynamic=False, static=1.0)
    if fp16.loss_scale > 0:
        return LossScale(dynamic=False, static=fp16.loss_scale)
    return LossScale(
        dynamic=True,
        initial_power=fp16.initial_scale_power,
        window=fp16.loss_scale_window,
        hysteresis=fp16.hysteresis,
        consecutive_hysteresis=fp16.consecutive_hysteresis,
        min_scale=fp16.min_loss_scale,
    )
