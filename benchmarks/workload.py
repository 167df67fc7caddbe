"""The work that benchmarks measure: the example GPT on random tokens, at sizes that two CPU cores bear."""

from __future__ import annotations

import dataclasses
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "examples"))

import gpt

CLIP_NORM = 1.0


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model, its loss, its optimizer and a batch."""

    config: gpt.GPTConfig
    init_fn: Callable[[], Any]
    loss_fn: Callable[[Any, Any], jax.Array]
    tx: optax.GradientTransformation
    batch: dict[str, jax.Array]


def small_gpt(batch_size: int = 16, **changes: Any) -> Workload:
    """The demo's GPT, or one with fields of its config changed."""
    config = gpt.GPTConfig(**{"width": 160, **changes})
    definition, init_fn = gpt.build(config)
    shape = (batch_size, config.context + 1)
    tokens = jax.random.randint(jax.random.key(0), shape, 0, config.vocab_size, jnp.int32)
    return Workload(config, init_fn, gpt.make_loss_fn(definition), optax.adamw(1e-3), {"tokens": tokens})


def bytes_on_first_device(tree: Any) -> int:
    """Bytes that the arrays of a tree hold on the first device, read from their shards."""
    first = jax.devices()[0]
    shards = [s for x in jax.tree.leaves(tree) if isinstance(x, jax.Array) for s in x.addressable_shards]
    return sum(shard.data.nbytes for shard in shards if shard.device == first)


def interleaved_seconds(runs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Time each run once a round, in turn, so that a busy machine slows all of them alike.

    Args:
        runs: name -> a function that starts one step and returns what to wait for.
        rounds: how often each is timed, after one untimed call that compiles.

    Returns:
        Name -> seconds of every timed call, in the order of the rounds.
    """
    for run in runs.values():
        jax.block_until_ready(run())
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            jax.block_until_ready(run())
            seconds[name].append(time.perf_counter() - start)
    return seconds
