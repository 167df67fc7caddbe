"""Starting the training run of child.py, in one process or two, and reading what it says."""

from __future__ import annotations

import json
import os
import pathlib
import socket
import subprocess
import sys
from typing import Any

ROOT = pathlib.Path(__file__).parents[2]


def child(folder: pathlib.Path, mode: str, *arguments: Any) -> subprocess.Popen[str]:
    """One process of the run."""
    command = [sys.executable, "-m", "tests.checkpoint.child", str(folder), mode, *map(str, arguments)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def pair(folder: pathlib.Path, mode: str, *arguments: Any) -> list[subprocess.Popen[str]]:
    """Two processes of four devices each, over gloo."""
    port = free_port()
    return [child(folder, mode, "--port", port, "--process", i, *arguments) for i in range(2)]


def said(process: subprocess.Popen[str], code: int | None = 0) -> list[dict[str, Any]]:
    """Waits for the end of a process, and returns what it said line by line."""
    out, err = process.communicate(timeout=240)
    assert code is None or process.returncode == code, f"exit code {process.returncode}\n{out}\n{err[-6000:]}"
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")]
