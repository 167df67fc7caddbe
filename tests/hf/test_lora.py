"""LoRA on a model of transformers: adapters alone train, are saved alone, and merge into a plain model."""

from __future__ import annotations

import json
import pathlib

import numpy as np
import pytest
from flax import nnx

import zeroj as zj
from tests.hf.rows import rows
from tests.hf.test_fixtures import FOLDER, example, load, logits_of
from zeroj.checkpoint.tensor_file import read_header

pytestmark = pytest.mark.usefixtures("compile_fast")


@pytest.mark.slow
def test_adapters_train_alone_and_merge(tmp_path: pathlib.Path) -> None:
    lora = example("lora")
    args = zj.TrainingArguments(
        str(tmp_path),
        deepspeed={"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}},
        per_device_train_batch_size=1,
        max_steps=4,
        learning_rate=3e-2,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
    )
    model = load("llama2", lora_rank=2, lora_targets=("q_proj", "v_proj", "down_proj"))
    trainer = zj.Trainer(model, args, train_dataset=rows(), trainable=lora.is_adapter)
    trainer.train()
    expected = dict(np.load(FOLDER / "llama2" / "expected.npz"))
    prompts = [
        {"input_ids": ids, "attention_mask": mask} for ids, mask in zip(expected["ids"], expected["mask"])
    ]
    before = trainer.predict(prompts).predictions
    real = expected["mask"].astype(bool)
    assert np.abs(before[:, :20] - expected["logits"])[real].max() > 0.05
    lora.save_adapter(trainer, tmp_path / "adapter", "llama2")
    lora.merge(trainer)
    np.testing.assert_allclose(trainer.predict(prompts).predictions, before, atol=1e-5)
    trainer.save_model(tmp_path / "merged", only=lambda path: not lora.is_adapter(path, None))
    merged = example("llama").from_pretrained(tmp_path / "merged")
    np.testing.assert_allclose(logits_of(merged, expected)[real], before[:, :20][real], atol=1e-5)
    adapter = read_header(tmp_path / "adapter" / "adapter_model.safetensors")
    assert len(adapter) == 2 * 2 * 3  # two tensors, two layers, three projections
    assert "base_model.model.model.layers.1.mlp.down_proj.lora_B.weight" in adapter
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["r"] == 2
    # by hand, as peft computes it: the file's weight and the adapter's product
    theirs = dict(nnx.to_flat_state(nnx.state(load("llama2"), nnx.Param)))
    path = ("model", "layers", 0, "self_attn", "q_proj")
    name = "base_model." + ".".join(map(str, ("model", *path)))
    change = 16.0 / 2 * adapter[f"{name}.lora_B.weight"] @ adapter[f"{name}.lora_A.weight"]
    mine = dict(nnx.to_flat_state(nnx.state(merged, nnx.Param)))[(*path, "weight")].get_value()
    np.testing.assert_allclose(mine, theirs[(*path, "weight")].get_value() + change, atol=1e-6)
    kept = dict(nnx.to_flat_state(nnx.state(merged, nnx.Param)))[("model", "norm", "weight")].get_value()
    np.testing.assert_array_equal(kept, theirs[("model", "norm", "weight")].get_value())


def test_what_is_learnt_of_a_line(tmp_path: pathlib.Path) -> None:
    tokens = example("tokens")
    file = tmp_path / "data.jsonl"
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    lines = [{"text": "ab"}, {"prompt": "a", "completion": "b"}, {"messages": chat}]
    file.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    plain, pair, talk = tokens.read_jsonl(file, tokens.Bytes(), 99)
    assert plain == {"input_ids": [256, 97, 98, 257], "labels": [-100, 97, 98, 257]}
    assert pair == {"input_ids": [256, 97, 98, 257], "labels": [-100, -100, 98, 257]}
    learnt = [i for i in talk["labels"] if i != -100]
    assert bytes(learnt[:-1]).decode() == "yo\n" and learnt[-1] == 257
    assert all(len(row["input_ids"]) == 3 for row in tokens.read_jsonl(file, tokens.Bytes(), 3))
    assert tokens.question(None, pair, tokens.Bytes()) == [256, 97]
    assert tokens.question("ab", pair, tokens.Bytes()) == [256, 97, 98]
    file.write_text('{"text": "a"}\n{"txt": "b"}\n')
    with pytest.raises(SystemExit, match="line 2"):
        tokens.read_jsonl(file, tokens.Bytes(), 9)
