"""Unknown keys: the nearest name, and where a misplaced key belongs; behaviours A1."""

from __future__ import annotations

import random
import string
from typing import Any

import pytest

from tests.config import keys
from zeroj.config import Config
from zeroj.config.names import legal_paths
from zeroj.config.old import put
from zeroj.config.schema import DsConfig
from zeroj.errors import ConfigError


def message(data: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as error:
        Config.load(data)
    return str(error.value)


def test_a_wrong_letter() -> None:
    assert 'gradient_clipp1ng: unknown key. Did you mean "gradient_clipping"?' in message(
        {"gradient_clipp1ng": 1.0}
    )


def test_a_wrong_letter_inside() -> None:
    text = message({"zero_optimization": {"stage": 2, "ofload_optimizer": {"device": "cpu"}}})
    assert 'zero_optimization.ofload_optimizer: unknown key. Did you mean "offload_optimizer"?' in text


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (
            {"zero_optimization": {"aio": {}}},
            "zero_optimization.aio: unknown key. It belongs to the top level.",
        ),
        ({"stage": 3}, 'stage: unknown key. It belongs to "zero_optimization".'),
        ({"pin_memory": True}, '"zero_optimization.offload_optimizer" or "zero_optimization.offload_param"'),
        ({"bf16": {"loss_scale": 0}}, 'bf16.loss_scale: unknown key. It belongs to "fp16".'),
        (
            {"optimizer": {"type": "SGD", "params": {"betas": [0, 0]}}},
            'optimizer.params.betas: unknown key. It belongs to another "type".',
        ),
        (
            {"optimizer": {"type": "Adam", "lr": 1}},
            'optimizer.lr: unknown key. It belongs to "optimizer.params".',
        ),
        ({"zerooptimization_x": 3}, 'Did you mean "zero_optimization"?'),
        ({"loss_scale_windo": 3}, 'Did you mean "loss_scale_window", which belongs to "fp16"?'),
        ({"qqqqqqqqqqq": 3}, "underscore are taken as comments"),
    ],
)
def test_where_it_belongs(data: dict[str, Any], said: str) -> None:
    assert said in message(data)


def test_known_to_deepspeed_but_not_supported() -> None:
    text = message(
        {"sparse_attention": {"mode": "fixed"}, "zero_optimization": {"zenflow": {"topk_ratio": 0.1}}}
    )
    assert 'sparse_attention: {"mode": "fixed"} (dict) is recognised but not supported' in text
    assert "zero_optimization.zenflow: " in text and text.count("Instead:") == 2


def test_comments_at_every_level() -> None:
    Config.load(
        {"_a": 1, "fp16": {"_b": 2}, "zero_optimization": {"offload_param": {"_c": 3}, "_stage": "x"}}
    )


def edits(name: str, rng: random.Random) -> str:
    """`name` with one character put in, left out, replaced, or swapped with the next."""
    at = rng.randrange(len(name))
    letter = rng.choice(string.ascii_lowercase + string.digits + "_")
    match rng.randrange(4):
        case 0:
            return name[:at] + letter + name[at:]
        case 1:
            return name[:at] + name[at + 1 :]
        case 2:
            return name[:at] + letter + name[at + 1 :]
    return name[:at] + name[at + 1 : at + 2] + name[at : at + 1] + name[at + 2 :]


def test_single_character_edits_of_every_key_are_refused_with_the_right_name() -> None:
    rng = random.Random(0)
    legal = set(legal_paths(DsConfig))
    right = wrong = 0
    misses = []
    for key in keys.all_keys():
        for _ in range(5):
            typo = edits(key.name, rng)
            path = (*key.path[:-1], typo)
            if path in legal or not typo or typo.startswith("_"):
                continue
            data = key.file(1)
            section = data
            for name in key.path[:-1]:
                section = section[name]
            section.pop(key.name)
            put(data, path, 1)
            text = message(data)
            assert f"{'.'.join(path)}: unknown key." in text
            if f'{".".join(path)}: unknown key. Did you mean "{key.name}"?' in text:
                right += 1
            else:
                wrong += 1
                misses.append(f"{path}")
    assert right + wrong > 1000
    assert right / (right + wrong) >= 0.95, f"{right} of {right + wrong}; {misses[:20]}"
