"""Old spellings: taken with one warning each."""

from __future__ import annotations

import pathlib
import warnings
from typing import Any

import pytest

from zeroj.config import Config
from zeroj.config.old import OLD
from zeroj.errors import ConfigError

ZERO = "zero_optimization"
SPELLINGS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({ZERO: True}, {ZERO: {"stage": 1}}),
    ({ZERO: False}, {ZERO: {"stage": 0}}),
    ({"bfloat16": {"enabled": True}}, {"bf16": {"enabled": True}}),
    ({"allgather_size": 1000}, {ZERO: {"allgather_bucket_size": 1000}}),
    ({"seq_parallel_comm_data_type": "bf16"}, {"seq_parallel_communication_data_type": "bf16"}),
    ({ZERO: {"stage": 2, "cpu_offload": True}}, {ZERO: {"stage": 2, "offload_optimizer": {"device": "cpu"}}}),
    (
        {ZERO: {"stage": 2, "cpu_offload": False}},
        {ZERO: {"stage": 2, "offload_optimizer": {"device": "none"}}},
    ),
    (
        {ZERO: {"stage": 3, "cpu_offload_param": True}},
        {ZERO: {"stage": 3, "offload_param": {"device": "cpu"}}},
    ),
    (
        {ZERO: {"stage": 3, "cpu_offload_params": True}},
        {ZERO: {"stage": 3, "offload_param": {"device": "cpu"}}},
    ),
    (
        {ZERO: {"stage": 2, "cpu_offload_use_pin_memory": False}},
        {ZERO: {"stage": 2, "offload_optimizer": {"pin_memory": False}}},
    ),
    (
        {ZERO: {"stage": 3, "stage3_gather_fp16_weights_on_model_save": True}},
        {ZERO: {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}},
    ),
    ({"aio": {"thread_count": 4}}, {"aio": {"intra_op_parallelism": 4}}),
]


@pytest.mark.parametrize(("old", "new"), SPELLINGS, ids=[str(old) for old, _ in SPELLINGS])
def test_old_means_new_and_says_so_once(old: dict[str, Any], new: dict[str, Any]) -> None:
    with pytest.warns(UserWarning, match="is an old spelling; write") as caught:
        one = Config.load(old)
    assert [pathlib.Path(warning.filename).name for warning in caught] == ["test_old.py"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other = Config.load(new)
    assert one.resolved() == other.resolved()
    notes = [note for note in one.notes if "old spelling" in note]
    assert len(notes) == 1 and notes[0] in one.report()
    assert not any("old spelling" in note for note in other.notes)


def test_every_old_spelling_is_in_the_list() -> None:
    def paths(data: Any, at: tuple[str, ...] = ()) -> set[tuple[str, ...]]:
        below = (
            set().union(*(paths(v, (*at, k)) for k, v in data.items())) if isinstance(data, dict) else set()
        )
        return below | {at}

    seen = set().union(*(paths(old) for old, _ in SPELLINGS))
    assert {old.path for old in OLD} <= seen


@pytest.mark.filterwarnings("ignore:.*old spelling")
def test_old_and_new_together_are_refused() -> None:
    data = {
        ZERO: {"stage": 2, "cpu_offload": True, "offload_optimizer": {"device": "cpu"}},
        "aio": {"thread_count": 2},
    }
    with pytest.raises(ConfigError) as error:
        Config.load(data)
    assert "1 fault\n" in str(error.value)
    assert (
        'zero_optimization.cpu_offload: is the old spelling of "zero_optimization.offload_optimizer"'
        in str(error.value)
    )


def test_pin_memory_goes_into_the_section_beside_it() -> None:
    with pytest.warns(UserWarning):
        config = Config.load({ZERO: {"stage": 2, "cpu_offload": True, "cpu_offload_use_pin_memory": False}})
    assert config.zero.offload_optimizer is not None
    assert (config.zero.offload_optimizer.device, config.zero.offload_optimizer.pin_memory) == ("cpu", False)


def test_the_same_setting_under_both_legal_names() -> None:
    data = {ZERO: {"stage": 3, "max_live_parameters": 5, "stage3_max_live_parameters": 6}}
    with pytest.raises(ConfigError, match="has the same setting twice"):
        Config.load(data)


@pytest.mark.filterwarnings("ignore:.*old spelling")
@pytest.mark.parametrize("value", [3, "yes", None])
def test_an_old_spelling_with_a_wrong_value(value: Any) -> None:
    with pytest.raises(
        ConfigError, match="offload_optimizer: must be a section" if value is not None else "."
    ) as error:
        Config.load({ZERO: {"stage": 2, "cpu_offload": value}, "x": 1})
    assert "x: unknown key" in str(error.value)
