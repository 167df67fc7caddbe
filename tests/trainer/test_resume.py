"""A run that is interrupted and goes on in a new process ends as one that was not."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from tests.trainer.child import run

pytestmark = [pytest.mark.usefixtures("compile_fast"), pytest.mark.slow]
ROOT = pathlib.Path(__file__).parent.parent.parent
TIMES = ("runtime", "per_second")


def in_new_process(folder: pathlib.Path, stop: int, resume: bool) -> dict[str, np.ndarray]:
    command = [
        sys.executable,
        "-m",
        "tests.trainer.child",
        str(folder),
        str(stop),
        "resume" if resume else "fresh",
    ]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return dict(np.load(folder / "params.npz"))


def state_of(folder: pathlib.Path) -> dict[str, Any]:
    state = json.loads((folder / "trainer_state.json").read_text())
    state["log_history"] = [
        {name: value for name, value in log.items() if not any(t in name for t in TIMES)}
        for log in state["log_history"]
        if "train_runtime" not in log
    ]
    for name in ("best_model_checkpoint",):
        state[name] = state[name] and pathlib.Path(state[name]).name
    return state


def test_interrupted_at_5_and_15_and_resumed_in_new_processes(tmp_path: pathlib.Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    wanted = run(whole, 18, resume=False)
    parts.mkdir()
    run(parts, 5, resume=False)
    in_new_process(parts, 15, resume=True)
    found = in_new_process(parts, 18, resume=True)
    assert {path.name for path in parts.glob("checkpoint-*")} >= {
        "checkpoint-5",
        "checkpoint-10",
        "checkpoint-15",
    }
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
    assert state_of(parts) == state_of(whole)
    assert len(state_of(whole)["log_history"]) == 7  # losses at 4, 8, 12, 16; evaluations at 6, 12, 18
