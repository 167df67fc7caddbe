"""Arguments against the file, and "auto"; behaviours A2 and A5, deepspeed.md 1g."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from zeroj.config import BatchSizes, Config
from zeroj.errors import ConfigError

# the shape of Hugging Face's ZeRO-3 template
TEMPLATE: dict[str, Any] = {
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16},
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "total_num_steps": "auto",
        },
    },
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}
ARGUMENTS: dict[str, Any] = {
    "fp16": False,
    "bf16": True,
    "learning_rate": 3e-4,
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "adam_epsilon": 1e-6,
    "weight_decay": 0.1,
    "warmup_steps": 100,
    "num_training_steps": 1000,
    "hidden_size": 64,
    "gradient_accumulation_steps": 8,
    "max_grad_norm": 0.5,
    "per_device_train_batch_size": 4,
}


def faults(data: dict[str, Any], **arguments: Any) -> str:
    with pytest.raises(ConfigError) as error:
        Config.load(data, **arguments)
    return str(error.value)


def test_the_template_with_all_arguments() -> None:
    config = Config.load(TEMPLATE, **ARGUMENTS)
    assert config.precision == "bf16"
    assert config.gradient_clipping == 0.5
    assert config.batch.resolve(2, "local=2") == BatchSizes(train=64, micro=4, accumulation=8)
    assert config.zero.reduce_bucket_size == 4096
    assert (
        config.zero.stage3_prefetch_bucket_size == 3686
    )  # 0.9 * 4096 = 3686.4, floored as Hugging Face does
    assert config.zero.stage3_param_persistence_threshold == 640
    params = config.resolved()["optimizer"]["params"]
    assert (params["lr"], params["betas"], params["eps"], params["weight_decay"]) == (
        3e-4,
        [0.9, 0.95],
        1e-6,
        0.1,
    )
    schedule = config.resolved()["scheduler"]["params"]
    assert (schedule["warmup_min_lr"], schedule["warmup_max_lr"]) == (0.0, 3e-4)
    assert (schedule["warmup_num_steps"], schedule["total_num_steps"]) == (100, 1000)


def test_the_template_without_arguments_lists_every_key() -> None:
    text = faults(TEMPLATE)
    assert "16 faults" in text
    assert text.count('is "auto", which needs') == 16
    assert "warmup_min_lr" not in text  # it is 0 by rule


def test_a_model_without_a_hidden_size() -> None:
    text = faults(TEMPLATE, **{**ARGUMENTS, "hidden_size": None})
    assert "3 faults" in text and text.count("hidden_size=...") == 3


@pytest.mark.parametrize("value", ["64", 0, -1, 2.5, True])
def test_a_hidden_size_that_is_none(value: Any) -> None:
    text = faults(TEMPLATE, **{**ARGUMENTS, "hidden_size": value})
    assert "hidden_size has to be a whole number of at least 1" in text and type(value).__name__ in text


def test_all_mismatches_at_once_with_values_and_types() -> None:
    data = {
        "gradient_accumulation_steps": 4,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": False},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.999]}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 10}},
    }
    text = faults(
        data,
        gradient_accumulation_steps=2,
        per_device_train_batch_size=2,
        max_grad_norm=0.5,
        bf16=True,
        learning_rate=3e-4,
        adam_beta1=0.9,
        adam_beta2=0.95,
        num_training_steps=20,
    )
    assert "config: 6 faults" in text
    for line in (
        "the file says 4 (int), the argument gradient_accumulation_steps says 2 (int)",
        "gradient_clipping: the file says 1.0 (float), the argument max_grad_norm says 0.5 (float)",
        "bf16.enabled: the file says false (bool), the argument bf16 says true (bool)",
        "optimizer.params.lr: the file says 0.0001 (float), the argument learning_rate says 0.0003 (float)",
        "optimizer.params.betas: the file says [0.9, 0.999] (list), the argument adam_beta1, adam_beta2 says",
        "total_num_steps: the file says 10 (int), the argument num_training_steps says 20 (int)",
    ):
        assert line in text


def test_text_and_number_are_not_the_same() -> None:
    text = faults({"gradient_accumulation_steps": "8"}, gradient_accumulation_steps=8)
    assert '"8" (str)' in text and "8 (int)" in text
    text = faults({"gradient_accumulation_steps": "auto"}, gradient_accumulation_steps="8")
    assert 'gradient_accumulation_steps: must be a whole number, got "8" (str)' in text


def test_equal_values_agree_whatever_their_number_type() -> None:
    data = {"gradient_accumulation_steps": 8, "gradient_clipping": 1, "train_micro_batch_size_per_gpu": 2e0}
    config = Config.load(
        data, gradient_accumulation_steps=np.int64(8), max_grad_norm=1.0, per_device_train_batch_size=2
    )
    assert config.batch.accumulation == 8 and type(config.batch.accumulation) is int


def test_the_file_alone() -> None:
    assert Config.load({"gradient_accumulation_steps": 4}).batch.accumulation == 4


def test_arguments_fill_what_the_file_leaves_out() -> None:
    data = {"optimizer": {"type": "AdamW", "params": {}}}
    config = Config.load(data, learning_rate=3e-4, max_grad_norm=0.0, bf16=True, zero_stage=2, fp16=False)
    assert config.resolved()["optimizer"]["params"]["lr"] == 3e-4
    assert (config.gradient_clipping, config.precision, config.zero.stage) == (None, "bf16", 2)
    assert "[from argument learning_rate]" in config.report()


def test_arguments_do_not_make_an_optimizer() -> None:
    config = Config.load({}, learning_rate=3e-4, warmup_steps=3, num_training_steps=9)
    assert config.make_optimizer() is None and config.make_schedule() is None


def test_the_third_batch_size_is_worked_out() -> None:
    for left_out in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        data: dict[str, Any] = {
            "train_batch_size": 32,
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 4,
        }
        data[left_out] = "auto"
        assert Config.load(data).batch.resolve(4, "local=4") == BatchSizes(32, 2, 4)
    text = faults({"train_batch_size": 32, "train_micro_batch_size_per_gpu": "auto"})
    assert "per_device_train_batch_size" in text


def test_one_precision_by_argument_switches_the_other_off() -> None:
    data = {"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}}
    assert Config.load(data, bf16=True).precision == "bf16"
    assert Config.load(data, fp16=True).precision == "fp16"
    assert Config.load(data, fp16=False, bf16=False).precision == "fp32"
    assert "fp16 and bf16 are both enabled" in faults(data, fp16=True, bf16=True)


def test_the_alias_of_a_key_is_resolved_too() -> None:
    data = {"zero_optimization": {"stage": 3, "param_persistence_threshold": "auto"}}
    assert Config.load(data, hidden_size=64).zero.stage3_param_persistence_threshold == 640
    assert "zero_optimization.param_persistence_threshold: is" in faults(data)


def test_the_section_amp_of_old_templates() -> None:
    config = Config.load({"amp": {"enabled": "auto", "opt_level": "auto"}})
    assert config.resolved()["amp"]["enabled"] is False and "amp" in config.report()


def test_unknown_arguments() -> None:
    assert 'unknown argument "learning_rat" of Config.load. Did you mean "learning_rate"?' in faults(
        {}, learning_rat=1.0
    )
    assert "Known: train_batch_size" in faults({}, qqqqqq=1.0)
