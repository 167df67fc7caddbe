"""The section "optimizer": one set of params for each type that zeroj builds."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import pydantic
from pydantic_core import PydanticCustomError

from zeroj.config.rows import Bool, Float, Section, Text, Variants, honoured, not_needed, refused

_Unit = Annotated[Float, pydantic.Field(ge=0, lt=1)]


def _pair(value: Any) -> Any:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise PydanticCustomError("pair", "must be a list of two numbers")
    return tuple(value)


Betas = Annotated[tuple[_Unit, _Unit], pydantic.BeforeValidator(_pair)]
DecayMask = Literal["all", "no_bias_or_norm"]
_LR = "Learning rate, where no scheduler sets it."
_CLIP = ("DeepSpeed refuses it here as well", 'use the top-level key "gradient_clipping"')


class CommonParams(Section):
    """What every optimizer takes."""

    weight_decay: Float = honoured(0.0, "Weight decay.", auto="weight_decay", ge=0)
    decay_mask: DecayMask = honoured(
        "all",
        'zeroj\'s own. "no_bias_or_norm": no weight decay for a leaf whose last name is bias or scale, or '
        'with a name in its path that has "norm" in it, or is like ln_1 or bn1 (zeroj/config/decay.py).',
    )
    max_grad_norm: Float | None = refused(None, *_CLIP)

    @property
    def base_lr(self) -> float:
        """The learning rate that a schedule scales."""
        return float(getattr(self, "lr"))  # noqa: B009 - each optimizer declares its own default


class AdamParams(CommonParams):
    """Params of Adam and AdamW."""

    lr: Float = honoured(1e-3, _LR, auto="learning_rate", ge=0)
    betas: Betas = honoured((0.9, 0.999), "Decay of the two moments.", auto="betas")
    eps: Float = honoured(1e-8, "Added to the root of the second moment.", auto="adam_epsilon", ge=0)
    bias_correction: Bool = honoured(True, "Correct the moments for their start at zero.")
    adam_w_mode: Bool = honoured(
        True,
        "true: decay is decoupled (AdamW), also for type Adam. false: decay is added to the gradient (L2).",
    )
    amsgrad: Bool = refused(
        False, "DeepSpeed's Adam does not implement it either", "pass optax.amsgrad as tx"
    )
    torch_adam: Bool = not_needed(False, "there is one implementation, which XLA fuses")
    fp32_optimizer_states: Bool = refused(
        True, "moments follow the section bf16, for every optimizer", "set bf16.bf16_optimizer_states"
    )
    set_grad_none: Bool = not_needed(True, "gradients are values of one step, never set back")


class AdagradParams(CommonParams):
    """Params of Adagrad."""

    lr: Float = honoured(1e-2, _LR, auto="learning_rate", ge=0)
    eps: Float = honoured(1e-10, "Added to the root of the sum of squares.", auto="adam_epsilon", ge=0)
    initial_accumulator_value: Float = honoured(0.0, "Where the sum of squares starts.", ge=0)
    lr_decay: Float = refused(0.0, "it is a schedule of its own", "use the section scheduler")


class LambParams(CommonParams):
    """Params of Lamb."""

    lr: Float = honoured(1e-3, _LR, auto="learning_rate", ge=0)
    betas: Betas = honoured((0.9, 0.999), "Decay of the two moments.", auto="betas")
    eps: Float = honoured(1e-8, "Added to the root of the second moment.", auto="adam_epsilon", ge=0)
    bias_correction: Bool = honoured(True, "Correct the moments for their start at zero.")
    max_coeff: Float = honoured(10.0, "Largest trust ratio.", gt=0)
    min_coeff: Float = honoured(0.01, "Smallest trust ratio.", ge=0)
    eps_inside_sqrt: Bool = honoured(False, "Add eps under the root instead.")
    amsgrad: Bool = refused(False, "DeepSpeed's Lamb does not implement it either", "leave the key out")


class LionParams(CommonParams):
    """Params of Lion."""

    lr: Float = honoured(1e-4, _LR, auto="learning_rate", ge=0)
    betas: Betas = honoured((0.9, 0.99), "Decay of the interpolation and of the momentum.", auto="betas")
    set_grad_none: Bool = not_needed(True, "gradients are values of one step, never set back")


class MuonParams(CommonParams):
    """Params of Muon, and of the AdamW that takes the leaves Muon does not."""

    lr: Float | None = honoured(
        None, "Learning rate of both, where theirs is left out.", auto="learning_rate", ge=0
    )
    muon_lr: Float | None = honoured(None, "Learning rate of Muon. Left out: lr, or 0.02.", ge=0)
    adam_lr: Float | None = honoured(
        None,
        "Learning rate of AdamW. Left out: lr, or 0.0003. A scheduler sets Muon's; the two keep their ratio.",
        ge=0,
    )
    momentum: Float = honoured(0.95, "Decay of Muon's momentum.", ge=0, lt=1)
    betas: Betas = honoured((0.9, 0.95), "Decay of AdamW's moments.", auto="betas")
    eps: Float = honoured(1e-10, "AdamW's eps.", auto="adam_epsilon", ge=0)
    ns_method: Literal["gram", "standard"] = not_needed(
        "gram", "both compute the same iteration, on the whole matrix; XLA chooses how"
    )

    @property
    def base_lr(self) -> float:
        """The learning rate of Muon, which a schedule scales."""
        return next(lr for lr in (self.muon_lr, self.lr, 0.02) if lr is not None)

    @property
    def base_adam_lr(self) -> float:
        """The learning rate of the AdamW beside it."""
        return next(lr for lr in (self.adam_lr, self.lr, 3e-4) if lr is not None)


class SGDParams(CommonParams):
    """Params of SGD."""

    lr: Float = honoured(1e-3, _LR, auto="learning_rate", ge=0)
    momentum: Float = honoured(0.0, "Decay of the momentum.", ge=0, lt=1)
    nesterov: Bool = honoured(False, "Look ahead by one step of the momentum.")
    dampening: Float = refused(0.0, "optax.trace has no such factor", "scale lr by 1 - dampening")


OPTIMIZERS: dict[str, type[CommonParams]] = {
    "Adam": AdamParams,
    "AdamW": AdamParams,
    "Adagrad": AdagradParams,
    "Lamb": LambParams,
    "Lion": LionParams,
    "Muon": MuonParams,
    "SGD": SGDParams,
}

_ONE_BIT = "it compresses by error feedback on torch's buffers; DeepSpeed refuses it together with ZeRO"
_MUP = "its learning rates come from shapes that the mup package records on torch modules"
REFUSED_OPTIMIZERS: dict[str, tuple[str, str]] = {
    "OneBitAdam": (_ONE_BIT, 'use "AdamW", and zero_quantized_gradients for fewer bytes'),
    "OneBitLamb": (_ONE_BIT, 'use "Lamb", and zero_quantized_gradients for fewer bytes'),
    "ZeroOneAdam": (_ONE_BIT, 'use "AdamW", and zero_quantized_gradients for fewer bytes'),
    "MuAdam": (_MUP, "pass tx=optax.multi_transform(...) with a learning rate for each width"),
    "MuAdamW": (_MUP, "pass tx=optax.multi_transform(...) with a learning rate for each width"),
    "MuSGD": (_MUP, "pass tx=optax.multi_transform(...) with a learning rate for each width"),
}


class OptimizerSection(Section):
    """The optimizer that the config describes; left out, the caller passes `tx`."""

    variants: ClassVar[Variants] = {"params": OPTIMIZERS}

    type: Text = honoured(..., 'Which optimizer, in any case: "' + '", "'.join(OPTIMIZERS) + '".')
    params: dict[str, Any] = honoured({}, "Its params, checked by type.")
    legacy_fusion: Bool = not_needed(False, "XLA fuses the update")
