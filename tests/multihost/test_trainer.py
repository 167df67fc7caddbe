"""Two real processes under a Trainer: the metrics of one, each reading its own rows, one of them writing logs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.multihost.test_two_processes import free_port, run_processes
from tests.multihost.trainer_worker import train

pytestmark = [pytest.mark.usefixtures("compile_fast"), pytest.mark.slow]
ROOT = Path(__file__).parent.parent.parent


def in_two_processes(folder: Path) -> list[dict[str, Any]]:
    port = free_port()
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.multihost.trainer_worker", str(i), "2", str(port), str(folder)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in range(2)
    ]
    try:
        output = [process.communicate(timeout=300)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    for process, text in zip(started, output, strict=True):
        assert process.returncode == 0, text[-4000:]
    return [json.loads((folder / f"process{i}.json").read_text()) for i in range(2)]


def test_two_processes_train_as_one(tmp_path: Path) -> None:
    together = in_two_processes(tmp_path)
    alone = train(tmp_path / "alone")
    for found in together:
        assert [sorted(log) for log in found["logs"]] == [sorted(log) for log in alone["logs"]]
        for a, b in zip(found["logs"], alone["logs"], strict=True):
            np.testing.assert_allclose([a[k] for k in sorted(a)], [b[k] for k in sorted(b)], rtol=2e-5)
        for a, b in zip(found["params"], alone["params"], strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)
        np.testing.assert_allclose(found["predictions"], alone["predictions"], atol=1e-4)
    assert together[0]["logs"] == together[1]["logs"]
    # each example is read by one of the two, once an epoch; the first is also looked at, for its shapes
    reads = [sorted(found["read"]) for found in together]
    assert max(len(read) for read in reads) < 0.75 * len(alone["read"])
    assert "step 1/5" in together[0]["printed"] and not together[1]["printed"]
    written = sorted(
        path.relative_to(tmp_path / "run").as_posix() for path in (tmp_path / "run").glob("csv/*")
    )
    assert written and len((tmp_path / "run" / written[0]).read_text().splitlines()) <= 7
    assert (tmp_path / "run" / "model" / "model.safetensors").read_bytes()[:8] == (
        tmp_path / "alone" / "model" / "model.safetensors"
    ).read_bytes()[:8]


def test_what_one_process_does_alone_is_named(tmp_path: Path) -> None:
    """J2: an error that says who never came, and where it was last, in place of waiting for ever."""
    told = run_processes(tmp_path, "lone", worker="tests.multihost.lone_worker")[0]["told"]
    assert len(told) == 4
    assert "iterate over different data: those of [1]" in told[0]
    for text, what in zip(told[1:], ("evaluation 'eval'", "prediction", "save_model"), strict=True):
        assert f"The {what} after update 1 is collective" in text
        assert "after 2 seconds process 1 (last at the evaluation 'eval' after update 1) had not" in text
