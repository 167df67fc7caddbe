"""Evaluation and prediction: exact sums over batches, predictions whole on the host."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from zeroj.step.batch import cast_floats, shard_batch
from zeroj.step.train_step import make_eval_step
from zeroj.trainer.data import GlobalBatch, Shape
from zeroj.trainer.losses import IGNORED


class PredictionOutput(NamedTuple):
    """Predictions and labels of every example, in the dataset's order, and metrics."""

    predictions: Any
    label_ids: Any
    metrics: dict[str, float]


class EvalPrediction(NamedTuple):
    """What compute_metrics gets: numpy arrays (examples, ...), shorter sequences filled up with -100."""

    predictions: Any
    label_ids: Any


@dataclasses.dataclass(frozen=True)
class Programs:
    """The compiled programs of an evaluation: the loss, and predictions."""

    loss: Callable[..., Any]
    predict: Callable[..., Any]


def programs(trainer: Any) -> Programs:
    """Built once for an engine."""
    if trainer._evaluation is None:
        plan = trainer.engine.plan
        trainer._evaluation = Programs(
            make_eval_step(trainer.losses.evaluation, plan, has_aux=True),
            make_eval_step(trainer.losses.prediction, plan, has_aux=True, loss_over="global"),
        )
    return trainer._evaluation


def run(trainer: Any, dataset: Any, prefix: str, *, keep_predictions: bool) -> PredictionOutput:
    """One pass over a dataset in its own order, without updates."""
    started = time.perf_counter()
    engine = trainer.engine
    shape = Shape(trainer.args.per_device_eval_batch_size, 1, trainer.world)
    total = count = 0.0
    examples = batches = 0
    outputs: list[Any] = []
    labels: list[Any] = []
    for batch in trainer.loader(dataset, shape, updates=False).epoch(0, None):
        placed = _placed(engine, batch)
        if _has_loss(trainer, batch):
            metrics = programs(trainer).loss(engine.state, placed)
            weight = float(metrics["aux"]["count"]) * engine.plan.degree
            total, count = total + float(metrics["loss"]) * weight, count + weight
        if keep_predictions:
            logits = programs(trainer).predict(engine.state, placed)["aux"]["logits"]
            outputs.append(_kept(trainer, logits, batch))
            if "labels" in batch.arrays:
                labels.append(whole(batch.arrays["labels"])[: batch.real])
        examples, batches = examples + batch.real, batches + 1
        trainer._call("on_prediction_step")
    seconds = max(1e-9, time.perf_counter() - started)
    found: dict[str, float] = {f"{prefix}_loss": total / count} if count else {}
    predictions = jax.tree.map(lambda *parts: joined(list(parts)), *outputs) if outputs else None
    label_ids = joined(labels) if labels else None
    if keep_predictions and trainer.compute_metrics is not None and label_ids is not None:
        extra = trainer.compute_metrics(EvalPrediction(predictions, label_ids))
        found |= {k if k.startswith(f"{prefix}_") else f"{prefix}_{k}": _number(v) for k, v in extra.items()}
    found |= {
        f"{prefix}_runtime": seconds,
        f"{prefix}_samples_per_second": examples / seconds,
        f"{prefix}_steps_per_second": batches / seconds,
    }
    return PredictionOutput(predictions, label_ids, found)


def whole(value: Any) -> np.ndarray:
    """An array on this host, whichever processes hold its shards."""
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return np.asarray(multihost_utils.process_allgather(value, tiled=True))
    return np.asarray(value)


def joined(parts: list[np.ndarray]) -> np.ndarray:
    """Batches one after the other; a shorter second dim is filled up with -100."""
    width = max((part.shape[1] for part in parts if part.ndim > 1), default=0)

    def fit(part: np.ndarray) -> np.ndarray:
        missing = width - part.shape[1] if part.ndim > 1 else 0
        pads = [(0, 0), (0, missing), *((0, 0) for _ in part.shape[2:])]
        return np.pad(part, pads, constant_values=IGNORED) if missing else part

    return np.concatenate([fit(part) for part in parts])


def _placed(engine: Any, batch: GlobalBatch) -> Any:
    arrays = cast_floats(batch.arrays, engine.plan.precision) if engine.config.auto_cast else batch.arrays
    return shard_batch(engine.plan, arrays)


def _has_loss(trainer: Any, batch: GlobalBatch) -> bool:
    """Whether there is something to compute a loss from: a loss of the user's, or labels."""
    return not trainer.losses.by_labels or "labels" in batch.arrays


def _kept(trainer: Any, logits: Any, batch: GlobalBatch) -> Any:
    if trainer.preprocess_logits is not None:
        logits = trainer.preprocess_logits(logits, batch.arrays.get("labels"))
    return jax.tree.map(lambda x: whole(x)[: batch.real], logits)


def _number(value: Any) -> Any:
    return float(value) if np.ndim(value) == 0 else value
