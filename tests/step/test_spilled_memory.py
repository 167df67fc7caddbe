"""State several times as large as the memory that the process may take."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

#: Bytes that compiling the step's programs takes: 85 MB on a quiet machine, up to 195 MB were seen on a busy one.
COMPILER = 220 << 20
ROOT = pathlib.Path(__file__).parents[2]


def run(folder: pathlib.Path, layers: int, moments: int) -> dict[str, int]:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.step.spilled_memory", str(folder), str(layers), str(moments)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["on_disk"] == moments * found["params"]
    assert all(loss > 0 for loss in found["losses"])
    return found


@pytest.mark.slow
def test_steps_take_the_memory_that_was_predicted(tmp_path: pathlib.Path) -> None:
    """Beside what stands before the steps: the gradients, the buffers, and one leaf's state in and out.

    A device here is host memory too, so the gradients and the leaf that is updated count; and so does what the
    compiler takes in the first step, which does not grow with the state.
    """
    found = run(tmp_path, 96, 12)
    leaf = found["buffers"] // 4
    taken = found["peak"] - found["base"]
    assert taken <= found["params"] + found["buffers"] + 3 * leaf + COMPILER, found
    assert found["on_disk"] >= 3 * taken, found


@pytest.mark.full
def test_state_of_four_times_all_memory_that_the_process_takes(tmp_path: pathlib.Path) -> None:
    """Interpreter, JAX, params and gradients included: 6.3 GB of state in at most 1.5 GB."""
    found = run(tmp_path, 100, 60)
    assert found["on_disk"] > 6.2e9
    assert found["peak"] <= 1.5e9 and found["on_disk"] >= 4 * found["peak"], found
