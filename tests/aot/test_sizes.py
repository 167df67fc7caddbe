"""Sizes of known models from their configurations, and the formulas that follow."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from zeroj.aot.sizes import Sizes, from_hugging_face, from_numbers
from zeroj.errors import PlanError

GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "n_layer": 12,
    "n_embd": 768,
    "n_head": 12,
    "vocab_size": 50257,
    "n_positions": 1024,
}
LLAMA_8B: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
LLAMA_405B = {
    **LLAMA_8B,
    "num_hidden_layers": 126,
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_attention_heads": 128,
}
MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize(
    ("config", "published"),
    [(GPT2, 124.44e6), (LLAMA_8B, 8.03e9), (LLAMA_405B, 405.85e9), (MIXTRAL, 46.7e9)],
)
def test_parameters_of_known_models(config: dict[str, Any], published: float) -> None:
    assert from_hugging_face(config).params == pytest.approx(published, rel=0.01)


def test_a_file_and_its_directory(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_8B))
    assert from_hugging_face(path) == from_hugging_face(str(tmp_path)) == from_hugging_face(LLAMA_8B)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "layers .*hidden .*vocab .*--params"),
        ('{"hidden_size": 8, "vocab_size": 9}', r"lacks the sizes layers \(num_hidden_layers"),
        ("[1]", "no JSON object"),
        ("{", "is not JSON"),
    ],
)
def test_a_config_that_does_not_tell(tmp_path: pathlib.Path, text: str, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(PlanError, match=message):
        from_hugging_face(path)


def test_no_file(tmp_path: pathlib.Path) -> None:
    with pytest.raises(PlanError, match="no model configuration"):
        from_hugging_face(tmp_path / "nothing.json")


def test_impossible_sizes_are_named_together() -> None:
    with pytest.raises(PlanError, match="layers=0, hidden=-1"):
        Sizes(10, 0, -1)


def test_formulas() -> None:
    sizes = from_numbers(13e9, 40, 5120, 50000)
    assert sizes.embedding == 50000 * 5120
    assert sizes.layer == (13 * 10**9 - sizes.embedding) // 40
    assert sizes.gathered == sizes.layer
    assert sizes.flops(1000, 2048) == 6 * 13e9 * 1000 + 12 * 40 * 5120 * 2048 * 1000
    assert sizes.kept(1000) == 2 * 1000 * 5120 * 40
    assert sizes.kept(1000, remat=False) == sizes.block_work(1000) * 40 == 34 * 1000 * 5120 * 40
    assert sizes.logits(1000) == 6 * 1000 * 50000
    assert sizes.scores(2, 1024) == 10 * 2 * 40 * 1024**2
