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
    cached = {"cache", "position_ids"} <= (trainer.model.columns or set())
    settings = (max_new_tokens, float(temperature), eos_token_id, cached)
    if settings not in trainer.decoders:
        trainer.decoders[settings] = make_eval_step(
            decoder(trainer.model.forward, *settings), plan, has_aux=True, loss_over="global"
        )
    batch = shard_batch(plan, {"tokens": tokens, "sizes": sizes, "seed": np.full((rows,), seed, np.int32)})
    aux = trainer.decoders[settings](trainer.engine.state, batch)["aux"]
    found, ends = whole(aux["tokens"]), whole(aux["sizes"])
    return [found[row, : ends[row]].tolist() for row in range(len(prompts))]


def decoder(forward: Any, length: int, temperature: float, eos: int | None, cached: bool = False) -> Any:
    """A "loss" without a loss, whose aux is the prompts with up to ``length`` tokens more.

    Without a cache the whole text is read anew for every token, which is right for any model; with one, the model
    reads the prompts once and then one token a row. A row that is done keeps its tokens while the others go on.

    Args:
        forward: see :class:`zeroj.trainer.models.Model`.
        length: tokens to add.
        temperature: divides the logits; 0 takes the likeliest.
        eos: a token that ends its text.
        cached: whether the model takes ``cache`` and ``position_ids``: given the number of places to keep it returns
            "logits" and "cache", and given that cache it reads one token a row, at its position.
    """

    def run(params: Any, batch: Any, rng: Any, model_state: Any) -> tuple[Any, Any, Any]:
        tokens, sizes = batch["tokens"], batch["sizes"]
        rows, places = jnp.arange(tokens.shape[0]), jnp.arange(tokens.shape[1])
        key = jax.random.key(batch["seed"][0])

        def read(**inputs: Any) -> Any:
            return forward(params, model_state, inputs, rng, False)[0]

        def add(text: Any, logits: jax.Array, step: jax.Array) -> Any:
            tokens, sizes, done = text
            logits = logits.astype(jnp.float32)
            if temperature > 0:
                token = jax.random.categorical(jax.random.fold_in(key, step), logits / temperature)
            else:
                token = jnp.argmax(logits, -1)
            grows = ~done
            tokens = jnp.where(grows[:, None] & (places == sizes[:, None]), token[:, None], tokens)
            sizes = sizes + grows
            done = done | (token == eos) if eos is not None else done
            return tokens.astype(jnp.int32), sizes, done

        def reread(text: Any, step: jax.Array) -> tuple[Any, None]:
            mask = (places < text[1][:, None]).astype(jnp.int32)
            logits = logits_of(read(input_ids=text[0], attention_mask=mask))
            return add(text, logits[rows, text[1] - 1], step), None

        def go_on(carry: Any, step: jax.Array) -> tuple[Any, None]:
            text, cache = carry
            last = text[1][:, None] - 1
            output = read(
                input_ids=jnp.take_along_axis(text[0], last, axis=1), position_ids=last, cache=cache
            )
            return (add(text, output["logits"][:, 0], step), output["cache"]), None

        text = (tokens, sizes, jnp.zeros(rows.shape, bool))
        if cached and length:
            output = read(input_ids=tokens[:, : tokens.shape[1] - length], cache=tokens.shape[1])
            text = add(text, output["logits"][rows, sizes - 1], jnp.int32(0))
            (text, _), _ = jax.lax.scan(go_on, (text, output["cache"]), jnp.arange(1, length))
        else:
            text, _ = jax.lax.scan(reread, text, jnp.arange(length))
        return jnp.float32(0), model_state, {"tokens": text[0], "sizes": text[1]}

    return run
