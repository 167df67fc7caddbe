"""The code in docs/migrating.md runs, and every name in it exists."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import zeroj as zj
from tests import oracle

pytestmark = pytest.mark.usefixtures("compile_fast")
DOC = (Path(__file__).parent.parent / "docs" / "migrating.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", DOC, re.DOTALL)


def init_fn() -> Any:
    keys = jax.random.split(jax.random.key(0), 2)
    return {
        "w1": jax.random.normal(keys[0], (6, 16)) * 0.3,
        "b1": jax.numpy.zeros(16),
        "w2": jax.random.normal(keys[1], (16, 3)) * 0.3,
    }


def test_the_scripts_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fixed = {
        "train_batch_size": 32,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
    }
    auto = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"},
        },
    }
    Path("ds_config.json").write_text(json.dumps(fixed))
    Path("ds_config_auto.json").write_text(json.dumps(auto))
    rng = np.random.default_rng(0)
    batches = [{"x": oracle.normal(rng, 32, 6), "y": oracle.normal(rng, 32, 3)} for _ in range(3)]
    names: dict[str, Any] = {"init_fn": init_fn, "batches": batches, "epoch": 1}
    assert len(BLOCKS) == 2
    exec(BLOCKS[0], names)
    assert names["engine"].global_steps == 3 and np.isfinite(float(names["metrics"]["loss"]))
    assert zj.Checkpointer("checkpoints").latest_step() == 3 and list(Path("out").glob("*.safetensors"))
    exec(BLOCKS[0], names)  # goes on from the checkpoint
    assert names["engine"].global_steps == 6 and names["client_state"] == {"epoch": 1}
    exec(BLOCKS[1], names)
    assert names["engine"].get_batch_info() == (4 * 8 * 8, 4, 8)
    assert names["engine"].plan.precision.name == "bf16" and names["engine"].plan.threshold == 160


def test_every_name_exists() -> None:
    for name in set(re.findall(r"`(?:[^`]*?)zj\.([A-Za-z_.]+)", DOC)):
        found: Any = zj
        for part in name.rstrip(".").split("."):
            found = getattr(found, part)
    engine = zj.initialize(
        lambda p, b: b["x"].mean() * p["w"].sum(),
        {"w": np.ones(8, np.float32)},
        {"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}},
    )
    after = re.sub(r"^\| [^|]*\|", "|", DOC, flags=re.MULTILINE)  # not DeepSpeed's own column
    after = re.sub(r"```text.*?```", "", after, flags=re.DOTALL)
    used = set(re.findall(r"\bengine\.([a-z_0-9]+)", after))
    missing = {name for name in used if not hasattr(engine, name)}
    assert len(used) > 10 and not missing
