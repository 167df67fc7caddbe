"""Llama 2 and 3, Qwen2 and their kin as Flax nnx modules that read and write Hugging Face's folders.

    model = llama.from_pretrained("folder")          # nothing is read yet: params are memory maps
    zj.Trainer(model, args, train_dataset=...).train()

Attributes are named as the tensors in the files, and weights lie as PyTorch keeps them, (out, in), so a
file is loaded and saved slice by slice without a transposition. Grouped-query attention, rotary positions with
Llama 3's and linear scaling, tied embeddings, biases of q, k and v (Qwen2), LoRA on any projection. With ``scan`` the
layers are one stack, compiled once; it is read from the same files and written to them.

Shapes in comments: B batch, T positions, D width, H heads, K key/value heads, E width of a head.
"""

from __future__ import annotations

import functools
import json
import math
import pathlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from llama_config import LlamaConfig

import zeroj as zj

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Linear(nnx.Module):
    """``x @ W.T``, with W (out, in) as in PyTorch, and a LoRA adapter if asked for."""

    def __init__(
        self, config: LlamaConfig, name: str, size_in: int, size_out: int, bias: bool, rngs: nnx.Rngs
    ):
        self.weight = nnx.Param(0.02 * jax.random.normal(rngs.params(), (size_out, size_in)))
        self.bias = nnx.Param(jnp.zeros((size_out,))) if bias else None
        self.scale = config.lora_alpha / max(1, config.lora_rank)
        adapted = config.lora_rank > 0 and name in config.lora_targets
        if adapted:  # Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021: B starts at zero
            bound = 1.0 / math.sqrt(size_in)
            shape = (config.lora_rank, size_in)
            self.lora_A = nnx.Param(jax.random.uniform(rngs.params(), shape, minval=-bound, maxval=bound))
            self.lora_B = nnx.Param(jnp.zeros((size_out, config.lora_rank)))
        self.adapted = adapted

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x @ self.weight[...].T
        y = y if self.bias is None else y + self.bias[...]
        return y + (x @ self.lora_A[...].T) @ self.lora_B[...].T * self.scale if self.adapted else y


class Embedding(nnx.Module):
    """Rows of a table."""

    def __init__(self, count: int, width: int, rngs: nnx.Rngs) -> None:
        self.weight = nnx.Param(0.02 * jax.random.normal(rngs.params(), (count, width)))


class RMSNorm(nnx.Module):
    """Division by the root of the mean square, in fp32."""

    def __init__(self, width: int, eps: float) -> None:
        self.weight, self.eps = nnx.Param(jnp.ones((width,))), eps

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + self.eps)
        return self.weight[...] * wide.astype(x.dtype)


class Attention(nnx.Module):
    """Causal self-attention in which several query heads share a key and a value."""

    def __init__(self, c: LlamaConfig, rngs: nnx.Rngs) -> None:
        heads, shared, width = c.num_attention_heads, c.key_value_heads, c.width_of_head
        bias = c.qkv_bias or c.attention_bias
        self.q_proj = Linear(c, "q_proj", c.hidden_size, heads * width, bias, rngs)
        self.k_proj = Linear(c, "k_proj", c.hidden_size, shared * width, bias, rngs)
        self.v_proj = Linear(c, "v_proj", c.hidden_size, shared * width, bias, rngs)
        self.o_proj = Linear(c, "o_proj", heads * width, c.hidden_size, c.attention_bias, rngs)
        self.width = width

    def __call__(self, x: jax.Array, seen: Seen, cache: Any = None) -> tuple[jax.Array, Any]:
        b, t, _ = x.shape
        q, k, v = (p(x).reshape(b, t, -1, self.width) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotated(q, seen.turn), rotated(k, seen.turn)
        y, cache = attend_cached(q, k, v, seen.mask, seen.positions, cache)
        return self.o_proj(y.reshape(b, t, -1)), cache


class MLP(nnx.Module):
    """SwiGLU."""

    def __init__(self, c: LlamaConfig, rngs: nnx.Rngs) -> None:
        self.gate_proj = Linear(c, "gate_proj", c.hidden_size, c.intermediate_size, c.mlp_bias, rngs)
        self.up_proj = Linear(c, "up_proj", c.hidden_size, c.intermediate_size, c.mlp_bias, rngs)
        self.down_proj = Linear(c, "down_proj", c.intermediate_size, c.hidden_size, c.mlp_bias, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nnx.Module):
    """Attention and MLP, each behind a norm and a residual connection."""

    def __init__(self, c: LlamaConfig, rngs: nnx.Rngs) -> None:
        self.self_attn = Attention(c, rngs)
        self.mlp = MLP(c, rngs)
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)

    def __call__(self, x: jax.Array, seen: Seen, cache: Any = None) -> tuple[jax.Array, Any]:
        y, cache = self.self_attn(self.input_layernorm(x), seen, cache)
        x = x + y
        return x + self.mlp(self.post_attention_layernorm(x)), cache


