"""Whether what is to train moves at all: by how much each group of params has changed, and why one has not."""

from __future__ import annotations

import dataclasses
import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zeroj.trainer.callbacks import TrainerCallback
from zeroj.trainer.state import TrainerControl, TrainerState

#: Updates after which a group that has not changed in any bit is reported.
PATIENCE = 10
#: Elements of a leaf that are kept to tell how far it has moved.
SAMPLE = 4096
_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


@dataclasses.dataclass(frozen=True)
class Trace:
    """What is remembered of one leaf: a sum of all its bits, and some of its elements."""

    bits: int
    sample: np.ndarray


class MovementCallback(TrainerCallback):
    """Prints how far each group of params has moved in the first epoch, and warns of one that has not moved.

    A group is the leaves whose paths differ in numbers alone. It is looked at after ``PATIENCE`` updates and at
    the end of the first epoch: the sum of its bits is exact, the distance is estimated from ``SAMPLE`` elements a
    leaf. Values in files (offload to NVMe) are not looked at.
    """

    def __init__(self) -> None:
        self._before: dict[str, Trace] = {}
        self._first = 0
        self._told = False

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """Remembers where params start."""
        self._before, self._first, self._told = traces(kwargs["trainer"].engine), state.global_step, False

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """Warns, once, of groups that have not moved."""
        if state.global_step - self._first == min(PATIENCE, state.max_steps - self._first):
            self._warn(kwargs["trainer"], traces(kwargs["trainer"].engine), state)

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """Prints the distances of the first epoch."""
        if self._told or state.epoch < 1:
            return
        self._told = True
        now = traces(kwargs["trainer"].engine)
        if state.is_world_process_zero:
            print(table(self._before, now), flush=True)

    def _warn(self, trainer: Any, now: dict[str, Trace], state: TrainerState) -> None:
        still = [name for name, members in groups(now).items() if self._unmoved(members, now)]
        if still:
            warnings.warn(
                f"After {state.global_step - self._first} updates these trainable params have not changed in any "
                f"bit: {', '.join(still)}. {reason(trainer, state)}",
                stacklevel=2,
            )

    def _unmoved(self, members: list[str], now: dict[str, Trace]) -> bool:
        return all(path in self._before and now[path].bits == self._before[path].bits for path in members)


def groups(found: dict[str, Trace]) -> dict[str, list[str]]:
    """Paths by group: numbers in a path become "*"."""
    named: dict[str, list[str]] = {}
    for path in found:
        named.setdefault(re.sub(r"(^|/)\d+(?=/|$)", r"\1*", path).removesuffix("/value"), []).append(path)
    return named


def traces(engine: Any) -> dict[str, Trace]:
    """What is remembered of every trainable leaf: of its master where there is one. All processes must call it."""
    plan, state = engine.plan, engine.state
    params = plan.treedef.flatten_up_to(state.params)
    masters = plan.treedef.flatten_up_to(state.opt_state.master) if plan.has_master else params
    found = {}
    for leaf, param, master in zip(plan.leaves, params, masters, strict=True):
        value = master if isinstance(master, jax.Array) else param
        if leaf.trainable and isinstance(value, jax.Array):
            found[leaf.path] = Trace(int(_bits(value)), _sample(value))
    return found


@jax.jit
def _sum_of_bits(value: jax.Array) -> jax.Array:
    words = jax.lax.bitcast_convert_type(value, _WORDS[value.dtype.itemsize])
    return jnp.sum(words.astype(jnp.uint32), dtype=jnp.uint32)


def _bits(value: jax.Array) -> jax.Array:
    if value.sharding.memory_kind == "pinned_host":
        value = jax.device_put(value, value.sharding.with_memory_kind("device"))
    return _sum_of_bits(value)


def _sample(value: jax.Array) -> np.ndarray:
    """Elements of this process's first shard, evenly spread."""
    shard = np.asarray(value.addressable_shards[0].data).ravel()
    return shard[:: max(1, shard.size // SAMPLE)][:SAMPLE].astype(np.float32)


def table(before: dict[str, Trace], now: dict[str, Trace]) -> str:
    """How far each group has moved, beside its size (root mean squares)."""
    lines = ["params moved in the first epoch (root mean square of the change, of the values; from samples)"]
    for name, members in groups(now).items():
        old = np.concatenate([before[path].sample for path in members if path in before] or [np.zeros(1)])
        new = np.concatenate([now[path].sample for path in members if path in before] or [np.zeros(1)])
        lines.append(f"  {name:<48} {_size(new - old):.2e}  {_size(new):.2e}")
    return "\n".join(lines)


def _size(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64)))) if values.size else 0.0


def reason(trainer: Any, state: TrainerState) -> str:
    """Why params may stand still, as far as it can be known."""
    engine = trainer.engine
    if int(engine.state.step) == 0:
        return (
            "Every update was skipped: gradients were not finite. Lower the loss scale or the learning rate."
        )
    if trainer.schedule is not None:
        rates = [float(trainer.schedule(step)) for step in range(int(engine.state.step))]
        if not any(rates):
            return "The learning rate was 0 in all of them."
    if engine.plan.precision.half and engine.config.master_dtype != "fp32":
        return "They have no fp32 master: an update may be too small for their precision."
    return "No gradient reaches them: the loss does not use them, or a mask keeps them back."
