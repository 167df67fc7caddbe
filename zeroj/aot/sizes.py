"""The sizes of a transformer, from numbers or a Hugging Face ``config.json``, and what follows from them."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from zeroj.errors import PlanError


@dataclasses.dataclass(frozen=True)
class Sizes:
    """A decoder-only transformer, as far as planning needs it.

    Args:
      params: number of parameters.
      layers: number of layers.
      hidden: width of the residual stream.
      vocab: size of the vocabulary.
      largest_layer: parameters of the largest layer, which stage 3 gathers as one; 0 means that it follows
      from
        the others: the larger of a layer and the embedding.
      heads: attention heads; 0 means heads of width 128.
    """

    params: int
    layers: int
    hidden: int
    vocab: int = 50257
    largest_layer: int = 0
    heads: int = 0

    def __post_init__(self) -> None:
        wrong = [
            f"{name}={value!r}"
            for name, value in dataclasses.asdict(self).items()
            if not isinstance(value, int) or value < (0 if name in ("largest_layer", "heads") else 1)
        ]
        if wrong:
            raise PlanError(f"sizes of a model are positive whole numbers: {', '.join(wrong)}")

    @property
    def layer(self) -> int:
        """Parameters of one layer: those outside the embedding, spread evenly."""
        return max(1, (self.params - self.embedding) // self.layers)

    @property
    def embedding(self) -> int:
        """Parameters of the embedding, at most half of the model."""
        return min(self.vocab * self.hidden, self.params // 2)

    @property
    def gathered(self) -> int:
        """Parameters that stage 3 gathers as one."""
        return self.largest_layer or max(self.layer, self.embedding)

    def flops(self, tokens: int, sequence: int) -> float:
        """Operations of forward and backward over a number of tokens, without recomputation.

        6 x params x tokens for the matrices and 12 x layers x hidden x sequence x tokens for attention
        (Kaplan et al. 2020, 2.1; Chowdhery et al. 2022, appendix B).
        """
        return 6.0 * self.params * tokens + 12.0 * self.layers * self.hidden * sequence * tokens

    def kept(self, tokens: int, remat: bool = True) -> int:
        """Bytes of activations that the forward pass leaves for the backward pass, at 16 bits.

        With rematerialization every layer keeps its input, 2 bytes x tokens x hidden, without it all of
        :meth:`block_work`.
        """
        return (2 * tokens * self.hidden if remat else self.block_work(tokens)) * self.layers

    def block_work(self, tokens: int) -> int:
        """Bytes of one layer's activations without the score matrix: 34 bytes x tokens x hidden.

        Korthikanti et al. 2022, "Reducing activation recomputation", equation 1 without its second term.
        """
        return 34 * tokens * self.hidden

    def scores(self, micro: int, sequence: int) -> int:
        """Bytes of attention's score matrix and its gradient, where no fused kernel avoids them.

        10 bytes x micro x heads x sequence^2: XLA keeps the probabilities and the gradient in fp32, and one
        copy at 16 bits.
        """
        return 10 * micro * (self.heads or max(1, self.hidden // 128)) * sequence**2

    def logits(self, tokens: int) -> int:
        """Bytes of the logits at 16 bits and of the loss's fp32 copy: 6 bytes x tokens x vocab."""
        return 6 * tokens * self.vocab


def from_numbers(params: float, layers: int, hidden: int, vocab: int = 50257) -> Sizes:
    """Returns the sizes for numbers as people give them (``params`` may be 13e9)."""
    return Sizes(int(params), int(layers), int(hidden), int(vocab))


_NAMES = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model", "dim"),
    "vocab": ("vocab_size",),
    "heads": ("num_attention_heads", "n_head", "num_heads", "n_heads"),
    "intermediate": ("intermediate_size", "n_inner", "ffn_dim", "d_ff"),
    "kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "expert_size": ("moe_intermediate_size",),
}
_GATED = (
    "llama",
    "mistral",
    "mixtral",
    "qwen",
    "gemma",
    "phi3",
    "deepseek",
    "olmo",
    "cohere",
    "granite",
    "yi",
)


def from_hugging_face(config: str | pathlib.Path | Mapping[str, Any]) -> Sizes:
    """Returns the sizes of the model that a Hugging Face ``config.json`` describes.

    Args:
      config: the path of the file or of its directory, or what it holds.

    Returns:
      The sizes. Parameters are counted from the shapes of a standard decoder layer (grouped attention, gated
      feed-forward for the families that have it, experts), norms and biases left out: within 1 % for GPT-2,
      Llama, Mistral, Qwen and Mixtral.

    Raises:
      PlanError: for a file that is not there or is not JSON, or that lacks sizes; the message lists all of
      them.
    """
    entries = config if isinstance(config, Mapping) else _read(pathlib.Path(config))
    entries = {**entries, **entries.get("text_config", {})}
    found = {name: next((entries[k] for k in keys if entries.get(k)), None) for name, keys in _NAMES.items()}
    missing = [f"{n} ({' or '.join(_NAMES[n])})" for n in ("layers", "hidden", "vocab") if found[n] is None]
    if missing:
        raise PlanError(
            f"config.json lacks the sizes {', '.join(missing)}: give --params --layers --hidden instead"
        )
    layers, hidden, vocab = (int(found[n] or 0) for n in ("layers", "hidden", "vocab"))
    layer = _attention(found, hidden) + _feed_forward(found, hidden, str(entries.get("model_type", "")))
    tied = bool(entries.get("tie_word_embeddings", "gpt2" in str(entries.get("model_type", ""))))
    embeddings = vocab * hidden * (1 if tied else 2)
    positions = int(entries.get("n_positions", 0)) * hidden
    params = layers * layer + embeddings + positions
    return Sizes(params, layers, hidden, vocab, max(layer, vocab * hidden), int(found["heads"] or 0))


def _read(path: pathlib.Path) -> Mapping[str, Any]:
    path = path / "config.json" if path.is_dir() else path
    try:
        entries = json.loads(path.read_text())
    except OSError as error:
        raise PlanError(f"no model configuration at {path}: {error.strerror}") from error
    except json.JSONDecodeError as error:
        raise PlanError(f"{path} is not JSON: {error}") from error
    if not isinstance(entries, dict):
        raise PlanError(f"{path} holds no JSON object")
    return entries


def _attention(found: dict[str, Any], hidden: int) -> int:
    heads = int(found["heads"] or 1)
    head_dim = int(found["head_dim"] or hidden // heads)
    kv_heads = int(found["kv_heads"] or heads)
    return 2 * hidden * heads * head_dim + 2 * hidden * kv_heads * head_dim


def _feed_forward(found: dict[str, Any], hidden: int, family: str) -> int:
    gated = any(name in family for name in _GATED)
    experts = int(found["experts"] or 1)
    width = int((found["expert_size"] if experts > 1 else None) or found["intermediate"] or 4 * hidden)
    return (3 if gated else 2) * hidden * width * experts + (experts * hidden if experts > 1 else 0)
