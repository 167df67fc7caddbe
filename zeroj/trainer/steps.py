"""The programs of a Trainer: its loss for training and for evaluation, and predictions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from zeroj.errors import PlanError
from zeroj.gather.loss import Mean, call_loss
from zeroj.trainer.losses import default_loss, logits_of, output_part
from zeroj.trainer.models import Model

#: The column of a batch that says which of its rows are real (1) and which fill it up (0).
REAL = "__real__"


@dataclasses.dataclass(frozen=True)
class Losses:
    """A model's losses.

    Args:
        model: the model.
        labels: the column of labels, where the batch has one.
        smoothing: label smoothing of the default loss.
        compute: the user's ``compute_loss_func(outputs, labels)``, in place of the model's or the default one.
        by_labels: whether the default loss is used, so that labels alone say what counts.
    """

    model: Model
    labels: str | None = None
    smoothing: float = 0.0
    compute: Callable[..., Any] | None = None
    by_labels: bool = False

    def told(self, params: Any, carried: Any, batch: Any) -> Losses:
        """The same, knowing whether the loss is the default one, by tracing the model on shapes."""
        forward = self.model.forward
        if forward is None or self.compute is not None:
            return dataclasses.replace(self, by_labels=False)
        key = jax.eval_shape(lambda: jax.random.key(0))
        output, _ = jax.eval_shape(lambda p, c, b, r: forward(p, c, b, r, False), params, carried, batch, key)
        return dataclasses.replace(self, by_labels=output_part(output, "loss") is None)

    def train(self, params: Any, batch: Any, rng: Any, model_state: Any) -> Any:
        """The loss of a step, and what the model carries on from it."""
        loss, carried = self._loss(params, batch, rng, model_state, True)
        if isinstance(loss, tuple) and not isinstance(loss, Mean) and len(loss) == 2:
            return loss[0], carried, loss[1]
        return loss, carried

    def evaluation(self, params: Any, batch: Any, rng: Any, model_state: Any) -> tuple[Any, Any, Any]:
        """The loss of a batch, and its count as an aux that is averaged over devices."""
        loss, _ = self._loss(params, batch, rng, model_state, False)
        value, aux = _counted(loss, batch)
        return value, model_state, aux

    def prediction(self, params: Any, batch: Any, rng: Any, model_state: Any) -> tuple[Any, Any, Any]:
        """No loss, and the model's output as aux; for a program over the whole batch."""
        if self.model.forward is None:
            raise PlanError("predict needs a model, not a loss: pass Trainer(model=module).")
        output, _ = self.model.forward(params, model_state, _plain(batch), rng, False)
        logits = logits_of(output)
        return jnp.float32(0), model_state, {"logits": output if logits is None else logits}

    def _loss(self, params: Any, batch: Any, rng: Any, carried: Any, train: bool) -> tuple[Any, Any]:
        if self.model.loss_fn is not None:
            loss = self.model.loss_fn(params, _plain(batch), rng)
        else:
            assert self.model.forward is not None
            output, carried = self.model.forward(params, carried, _plain(batch), rng, train)
            loss = self._of_output(output, batch)
        if REAL in batch:
            loss = _weighted(loss, batch[REAL])
        return loss, carried

    def _of_output(self, output: Any, batch: Any) -> Any:
        labels = batch.get(self.labels) if self.labels else None
        if self.compute is not None:
            return self.compute(output, labels)
        loss = output_part(output, "loss")
        if loss is not None:
            return loss
        logits = logits_of(output)
        if logits is None or labels is None:
            raise PlanError(
                "The model returned no loss, and there are "
                + ("no logits" if logits is None else "no labels in the batch")
                + " to compute one from. Return an object or dict with 'loss', logits beside a column 'labels', "
                "or pass Trainer(compute_loss_func=...)."
            )
        return default_loss(logits, labels, self.model.loss_kind, self.smoothing)


def _counted(loss: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
    out = call_loss(lambda params, batch: loss, None, batch, None, (), False)
    rows = next(jnp.shape(x)[0] for x in jax.tree.leaves(batch) if jnp.ndim(x))
    count = jnp.float32(rows) if out.weight is None else out.weight
    value = out.total if out.weight is None else Mean(out.total, out.weight)
    return value, {"count": jnp.asarray(count, jnp.float32)}


def _plain(batch: Any) -> Any:
    return (
        {name: value for name, value in batch.items() if name != REAL} if isinstance(batch, dict) else batch
    )


def _weighted(loss: Any, real: jax.Array) -> Any:
    """The loss of a slice of one row, real or not: it weighs as much as it counts, or nothing."""
    weight = jnp.max(real).astype(jnp.float32)
    pair = isinstance(loss, tuple) and not isinstance(loss, Mean) and len(loss) == 2
    value, aux = loss if pair else (loss, None)
    if isinstance(value, Mean):
        value = Mean(jnp.where(weight > 0, value.total, 0.0), value.count * weight)
    else:
        value = Mean(jnp.where(weight > 0, value, 0.0), weight)
    return (value, aux) if pair else value
