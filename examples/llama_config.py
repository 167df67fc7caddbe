"""The shape of a Llama, Mistral or Qwen2, read from config.json and written to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

KINDS = ("llama", "mistral", "qwen2")


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
        scan: whether all layers are one stack of params, run by ``jax.lax.scan``: one layer is compiled.
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
    scan: bool = False
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
        known = {field.name for field in dataclasses.fields(cls)} - {
            "raw",
            "scan",
            "rope_scaling",
            "rope_theta",
        }
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
        for name in ("raw", "scan", "qkv_bias", "lora_rank", "lora_alpha", "lora_targets", "rope_scaling"):
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
