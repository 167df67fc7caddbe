"""Combinations that cannot be honoured; behaviours A10, deepspeed.md 2.10."""

from __future__ import annotations

from typing import Any

import pytest

from zeroj.config import Config, Zero
from zeroj.config.root_rules import ROOT_RULES
from zeroj.config.rules import ZERO_RULES
from zeroj.errors import ConfigError

CPU, NVME = {"device": "cpu"}, {"device": "nvme", "nvme_path": "/nvme"}
SGD = {"type": "SGD", "params": {}}
BROKEN_ZERO: list[tuple[dict[str, Any], str]] = [
    *(
        ({"stage": s, "offload_param": CPU}, f"offload_param.device: below stage 3 .* not {s}")
        for s in (0, 1, 2)
    ),
    *(({"stage": s, "offload_param": NVME}, "offload_param.device: .* stage 3") for s in (0, 1, 2)),
    *(({"stage": 0, "offload_optimizer": x}, "offload_optimizer.device: at stage 0") for x in (CPU, NVME)),
    ({"stage": 3, "offload_optimizer": {"device": "nvme"}}, "offload_optimizer.nvme_path: is required"),
    ({"stage": 3, "offload_param": {"device": "nvme"}}, "offload_param.nvme_path: is required"),
    ({"stage": 2, "zero_hpz_partition_size": 4}, "zero_hpz_partition_size: .* stage 3, not 2"),
    ({"stage": 2, "zero_quantized_weights": True}, "zero_quantized_weights: .* stage 3, not 2"),
    (
        {"stage": 3, "zero_quantized_nontrainable_weights": True, "offload_param": {"device": "cpu"}},
        "zero_quantized_nontrainable_weights: .*live in host memory; choose one",
    ),
    (
        {"stage": 1, "zero_quantized_nontrainable_weights": True},
        "zero_quantized_nontrainable_weights: .* stage 3",
    ),
    ({"stage": 1, "zero_quantized_gradients": True}, "zero_quantized_gradients: .* stage 3, not 1"),
    ({"stage": 3, "zeropp_loco_param": {}}, "zeropp_loco_param: .*needs zero_quantized_gradients"),
    ({"stage": 2, "mics_shard_size": 4}, "mics_shard_size: .* stage 3, not 2"),
    ({"stage": 3, "mics_shard_size": 0}, "mics_shard_size: 0 is neither off"),
    ({"stage": 3, "mics_shard_size": 4, "zero_hpz_partition_size": 4}, "mics_shard_size: MiCS and hpZ"),
    (
        {"stage": 3, "mics_hierarchical_params_gather": True},
        "mics_hierarchical_params_gather: .* mics_shard_size",
    ),
    ({"stage": 2, "reshard_after_forward": False}, "reshard_after_forward: .* stage 3, not 2"),
]
BROKEN: list[tuple[dict[str, Any], str]] = [
    *(({"zero_optimization": zero}, rf"zero_optimization\.{text}") for zero, text in BROKEN_ZERO),
    ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "fp16.enabled: fp16 and bf16 are both enabled"),
    ({"fp16": {"loss_scale_window": 0}}, "fp16.loss_scale_window: must be at least 1"),
    ({"fp16": {"min_loss_scale": 0}}, "fp16.min_loss_scale: must be above 0"),
    ({"fp16": {"min_loss_scale": 4, "initial_scale_power": 1}}, "fp16.min_loss_scale: is above the scale"),
    ({"fp16": {"fp16_master_weights_and_grads": True}}, "fp16_master_weights_and_grads: needs fp16.enabled"),
    (
        {"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}},
        "fp16_master_weights_and_grads: .* stage from 1 to 3",
    ),
    ({"bf16": {"bf16_master_weights_and_grads": True}}, "bf16_master_weights_and_grads: needs bf16.enabled"),
    ({"bf16": {"bf16_optimizer_states": True}}, "bf16_optimizer_states: needs bf16.enabled"),
    ({"data_types": {"param_dtype": "bf16"}}, "data_types.param_dtype: has to repeat the precision"),
    ({"data_types": {"param_dtype": "fp32"}, "bf16": {"enabled": True}}, "data_types.param_dtype: "),
    (
        {"optimizer": {"type": "AdamW", "params": {"adam_w_mode": False}}},
        "adam_w_mode: AdamW is the decoupled",
    ),
    ({"scheduler": {"type": "WarmupLR"}}, "scheduler.params.warmup_max_lr: is required"),
    (
        {"scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 9}}},
        "scheduler.type: WarmupCosineLR",
    ),
    (
        {"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0, "cycle_max_lr": 1}}},
        "cycle_momentum: only a configured",
    ),
    (
        {
            "optimizer": SGD,
            "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 2, "cycle_max_lr": 1}},
        },
        "cycle_max_lr: is below",
    ),
    ({"compile": {"passes": ["z3", "autotp"]}}, 'compile.passes: only "z1" and "z3"'),
    ({"optimizer": {"type": "OneBitAdam"}}, '"OneBitAdam" .str. is recognised but not supported'),
    ({"optimizer": {"type": "zerooneadam"}}, "optimizer.type: .* Instead: "),
    ({"optimizer": {"type": "MuAdam"}}, "optimizer.type: .*optax.multi_transform"),
    ({"optimizer": {"type": "AdmW"}}, 'Did you mean "AdamW"'),
    ({"optimizer": {"type": "RMSprop"}}, "optimizer.type: .*pass an optax transformation"),
    ({"scheduler": {"type": "CosineAnnealingLR"}}, "scheduler.type: .*schedule in Python"),
    ({"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1.0}}}, "max_grad_norm: .*gradient_clipping"),
    ({"optimizer": {"params": {}}}, "optimizer.type: is required here and missing"),
    (
        {"optimizer": {"type": "Adam", "params": {"betas": [0.9, 1.0]}}},
        r"betas: .*less than 1, got \[0.9, 1.0\]",
    ),
]


@pytest.mark.parametrize(("data", "text"), BROKEN, ids=[text[:50] for _, text in BROKEN])
def test_each_is_refused_with_its_key_and_reason(data: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text) as error:
        Config.load(data)
    assert "1 fault\n" in str(error.value)


@pytest.mark.parametrize(("zero", "text"), BROKEN_ZERO, ids=[text[:50] for _, text in BROKEN_ZERO])
def test_each_is_refused_from_python_too(zero: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Zero(**zero)


def test_every_rule_is_broken_by_one_of_these() -> None:
    rules = [rule.text.split("{")[0][:30] for rule in (*ZERO_RULES, *ROOT_RULES)]
    messages = []
    for data, _ in BROKEN:
        with pytest.raises(ConfigError) as error:
            Config.load(data)
        messages.append(str(error.value))
    assert [rule for rule in rules if not any(rule in message for message in messages)] == []


def test_all_kinds_of_fault_in_one_message() -> None:
    data = {
        "gradient_clipp1ng": 1.0,
        "train_batch_size": "8",
        "sparse_gradients": True,
        "steps_per_print": "auto",
        "fp16": {"enabled": True, "hysteresis": 0},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 1, "offload_param": {"device": "cpu"}, "aio": {}},
        "optimizer": {"type": "Adam", "params": {"lr": "auto", "momentum": 0.9}},
    }
    with pytest.raises(ConfigError) as error:
        Config.load(data)
    text = str(error.value)
    assert "config: 10 faults" in text
    for key in (
        "gradient_clipp1ng",
        "train_batch_size",
        "sparse_gradients",
        "steps_per_print",
        "fp16.hysteresis",
        "fp16.enabled",
        "zero_optimization.offload_param.device",
        "zero_optimization.aio",
        "optimizer.params.lr",
        "optimizer.params.momentum",
    ):
        assert f"\n  - {key}: " in text


def test_a_key_at_fault_does_not_cause_further_faults() -> None:
    with pytest.raises(ConfigError) as error:
        Config.load({"zero_optimization": {"stage": 7, "offload_param": {"device": "cpu"}}})
    assert "1 fault\n" in str(error.value)


@pytest.mark.parametrize(
    ("hpz", "world", "local", "text"),
    [
        (8, 8, 8, "one node"),
        (8, 8, 4, "divide the 4"),
        (3, 8, 4, "divide the 4"),
        (4, 8, 4, None),
        (2, 8, 4, None),
    ],
)
def test_groups_against_devices(hpz: int, world: int, local: int, text: str | None) -> None:
    zero = Zero(stage=3, zero_hpz_partition_size=hpz)
    if text is None:
        zero.check_devices(world, local)
        return
    with pytest.raises(ConfigError, match=f"zero_hpz_partition_size: {hpz} on {world} devices: .*{text}"):
        zero.check_devices(world, local)


def test_mics_groups_are_equal() -> None:
    Zero(stage=3, mics_shard_size=4).check_devices(8, 4)
    with pytest.raises(ConfigError, match="mics_shard_size: 3 does not divide the 8 devices"):
        Zero(stage=3, mics_shard_size=3).check_devices(8, 4)


def test_a_hierarchical_gather_of_mics_takes_whole_nodes() -> None:
    zero = Zero(stage=3, mics_shard_size=4, mics_hierarchical_params_gather=True)
    for world, local in ((8, 4), (8, 2), (16, 8)):
        zero.check_devices(world, local)
    with pytest.raises(ConfigError, match="mics_hierarchical_params_gather: a group of 4 devices is not"):
        zero.check_devices(12, 3)
