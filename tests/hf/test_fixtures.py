"""Llama and GPT-2 against files that transformers wrote, its logits, and its losses under a plain AdamW loop."""

from __future__ import annotations

import importlib
import json
import pathlib
import sys
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

import zeroj as zj
from tests.hf.rows import rows

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent.parent / "examples"))
FOLDER = pathlib.Path(__file__).parent / "fixtures"
TOLERANCE = 1e-4
pytestmark = pytest.mark.usefixtures("compile_fast")


def example(name: str) -> Any:
    """An example's module."""
    return importlib.import_module(name)


def load(name: str, **changes: Any) -> Any:
    return example("gpt2" if name == "gpt2" else "llama").from_pretrained(FOLDER / name, **changes)


def logits_of(model: Any, expected: Any) -> np.ndarray:
    definition, params = nnx.split(model)
    params = jax.tree.map(np.asarray, params)
    return np.asarray(nnx.merge(definition, params)(expected["ids"], expected["mask"]))


@pytest.mark.parametrize("name", ("llama2", "llama3", "qwen2", "gpt2"))
def test_logits_are_transformers_own(name: str) -> None:
    expected = np.load(FOLDER / name / "expected.npz")
    real = expected["mask"].astype(bool)
    assert np.abs(expected["logits"]).max() > 0.1
    found = logits_of(load(name), expected)
    np.testing.assert_allclose(found[real], expected["logits"][real], rtol=0, atol=TOLERANCE)


def trained(name: str, folder: pathlib.Path, accumulation: int, **given: Any) -> zj.Trainer:
    base: dict[str, Any] = {
        "deepspeed": {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}},
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": accumulation,
        "max_steps": 20,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    model = load(name)
    assert all(isinstance(value, np.memmap) for value in jax.tree.leaves(nnx.state(model, nnx.Param)))
    trainer = zj.Trainer(model, zj.TrainingArguments(str(folder), **base | given), train_dataset=rows())
    trainer.train()
    return trainer


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, accumulation",
    (
        ("llama3", 1),
        pytest.param("llama2", 8, marks=pytest.mark.full),
        pytest.param("gpt2", 1, marks=pytest.mark.full),
    ),
)
def test_losses_are_a_plain_torch_loops(name: str, accumulation: int, tmp_path: pathlib.Path) -> None:
    """Twenty updates from the files' weights under stage 3; then saved, and read again as they are."""
    expected = np.load(FOLDER / name / "expected.npz")
    wanted = expected[f"losses{accumulation}"]
    trainer = trained(name, tmp_path, accumulation)
    found = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE)
    assert wanted[-1] < 0.95 * wanted[0]
    trainer.save_model(tmp_path / "saved")
    saved = example("gpt2" if name == "gpt2" else "llama").from_pretrained(tmp_path / "saved")
    whole = zj.full_params(trainer.engine.state, trainer.engine.plan)
    for a, b in zip(jax.tree.leaves(nnx.state(saved, nnx.Param)), jax.tree.leaves(whole), strict=True):
        np.testing.assert_array_equal(a, b)
    mine = json.loads((tmp_path / "saved" / "config.json").read_text())
    theirs = json.loads((FOLDER / name / "config.json").read_text())
    assert {k: v for k, v in mine.items() if k in theirs} == theirs | {"dtype": mine["dtype"]}


def test_a_config_that_is_not_computed_is_refused(tmp_path: pathlib.Path) -> None:
    data = json.loads((FOLDER / "llama3" / "config.json").read_text())
    data |= {"hidden_act": "gelu", "rope_parameters": {"rope_type": "yarn", "factor": 2.0}}
    (tmp_path / "config.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match="gelu.*yarn"):
        example("llama").from_pretrained(tmp_path)


def test_a_cast_is_made_slice_by_slice() -> None:
    model = load("llama2", dtype="bfloat16", lora_rank=4)
    leaves = dict(nnx.to_flat_state(nnx.state(model, nnx.Param)))
    weight = leaves[("model", "layers", 0, "self_attn", "q_proj", "weight")].get_value()
    assert not isinstance(weight, np.ndarray) and weight.dtype == "bfloat16" and weight.shape == (16, 16)
    assert weight[:2].dtype == "bfloat16" and weight[:2].shape == (2, 16)
    adapter = leaves[("model", "layers", 0, "self_attn", "q_proj", "lora_B")].get_value()
    assert adapter.shape == (16, 4) and not np.asarray(adapter).any()
