"""Writes tests/hf/fixtures with PyTorch and transformers: tiny models in Hugging Face's files, and what they compute.

    pip install 'zeroj[hf]' && python -m tests.hf.make_fixtures

Each folder holds config.json and safetensors (the first in several files with an index) as save_pretrained
writes them, and expected.npz: token ids, their logits, and the losses of a plain AdamW loop.
"""

from __future__ import annotations

import json
import pathlib
import shutil
from typing import Any

import numpy as np
import torch
import transformers

from tests.hf.rows import VOCAB, rows
from zeroj.trainer.data import order_of

FOLDER = pathlib.Path(__file__).parent / "fixtures"
UPDATES, RATE, SEED = 20, 1e-2, 42
SMALL = {"vocab_size": VOCAB, "max_position_embeddings": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def configs() -> dict[str, Any]:
    """The models, by folder."""
    plain = SMALL | {"hidden_size": 16, "intermediate_size": 32}
    grouped = plain | {"num_key_value_heads": 2}
    return {
        "llama2": transformers.LlamaConfig(**plain),
        "llama3": transformers.LlamaConfig(
            **grouped, tie_word_embeddings=True, rope_theta=500000.0, rope_scaling=LLAMA3
        ),
        "qwen2": transformers.Qwen2Config(**grouped, tie_word_embeddings=True),
        "gpt2": transformers.GPT2Config(
            vocab_size=VOCAB,
            n_positions=64,
            n_embd=16,
            n_layer=2,
            n_head=4,
            resid_pdrop=0,
            embd_pdrop=0,
            attn_pdrop=0,
        ),
    }


def make_model(config: Any) -> Any:
    """A model with weights large enough that every part of it shows in the logits."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(0.15 * torch.randn_like(param) + (param if param.ndim == 1 else 0))
    return model


def losses(model: Any, data: list[dict[str, list[int]]], size: int) -> list[float]:
    """A plain loop: AdamW, linear schedule, clipping to 1, one batch an update."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: max(0.0, 1 - t / UPDATES))
    found: list[float] = []
    epoch = 0
    while len(found) < UPDATES:
        order = order_of(len(data), epoch, SEED)
        for start in range(0, len(data), size):
            texts = [data[i]["input_ids"] for i in order[start : start + size]]
            length = max(map(len, texts))
            mask = torch.tensor([[1] * len(t) + [0] * (length - len(t)) for t in texts])
            ids = torch.tensor([t + [0] * (length - len(t)) for t in texts])
            logits = model(ids, attention_mask=mask).logits[:, :-1]
            targets = torch.where(mask.bool(), ids, -100)[:, 1:]
            loss = torch.nn.functional.cross_entropy(logits.reshape(-1, VOCAB), targets.reshape(-1))
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            found.append(loss.item())
        epoch += 1
    return found[:UPDATES]


def main() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
    data, rng = rows(), np.random.default_rng(1)
    ids, mask = rng.integers(0, VOCAB, (2, 20)), np.ones((2, 20), np.int32)
    mask[1, 13:] = 0
    for name, config in configs().items():
        folder = FOLDER / name
        model = make_model(config)
        model.save_pretrained(folder, max_shard_size="8KB" if name == "llama2" else "1GB")
        logits = model(torch.tensor(ids), attention_mask=torch.tensor(mask)).logits.detach().numpy()
        expected = {"ids": ids, "mask": mask, "logits": logits}
        for accumulation in (1, 8):
            expected[f"losses{accumulation}"] = np.array(losses(make_model(config), data, 8 * accumulation))
        np.savez_compressed(folder / "expected.npz", **expected)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    (FOLDER / "made_with.json").write_text(json.dumps(versions, indent=2) + "\n")


if __name__ == "__main__":
    main()
