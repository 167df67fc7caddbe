"""A tiny language model in the three forms that a Trainer takes, and data for it."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

VOCAB, WIDTH = 32, 16


@dataclasses.dataclass
class Config:
    hidden_size: int = WIDTH
    vocab_size: int = VOCAB


class Net(nnx.Module):
    """Embedding, one hidden layer, head; logits alone."""

    def __init__(self, rngs: nnx.Rngs, dropout: float = 0.0) -> None:
        self.config = Config()
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.hidden = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.norm = nnx.LayerNorm(4 * WIDTH, rngs=rngs)
        self.head = nnx.Linear(4 * WIDTH, VOCAB, rngs=rngs)
        self.drop = nnx.Dropout(dropout, rngs=rngs) if dropout else None

    def __call__(self, input_ids: jax.Array) -> jax.Array:
        x = jnp.tanh(self.hidden(self.embed(input_ids)))
        x = x if self.drop is None else self.drop(x)
        return self.head(self.norm(x))


class LinenNet(linen.Module):
    """The same kind of model in linen, with a dict of logits."""

    @linen.compact
    def __call__(self, input_ids: jax.Array, deterministic: bool = True) -> dict[str, jax.Array]:
        x = jnp.tanh(linen.Dense(4 * WIDTH)(linen.Embed(VOCAB, WIDTH)(input_ids)))
        x = linen.Dropout(0.1, deterministic=deterministic)(x)
        return {"logits": linen.Dense(VOCAB)(x)}


def net(seed: int = 0, dropout: float = 0.0) -> Net:
    return Net(nnx.Rngs(seed), dropout)


def text(count: int, length: int = 12, seed: int = 0, varied: bool = True) -> list[dict[str, Any]]:
    """Sequences that count up, so that there is something to learn."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        size = int(rng.integers(4, length + 1)) if varied else length
        ids = (rng.integers(VOCAB) + rng.integers(1, 3) * np.arange(size)) % VOCAB
        rows.append({"input_ids": ids.tolist(), "labels": ids.tolist(), "name": "row"})
    return rows


def plain_loss(params: Any, batch: Any) -> jax.Array:
    """Squared error of a linear model: a plain mean over rows."""
    return jnp.mean(jnp.square(batch["x"] @ params["w"] + params["b"] - batch["y"]))


def plain_params() -> dict[str, np.ndarray]:
    return {"w": np.ones((4, 1), np.float32) * 0.1, "b": np.zeros((1,), np.float32)}


def plain_rows(count: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(count, 4)).astype(np.float32)
    y = (x @ np.arange(4, dtype=np.float32)[:, None] + 0.5).astype(np.float32)
    return [{"x": a, "y": b} for a, b in zip(x, y)]
