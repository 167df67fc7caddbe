"""Llama 2 and 3, Qwen2 and their kin as Flax nnx modules that read and write Hugging Face's folders.

    model = llama.from_pretrained("folder")          # nothing is read yet: params are memory maps
    zj.Trainer(model, args, train_dataset=...).train()

Attributes are named as the tensors in the files, and weights lie as PyTorch keeps them, (out, in), so a
file is loaded and saved slice by slice without a transposition. Grouped-query attention, rotary positions with
Llama 3's and linear scaling, tied embeddings, biases of q, k and v (Qwen2), LoRA on any projection.

Shapes in comments: B batch, T positions, D width, H heads, K key/value heads, E width of a head.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import zeroj as zj

KINDS = ("llama", "mistral", "qwen2")
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """The shape of the model, by the names of config.json.

    Args:
        num_key_value_heads: None for as many as heads.
        head_dim: None for hidden_size / num_attention_heads.
        rope_scaling: None, or {"rope_type": "llama3" | "linear", "factor": ..., ...}.
        qkv_bias: whether q, k and v have biases, as in Qwen2; o has one only by ``attention_bias``.
        lora_rank: rank of the adapters; 0 for none.
        lora_alpha: what ``B @ A`` is multiplied by, times the rank.
        lora_targets: projections that have adapters.
        raw: the file's own dict, from which a saved config.json is made.
    """

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    qkv_bias: bool = False
    mlp_bias: bool = False
    model_type: str = "llama"
    lora_rank: int = 0
    lora_alpha: float = 16.0
    lora_targets: tuple[str, ...] = ("q_proj", "v_proj")
    raw: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], **changes: Any) -> LlamaConfig:
        """Reads a config.json; refuses what this file does not compute."""
        rope = dict(data.get("rope_parameters") or data.get("rope_scaling") or {})
        kind = rope.get("rope_type", rope.get("type", "default"))
        faults = [
            text
            for text, wrong in (
                (
                    f"model_type {data.get('model_type')!r} is none of {KINDS}",
                    data.get("model_type") not in KINDS,
                ),
                (f"hidden_act {data.get('hidden_act')!r}", data.get("hidden_act", "silu") != "silu"),
                (f"rope type {kind!r}", kind not in ("default", "linear", "llama3")),
                ("use_sliding_window", bool(data.get("use_sliding_window"))),
                ("sliding_window", data.get("model_type") == "mistral" and bool(data.get("sliding_window"))),
            )
            if wrong
        ]
        if faults:
            raise ValueError("This config.json asks for what llama.py does not compute: " + "; ".join(faults))
        known = {field.name for field in dataclasses.fields(cls)} - {"raw", "rope_scaling", "rope_theta"}
        values: dict[str, Any] = {name: value for name, value in data.items() if name in known}
        values |= {
            "rope_theta": float(rope.get("rope_theta", data.get("rope_theta", 10000.0))),
            "rope_scaling": None if kind == "default" else rope | {"rope_type": kind},
            "qkv_bias": data["model_type"] == "qwen2" or bool(data.get("attention_bias")),
            "raw": dict(data),
        }
        return cls(**(values | changes))

    def to_dict(self) -> dict[str, Any]:
        """What config.json holds: the file's own keys, or all of them for a model made here."""
        own = dataclasses.asdict(self)
        for name in ("raw", "qkv_bias", "lora_rank", "lora_alpha", "lora_targets", "rope_scaling"):
            del own[name]
        name = "Qwen2" if self.model_type == "qwen2" else self.model_type.capitalize()
        own |= {"architectures": [f"{name}ForCausalLM"], "hidden_act": "silu", "head_dim": self.width_of_head}
        own["num_key_value_heads"] = self.key_value_heads
        own["rope_parameters"] = {
            "rope_type": "default",
            **(self.rope_scaling or {}),
            "rope_theta": self.rope_theta,
        }
        return own | dict(self.raw)

    @property
    def key_value_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def width_of_head(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads


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

    def __call__(self, x: jax.Array, turn: tuple[jax.Array, jax.Array], mask: jax.Array | None) -> jax.Array:
        b, t, _ = x.shape
        q, k, v = (p(x).reshape(b, t, -1, self.width) for p in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(attend(rotated(q, turn), rotated(k, turn), v, mask).reshape(b, t, -1))


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

    def __call__(self, x: jax.Array, turn: Any, mask: jax.Array | None) -> jax.Array:
        x = x + self.self_attn(self.input_layernorm(x), turn, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nnx.Module):
    """Token ids to the last hidden state."""

    def __init__(self, c: LlamaConfig, rngs: nnx.Rngs) -> None:
        self.embed_tokens = Embedding(c.vocab_size, c.hidden_size, rngs)
        self.layers = nnx.List([Layer(c, rngs) for _ in range(c.num_hidden_layers)])
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.remat = False

    def __call__(self, input_ids: jax.Array, turn: Any, mask: jax.Array | None) -> jax.Array:
        x = self.embed_tokens.weight[...][input_ids]
        turn = jax.tree.map(lambda part: part.astype(x.dtype), turn)
        for layer in self.layers:
            definition, params = nnx.split(layer)
            run = lambda params, x, definition=definition: nnx.merge(definition, params)(x, turn, mask)  # noqa: E731
            x = (jax.checkpoint(run) if self.remat else run)(params, x)
        return self.norm(x)


class Llama(nnx.Module):
    """Token ids (B, T) to logits (B, T, vocabulary)."""

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
    ) -> jax.Array:
        positions = jnp.arange(input_ids.shape[1])[None] if position_ids is None else position_ids
        x = self.model(input_ids, angles(self.config, positions), attention_mask)
        return (
            x @ self.model.embed_tokens.weight[...].T if self.config.tie_word_embeddings else self.lm_head(x)
        )

    def gradient_checkpointing_enable(self) -> None:
        """Recompute each layer in the backward pass."""
        self.model.remat = True

    @staticmethod
    def tensor_name(path: str) -> str:
        """A leaf's name in the files."""
        return path.removesuffix("/value").replace("/", ".")


def attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None) -> jax.Array:
    """Causal attention of q (B, T, H, E) over k and v (B, T, K, E), with scores in fp32; (B, T, H, E).

    ``mask`` (B, T) has ones for the positions to look at; None for all.
    """
    b, t, h, e = q.shape
    groups = q.reshape(b, t, k.shape[2], -1, e)
    scores = jnp.einsum("btkge,bske->bkgts", groups, k, preferred_element_type=jnp.float32) / math.sqrt(e)
    seen = jnp.tril(jnp.ones((t, t), bool))[None]
    seen = seen if mask is None else seen & mask[:, None, :].astype(bool)
    scores = jnp.where(seen[:, None, None], scores, jnp.finfo(jnp.float32).min)
    shares = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("bkgts,bske->btkge", shares, v).reshape(b, t, h, e)


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
        **changes: fields of the config to change, such as ``lora_rank=8``; adapters start anew.
    """
    folder = pathlib.Path(folder)
    config = LlamaConfig.from_dict(json.loads((folder / "config.json").read_text()), **changes)
    return zj.load_module(
        folder,
        lambda: Llama(config, nnx.Rngs(0)),
        names=Llama.tensor_name,
        dtype=dtype,
        fresh=lambda path: "lora_" in path,
    )
