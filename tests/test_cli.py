"""The command line, run as its users run it."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from safetensors.numpy import load_file

import zeroj as zj
from zeroj.aot.plan_command import amount
from zeroj.cli import main
from zeroj.errors import PlanError

SIZES = ["plan", "--params", "13e9", "--layers", "40", "--hidden", "5120"]


def output(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(words) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def test_plan_prints_every_choice_and_the_advice(capsys: pytest.CaptureFixture[str]) -> None:
    thirty = ["plan", "--params", "30e9", "--layers", "48", "--hidden", "7168"]
    text = output(capsys, *thirty, "--gpu", "a100-80")
    assert "* stage 3" in text
    assert "stage 3 + optimizer on cpu + params on cpu" in text
    assert "advised: stage 3" in text and "stage 2 is over the GPU memory" in text


def test_plan_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(output(capsys, *SIZES, "--json", "--nodes", "2", "--nvme", "4TB"))
    assert found["model"]["params"] == 13 * 10**9
    assert found["machine"]["nvme"] == 4e12
    (advised,) = [row for row in found["choices"] if row["advised"]]
    assert advised["fits"] and advised["device"] == sum(advised["parts"].values())
    assert any(row["choice"]["zeropp"] for row in found["choices"])


def test_plan_of_a_hugging_face_model(capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path) -> None:
    config = {"num_hidden_layers": 12, "hidden_size": 768, "vocab_size": 50257, "num_attention_heads": 12}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "advised: stage 0" in output(capsys, "plan", str(tmp_path), "--gpus", "1")


def test_the_cluster_s_sizes_are_read(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--gpu-memory", "24GB", "--host-memory", "64GiB", "--network", "100Gbps", "--nodes", "2"]
    machine = json.loads(output(capsys, *SIZES, *words, "--json"))["machine"]
    assert machine["gpu"]["memory_bytes"] == 24 * 10**9
    assert machine["host_memory"] == 64 * 2**30
    assert machine["gpu"]["network"]["value"] == 100e9 / 8 / 8


def test_more_pinned_memory_than_the_pool_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(
        capsys, *SIZES, "--params", "100e9", "--nodes", "2", "--gpu", "a100-80", "--host-memory", "2TB"
    )
    assert "set XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=" in text


def test_the_advised_configuration_is_written(
    capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "ds_config.json"
    output(
        capsys, *SIZES, "--network", "10Gbps", "--nodes", "2", "--accumulation", "4", "--ds-config", str(path)
    )
    assert json.loads(path.read_text()) == {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 4,
        "train_batch_size": 64,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "zero_hpz_partition_size": 8,
            "zero_quantized_weights": True,
            "zero_quantized_gradients": True,
        },
    }


def test_the_picture_is_written(capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path) -> None:
    path = tmp_path / "memory.png"
    output(capsys, *SIZES, "--plot", str(path))
    assert path.read_bytes().startswith(b"\x89PNG")


def test_deepspeed_s_estimate_stands_beside_what_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, *SIZES, "--deepspeed-estimate")
    assert "zero_init=1, stage 3  [needed:" in text and text.count("[needed:") == 8


def test_a_step_of_one_s_own_is_compiled(
    capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_step.py").write_text(
        textwrap.dedent(
            """
            import jax
            from jax.sharding import NamedSharding, PartitionSpec as P

            def build(target):
                sharding = NamedSharding(target.mesh(), P(("node", "local")))
                return jax.jit(lambda x: x.sum()), jax.ShapeDtypeStruct((64, 8), "float32", sharding=sharding)
            """
        )
    )
    monkeypatch.chdir(tmp_path)
    text = output(capsys, "plan", "my_step:build", "--nodes", "2", "--gpus", "4")
    assert "8 x NVIDIA H100" in text and "all-reduce" in text
    found = json.loads(output(capsys, "plan", "my_step:build", "--json"))
    assert found["collectives"][0]["reach"] == "intra"
    assert "no function 'nothing'" in refused(capsys, "plan", "my_step:nothing")
    assert "no function 'build' in a module 'no_module'" in refused(capsys, "plan", "no_module:build")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["plan"], "give --params, --layers, --hidden as well"),
        (["plan", "--params", "1e9"], "give --layers, --hidden as well"),
        ([*SIZES, "--gpu", "h1000"], "no GPU named 'h1000'"),
        ([*SIZES, "--nodes", "0"], "nodes=0"),
        ([*SIZES, "--host-memory", "much"], "'much' is no amount"),
        (["plan", "nowhere.json"], "no model configuration at nowhere.json"),
        (
            [*SIZES, "--params", "500e9", "--gpus", "1", "--host-memory", "1GB", "--ds-config", "x.json"],
            "no configuration to write: nothing fits",
        ),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    assert message in refused(capsys, *words)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("80GB", 80e9),
        ("1.5TiB", 1.5 * 2**40),
        ("100Gbps", 100e9),
        ("4e12", 4e12),
        ("10 Gb/s", 10e9),
        ("0", 0),
    ],
)
def test_amounts(text: str, value: float) -> None:
    assert amount(text) == value


def test_no_amount() -> None:
    with pytest.raises(PlanError, match="write for example 80GB"):
        amount("GB")


def test_report(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(output(capsys, "report", "--json"))
    assert len(found["devices"]) == 8
    assert "pinned_host" in found["devices"][0]["memory_kinds"]
    assert found["host_memory_bytes"] > 0 and found["packages"]["jax"]
    text = output(capsys, "report")
    assert "devices of this one: 8" in text and "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB" in text


def test_report_names_the_pool_s_limit(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "200")
    assert json.loads(output(capsys, "report", "--json"))["pinned_pool_bytes"] == 200 * 2**30


def test_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "zeroj.cli", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "plan" in done.stdout and "report" in done.stdout


def test_inspect_and_convert_a_checkpoint(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine = zj.initialize(lambda p, b: (b @ p["w"]).mean(), {"w": np.ones((8, 3), np.float32)}, config)
    engine.train_batch(np.ones((8, 8), np.float32))
    engine.save_checkpoint(tmp_path / "run", wait=True)
    engine.close()
    assert main(["inspect", str(tmp_path / "run"), "--verify"]) == 0
    assert "(8, 3)" in capsys.readouterr().out
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    assert load_file(tmp_path / "out" / "model.safetensors")["w"].shape == (8, 3)
    assert main(["inspect", str(tmp_path / "nothing")]) == 2