class Decoder(nnx.Module):
    """Token ids to the last hidden state."""

    def __init__(self, c: LlamaConfig, rngs: nnx.Rngs) -> None:
        self.embed_tokens = Embedding(c.vocab_size, c.hidden_size, rngs)
        self.layers = _layers(c, rngs)
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.remat = False

    def __call__(self, input_ids: jax.Array, seen: Seen, cache: Any = None) -> tuple[jax.Array, Any]:
        x = self.embed_tokens.weight[...][input_ids]
        seen = seen._replace(turn=jax.tree.map(lambda part: part.astype(x.dtype), seen.turn))
        x, kept = self.run(x, seen, cache)
        return self.norm(x), kept

    def run(self, x: jax.Array, seen: Seen, cache: Any) -> tuple[jax.Array, Any]:
        """All layers, one after the other, or by a scan over their stack."""
        keep = jax.checkpoint if self.remat and cache is None else lambda run: run
        if isinstance(self.layers, Layer):
            definition, stacked = nnx.split(self.layers)

            def step(x: jax.Array, layer: tuple[Any, Any]) -> tuple[jax.Array, Any]:
                params, own = layer
                own = own if isinstance(cache, tuple) else cache
                return keep(functools.partial(_layer, definition, seen, own))(params, x)

            return jax.lax.scan(step, x, (stacked, cache if isinstance(cache, tuple) else None))
        kept = []
        for index, layer in enumerate(self.layers):
            definition, params = nnx.split(layer)
            own = cache[index] if isinstance(cache, list) else cache
            x, own = keep(functools.partial(_layer, definition, seen, own))(params, x)
            kept.append(own)
        return x, kept


def _layer(definition: Any, seen: Seen, cache: Any, params: Any, x: jax.Array) -> tuple[jax.Array, Any]:
    return nnx.merge(definition, params)(x, seen, cache)


def _layers(c: LlamaConfig, rngs: nnx.Rngs) -> Any:
    """A list of layers, or one whose params have a leading dim of all layers."""
    if not c.scan:
        return nnx.List([Layer(c, rngs) for _ in range(c.num_hidden_layers)])

    @nnx.split_rngs(splits=c.num_hidden_layers)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def make(rngs: nnx.Rngs) -> Layer:
        return Layer(c, rngs)

    return make(rngs)


class Llama(nnx.Module):
    """Token ids (B, T) to logits (B, T, vocabulary).

    To continue texts, first the whole prompts with ``cache``, the number of positions to keep room for: a dict of
    logits and the cache. Then one token a row, its ``position_ids`` (B, 1), and the cache.
    """

    loss_type = "ForCausalLM"

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs) -> None:
        self.config = config
        self.model = Decoder(config, rngs)
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config, "lm_head", config.hidden_size, config.vocab_size, False, rngs)

    def __call__(
        self,
        input_ids: jax.Array,
        attention_mask: jax.Array | None = None,
        position_ids: jax.Array | None = None,
        cache: Any = None,
    ) -> Any:
        positions = jnp.arange(input_ids.shape[1])[None] if position_ids is None else position_ids
        seen = Seen(angles(self.config, positions), attention_mask, positions)
        x, kept = self.model(input_ids, seen, cache)
        tied = self.config.tie_word_embeddings
        logits = x @ self.model.embed_tokens.weight[...].T if tied else self.lm_head(x)
        return logits if cache is None else {"logits": logits, "cache": kept}

    def gradient_checkpointing_enable(self) -> None:
        """Recompute each layer in the backward pass."""
        self.model.remat = True

    def tensor_name(self, path: str) -> str | list[str]:
        """A leaf's name in the files; of a stack the name for each layer."""
        return tensor_name(self.config, path)


def tensor_name(config: LlamaConfig, path: str) -> str | list[str]:
    """See :meth:`Llama.tensor_name`."""
    name = path.removesuffix("/value").replace("/", ".")
    if config.scan and name.startswith("model.layers."):
        return [name.replace("layers.", f"layers.{i}.", 1) for i in range(config.num_hidden_layers)]
    return name


