"""What saving and restoring a large state takes of the host's memory, beside the state itself."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest

from tests.checkpoint import loading
from tests.checkpoint.processes import ROOT, free_port


def run(folder: pathlib.Path, mode: str, megabytes: int, count: int) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "tests.checkpoint.big", str(folder), mode, str(megabytes)]
    port = free_port()
    processes = [
        subprocess.Popen(
            [*command, *([str(port), str(i)] if count > 1 else [])],
            cwd=ROOT,
            env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(count)
    ]
    found = []
    for process in processes:
        out, err = process.communicate(timeout=600)
        assert process.returncode == 0, err[-3000:]
        found.append(json.loads(out.splitlines()[-1]))
    return found


@pytest.mark.full
@pytest.mark.parametrize("count", (1, 2))
def test_four_gigabytes(count: int, tmp_path: pathlib.Path) -> None:
    """H15: at most 1.3 times what the process holds, its own code and libraries aside."""
    check(tmp_path, 4096, count, 1.3)


@pytest.mark.slow
def test_half_a_gigabyte(tmp_path: pathlib.Path) -> None:
    """The 64 MiB in flight and a leaf weigh more beside a small state."""
    check(tmp_path, 512, 1, 1.6)


def check(folder: pathlib.Path, megabytes: int, count: int, most: float) -> None:
    for mode in ("save", "restore"):
        found = run(folder, mode, megabytes, count)
        for one in found:
            assert one["held"] == pytest.approx(megabytes * 2**20 / count, rel=0.01)
            assert one["means"] == pytest.approx({f"w{i}": float(i) for i in range(12)}, rel=1e-5)
            ratio = (one["peak"] - one["before"]) / one["held"]
            print(
                f"{mode}, {count} processes: {one['held'] / 1e9:.2f} GB held, {ratio:.2f} times that at most"
            )
            assert ratio <= most, (mode, one)


@pytest.mark.parametrize(
    "megabytes, source",
    (
        (128, "files"),
        pytest.param(1024, "files", marks=pytest.mark.full),
        pytest.param(1024, "init", marks=pytest.mark.full),
    ),
)
def test_loading_takes_what_is_held(megabytes: int, source: str, tmp_path: pathlib.Path) -> None:
    """K4: neither masters beside the params, nor pages of the file beside their values."""
    file = tmp_path / "model.safetensors"
    loading.write(file, megabytes)
    command = [
        sys.executable,
        "-m",
        "tests.checkpoint.loading",
        str(file),
        *(["init"] if source == "init" else []),
    ]
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    out = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert out.returncode == 0, out.stderr[-3000:]
    found = json.loads(out.stdout.splitlines()[-1])
    assert found["held"] == pytest.approx(megabytes * 2**20, rel=0.02)
    assert found["means"] == [float(i) for i in range(loading.LEAVES)]
    ratio = (found["peak"] - found["before"]) / found["held"]
    print(f"{source}: {found['held'] / 1e6:.0f} MB held, {ratio:.2f} times that at most")
    assert ratio <= 1.3, found
