"""``make gpu-check``: its parts run on any device; without a GPU it says so and fails."""

from __future__ import annotations

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "benchmarks"))

import gpu_check
import workload


@pytest.mark.usefixtures("compile_fast")
def test_parity_is_judged_against_plain_optax(capsys: pytest.CaptureFixture[str]) -> None:
    work = workload.small_gpt(layers=2, heads=2, width=32, context=16)
    run = gpu_check.stage_run(work, 3, steps=2)
    assert run.predicted_bytes > 0 and run.seconds > 0 and "HloModule" in run.hlo
    (figure,) = gpu_check.parity(work, {3: run}, steps=2)
    assert figure.met and figure.value > 0
    wrong = gpu_check.Run([1.01 * x for x in run.losses], run.params, 1.0, 1, None, "")
    (figure,) = gpu_check.parity(work, {3: wrong}, steps=2)
    assert figure.met is False


def test_a_peak_is_judged_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "predicted_seconds", lambda hlo: 0.5)
    runs = {
        stage: gpu_check.Run([], None, 1.0, 100, peak, "") for stage, peak in enumerate((104, 110, 90, None))
    }
    found = {figure.name: figure.met for figure in gpu_check.predictions(runs)}
    peaks = [found.get(f"peak memory, off by a factor, stage {stage}") for stage in range(4)]
    assert peaks == [True, False, False, None]


def test_without_a_gpu_it_says_so_and_fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_check.py"])
    assert gpu_check.main() == 1
    assert "no GPU here" in capsys.readouterr().out
