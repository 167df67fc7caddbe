"""The report of a file, and docs/ds_config.md, which cannot drift from the schema."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest

from tests.config import keys
from zeroj.config import Config
from zeroj.config.report import document
from zeroj.config.root_rules import ROOT_RULES
from zeroj.config.rules import ZERO_RULES

DOC = pathlib.Path(__file__).parents[2] / "docs" / "ds_config.md"


def test_the_doc_is_what_the_schema_says() -> None:
    assert DOC.read_text(encoding="utf-8") == document(), (
        "run: python -m zeroj.config.report > docs/ds_config.md"
    )


def test_the_command_prints_the_doc() -> None:
    command = [sys.executable, "-W", "error", "-m", "zeroj.config.report"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=DOC.parents[1])
    assert (done.returncode, done.stderr, done.stdout) == (0, "", document())


def test_the_doc_has_every_key_with_a_reason() -> None:
    text = document()
    for key in keys.all_keys():
        lines = [line for line in text.splitlines() if line.startswith(f"| `{key.name}` |")]
        assert any(f"**{key.row.status}**" in line and key.row.text[:40] in line for line in lines), key
        assert len(key.row.text) > 5 and (key.row.status != "refused" or len(key.row.instead) > 5)
    assert text.count("\n| `") >= len({(key.model, key.name) for key in keys.all_keys()})


def test_the_doc_has_every_rule() -> None:
    rules = document().split("## Combinations that are refused")[1]
    assert rules.count("\n| `") == len(ZERO_RULES) + len(ROOT_RULES)
    assert "{" not in rules


def test_a_report() -> None:
    data = {
        "train_batch_size": 32,
        "steps_per_print": 10,
        "zero_optimization": {"stage": 3, "param_persistence_threshold": 1e5, "overlap_comm": True},
        "elasticity": {"enabled": False, "max_train_batch_size": 2000},
        "optimizer": {"type": "Adam", "params": {"lr": 3e-4}},
    }
    report = Config.load(data).report()
    for line in (
        "honoured    train_batch_size = 32",
        "honoured    zero_optimization.stage = 3",
        "honoured    zero_optimization.param_persistence_threshold = 100000",
        "honoured    zero_optimization.overlap_comm = true",
        'off         elasticity = {"enabled": false, "max_train_batch_size": 2000}',
        "honoured    gradient_clipping (default) = 1.0",
        "note        gradient_clipping is left out: gradients are clipped to a global norm of 1.0",
        "optimizer   Adam: scale_by_adam(",
    ):
        assert line in report
    assert max(map(len, report.splitlines())) < 200


def test_everything_in_the_file_is_in_the_report() -> None:
    data = {
        "fp16": {"enabled": True, "hysteresis": 3},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1}},
        "tensorboard": {"enabled": True, "job_name": "x"},
        "gradient_clipping": 0,
    }
    report = Config.load(data).report()
    for key in ("fp16.enabled", "fp16.hysteresis", "scheduler.type", "scheduler.params.warmup_max_lr"):
        assert f" {key} = " in report
    assert "tensorboard.job_name" in report and "gradient_clipping (default)" not in report


def test_resolved_is_plain_and_complete() -> None:
    config = Config.load({"optimizer": {"type": "Lion"}, "zero_optimization": {"stage": 1}})
    data = json.loads(json.dumps(config.resolved()))
    assert data["optimizer"]["params"]["betas"] == [0.9, 0.99]
    assert data["gradient_clipping"] == 1.0 and data["zero_optimization"]["stage"] == 1
    assert set(data) == {key.name for key in keys.all_keys() if len(key.path) == 1}


@pytest.mark.parametrize(
    ("data", "note"),
    [
        ({}, "gradient_clipping is left out"),
        ({"zero_optimization": {"stage": 2, "stage3_max_live_parameters": 1}}, "no effect at stage 2"),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "nvme_path": "/x"}}},
            'offload_optimizer.nvme_path is not used, since device is "cpu"',
        ),
        (
            {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 5}}},
            "ends (total_num_steps 5) before its warm-up does (1000)",
        ),
        (
            {
                "optimizer": {"type": "SGD"},
                "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0, "cycle_max_lr": 1}},
            },
            "SGD has no betas: cycle_momentum has no effect",
        ),
    ],
)
def test_notes(data: dict, note: str) -> None:
    config = Config.load(data)
    assert any(note in text for text in config.notes) and note in config.report()
