"""Reading text: comments, trailing commas, duplicates; behaviours A1e and A1f, A6."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

from zeroj.config import Config
from zeroj.config.reader import read
from zeroj.errors import ConfigError

TEXT = r"""
// a line
{
  # another
  "train_batch_size": 32, /* "train_batch_size": 64,
  still a comment */
  "_why": "keys that start with an underscore are comments, whatever they hold",
  "tensorboard": {"output_path": "http://host/#not//a /*comment*/ \" , }", "_x": [1, 2],},
  "bf16": {"enabled": true,
  },
}
"""


def test_comments_and_trailing_commas() -> None:
    data, name, faults = read(TEXT)
    assert data == {
        "train_batch_size": 32,
        "tensorboard": {"output_path": 'http://host/#not//a /*comment*/ " , }'},
        "bf16": {"enabled": True},
    }
    assert (name, faults) == ("config", [])


def test_path_dict_and_text_are_the_same(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text(TEXT)
    data = {"train_batch_size": 32, "bf16": {"enabled": True}, "_note": object()}
    for source in (file, str(file), TEXT, data):
        config = Config.load(source)
        assert (config.batch.train, config.precision) == (32, "bf16")
    assert "_note" in data  # the caller's dict is left alone


def test_a_dict_is_copied() -> None:
    data: dict[str, Any] = {"zero_optimization": {"stage": 1, "cpu_offload": True}}
    with pytest.warns(UserWarning):
        Config.load(data)
    assert data == {"zero_optimization": {"stage": 1, "cpu_offload": True}}


def test_duplicates_are_listed_with_everything_else() -> None:
    text = '{"steps_per_print": 1, "steps_per_print": 2, "fp16": {"enabled": false, "enabled": true}, "x": 1}'
    with pytest.raises(ConfigError) as error:
        Config.load(text)
    assert "3 faults" in str(error.value)
    assert "- steps_per_print: duplicate key" in str(error.value)
    assert "- fp16.enabled: duplicate key" in str(error.value)
    assert "- x: unknown key" in str(error.value)


@pytest.mark.parametrize("text", ['{"a": 1', '{"a" 1}', "{a: 1}", '{"a": 1} x', "[{}]", "{" * 3, '{"a": 00}'])
def test_what_is_not_json(text: str) -> None:
    with pytest.raises(ConfigError, match=r"config: (is not JSON|a config is one object)"):
        Config.load(text)


def test_error_lines_are_those_of_the_file() -> None:
    with pytest.raises(ConfigError, match="line 4"):
        Config.load('{\n/* two\nlines */ "a": 1,\n "b" 2}')


def test_deep_nesting() -> None:
    with pytest.raises(ConfigError):
        Config.load('{"a":' * 100_000 + "1" + "}" * 100_000)


def test_a_missing_file_and_a_file_that_is_not_text(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match="nowhere.json: No such file"):
        Config.load(tmp_path / "nowhere.json")
    with pytest.raises(ConfigError, match="Is a directory"):
        Config.load(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00{")
    with pytest.raises(ConfigError, match="not text in UTF-8"):
        Config.load(tmp_path / "binary")


@pytest.mark.parametrize("source", [None, 3, ["a"], b"{}"])
def test_what_is_not_a_config(source: Any) -> None:
    with pytest.raises(ConfigError, match="a config is a path, a dict or JSON text, not"):
        Config.load(source)


def test_a_key_that_is_not_text() -> None:
    with pytest.raises(ConfigError, match="the key 3 is not text"):
        Config.load({3: 4})  # type: ignore[dict-item]


def test_numbers() -> None:
    zero = Config.load(
        '{"zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8, "sub_group_size": 2e8}}'
    ).zero
    assert (zero.reduce_bucket_size, zero.sub_group_size) == (500_000_000, 200_000_000)
    assert type(zero.reduce_bucket_size) is int
    for value in ("3686.4", "true", '"true"', '"1e9"', "-5", "0", "NaN", "Infinity", "1e999"):
        with pytest.raises(ConfigError, match=r"zero_optimization\.reduce_bucket_size: "):
            Config.load('{"zero_optimization": {"reduce_bucket_size": ' + value + "}}")
