"""TrainingArguments: names, defaults, refusals, "auto", and a ds_config that says something else."""

from __future__ import annotations

import enum
import json
import pathlib
from typing import Any

import numpy as np
import pytest

import zeroj as zj
from tests.trainer import toy
from zeroj.trainer.schedules import make_schedule

#: Hugging Face's documented ZeRO-2 and ZeRO-3 configs, host offload left out.
STAGE_2: dict[str, Any] = {
    "fp16": {
        "enabled": "auto",
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
    "zero_optimization": {
        "stage": 2,
        "allgather_partitions": True,
        "allgather_bucket_size": 2e8,
        "overlap_comm": True,
        "reduce_scatter": True,
        "reduce_bucket_size": 2e8,
        "contiguous_gradients": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
STAGE_3 = STAGE_2 | {
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    }
}


def test_an_unknown_and_an_unsupported_name_are_refused_together() -> None:
    with pytest.raises(zj.ConfigError) as error:
        zj.TrainingArguments(
            "out", learning_rat=1e-4, push_to_hub=True, fsdp="full_shard", dataloader_num_workers=4
        )
    text = str(error.value)
    assert "learning_rate" in text and "push_to_hub" in text and "fsdp" in text
    assert "dataloader_num_workers" not in text
    zj.TrainingArguments("out", push_to_hub=False, fsdp="", optim="adamw_torch")


def test_all_wrong_values_are_told_at_once() -> None:
    with pytest.raises(zj.ConfigError) as error:
        zj.TrainingArguments(
            "out",
            fp16=True,
            bf16=True,
            gradient_accumulation_steps=0,
            lr_scheduler_type="stairs",
            load_best_model_at_end=True,
            report_to="smoke",
            logging_steps=2.5,
        )
    for name in (
        "fp16",
        "gradient_accumulation_steps",
        "stairs",
        "load_best_model_at_end",
        "smoke",
        "logging_steps",
    ):
        assert name in str(error.value)


class Strategy(enum.Enum):
    EPOCH = "epoch"


class Theirs:
    """An object with some of the attributes of transformers.TrainingArguments."""

    def __init__(self, **given: Any) -> None:
        defaults = {
            "output_dir": "out",
            "eval_strategy": Strategy.EPOCH,
            "push_to_hub": False,
            "optim": "adamw_torch",
        }
        vars(self).update(
            defaults | {"gradient_checkpointing": None, "per_device_train_batch_size": 3} | given
        )


def test_another_librarys_arguments_are_read_by_attribute() -> None:
    args = zj.TrainingArguments.of(Theirs(learning_rate=0.1))
    assert (args.eval_strategy, args.per_device_train_batch_size, args.learning_rate) == ("epoch", 3, 0.1)
    assert args.gradient_checkpointing is False
    with pytest.raises(zj.ConfigError, match="push_to_hub"):
        zj.TrainingArguments.of(Theirs(push_to_hub=True))
    with pytest.raises(zj.ConfigError, match="optim"):
        zj.TrainingArguments.of(Theirs(optim="adafactor"))


@pytest.mark.parametrize("template", (STAGE_2, STAGE_3), ids=("stage 2", "stage 3"))
@pytest.mark.parametrize("fp16", (False, True))
def test_the_documented_templates_resolve(
    template: dict[str, Any], fp16: bool, tmp_path: pathlib.Path
) -> None:
    """As they stand, from a file, with the default arguments, whose warm-up is 0."""
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(template))
    args = zj.TrainingArguments("out", deepspeed=str(file), fp16=fp16, gradient_accumulation_steps=4)
    config = args.load_config(total=100, hidden_size=64, world=8)
    found = config.resolved()
    assert config.precision == ("fp16" if fp16 else "fp32")
    assert config.batch.resolve(8, "local=8").train == 8 * 8 * 4
    assert found["optimizer"]["params"]["lr"] == 5e-5 and config.gradient_clipping == 1.0
    zero = found["zero_optimization"]
    assert zero["stage"] == template["zero_optimization"]["stage"]
    if zero["stage"] == 3:
        assert zero["reduce_bucket_size"] == 64 * 64
        assert zero["stage3_prefetch_bucket_size"] == int(0.9 * 64 * 64)
        assert zero["stage3_param_persistence_threshold"] == 640


def test_a_width_that_auto_needs_is_asked_for() -> None:
    args = zj.TrainingArguments("out", deepspeed=STAGE_3)
    with pytest.raises(zj.ConfigError, match="hidden_size"):
        args.load_config(total=100, hidden_size=None, world=8)


def test_every_disagreement_of_file_and_arguments_is_told(tmp_path: pathlib.Path) -> None:
    file = {
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": "auto"}},
        "bf16": {"enabled": True},
    }
    args = zj.TrainingArguments(str(tmp_path), deepspeed=file, gradient_accumulation_steps=2)
    rows = toy.plain_rows(64)
    with pytest.raises(zj.ConfigError) as error:
        zj.Trainer(toy.plain_loss, args, params=toy.plain_params(), train_dataset=rows).train()
    for part in (
        "gradient_accumulation_steps",
        "4",
        "2",
        "gradient_clipping",
        "0.5",
        "lr",
        "0.001",
        "5e-05",
        "bf16",
    ):
        assert part in str(error.value), part


#: Rates of the first updates of 10, warm-up 2, peak 1, as transformers/optimization.py computes them.
RATES = {
    "linear": [0.0, 0.5, 1.0, 0.875, 0.75],
    "constant": [1.0, 1.0, 1.0, 1.0, 1.0],
    "constant_with_warmup": [0.0, 0.5, 1.0, 1.0, 1.0],
    "cosine": [0.0, 0.5, 1.0, 0.9619397662556434, 0.8535533905932737],
    "cosine_with_restarts": [0.0, 0.5, 1.0, 0.9619397662556434, 0.8535533905932737],
    "polynomial": [0.0, 0.5, 1.0, 0.8750000125, 0.750000025],
    "inverse_sqrt": [0.0, 0.5, 1.0, 0.816496580927726, 0.7071067811865476],
}


@pytest.mark.parametrize("kind", RATES)
def test_schedules(kind: str) -> None:
    schedule = make_schedule(kind, 1.0, 2, 10)
    np.testing.assert_allclose([float(schedule(t)) for t in range(5)], RATES[kind], rtol=1e-6)


def test_a_schedules_settings_are_checked() -> None:
    floor = make_schedule("cosine_with_min_lr", 1.0, 0, 10, {"min_lr": 0.1})
    assert float(floor(10)) == pytest.approx(0.1)
    with pytest.raises(zj.ConfigError, match="num_cycles"):
        make_schedule("cosine", 1.0, 0, 10, {"cycles": 2})
    assert zj.TrainingArguments("out", warmup_ratio=0.25).warmup(10) == 3
    assert zj.TrainingArguments("out", warmup_steps=0.1).warmup(100) == 10
    assert zj.TrainingArguments("out", warmup_steps=7, warmup_ratio=0.5).warmup(10) == 7
