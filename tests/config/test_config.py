"""What a config means: its attributes, and the features that it needs."""

from __future__ import annotations

from typing import Any

import pytest

from zeroj.config import Config, LossScale, Zero
from zeroj.config.needs import ZERO_NEEDS

CPU, NVME = {"device": "cpu"}, {"device": "nvme", "nvme_path": "/nvme"}
ON = {"enabled": True}


def test_an_empty_file() -> None:
    config = Config.load({})
    assert config.zero == Zero(stage=0)
    assert (config.precision, config.master_dtype, config.optimizer_state_dtype) == ("fp32", "fp32", "fp32")
    assert config.gradient_clipping == 1.0
    assert config.gradient_allreduce_op == "mean"
    assert config.loss_scale == LossScale(dynamic=False, static=1.0) and config.loss_scale.initial == 1.0
    assert not config.check_grad_overflow and not config.auto_cast
    assert (config.communication_dtype, config.grad_accum_dtype, config.steps_per_print) == (None, None, None)
    assert config.optimizer_text == "none in the config: pass tx"
    assert config.needs() == ()


@pytest.mark.parametrize(("value", "clip"), [(0, None), (0.0, None), (1.0, 1.0), (0.5, 0.5), (3, 3.0)])
def test_clipping(value: float, clip: float | None) -> None:
    config = Config.load({"gradient_clipping": value})
    assert config.gradient_clipping == clip
    assert not any("gradient_clipping" in note for note in config.notes)


@pytest.mark.parametrize(
    ("data", "precision", "master", "checked"),
    [
        ({"bf16": ON}, "bf16", "fp32", True),
        ({"bf16": {**ON, "check_grad_overflow": False}}, "bf16", "fp32", False),
        ({"fp16": ON}, "fp16", "fp32", True),
        (
            {"bf16": {**ON, "bf16_master_weights_and_grads": True}, "zero_optimization": {"stage": 1}},
            "bf16",
            "bf16",
            True,
        ),
        (
            {"fp16": {**ON, "fp16_master_weights_and_grads": True}, "zero_optimization": {"stage": 2}},
            "fp16",
            "fp16",
            True,
        ),
        ({"fp16": {"enabled": False}, "bf16": {"enabled": False}}, "fp32", "fp32", False),
    ],
)
def test_precision(data: dict[str, Any], precision: str, master: str, checked: bool) -> None:
    config = Config.load(data)
    assert (config.precision, config.master_dtype, config.check_grad_overflow) == (precision, master, checked)


def test_loss_scale() -> None:
    assert Config.load({"fp16": ON}).loss_scale == LossScale(
        dynamic=True,
        initial_power=16,
        window=1000,
        hysteresis=2,
        consecutive_hysteresis=False,
        min_scale=1.0,
    )
    section = {
        **ON,
        "initial_scale_power": 4,
        "loss_scale_window": 7,
        "hysteresis": 3,
        "consecutive_hysteresis": True,
        "min_loss_scale": 2,
    }
    scale = Config.load({"fp16": section}).loss_scale
    assert scale == LossScale(True, 1.0, 4, 7, 3, True, 2.0) and scale.initial == 16.0
    static = Config.load({"fp16": {**ON, "loss_scale": 128}}).loss_scale
    assert (static.dynamic, static.initial) == (False, 128.0)
    assert Config.load({"bf16": ON}).loss_scale.initial == 1.0  # I4: bf16 is never scaled


def test_dtypes_and_printing() -> None:
    config = Config.load(
        {
            "communication_data_type": "fp32",
            "data_types": {"grad_accum_dtype": "bf16"},
            "steps_per_print": 7,
            "fp16": {**ON, "auto_cast": True},
            "gradient_allreduce_op": "sum",
        }
    )
    assert (config.communication_dtype, config.grad_accum_dtype, config.steps_per_print) == (
        "fp32",
        "bf16",
        7,
    )
    assert config.auto_cast and config.gradient_allreduce_op == "sum"


NEEDS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"zero_optimization": {"stage": 2, "offload_optimizer": CPU}}, ("offload_optimizer:cpu",)),
    ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "none"}}}, ()),
    (
        {"zero_optimization": {"stage": 3, "offload_optimizer": {**CPU, "ratio": 0.5}}},
        ("offload_optimizer:cpu", "offload_optimizer:ratio"),
    ),
    ({"zero_optimization": {"stage": 3, "offload_optimizer": NVME}}, ("offload_optimizer:nvme", "nvme")),
    ({"zero_optimization": {"stage": 3, "offload_param": NVME}}, ("offload_param:nvme", "nvme")),
    ({"zero_optimization": {"stage": 3, "offload_param": CPU}}, ("offload_param:cpu",)),
    ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 4}}, ("zero++:hpZ",)),
    ({"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}, ("zero++:qwZ",)),
    (
        {"zero_optimization": {"stage": 3, "zero_quantized_nontrainable_weights": True}},
        ("zero++:nontrainable",),
    ),
    (
        {"zero_optimization": {"stage": 3, "zero_quantized_gradients": True, "zeropp_loco_param": {}}},
        ("zero++:qgZ", "zero++:loco"),
    ),
    (
        {"zero_optimization": {"stage": 3, "mics_shard_size": 4, "mics_hierarchical_params_gather": True}},
        ("mics", "mics:hierarchical"),
    ),
]


@pytest.mark.parametrize(("data", "needs"), NEEDS, ids=[str(needs) for _, needs in NEEDS])
def test_needs(data: dict[str, Any], needs: tuple[str, ...]) -> None:
    assert Config.load(data).needs() == needs


def test_every_need_is_asked_for_by_one_of_these() -> None:
    assert {name for _, needs in NEEDS for name in needs} == {*ZERO_NEEDS}


def test_a_config_is_frozen() -> None:
    config = Config.load({})
    with pytest.raises(AttributeError):
        config.loaded = None  # type: ignore[misc]
    with pytest.raises(ValueError):
        config.zero.stage = 3
