"""Two real processes over gloo, four CPU devices each, train as one process with eight devices does."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.multihost.worker import STEPS, train

pytestmark = pytest.mark.usefixtures("compile_fast")
ROOT = Path(__file__).parent.parent.parent


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def run_processes(
    folder: Path, case: int | str, count: int = 2, worker: str = "tests.multihost.worker"
) -> list[dict[str, np.ndarray]]:
    port = free_port()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    started = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                worker,
                str(i),
                str(count),
                str(port),
                str(folder),
                str(case),
            ],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in range(count)
    ]
    try:
        output = [process.communicate(timeout=300)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    for process, text in zip(started, output, strict=True):
        assert process.returncode == 0, text[-4000:]
    return [dict(np.load(folder / f"process{i}.npz")) for i in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize("stage", (pytest.param(1, marks=pytest.mark.full), 3))
def test_two_processes_train_as_one(stage: int, tmp_path: Path) -> None:
    """Losses, norms, whole params on every process, and one more step after a checkpoint."""
    together = run_processes(tmp_path, stage)
    (tmp_path / "alone").mkdir()
    alone = train(tmp_path / "alone", stage)
    assert alone["seen"].shape == (STEPS + 1, 2)
    assert alone["seen"][-1, 0] < alone["seen"][0, 0]
    for found in together:
        assert found.keys() == alone.keys()
        for name, wanted in alone.items():
            if name == "plan":
                assert str(found[name]) == str(wanted)
                continue
            distance = np.linalg.norm(found[name] - wanted) / np.linalg.norm(wanted)
            assert distance <= 1e-6, (name, distance)
    for name, value in together[0].items():
        np.testing.assert_array_equal(value, together[1][name], err_msg=name)
