"""`zj.Zero`, the section "zero_optimization" in Python."""

from __future__ import annotations

import copy
import pickle

import pytest

from zeroj.config import Config, Zero
from zeroj.config.offload import OffloadOptimizer
from zeroj.errors import ConfigError


def test_defaults() -> None:
    zero = Zero()
    assert (zero.stage, zero.offload_optimizer, zero.offload_param) == (0, None, None)
    assert zero.stage3_param_persistence_threshold is None and zero.reshard_after_forward


def test_left_out_and_written_thresholds_differ() -> None:
    assert Zero(stage=3).stage3_param_persistence_threshold is None
    assert Zero(stage=3, stage3_param_persistence_threshold=0).stage3_param_persistence_threshold == 0
    assert Zero(stage=3, param_persistence_threshold=1e5).stage3_param_persistence_threshold == 100_000


def test_sections_as_dicts_and_as_objects() -> None:
    one = Zero(stage=3, offload_optimizer={"device": "cpu", "pin_memory": False})
    other = Zero(stage=3, offload_optimizer=OffloadOptimizer(device="cpu", pin_memory=False))
    assert one == other
    assert one.offload_optimizer is not None and one.offload_optimizer.device == "cpu"


def test_the_file_and_python_agree() -> None:
    section = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "max_live_parameters": 5}
    assert Config.load({"zero_optimization": section}).zero == Zero(**section)


def test_copies() -> None:
    zero = Zero(stage=2, offload_optimizer={"device": "cpu"})
    assert pickle.loads(pickle.dumps(zero)) == zero == copy.deepcopy(zero)


def test_all_faults_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        Zero(
            stag=3,
            reduce_bucket_size=2.5,
            legacy_stage1=True,
            offload_param={"device": "gpu", "pin_memry": True},
        )
    text = str(error.value)
    assert "zj.Zero: 5 faults" in text
    for line in (
        'stag: unknown key. Did you mean "stage"?',
        "reduce_bucket_size: must be a whole number, got 2.5 (float)",
        "legacy_stage1: true (bool) is recognised but not supported",
        "offload_param.device: must be 'none', 'cpu' or 'nvme', got \"gpu\" (str)",
        'offload_param.pin_memry: unknown key. Did you mean "pin_memory"?',
    ):
        assert line in text
