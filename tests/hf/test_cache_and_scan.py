"""Decoding with a cache, and layers as one stack: the logits of the plain model, in and out of the same files."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import zeroj as zj
from tests.hf.rows import rows
from tests.hf.test_fixtures import FOLDER, example, load

pytestmark = pytest.mark.usefixtures("compile_fast")
PROMPTS = [[5, 6, 7, 8], [9], [3, 5], [1, 2, 3, 4, 5, 6]]


def loaded(name: str, **changes: Any) -> Any:
    """The definition and params of a fixture's model, on the device."""
    definition, params = nnx.split(load(name, **changes))
    return definition, jax.tree.map(jnp.asarray, params)


@pytest.mark.parametrize(
    "name, scan", (("llama3", False), ("llama2", True), ("qwen2", False), ("gpt2", False))
)
def test_logits_with_a_cache_are_those_of_the_whole_text(name: str, scan: bool) -> None:
    """Prompts of different lengths, then token by token."""
    definition, params = loaded(name, **({"scan": True} if scan else {}))
    ids = np.random.default_rng(0).integers(0, 64, (3, 12))
    sizes, start = np.array([4, 2, 5]), 5
    whole = jax.jit(lambda p, ids: nnx.merge(definition, p)(ids))(params, ids)
    prompt = jax.jit(lambda p, ids: nnx.merge(definition, p)(ids, cache=12))
    one = jax.jit(lambda p, ids, at, cache: nnx.merge(definition, p)(ids, position_ids=at, cache=cache))
    found = prompt(params, ids[:, :start])
    row = np.arange(3)
    np.testing.assert_allclose(found["logits"][row, sizes - 1], whole[row, sizes - 1], rtol=0, atol=1e-5)
    for _ in range(7):
        found = one(params, ids[row, sizes][:, None], sizes[:, None], found["cache"])
        np.testing.assert_allclose(found["logits"][:, 0], whole[row, sizes], rtol=0, atol=1e-5)
        sizes = sizes + 1


def trainer(model: Any, folder: pathlib.Path, **given: Any) -> zj.Trainer:
    base: dict[str, Any] = {
        "deepspeed": {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}},
        "per_device_train_batch_size": 1,
        "max_steps": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    return zj.Trainer(model, zj.TrainingArguments(str(folder), **base | given), train_dataset=rows())


@pytest.mark.parametrize("scan", (False, pytest.param(True, marks=pytest.mark.full)))
def test_text_under_stage_3_reads_each_token_once(scan: bool, tmp_path: pathlib.Path) -> None:
    run = trainer(load("llama3", scan=scan), tmp_path)
    found = run.generate(PROMPTS, max_new_tokens=4)
    definition, params = loaded("llama3")
    ids = np.array([text + [0] * (10 - len(text)) for text in found])
    likeliest = jax.jit(lambda p, ids: nnx.merge(definition, p)(ids))(params, ids).argmax(-1)
    for row, (prompt, text) in enumerate(zip(PROMPTS, found, strict=True)):
        assert text == prompt + likeliest[row, len(prompt) - 1 : len(prompt) + 3].tolist()
    ((settings, program),) = run.decoders.items()
    assert settings[-1] is True
    batch = {
        "tokens": np.zeros((8, 10), np.int32),
        "sizes": np.ones(8, np.int32),
        "seed": np.zeros(8, np.int32),
    }
    text = program.lower(run.engine.state, batch).as_text()
    assert "tensor<8x1x64xf32>" in text  # logits of one token a row
    assert "tensor<8x10x64xf32>" not in text  # never those of the whole text


def test_a_stack_is_read_from_and_written_to_the_same_files(tmp_path: pathlib.Path) -> None:
    """Losses are those of a plain loop in torch; each tensor that is saved is its layer of the stack."""
    run = trainer(load("llama3", scan=True), tmp_path, max_steps=20)
    run.train()
    losses = [log["loss"] for log in run.state.log_history if "loss" in log]
    np.testing.assert_allclose(
        losses, np.load(FOLDER / "llama3" / "expected.npz")["losses1"], rtol=0, atol=1e-4
    )
    (file,) = run.save_model()
    saved = zj.load_safetensors(file, shapes("llama3"), names=lambda path: path)
    stacks = zj.full_params(run.engine.state, run.engine.plan)["model"]["layers"]
    for i in range(2):
        for part, name in (("mlp", "up_proj"), ("self_attn", "q_proj")):
            stack = stacks[part][name]["weight"][...]
            np.testing.assert_array_equal(saved[f"model.layers.{i}.{part}.{name}.weight"], stack[i])
    again = example("llama").from_pretrained(tmp_path, scan=True)
    stack = nnx.state(again, nnx.Param)["model"]["layers"]["mlp"]["up_proj"]["weight"].get_value()
    assert not isinstance(stack, np.ndarray) and stack.shape == (2, *stack[0].shape)
    np.testing.assert_array_equal(stack[1:2, :3], np.asarray(stack)[1:2, :3])
    listed = jax.tree.leaves(nnx.state(example("llama").from_pretrained(tmp_path), nnx.Param))
    assert len(listed) == len(saved) and all(np.isfinite(value).all() for value in listed)


def shapes(name: str) -> dict[str, jax.ShapeDtypeStruct]:
    """The tensors of a fixture's files by name."""
    from zeroj.checkpoint.tensor_file import read_header, tensor_files

    found = {key: value for file in tensor_files(FOLDER / name) for key, value in read_header(file).items()}
    return {key: jax.ShapeDtypeStruct(value.shape, value.dtype) for key, value in found.items()}


def test_names_that_do_not_fit_a_stack_are_named(tmp_path: pathlib.Path) -> None:
    with pytest.raises(zj.CheckpointError, match=r"w: 3 names for a stack of shape \(2, 4\)"):
        zj.load_safetensors(
            FOLDER / "llama2",
            {"w": jax.ShapeDtypeStruct((2, 4), np.float32)},
            names=lambda _: ["a", "b", "c"],
        )
