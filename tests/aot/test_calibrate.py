"""Calibration: every measurement runs on any device; the file goes round; without a GPU it is refused."""

from __future__ import annotations

import json
import pathlib

import jax
import pytest

from zeroj.aot import calibrate
from zeroj.aot.choices import Batch, Choice, Machine
from zeroj.aot.closed_form import estimate
from zeroj.aot.hardware import as_json, find, load
from zeroj.aot.sizes import from_numbers
from zeroj.cli import main
from zeroj.errors import PlanError

TINY = calibrate.Loads(matrix=64, products=2, nbytes=2**16)


def test_every_rate_is_measured_on_the_devices_at_hand() -> None:
    rates = calibrate.measure(jax.devices()[:4], TINY)
    assert set(rates) == {"flops_bf16", "hbm", "h2d", "d2h", "all_gather", "reduce_scatter"}
    assert all(rate > 0 for rate in rates.values())


def test_one_device_has_no_link_to_others() -> None:
    assert set(calibrate.measure(jax.devices()[:1], TINY)) == {"flops_bf16", "hbm", "h2d", "d2h"}


def test_measured_rates_replace_assumed_ones_and_nothing_else() -> None:
    gpu = find("h100")
    found = calibrate.calibrated(gpu, {"flops_bf16": 6e14, "h2d": 5e10, "d2h": 4e10, "hbm": 9e12}, "this")
    assert found.flops_bf16.usable == pytest.approx(6e14)
    assert found.pcie.usable == pytest.approx(4e10)
    assert (found.hbm.value, found.hbm.efficiency) == (9e12, 1.0)  # more than the data sheet says
    assert "measured on this" in found.pcie.source
    assert (found.nvlink, found.network, found.core_count) == (gpu.nvlink, gpu.network, gpu.core_count)


def test_the_file_is_what_hardware_takes(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow = calibrate.calibrated(find("h100"), {"flops_bf16": 1e13}, "a slow GPU")
    path = tmp_path / "gpu.json"
    path.write_text(as_json(slow))
    assert load(path) == slow
    words = [
        "plan",
        "--params",
        "1e9",
        "--layers",
        "24",
        "--hidden",
        "2048",
        "--json",
        "--hardware",
        str(path),
    ]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)["choices"][0]
    wanted = estimate(Choice(0), from_numbers(1e9, 24, 2048), Batch(), Machine(slow, 1, 8, 1e12, 0))
    assert found["seconds"] == pytest.approx(wanted.seconds)


@pytest.mark.parametrize("text", ["", "[1]", "{}", '{"hbm": {"value": 1}}'])
def test_a_file_that_is_no_description_is_refused(tmp_path: pathlib.Path, text: str) -> None:
    path = tmp_path / "gpu.json"
    path.write_text(text)
    with pytest.raises(PlanError, match="is no hardware description"):
        load(path)
    with pytest.raises(PlanError, match="no hardware description at"):
        load(tmp_path / "nothing.json")


def test_without_a_gpu_it_says_so_and_fails(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "gpu.json"
    assert main(["plan", "--calibrate", str(path)]) == 2
    assert "measuring needs a GPU" in capsys.readouterr().err
    assert not path.exists()
