"""Every key of the schema x {default, each legal value, "auto", wrong type, out of range}."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic_core import PydanticUndefined

from tests.config import keys
from zeroj.config import Config
from zeroj.config.auto import ARGUMENTS, AUTO_RULES
from zeroj.config.domain import kind_of, literals
from zeroj.errors import ConfigError

ALL = keys.all_keys()
LEAVES = [key for key in ALL if not key.is_section]
VALUES: dict[str, Any] = {
    "train_batch_size": 32,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "max_grad_norm": 0.5,
    "fp16": True,
    "bf16": True,
    "learning_rate": 3e-4,
    "adam_beta1": 0.8,
    "adam_beta2": 0.95,
    "adam_epsilon": 1e-6,
    "weight_decay": 0.1,
    "warmup_steps": 10,
    "num_training_steps": 100,
    "hidden_size": 64,
    "zero_stage": 2,
    "offload_optimizer_device": "cpu",
    "offload_optimizer_nvme_path": "/nvme",
    "offload_param_device": "cpu",
    "offload_param_nvme_path": "/nvme",
    "zero3_save_16bit_model": True,
}


def each(items: list[keys.Key]) -> Any:
    return pytest.mark.parametrize("key", items, ids=str)


def resolved(config: Config, key: keys.Key) -> Any:
    value: Any = config.resolved()
    for name in key.path:
        value = value[name]
    return value


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, str) and isinstance(b, list):
        return [a] == b
    return isinstance(a, bool) == isinstance(b, bool) and bool(a == b)


def takes_any_text(key: keys.Key) -> bool:
    if key.is_section or literals(key.model, key.name) or key.name in ("type", "passes", "betas"):
        return False
    return kind_of(key.model, key.name) in (str, tuple)


def test_the_table_has_every_key() -> None:
    assert len(ALL) > 250
    assert len({str(key) for key in ALL}) == len(ALL)
    assert set(VALUES) == set(ARGUMENTS)


@each(ALL)
def test_left_out_and_default(key: keys.Key) -> None:
    default = key.model.model_fields[key.name].default
    if default is PydanticUndefined:
        with pytest.raises(ConfigError, match=f"{key.dotted}: is required"):
            data = key.file(1)
            section = data
            for name in key.path[:-1]:
                section = section[name]
            del section[key.name]
            Config.load(data)
        return
    Config.load(key.base)
    if default is None or not key.is_section:
        written = list(default) if isinstance(default, tuple) else default
        assert equal(resolved(Config.load(key.file(written)), key), written)


@each(LEAVES)
def test_each_legal_value(key: keys.Key) -> None:
    field = key.model.model_fields[key.name]
    for value in keys.legal_values(key):
        harmless = key.row.status != "refused" or value == field.default or isinstance(value, dict)
        if harmless:
            config = Config.load(key.file(value))
            if not isinstance(value, dict):
                assert equal(value, resolved(config, key)), value
            assert key.dotted in config.report()
        else:
            with pytest.raises(ConfigError) as error:
                Config.load(key.file(value))
            assert f"{key.dotted}: {json.dumps(value)}" in str(error.value)
            assert key.row.text in str(error.value) and key.row.instead in str(error.value)


@each(ALL)
def test_wrong_type_and_out_of_range(key: keys.Key) -> None:
    for value in keys.illegal_values(key):
        with pytest.raises(ConfigError) as error:
            Config.load(key.file(value))
        assert f"{key.dotted}:" in str(error.value), value
        assert type(value).__name__ in str(error.value) or "refused" in key.row.status


@each(ALL)
def test_auto(key: keys.Key) -> None:
    file = key.file("auto")
    if key.row.auto is not None:
        arguments = AUTO_RULES[key.row.auto].arguments
        if arguments:
            with pytest.raises(ConfigError) as error:
                Config.load(file)
            assert f"{key.dotted}:" in str(error.value) and arguments[0] in str(error.value)
        config = Config.load(file, **{name: VALUES[name] for name in arguments})
        value = resolved(config, key)
        assert value != "auto" and value is not None
        assert key.dotted in config.report() and "[from " in config.report()
    elif takes_any_text(key):
        assert resolved(Config.load(file), key) in ("auto", ["auto"])
    else:
        with pytest.raises(ConfigError) as error:
            Config.load(file)
        assert f"{key.dotted}:" in str(error.value)


def test_auto_lists_everything_that_it_needs() -> None:
    file = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"},
        "steps_per_print": "auto",
    }
    with pytest.raises(ConfigError) as error:
        Config.load(file)
    for text in (
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "learning_rate",
        "adam_beta1",
        "adam_beta2",
        "hidden_size",
        "steps_per_print",
    ):
        assert text in str(error.value)
