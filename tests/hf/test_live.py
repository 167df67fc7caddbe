"""With PyTorch and transformers installed: their classes in, and files that they read back. ``make test-hf``.

The leg that needs them; the others compare with files that they wrote. Not collected where they are missing.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

import datasets
import jax
import numpy as np
import pytest
import tokenizers
import torch
import transformers

import zeroj as zj
from tests.hf.make_fixtures import configs, make_model
from tests.hf.rows import rows
from tests.hf.test_fixtures import FOLDER, example
from tests.trainer.test_arguments import STAGE_3
from zeroj.trainer.refused import NO_EFFECT, THEIR_DEFAULTS

pytestmark = [pytest.mark.usefixtures("compile_fast"), pytest.mark.hf]
CPU = {"device": "cpu", "pin_memory": True}
#: What their constructor adds to its arguments.
DERIVED = {"distributed_state", "deepspeed_plugin", "fsdp_plugin_args", "mixed_precision"}
#: The commonest config: Hugging Face's ZeRO-3 template, full of "auto", with host offload.
COMMONEST: dict[str, Any] = STAGE_3 | {
    "zero_optimization": STAGE_3["zero_optimization"] | {"offload_optimizer": CPU, "offload_param": CPU}
}


@pytest.mark.parametrize("name", ("llama3", "qwen2", "gpt2"))
def test_fine_tuned_and_read_back_by_transformers(name: str, tmp_path: pathlib.Path) -> None:
    """Fifty updates in fp16 with accumulation 8 and host offload; then both compute the same from the files."""
    make_model(configs()[name]).save_pretrained(tmp_path / "before")
    module = example("gpt2" if name == "gpt2" else "llama")
    theirs = transformers.TrainingArguments(
        str(tmp_path / "out"),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=8,
        max_steps=50,
        learning_rate=1e-2,
        logging_steps=10,
        save_strategy="no",
        use_cpu=True,
    )
    theirs.fp16 = True  # on a machine without a GPU their constructor would refuse it
    args = zj.TrainingArguments.of(theirs)
    args.deepspeed = COMMONEST
    data = datasets.Dataset.from_list(rows())
    trainer = zj.Trainer(
        module.from_pretrained(tmp_path / "before", dtype="float32"), args, train_dataset=data
    )
    trainer.train()
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    assert losses[-1] < 0.8 * losses[0]
    trainer.save_model(tmp_path / "after")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "after", dtype=torch.float32).eval()
    held = rows()[:5]
    found = trainer.predict([{"input_ids": row["input_ids"]} for row in held]).predictions
    mine = module.from_pretrained(tmp_path / "after", dtype="float32")
    plain = zj.Trainer(mine, zj.TrainingArguments(str(tmp_path / "plain")), eval_dataset=held)
    exact = plain.predict([{"input_ids": row["input_ids"]} for row in held]).predictions
    for row, half, whole in zip(held, found, exact, strict=True):
        size = len(row["input_ids"])
        with torch.no_grad():
            wanted = model(torch.tensor([row["input_ids"]])).logits[0].numpy()
        np.testing.assert_allclose(whole[:size], wanted, rtol=0, atol=1e-4)
        np.testing.assert_allclose(half[:size], wanted, rtol=0, atol=0.05)  # computed in fp16


def test_their_arguments_and_their_defaults() -> None:
    """Every field of theirs is zeroj's, has no effect here, or is refused by name; and defaults agree."""
    args = transformers.TrainingArguments("out", use_cpu=True)
    mine = zj.TrainingArguments.of(args)
    own = mine.to_dict()
    theirs = {name for name in vars(args) if not name.startswith("_")}
    unknown = theirs - set(own) - NO_EFFECT - set(THEIR_DEFAULTS) - DERIVED
    assert not unknown, sorted(unknown)
    fresh = zj.TrainingArguments("out").to_dict()
    assert own == fresh


def test_their_callbacks_are_called(tmp_path: pathlib.Path) -> None:
    seen: list[int] = []

    class Theirs(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            seen.append(state.global_step)
            control.should_training_stop = state.global_step == 2
            return control

    class Inside(transformers.TrainerCallback):
        def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            return control

    from tests.trainer import toy

    args = zj.TrainingArguments(str(tmp_path), max_steps=5, per_device_train_batch_size=1, save_strategy="no")
    stop = transformers.EarlyStoppingCallback
    zj.Trainer(toy.net(), args, train_dataset=toy.text(32), callbacks=[Theirs]).train()
    assert seen == [1, 2] and stop is not None
    with pytest.raises(zj.ConfigError, match="on_substep_end"):
        zj.Trainer(toy.net(), args, train_dataset=toy.text(32), callbacks=[Inside])


def test_logits_of_larger_heads_and_contexts(tmp_path: pathlib.Path) -> None:
    """More heads than the fixtures, longer than a scaled wave, and biases everywhere."""
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=16,
        attention_bias=True,
        mlp_bias=True,
        max_position_embeddings=512,
        rope_scaling={"rope_type": "linear", "factor": 4.0},
    )
    model = make_model(config)
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    ids = np.random.default_rng(0).integers(0, 97, (1, 300))
    with torch.no_grad():
        wanted = model(torch.tensor(ids)).logits.numpy()
    mine: Any = example("llama").from_pretrained(tmp_path)
    definition, params = zj_split(mine)
    from flax import nnx

    found = nnx.merge(definition, params)(ids)
    np.testing.assert_allclose(np.asarray(found), wanted, rtol=0, atol=1e-4)


def zj_split(model: Any) -> Any:
    from flax import nnx

    definition, params = nnx.split(model)
    return definition, jax.tree.map(np.asarray, params)


def test_a_folders_tokenizer(tmp_path: pathlib.Path) -> None:
    words = {"<s>": 0, "</s>": 1, "a": 2, "b": 3, "[UNK]": 4}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.save(str(tmp_path / "tokenizer.json"))
    config = json.loads((FOLDER / "llama3" / "config.json").read_text()) | {
        "bos_token_id": 0,
        "eos_token_id": [1, 2],
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokens = example("tokens")
    found = tokens.tokenizer_of(tmp_path)
    row = tokens.encode([("a b", False), (" a", True)], found, 99)
    assert row == {"input_ids": [0, 2, 3, 2, 1], "labels": [-100, -100, -100, 2, 1]}
    assert (found.pad_token_id, found.vocab_size, found.decode([2, 3])) == (1, 5, "a b")
    (tmp_path / "saved").mkdir()
    found.save_pretrained(str(tmp_path / "saved"))
    assert (tmp_path / "saved" / "tokenizer.json").is_file()
