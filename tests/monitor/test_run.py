"""What the engine tells about a run, key by key of the config."""

from __future__ import annotations

import csv
import gc
import json
import re
import sys
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import zeroj as zj
from tests import oracle

pytestmark = pytest.mark.usefixtures("compile_fast")


def loss(params: Any, batch: Any) -> jax.Array:
    return jnp.mean((batch["x"] @ params["w"]) ** 2)


def engine(**sections: Any) -> zj.Engine:
    config = {
        "train_batch_size": 16,
        "gradient_clipping": 0,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "SGD", "params": {"lr": 0.25}},
    }
    params = {"w": np.ones((24, 8), np.float32)}
    return zj.initialize(loss, params, config | sections, mesh=oracle.mesh_of(8))


def train(run: zj.Engine, steps: int) -> list[dict[str, float]]:
    rng = np.random.default_rng(0)
    seen = []
    for _ in range(steps):
        metrics = run.train_batch({"x": oracle.normal(rng, 16, 24, scale=0.1)})
        seen.append({key: float(metrics[key]) for key in ("loss", "grad_norm", "loss_scale")})
    run.close()
    return seen


def rows(path: Path) -> list[tuple[int, float]]:
    with path.open() as file:
        return [(int(step), float(value)) for step, value in list(csv.reader(file))[1:]]


def test_csv_holds_every_step_against_examples_seen(tmp_path: Path) -> None:
    section = {"csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}}
    seen = train(engine(**section), 3)
    folder = tmp_path / "job"
    assert rows(folder / "Train_Samples_train_loss.csv") == [
        (16 * (i + 1), pytest.approx(m["loss"])) for i, m in enumerate(seen)
    ]
    assert (folder / "Train_Samples_train_loss.csv").read_text().startswith("step,train_loss")
    assert [v for _, v in rows(folder / "Train_Samples_lr.csv")] == [0.25] * 3
    assert [v for _, v in rows(folder / "Train_Samples_grad_norm.csv")] == [
        pytest.approx(m["grad_norm"]) for m in seen
    ]
    train(engine(**section), 1)  # a resumed run appends
    text = (folder / "Train_Samples_train_loss.csv").read_text()
    assert text.count("step,train_loss") == 1 and len(text.splitlines()) == 5


def test_only_process_0_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = {"csv_monitor": {"enabled": True, "output_path": str(tmp_path)}}
    config = zj.Config.load({"train_batch_size": 16, **section})
    from zeroj.monitor.events import make_writers

    monkeypatch.setattr(jax, "process_index", lambda *_: 1)
    assert make_writers(config) == [] and list(tmp_path.iterdir()) == []


def test_tensorboard_gets_the_same_scalars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, float, int]] = []
    closed: list[str] = []

    class SummaryWriter:
        def __init__(self, folder: str) -> None:
            self.folder = folder

        def add_scalar(self, name: str, value: float, step: int) -> None:
            calls.append((name, value, step))

        def close(self) -> None:
            closed.append(self.folder)

    monkeypatch.setitem(sys.modules, "tensorboardX", types.SimpleNamespace(SummaryWriter=SummaryWriter))
    seen = train(engine(tensorboard={"enabled": True, "output_path": str(tmp_path), "job_name": "j"}), 2)
    losses = [c for c in calls if c[0] == "Train/Samples/train_loss"]
    assert losses == [("Train/Samples/train_loss", seen[i]["loss"], 16 * (i + 1)) for i in range(2)]
    assert closed == [str(tmp_path / "j")]


