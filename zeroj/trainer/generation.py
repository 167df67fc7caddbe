"""Text from a model under a sharded plan: a loop of fixed length, every device in step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zeroj.errors import PlanError
from zeroj.step.batch import shard_batch
from zeroj.step.train_step import make_eval_step
from zeroj.trainer.evaluation import whole
from zeroj.trainer.losses import logits_of


def generate(
    trainer: Any,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int = 32,
    temperature: float = 0.0,
    eos_token_id: int | None = None,
    seed: int = 0,
) -> list[list[int]]:
    """See :meth:`zeroj.Trainer.generate`."""
    if trainer.model.forward is None:
        raise PlanError("generate needs a model, not a loss: pass Trainer(model=module).")
    if not prompts or not all(len(prompt) for prompt in prompts):
        raise PlanError("generate needs prompts of at least one token each.")
    plan = trainer.engine.plan
    longest = max(len(prompt) for prompt in prompts)
    rows = -(-len(prompts) // plan.degree) * plan.degree
    tokens = np.zeros((rows, longest + max_new_tokens), np.int32)
    sizes = np.ones((rows,), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)], sizes[row] = prompt, len(prompt)
    settings = (max_new_tokens, float(temperature), eos_token_id)
    if settings not in trainer.decoders:
        trainer.decoders[settings] = make_eval_step(
            decoder(trainer.model.forward, *settings), plan, has_aux=True, loss_over="global"
        )
    batch = shard_batch(plan, {"tokens": tokens, "sizes": sizes, "seed": np.full((rows,), seed, np.int32)})
    aux = trainer.decoders[settings](trainer.engine.state, batch)["aux"]
    found, ends = whole(aux["tokens"]), whole(aux["sizes"])
    return [found[row, : ends[row]].tolist() for row in range(len(prompts))]


def decoder(forward: Any, length: int, temperature: float, eos: int | None) -> Any:
    """A "loss" without a loss, whose aux is the prompts with up to ``length`` tokens more.

    The whole text is read anew for every token: simple, right for any model, and good for looking at samples
    during training; serving wants a cache. A row that is done keeps its tokens while the others go on.
    """

    def run(params: Any, batch: Any, rng: Any, model_state: Any) -> tuple[Any, Any, Any]:
        rows = jnp.arange(batch["tokens"].shape[0])
        places = jnp.arange(batch["tokens"].shape[1])
        key = jax.random.key(batch["seed"][0])

        def add(carry: Any, step: jax.Array) -> tuple[Any, None]:
            tokens, sizes, done = carry
            seen = {"input_ids": tokens, "attention_mask": (places < sizes[:, None]).astype(jnp.int32)}
            output, _ = forward(params, model_state, seen, rng, False)
            logits = logits_of(output)[rows, sizes - 1].astype(jnp.float32)
            if temperature > 0:
                token = jax.random.categorical(jax.random.fold_in(key, step), logits / temperature)
            else:
                token = jnp.argmax(logits, -1)
            grows = ~done
            tokens = jnp.where(grows[:, None] & (places == sizes[:, None]), token[:, None], tokens)
            sizes = sizes + grows
            done = done | (token == eos) if eos is not None else done
            return (tokens.astype(jnp.int32), sizes, done), None

        start = (batch["tokens"], batch["sizes"], jnp.zeros(rows.shape, bool))
        (tokens, sizes, _), _ = jax.lax.scan(add, start, jnp.arange(length))
        return jnp.float32(0), model_state, {"tokens": tokens, "sizes": sizes}

    return run