class Seen(NamedTuple):
    """What attention goes by: the positions' turns, the mask (B, T) or None, and positions (B or 1, T)."""

    turn: Any
    mask: jax.Array | None
    positions: jax.Array


def attend(q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array) -> jax.Array:
    """Attention of q (B, T, H, E) over k and v (B, S, K, E), with scores in fp32; (B, T, H, E).

    ``seen`` (B or 1, T, S) says which positions each one looks at.
    """
    b, t, h, e = q.shape
    groups = q.reshape(b, t, k.shape[2], -1, e)
    scores = jnp.einsum("btkge,bske->bkgts", groups, k, preferred_element_type=jnp.float32) / math.sqrt(e)
    scores = jnp.where(seen[:, None, None], scores, jnp.finfo(jnp.float32).min)
    shares = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("bkgts,bske->btkge", shares, v).reshape(b, t, h, e)


def attend_cached(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None, positions: jax.Array, cache: Any
) -> tuple[jax.Array, Any]:
    """Causal attention, and the keys and values to keep.

    Args:
        q: queries (B, T, H, E); k and v (B, T, K, E) are those of the same positions.
        k: keys.
        v: values.
        mask: (B, T), ones for the positions to look at; None for all.
        positions: (B or 1, T).
        cache: None for nothing; a number of positions to keep room for, where the prompts begin; or keys and
            values (B, S, K, E) so far, where T is 1.
    """
    if isinstance(cache, tuple):
        places = jnp.arange(cache[0].shape[1])
        here = (places == positions)[:, :, None, None]  # a select, which every device does for its own rows
        k, v = (jnp.where(here, new, old) for new, old in zip((k, v), cache, strict=True))
        return attend(q, k, v, places <= positions[..., None]), (k, v)
    t = q.shape[1]
    seen = jnp.tril(jnp.ones((t, t), bool))[None]
    y = attend(q, k, v, seen if mask is None else seen & mask[:, None, :].astype(bool))
    room = None if cache is None else ((0, 0), (0, cache - t), (0, 0), (0, 0))
    return y, None if room is None else (jnp.pad(k, room), jnp.pad(v, room))


def angles(config: LlamaConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine (B or 1, T, 1, E) of each position's turns (Su et al., "RoFormer", 2021)."""
    turns = frequencies(config)
    found = positions[..., None].astype(jnp.float32) * jnp.concatenate([turns, turns])
    return jnp.cos(found)[:, :, None], jnp.sin(found)[:, :, None]


def frequencies(config: LlamaConfig) -> jax.Array:
    """Turns per position of each pair of dims (E / 2), scaled as config.json says."""
    width, scaling = config.width_of_head, config.rope_scaling
    turns = config.rope_theta ** (-jnp.arange(0, width, 2, dtype=jnp.float32) / width)
    if scaling is None:
        return turns
    slow = turns / scaling["factor"]
    if scaling["rope_type"] == "linear":
        return slow
    # Llama 3: long waves are slowed down, short ones kept, those between mixed
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    context = scaling["original_max_position_embeddings"]
    mix = jnp.clip((context * turns / (2 * math.pi) - low) / (high - low), 0.0, 1.0)
    return (1 - mix) * slow + mix * turns


def rotated(x: jax.Array, turn: tuple[jax.Array, jax.Array]) -> jax.Array:
    """x (B, T, heads, E) with its first and second half turned against each other."""
    first, second = jnp.split(x, 2, axis=-1)
    return x * turn[0] + jnp.concatenate([-second, first], axis=-1) * turn[1]


def from_pretrained(folder: str | pathlib.Path, dtype: Any = None, **changes: Any) -> Llama:
    """A model whose params are those in a folder of Hugging Face's, as memory maps: nothing is read yet.

    A Trainer, or ``zj.init_state``, sends each device its slices alone, whatever the stage.

    Args:
        folder: with config.json and safetensors, whole or with an index.
        dtype: dtype of the params; left out, the files'. The cast is made slice by slice.
        **changes: fields of the config to change, such as ``lora_rank=8`` (adapters start anew) or ``scan=True``.
    """
    folder = pathlib.Path(folder)
    config = LlamaConfig.from_dict(json.loads((folder / "config.json").read_text()), **changes)
    return zj.load_module(
        folder,
        lambda: Llama(config, nnx.Rngs(0)),
        names=functools.partial(tensor_name, config),
        dtype=dtype,
        fresh=lambda path: "lora_" in path,
    )
