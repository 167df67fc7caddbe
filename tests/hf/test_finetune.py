"""The fine-tuning example from its command line: train, go on, save what llama.py reads again."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from tests.hf.test_fixtures import example

ROOT = pathlib.Path(__file__).parent.parent.parent


def run(*arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(ROOT / "examples" / "finetune_llama.py"), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


@pytest.mark.full
def test_train_and_resume(tmp_path: pathlib.Path) -> None:
    lines = [{"prompt": f"{a} plus 2 is ", "completion": f"{a + 2}."} for a in range(40)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))
    out = tmp_path / "out"
    common = ("--tiny", "--train", str(tmp_path / "data.jsonl"), "--out", str(out), "--learning-rate", "1e-3")
    run(*common, "--max-steps", "6", "--save-steps", "3")
    assert (out / "checkpoint-3").is_dir() and (out / "loss.png").is_file()
    shown = run(*common, "--max-steps", "8", "--save-steps", "3", "--resume")
    assert "from update 6" in shown and "sample:" in shown
    state = json.loads((out / "trainer_state.json").read_text())
    assert state["global_step"] == 8
    model = example("llama").from_pretrained(out / "model")
    assert model.config.hidden_size == 128
    assert np.isfinite(model.model.norm.weight.get_value()).all()
