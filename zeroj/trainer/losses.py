"""The default losses: from logits and labels to an exactly weighted mean."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from zeroj.errors import PlanError
from zeroj.gather.loss import Mean

#: The label of a position that does not count.
IGNORED = -100


def cross_entropy(logits: jax.Array, labels: jax.Array, smoothing: float = 0.0) -> Mean:
    """Cross-entropy in nats over the labels that count: each token weighs the same, whatever batch it is in.

    Args:
        logits: (..., classes), any float dtype; computed in fp32.
        labels: (...), integers; ``IGNORED`` does not count.
        smoothing: share of the target that is spread over all classes (Szegedy et al., "Rethinking the
            Inception Architecture for Computer Vision", 2016).

    Returns:
        The sum over labels that count, and their number.
    """
    counted = labels != IGNORED
    scores = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    index = jnp.where(counted, labels, 0)[..., None].astype(jnp.int32)
    losses = -jnp.take_along_axis(scores, index, axis=-1)[..., 0]
    if smoothing:
        losses = (1.0 - smoothing) * losses - smoothing * jnp.mean(scores, axis=-1)
    return Mean(jnp.sum(jnp.where(counted, losses, 0.0)), jnp.sum(counted))


def default_loss(
    logits: jax.Array, labels: jax.Array, kind: str | None = None, smoothing: float = 0.0
) -> Mean:
    """The loss that the shapes, or ``kind``, ask for.

    Args:
        logits: a model's output.
        labels: what it should be.
        kind: "ForCausalLM" (position t predicts label t + 1), "ForTokenClassification", "ForMaskedLM",
            "ForSequenceClassification" or "regression"; left out: causal for (B, T, V) logits and (B, T)
            integer labels, classes for (B, C) logits and (B,) integer labels, squared error for float labels.
        smoothing: label smoothing, for classes.

    Raises:
        PlanError: the shapes fit none of these.
    """
    classes = jnp.issubdtype(labels.dtype, jnp.integer) and logits.ndim == labels.ndim + 1
    if not classes and jnp.issubdtype(labels.dtype, jnp.inexact):
        return _squared_error(logits, labels)
    if not classes or logits.shape[: labels.ndim] != labels.shape:
        raise PlanError(
            f"The default loss knows no loss for logits {logits.shape} {logits.dtype} and labels {labels.shape} "
            f"{labels.dtype}. Return a loss from the model, or pass Trainer(compute_loss_func=...)."
        )
    causal = kind == "ForCausalLM" if kind else labels.ndim == 2
    if causal:
        logits, labels = logits[:, :-1], labels[:, 1:]
    return cross_entropy(logits, labels, smoothing)


def _squared_error(outputs: jax.Array, labels: jax.Array) -> Mean:
    """Mean squared error; a row whose labels are NaN does not count."""
    if outputs.size != labels.size:
        raise PlanError(f"Outputs {outputs.shape} and float labels {labels.shape} differ in size.")
    wanted = labels.reshape(labels.shape[0], -1).astype(jnp.float32)
    found = outputs.reshape(labels.shape[0], -1).astype(jnp.float32)
    counted = ~jnp.isnan(wanted)
    squares = jnp.square(found - jnp.where(counted, wanted, 0.0))
    return Mean(jnp.sum(jnp.where(counted, squares, 0.0)), jnp.sum(counted))


def output_part(output: Any, name: str) -> Any:
    """``output.name``, ``output["name"]``, or None where it has neither."""
    if isinstance(output, dict):
        return output.get(name)
    return getattr(output, name, None)


def logits_of(output: Any) -> Any:
    """The logits of a model's output: the array itself, its ``logits``, or the first of a tuple."""
    if hasattr(output, "shape") and hasattr(output, "dtype"):
        return output
    found = output_part(output, "logits")
    if found is None and isinstance(output, tuple) and output and hasattr(output[0], "shape"):
        return output[0]
    return found
