"""Configs of the shapes that people have, in tests/config/files: each loads, reports, makes its optimizer."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from zeroj.config import BatchSizes, Config
from zeroj.config.reader import read

FILES = pathlib.Path(__file__).parent / "files"
TRAINER: dict[str, Any] = {
    "fp16": False,
    "bf16": True,
    "learning_rate": 5e-5,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "weight_decay": 0.01,
    "warmup_steps": 5,
    "num_training_steps": 50,
    "hidden_size": 128,
    "gradient_accumulation_steps": 2,
    "max_grad_norm": 1.0,
    "per_device_train_batch_size": 4,
}
PLUGIN: dict[str, Any] = {
    "zero_stage": 2,
    "offload_optimizer_device": "cpu",
    "offload_optimizer_nvme_path": "/x",
    "offload_param_device": "none",
    "zero3_save_16bit_model": False,
}
# name -> arguments, stage, precision, batch on 4 devices, needs
EXPECTED: dict[str, tuple[dict[str, Any], int, str, BatchSizes, tuple[str, ...]]] = {
    "stage1_bf16": ({}, 1, "bf16", BatchSizes(64, 4, 4), ()),
    "stage2_fp16": ({}, 2, "fp16", BatchSizes(64, 8, 2), ()),
    "stage2_offload": ({}, 2, "bf16", BatchSizes(16, 4, 1), ("offload_optimizer:cpu",)),
    "stage3_offload": ({}, 3, "bf16", BatchSizes(32, 1, 8), ("offload_optimizer:cpu", "offload_param:cpu")),
    "stage3_nvme": (
        {},
        3,
        "bf16",
        BatchSizes(8, 2, 1),
        ("offload_optimizer:nvme", "offload_param:nvme", "nvme"),
    ),
    "stage3_zeropp": (
        {},
        3,
        "bf16",
        BatchSizes(8, 2, 1),
        ("zero++:hpZ", "zero++:qwZ", "zero++:qgZ", "zero++:loco"),
    ),
    "hf_zero2_auto": (TRAINER, 2, "bf16", BatchSizes(32, 4, 2), ()),
    "hf_zero3_auto": (TRAINER, 3, "bf16", BatchSizes(32, 4, 2), ()),
    "old_style": ({}, 2, "bf16", BatchSizes(16, 4, 1), ()),
    "monitored": ({}, 0, "bf16", BatchSizes(32, 8, 1), ()),
    "mics_muon": ({}, 3, "bf16", BatchSizes(16, 4, 1), ("mics",)),
    "accelerate_auto": (PLUGIN, 2, "bf16", BatchSizes(8, 2, 1), ("offload_optimizer:cpu",)),
}


def test_every_file_is_expected() -> None:
    assert {file.stem for file in FILES.glob("*.json")} == set(EXPECTED)


@pytest.mark.filterwarnings("ignore:.*old spelling")
@pytest.mark.parametrize("name", EXPECTED)
def test_a_file(name: str) -> None:
    arguments, stage, precision, sizes, needs = EXPECTED[name]
    config = Config.load(FILES / f"{name}.json", **arguments)
    assert (config.zero.stage, config.precision, config.needs()) == (stage, precision, needs)
    assert config.batch.resolve(4, "local=4") == sizes
    report = config.report()
    data, _, _ = read(FILES / f"{name}.json")
    for key, value in data.items():
        assert key in report or value == {} or any("old spelling" in note for note in config.notes), key
    tx = config.make_optimizer()
    if tx is None:
        assert name == "monitored"
        return
    params = {"w": jnp.ones((4, 3)), "bias": jnp.ones(3)}
    state = tx.init(params)
    for _ in range(3):
        updates, state = jax.jit(tx.update)(params, state, params)
        params = optax.apply_updates(params, updates)
    assert all(bool(jnp.all(jnp.isfinite(leaf)) & jnp.all(leaf < 1)) for leaf in jax.tree.leaves(params))
