"""GPT-2 as Flax nnx modules that read and write Hugging Face's folders; see llama.py.

    model = gpt2.from_pretrained("folder")
    zj.Trainer(model, args, train_dataset=...).train()

Attributes are named as the tensors in the files; the files keep these weights as (in, out), as Flax does.
Shapes in comments: B batch, T positions, D width, H heads.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from llama import attend_cached

import zeroj as zj


@dataclasses.dataclass(frozen=True)
class GPT2Config:
    """The shape of the model, by the names of config.json.

    Args:
        n_inner: width of the MLP; None for 4 * n_embd.
        raw: the file's own dict, from which a saved config.json is made.
    """

    vocab_size: int = 50257
    n_positions: int = 1024
    n_embd: int = 768
    n_layer: int = 12
    n_head: int = 12
    n_inner: int | None = None
    layer_norm_epsilon: float = 1e-5
    raw: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> GPT2Config:
        """Reads a config.json; refuses what this file does not compute."""
        plain = {
            "model_type": "gpt2",
            "activation_function": "gelu_new",
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "tie_word_embeddings": True,
            "add_cross_attention": False,
        }
        faults = [f"{name}={data[name]!r}" for name, value in plain.items() if data.get(name, value) != value]
        if faults:
            raise ValueError("This config.json asks for what gpt2.py does not compute: " + ", ".join(faults))
        known = {field.name for field in dataclasses.fields(cls)} - {"raw"}
        return cls(**{name: value for name, value in data.items() if name in known}, raw=dict(data))

    def to_dict(self) -> dict[str, Any]:
        """What config.json holds."""
        own = dataclasses.asdict(self)
        del own["raw"]
        return own | {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]} | dict(self.raw)


class Linear(nnx.Module):
    """``x @ W + b``."""

    def __init__(self, size_in: int, size_out: int, rngs: nnx.Rngs) -> None:
        self.weight = nnx.Param(0.02 * jax.random.normal(rngs.params(), (size_in, size_out)))
        self.bias = nnx.Param(jnp.zeros((size_out,)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.weight[...] + self.bias[...]


class LayerNorm(nnx.Module):
    """Mean 0 and variance 1, in fp32."""

    def __init__(self, width: int, eps: float) -> None:
        self.weight, self.bias, self.eps = nnx.Param(jnp.ones((width,))), nnx.Param(jnp.zeros((width,))), eps

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        wide = (wide - wide.mean(-1, keepdims=True)) * jax.lax.rsqrt(wide.var(-1, keepdims=True) + self.eps)
        return wide.astype(x.dtype) * self.weight[...] + self.bias[...]


class Table(nnx.Module):
    """Rows to look up."""

    def __init__(self, count: int, width: int, rngs: nnx.Rngs) -> None:
        self.weight = nnx.Param(0.02 * jax.random.normal(rngs.params(), (count, width)))


class Attention(nnx.Module):
    """Causal self-attention."""

    def __init__(self, c: GPT2Config, rngs: nnx.Rngs) -> None:
        self.heads = c.n_head
        self.c_attn = Linear(c.n_embd, 3 * c.n_embd, rngs)
        self.c_proj = Linear(c.n_embd, c.n_embd, rngs)

    def __call__(self, x: jax.Array, mask: Any, positions: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
        b, t, d = x.shape
        q, k, v = (y.reshape(b, t, self.heads, -1) for y in jnp.split(self.c_attn(x), 3, axis=-1))
        y, cache = attend_cached(q, k, v, mask, positions, cache)
        return self.c_proj(y.reshape(b, t, d)), cache


class MLP(nnx.Module):
    """Two layers with GELU."""

    def __init__(self, c: GPT2Config, rngs: nnx.Rngs) -> None:
        inner = c.n_inner or 4 * c.n_embd
        self.c_fc, self.c_proj = Linear(c.n_embd, inner, rngs), Linear(inner, c.n_embd, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.c_proj(jax.nn.gelu(self.c_fc(x), approximate=True))


class Layer(nnx.Module):
    """Attention and MLP, each behind a norm and a residual connection."""

    def __init__(self, c: GPT2Config, rngs: nnx.Rngs) -> None:
        self.ln_1, self.attn = LayerNorm(c.n_embd, c.layer_norm_epsilon), Attention(c, rngs)
        self.ln_2, self.mlp = LayerNorm(c.n_embd, c.layer_norm_epsilon), MLP(c, rngs)

    def __call__(self, x: jax.Array, mask: Any, positions: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
        y, cache = self.attn(self.ln_1(x), mask, positions, cache)
        x = x + y
        return x + self.mlp(self.ln_2(x)), cache


class Decoder(nnx.Module):
    """Token ids to the last hidden state."""

    def __init__(self, c: GPT2Config, rngs: nnx.Rngs) -> None:
        self.wte, self.wpe = Table(c.vocab_size, c.n_embd, rngs), Table(c.n_positions, c.n_embd, rngs)
        self.h = nnx.List([Layer(c, rngs) for _ in range(c.n_layer)])
        self.ln_f = LayerNorm(c.n_embd, c.layer_norm_epsilon)
        self.remat = False

    def __call__(self, ids: jax.Array, mask: Any, positions: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
        x = self.wte.weight[...][ids] + self.wpe.weight[...][positions]
        kept = []
        for index, layer in enumerate(self.h):
            definition, params = nnx.split(layer)

            def run(params: Any, x: jax.Array, cache: Any, definition: Any = definition) -> Any:
                return nnx.merge(definition, params)(x, mask, positions, cache)

            own = cache[index] if isinstance(cache, list) else cache
            x, own = (jax.checkpoint(run) if self.remat and cache is None else run)(params, x, own)
            kept.append(own)
        return self.ln_f(x), kept


class GPT2(nnx.Module):
    """Token ids (B, T) to logits (B, T, vocabulary); the head is the token table. ``cache`` as in llama.py."""

    loss_type = "ForCausalLM"

    def __init__(self, config: GPT2Config, rngs: nnx.Rngs) -> None:
        self.config, self.transformer = config, Decoder(config, rngs)

    def __call__(
        self,
        input_ids: jax.Array,
        attention_mask: jax.Array | None = None,
        position_ids: jax.Array | None = None,
        cache: Any = None,
    ) -> Any:
        positions = jnp.arange(input_ids.shape[1])[None] if position_ids is None else position_ids
        x, kept = self.transformer(input_ids, attention_mask, positions, cache)
        logits = x @ self.transformer.wte.weight[...].T
        return logits if cache is None else {"logits": logits, "cache": kept}

    def gradient_checkpointing_enable(self) -> None:
        """Recompute each layer in the backward pass."""
        self.transformer.remat = True

    @staticmethod
    def tensor_name(path: str) -> str:
        """A leaf's name in the files."""
        return path.removesuffix("/value").replace("/", ".")


def from_pretrained(folder: str | pathlib.Path, dtype: Any = None) -> GPT2:
    """A model whose params are those in a folder of Hugging Face's, as memory maps; see llama.py."""
    folder = pathlib.Path(folder)
    config = GPT2Config.from_dict(json.loads((folder / "config.json").read_text()))
    return zj.load_module(folder, lambda: GPT2(config, nnx.Rngs(0)), names=GPT2.tensor_name, dtype=dtype)
