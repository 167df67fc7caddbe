"""A GPT decoder of Flax nnx modules in one file: the example model that zeroj's demo trains.

Nothing here knows of zeroj. Pre-norm blocks, learned positions, GELU MLP, causal attention, and a head that
is tied to the token embedding unless the config says otherwise (Radford et al., "Language Models are
Unsupervised Multitask Learners", 2019). Shapes in comments: B batch, T positions, D width, H heads, V tokens.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

Batch = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    """The shape of the model.

    Args:
        vocab_size: number of token ids.
        context: the longest sequence, in tokens.
        layers: number of blocks.
        heads: attention heads; must divide ``width``.
        width: size of the residual stream.
        tied: whether the output head is the transpose of the token embedding.
        scan: stack the blocks' params on a leading dim and run them by ``jax.lax.scan``: one block is
            compiled, whatever the depth. Otherwise the blocks are a list and the program is unrolled.
        remat: recompute each block in the backward pass in place of keeping its activations.
        dtype: dtype of the activations; None means the dtype of the params that the caller passes.
    """

    vocab_size: int = 256
    context: int = 128
    layers: int = 4
    heads: int = 4
    width: int = 192
    tied: bool = True
    scan: bool = True
    remat: bool = False
    dtype: Any = None

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of heads {self.heads}")


class Attention(nnx.Module):
    """Causal self-attention over the sequence."""

    def __init__(self, config: GPTConfig, rngs: nnx.Rngs) -> None:
        init = nnx.initializers.normal(0.02)
        out_init = nnx.initializers.normal(0.02 / (2 * config.layers) ** 0.5)
        self.heads = config.heads
        self.qkv = nnx.Linear(config.width, 3 * config.width, kernel_init=init, dtype=config.dtype, rngs=rngs)
        self.out = nnx.Linear(config.width, config.width, kernel_init=out_init, dtype=config.dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        b, t, d = x.shape
        q, k, v = (y.reshape(b, t, self.heads, d // self.heads) for y in jnp.split(self.qkv(x), 3, axis=-1))
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True)  # (B, T, H, D / H)
        return self.out(y.reshape(b, t, d))


class Block(nnx.Module):
    """Attention and a four times wider MLP, each behind a norm and a residual connection."""

    def __init__(self, config: GPTConfig, rngs: nnx.Rngs) -> None:
        d, dtype = config.width, config.dtype
        init = nnx.initializers.normal(0.02)
        out_init = nnx.initializers.normal(0.02 / (2 * config.layers) ** 0.5)
        self.norm1 = nnx.LayerNorm(d, dtype=dtype, rngs=rngs)
        self.attention = Attention(config, rngs)
        self.norm2 = nnx.LayerNorm(d, dtype=dtype, rngs=rngs)
        self.up = nnx.Linear(d, 4 * d, kernel_init=init, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(4 * d, d, kernel_init=out_init, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm1(x))
        return x + self.down(jax.nn.gelu(self.up(self.norm2(x))))


class GPT(nnx.Module):
    """Token ids (B, T) to logits (B, T, V)."""

    def __init__(self, config: GPTConfig, rngs: nnx.Rngs) -> None:
        init = nnx.initializers.normal(0.02)
        embed = functools.partial(nnx.Embed, features=config.width, embedding_init=init, dtype=config.dtype)
        self.config = config
        self.tokens = embed(config.vocab_size, rngs=rngs)
        self.positions = embed(config.context, rngs=rngs)
        self.blocks = _stacked_blocks(config, rngs) if config.scan else _listed_blocks(config, rngs)
        self.norm = nnx.LayerNorm(config.width, dtype=config.dtype, rngs=rngs)
        if not config.tied:
            self.head = nnx.Linear(
                config.width,
                config.vocab_size,
                use_bias=False,
                kernel_init=init,
                dtype=config.dtype,
                rngs=rngs,
            )

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        x = self.norm(self._run_blocks(x))
        return self.tokens.attend(x) if self.config.tied else self.head(x)

    def _run_blocks(self, x: jax.Array) -> jax.Array:
        apply = jax.checkpoint(_apply_block, static_argnums=0) if self.config.remat else _apply_block
        if self.config.scan:
            definition, stacked = nnx.split(self.blocks)
            return jax.lax.scan(lambda x, layer: (apply(definition, layer, x), None), x, stacked)[0]
        for block in self.blocks:
            x = apply(*nnx.split(block), x)
        return x


def _apply_block(definition: nnx.GraphDef, params: nnx.State, x: jax.Array) -> jax.Array:
    return nnx.merge(definition, params)(x)


def _stacked_blocks(config: GPTConfig, rngs: nnx.Rngs) -> Block:
    """All blocks as one, each param with a leading dim of ``layers``."""

    @nnx.split_rngs(splits=config.layers)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def make(rngs: nnx.Rngs) -> Block:
        return Block(config, rngs)

    return make(rngs)


def _listed_blocks(config: GPTConfig, rngs: nnx.Rngs) -> nnx.List:
    return nnx.List([Block(config, rngs) for _ in range(config.layers)])


def build(config: GPTConfig, seed: int = 0) -> tuple[nnx.GraphDef, Callable[[], nnx.State]]:
    """The model's definition, and a function that makes its params.

    Args:
        config: the model's shape.
        seed: seed of the initial values.

    Returns:
        ``(definition, init_fn)``. ``init_fn()`` returns the params as an ``nnx.State`` and can be traced, so
        that ``jax.eval_shape`` sees the shapes without an array and ``jax.jit`` makes the values in place.

    Example:
        >>> definition, init_fn = build(GPTConfig(layers=2))
        >>> logits = apply(definition, init_fn(), jnp.zeros((1, 8), jnp.int32))
    """
    definition, _ = nnx.split(nnx.eval_shape(lambda: GPT(config, nnx.Rngs(params=seed))))
    return definition, lambda: nnx.split(GPT(config, nnx.Rngs(params=seed)))[1]


def apply(definition: nnx.GraphDef, params: nnx.State, tokens: jax.Array) -> jax.Array:
    """Logits (B, T, V) of token ids (B, T), as a pure function."""
    return nnx.merge(definition, params)(tokens)


def make_loss_fn(definition: nnx.GraphDef) -> Callable[[nnx.State, Batch], jax.Array]:
    """The loss as a pure function ``(params, batch) -> scalar``: mean next-token cross-entropy in nats.

    ``batch["tokens"]`` is (B, T + 1): all positions but the last are inputs, all but the first are targets.
    """

    def loss_fn(params: nnx.State, batch: Batch) -> jax.Array:
        inputs, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        logits = apply(definition, params, inputs).astype(jnp.float32)
        scores = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)
        return -jnp.mean(scores)

    return loss_fn


@functools.partial(jax.jit, static_argnames=("definition", "length"))
def generate(
    definition: nnx.GraphDef,
    params: nnx.State,
    prompt: jax.Array,
    key: jax.Array,
    length: int = 200,
    temperature: float = 0.8,
) -> jax.Array:
    """Continue a prompt by sampling, one token at a time, from the last ``context`` tokens.

    Args:
        definition: what ``build`` returned.
        params: whole params.
        prompt: token ids (B, P).
        key: a JAX random key.
        length: number of tokens to add; fixed, so that the loop compiles once.
        temperature: divides the logits; smaller is safer and duller.

    Returns:
        Token ids (B, P + length).
    """
    batch, start = prompt.shape
    total = start + length
    window = min(nnx.merge(definition, params).config.context, total)
    tokens = jnp.pad(prompt, ((0, 0), (0, length)))

    def add_token(end: jax.Array, tokens: jax.Array) -> jax.Array:
        first = jnp.clip(end - window, 0, total - window)
        seen = jax.lax.dynamic_slice(tokens, (0, first), (batch, window))
        logits = apply(definition, params, seen)[:, end - first - 1].astype(jnp.float32)
        token = jax.random.categorical(jax.random.fold_in(key, end), logits / temperature)
        return tokens.at[:, end].set(token.astype(tokens.dtype))

    return jax.lax.fori_loop(start, total, add_token, tokens)
