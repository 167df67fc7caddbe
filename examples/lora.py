"""LoRA for llama.py: which params are adapters, saving them alone, and merging them into the weights."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import zeroj as zj


def is_adapter(path: str, leaf: Any) -> bool:
    """Whether a leaf belongs to an adapter: what trains."""
    return "lora_" in path


def peft_name(name: str | list[str]) -> str | list[str]:
    """The name of an adapter's tensor in the files of the package peft, from that in the model's own files."""
    if isinstance(name, list):
        return [f"base_model.model.{part}.weight" for part in name]
    return f"base_model.model.{name}.weight"


def save_adapter(trainer: zj.Trainer, folder: pathlib.Path, base: str) -> None:
    """Writes the adapters alone, as peft keeps them. Every process must call it."""
    own = trainer.model.source.tensor_name
    files = zj.export_safetensors(
        trainer.engine.state,
        folder,
        plan=trainer.engine.plan,
        frozen=False,
        names=lambda path: peft_name(own(path)),
    )
    if trainer.is_world_process_zero():
        files[0].replace(folder / "adapter_model.safetensors")
        config = trainer.model.source.config
        data = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "r": config.lora_rank,
            "lora_alpha": config.lora_alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": list(config.lora_targets),
        }
        (folder / "adapter_config.json").write_text(json.dumps(data, indent=2) + "\n")


def merge(trainer: zj.Trainer) -> None:
    """Adds each adapter's ``B @ A`` to its weight and sets B to zero, shard by shard; logits stay as they are.

    Every process must call it. Weights that do not train have no master, so in half precision the sum is rounded.
    """
    engine, config = trainer.engine, trainer.model.source.config
    plan, scale = engine.plan, config.lora_alpha / config.lora_rank
    adapted = {leaf.path.rsplit("/", 2)[0] for leaf in plan.leaves if leaf.path.endswith("lora_A/value")}
    for path in sorted(adapted):
        down, up = (zj.get_full(engine.state, plan, f"{path}/lora_{name}/value") for name in "AB")
        weight = zj.get_full(engine.state, plan, f"{path}/weight/value")
        merged = weight + (scale * (up @ down)).astype(weight.dtype)
        engine.state = zj.set_full(engine.state, plan, f"{path}/weight/value", merged)
        engine.state = zj.set_full(engine.state, plan, f"{path}/lora_B/value", 0 * up)
