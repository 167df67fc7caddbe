"""Which dtype each leaf is computed, stored, communicated and accumulated in."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from zeroj.errors import PlanError

_HALF = {"bf16": jnp.bfloat16, "fp16": jnp.float16}
_FP32 = np.dtype(np.float32)
_NAMES = {"fp32": jnp.float32, **_HALF}


@dataclass(frozen=True)
class Precision:
    """The dtype policy of a plan.

    Attributes:
        name: "fp32" (every leaf keeps the dtype the user gave it), "bf16" or "fp16" (floating leaves are
            computed in it, and the optimizer works on an fp32 master).
        communication: dtype of the gradient reduction; None means the dtype in which the gradient arises.
        accumulation: dtype in which gradients are summed over micro-batches.
        low_master: whether the optimizer updates the values that the loss computes with, and gradients are
            kept in their dtype: no fp32 master, 2 bytes where there were 6, and small updates are rounded away.
    """

    name: str = "fp32"
    communication: np.dtype | None = None
    accumulation: np.dtype = _FP32
    low_master: bool = False

    @property
    def half(self) -> bool:
        """Whether the loss computes in half precision."""
        return self.name in _HALF

    @property
    def has_master(self) -> bool:
        """Whether the optimizer works on fp32 values other than those that the loss computes with."""
        return self.half and not self.low_master

    def compute(self, dtype: np.dtype) -> np.dtype:
        """The dtype in which the loss sees a leaf of the user's ``dtype``."""
        return np.dtype(_HALF[self.name]) if self.half and _floating(dtype) else np.dtype(dtype)

    def master(self, dtype: np.dtype) -> np.dtype:
        """The dtype in which the optimizer updates a leaf of the user's ``dtype``."""
        return _FP32 if self.has_master and _floating(dtype) else self.compute(dtype)

    def accumulator(self, dtype: np.dtype) -> np.dtype:
        """The dtype in which gradients of a leaf are summed over micro-batches."""
        return self.accumulation if self.half else np.promote_types(self.accumulation, dtype)

    def gradient(self, dtype: np.dtype) -> np.dtype:
        """The dtype in which reduced gradients are kept: that of what the optimizer updates."""
        return self.master(dtype)

    def seen(self, dtype: np.dtype) -> np.dtype:
        """The dtype in which gradients are unscaled and clipped, and in which the optimizer gets them."""
        return _FP32 if self.half and _floating(dtype) else np.dtype(dtype)


def make_precision(
    name: str,
    communication: str | None = None,
    accumulation: str | None = None,
    *,
    low_master: bool = False,
) -> Precision:
    """Builds the policy from the names that ds_config.json uses.

    Args:
        name: "fp32", "bf16" or "fp16".
        communication: the dtype of the gradient reduction; left out, the compute dtype.
        accumulation: the dtype in which gradients are summed; left out, fp32, or that of a low master.
        low_master: see :class:`Precision`; of no effect in fp32.

    Raises:
        PlanError: a name other than "fp32", "bf16" and "fp16".
    """
    given = {
        "precision": name,
        "communication": communication or "fp32",
        "accumulation": accumulation or "fp32",
    }
    wrong = {what: value for what, value in given.items() if value not in _NAMES}
    if wrong:
        raise PlanError(f"{wrong} must be among 'fp32', 'bf16' and 'fp16'.")
    reduce = None if communication is None else np.dtype(_NAMES[communication])
    summed = accumulation or (name if low_master else "fp32")
    return Precision(name, reduce, np.dtype(_NAMES[summed]), low_master)


def _floating(dtype: np.dtype) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating))