def test_wandb_gets_the_same_scalars(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    logged: list[tuple[int, dict[str, float]]] = []

    class Run:
        def log(self, values: dict[str, float], step: int) -> None:
            logged.append((step, values))

        def finish(self) -> None:
            started.append("finished")

    def init(**options: Any) -> Run:
        started.append(options)
        return Run()

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    seen = train(engine(wandb={"enabled": True, "project": "p", "group": "g", "team": "t"}), 2)
    assert started == [{"project": "p", "group": "g", "entity": "t"}, "finished"]
    assert [step for step, _ in logged] == [16, 32]
    assert [v["Train/Samples/train_loss"] for _, v in logged] == [m["loss"] for m in seen]


@pytest.mark.parametrize("section", ("tensorboard", "wandb"))
def test_an_absent_package_is_named_with_its_extra(section: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = {"tensorboard": "tensorboardX", "wandb": "wandb"}[section]
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(zj.ConfigError, match=rf"{section}.enabled needs {package}: .*zeroj\[{section}\]"):
        engine(**{section: {"enabled": True}})


def test_steps_per_print(capsys: pytest.CaptureFixture[str]) -> None:
    seen = train(engine(steps_per_print=2), 5)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["step 2", "step 4"]
    assert f"loss {seen[1]['loss']:.6g}" in lines[0] and "lr 0.25" in lines[0] and "samples/s" in lines[0]
    train(engine(), 2)
    assert capsys.readouterr().out == ""


def test_wall_clock_breakdown_names_all_four_parts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    watched = engine(
        wall_clock_breakdown=True, csv_monitor={"enabled": True, "output_path": str(tmp_path), "job_name": ""}
    )
    train(watched, 3)
    lines = [line for line in capsys.readouterr().out.splitlines() if "time in ms" in line]
    assert len(lines) == 3
    found = [
        dict(re.findall(r"(data|transfer|compile|step) ([\d.]+)", line.split(": ", 2)[2])) for line in lines
    ]
    assert set(found[0]) == {"transfer", "compile", "step"}  # nobody waited for the first batch
    assert set(found[1]) == set(found[2]) == {"data", "transfer", "step"}
    assert float(found[0]["compile"]) > float(found[2]["step"]) > 0
    assert [at for at, _ in rows(tmp_path / "Train_Samples_elapsed_time_ms_compile.csv")] == [16]
    assert len(rows(tmp_path / "Train_Samples_elapsed_time_ms_step.csv")) == 3


def test_flops_are_those_of_the_program(tmp_path: Path) -> None:
    target = tmp_path / "flops.txt"
    watched = engine(flops_profiler={"enabled": True, "profile_step": 2, "output_file": str(target)})
    train(watched, 1)
    assert not target.exists()
    watched = engine(flops_profiler={"enabled": True, "profile_step": 2, "output_file": str(target)})
    train(watched, 2)
    text, program = target.read_text(), watched.monitor.program
    # each device: (2, 24) @ (24, 8) forward, (24, 2) @ (2, 8) for the gradient
    assert program is not None and program.matrix_flops == 2 * 2 * (2 * 24 * 8)
    assert program.xla_flops >= program.matrix_flops
    assert "of step 2" in text and "1.54 kFLOP" in text and "12.29 kFLOP" in text and "192" in text


def test_flops_of_a_loop_are_multiplied_out(capsys: pytest.CaptureFixture[str]) -> None:
    def scanned(params: Any, batch: Any) -> jax.Array:
        def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(x @ w), None

        return jnp.mean(jax.lax.scan(layer, batch["x"], params["w"])[0] ** 2)

    config = {
        "train_batch_size": 16,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "flops_profiler": {"enabled": True},
    }
    run = zj.initialize(scanned, {"w": np.zeros((6, 24, 24), np.float32)}, config)
    train(run, 1)
    one = 2 * 2 * 24 * 24
    assert run.monitor.program is not None
    # six layers forward and twice that backward, less the gradient of the batch, which nobody asks for
    assert 17 * one <= run.monitor.program.matrix_flops <= 18 * one
    assert "flops profile of step 1" in capsys.readouterr().out


def test_comms_logger_lists_the_collectives_of_the_step(capsys: pytest.CaptureFixture[str]) -> None:
    watched = engine(comms_logger={"enabled": True})
    train(watched, 2)
    text = capsys.readouterr().out
    assert text.count("collective") == 1  # once, not every step
    program = watched.monitor.program
    assert program is not None
    gathered = [c for c in program.collectives if c.op == "all-gather"]
    assert {(c.payload, c.group_size, c.reach) for c in gathered} == {(24 * 8 * 4, 8, "inter")}
    line = next(line for line in text.splitlines() if line.startswith("all-gather"))
    assert line.split()[:6] == ["all-gather", "f32", "8", "inter", "768", "B"]
    some = engine(comms_logger={"enabled": True, "prof_all": False, "prof_ops": ["all_gather", "all_to_all"]})
    train(some, 1)
    text = capsys.readouterr().out
    assert "all-gather" in text and "reduce-scatter" not in text and "no all-to-all in the step" in text


def test_memory_breakdown_counts_live_arrays(capsys: pytest.CaptureFixture[str]) -> None:
    from zeroj.monitor.memory import host_bytes, live_bytes

    spread = jax.device_put(
        np.zeros((8, 1 << 10), np.float32), NamedSharding(zj.make_mesh(), PartitionSpec("local"))
    )
    gc.collect()
    before = sum(live_bytes().values())
    assert sum(live_bytes().values()) == before, "counting makes nothing that counts"
    assert spread.nbytes > 0
    kept = jax.device_put(np.zeros(1 << 20, np.float32), jax.devices()[0])
    assert sum(live_bytes().values()) - before == kept.nbytes
    now, most = host_bytes()
    assert 1e7 < now <= most * 1.01
    train(engine(memory_breakdown=True, steps_per_print=2), 2)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("memory")]
    assert [line.split(":")[0] for line in lines] == [
        "memory at the start",
        "memory after the first step",
        "memory after step 2",
    ]
    assert "device" in lines[0] and "process" in lines[0]


def test_dump_state_prints_every_value_in_force_and_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    watched = engine(dump_state=True)
    text = capsys.readouterr().out
    data, end = json.JSONDecoder().raw_decode(text)
    assert data == watched.config.resolved()
    assert str(watched.plan) in text[end:]
