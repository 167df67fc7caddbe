"""A run of DeepSpeed goes on in zeroj: universal checkpoints, written here by hand from their documented layout."""

from __future__ import annotations

import pathlib
import pickle
import zipfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zeroj as zj
from tests.checkpoint.torch_writer import write_torch_file
from tests.checkpoint.toy import BATCHES, PARAMS, assert_in_place, flat, loss, plan_of, train
from zeroj.checkpoint.torch_file import read_torch_file
from zeroj.spill.tier import is_spilled

TX = optax.adamw(1e-2)


def oracle(steps: int) -> tuple[Any, Any]:
    """Plain optax on one device: params and state after so many steps."""
    params: Any = jax.tree.map(jnp.asarray, PARAMS)
    state = TX.init(params)
    for batch in BATCHES[:steps]:
        grads = jax.grad(loss)(params, batch)
        updates, state = TX.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def torch_name(path: str) -> str:
    return f"module.{path}.weight"


def flip(path: str, value: np.ndarray) -> np.ndarray:
    """PyTorch keeps a Linear's weight transposed."""
    return value.T if path in ("w1", "w2") else value


def write_universal(folder: pathlib.Path, params: Any, moments: Any, steps: int) -> None:
    for path in PARAMS:
        kinds = {"fp32": params[path], "exp_avg": moments.mu[path], "exp_avg_sq": moments.nu[path]}
        for kind, value in kinds.items():
            tensor = np.array(flip(path, np.asarray(value)), order="C")
            write_torch_file(
                folder / "zero" / torch_name(path) / f"{kind}.pt", {"param": tensor, "cat_dim": 0}
            )
        write_torch_file(folder / "zero" / torch_name(path) / "step.pt", steps)


@pytest.fixture(scope="module")
def universal(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("deepspeed")
    params, state = oracle(4)
    write_universal(folder / "global_step4_universal", params, state[0], 4)
    (folder / "latest_universal").write_text("global_step4_universal")
    return folder


@pytest.mark.parametrize(
    ("stage", "mesh", "precision"), [(3, "8", "fp32"), (1, "5", "fp32"), (2, "2x4", "bf16")]
)
def test_the_next_steps_equal_the_oracles(
    universal: pathlib.Path, stage: int, mesh: str, precision: str
) -> None:
    plan = plan_of(stage, mesh, precision, tx=TX)
    state = zj.load_universal(universal, TX, plan, names=torch_name, change=flip)
    assert_in_place(state, plan, TX)
    params, opt = oracle(4)
    found = flat(state, plan)
    assert int(state.step) == int(found["opt_state/0/count"]) == 4
    for path in PARAMS:
        assert np.array_equal(found[f"params/{path}"], np.asarray(params[path]))
        assert np.array_equal(found[f"opt_state/0/nu/{path}"], np.asarray(opt[0].nu[path]))
    if precision == "fp32":
        after, _ = train(state, plan, 4, 6, TX)
        wanted, _ = oracle(6)
        whole = zj.full_params(after, plan)
        for path in PARAMS:
            np.testing.assert_allclose(whole[path], wanted[path], rtol=2e-5, atol=1e-6, err_msg=path)


@pytest.mark.parametrize(("precision", "params"), [("fp32", True), ("bf16", True), ("bf16", False)])
def test_onto_a_plan_with_files(
    universal: pathlib.Path, tmp_path: pathlib.Path, precision: str, params: bool
) -> None:
    """The same values in files as in memory, and the next steps with them."""
    folders = {"nvme": str(tmp_path), "nvme_params": str(tmp_path) if params else None}
    files, plain = plan_of(3, "8", precision, tx=TX, **folders), plan_of(3, "8", precision, tx=TX, tier="cpu")
    state, wanted = (
        zj.load_universal(universal, TX, plan, names=torch_name, change=flip) for plan in (files, plain)
    )
    assert any(map(is_spilled, jax.tree.leaves(state.opt_state)))
    assert any(map(is_spilled, jax.tree.leaves(state.params))) == params
    expected = flat(wanted, plain)
    for name, value in flat(state, files).items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)
    _, losses = train(state, files, 4, 6, TX)
    _, again = train(wanted, plain, 4, 6, TX)
    assert losses == pytest.approx(again, rel=1e-4)


def test_everything_that_does_not_fit_is_listed(universal: pathlib.Path, tmp_path: pathlib.Path) -> None:
    plan = plan_of(3, tx=TX, params={**PARAMS, "new": np.zeros(3, np.float32)})
    with pytest.raises(zj.CheckpointError) as error:
        zj.load_universal(universal, TX, plan, names=torch_name)
    text = str(error.value)
    assert "new: " in text and "w1: " in text and "(36, 5), planned (5, 36)" in text
    assert "module.emb.weight" in text and "names=" in text
    with pytest.raises(zj.CheckpointError, match=r"ds_to_universal"):
        zj.load_universal(tmp_path, TX, plan)


def test_different_step_counts_are_refused(tmp_path: pathlib.Path) -> None:
    params, state = oracle(1)
    write_universal(tmp_path, params, state[0], 1)
    write_torch_file(tmp_path / "zero" / torch_name("b1") / "step.pt", np.asarray(2.0, np.float32))
    with pytest.raises(zj.CheckpointError, match=r"different steps \[1, 2\]"):
        zj.load_universal(tmp_path, TX, plan_of(0, tx=TX), names=torch_name, change=flip)


def test_what_the_checkpoint_has_nothing_for_starts_anew(universal: pathlib.Path) -> None:
    tx = optax.chain(optax.ema(0.9), optax.adamw(1e-2))
    with pytest.warns(UserWarning, match="0/ema/w1"):
        state = zj.load_universal(universal, tx, plan_of(3, tx=tx), names=torch_name, change=flip)
    found = flat(state, plan_of(3, tx=tx))
    assert not found["opt_state/0/ema/w1"].any() and found["opt_state/1/0/mu/w1"].any()


def test_tensors_and_containers_come_back_as_views_of_the_file(tmp_path: pathlib.Path) -> None:
    base = np.arange(24, dtype=np.float32).reshape(4, 6)
    content = {
        "whole": base,
        "view": base[1:3, ::2],
        "turned": base.T,
        "int": np.arange(3),
        "flag": np.array([True, False]),
        "list": [1, 2.5, None, ("a", True)],
        "empty": np.zeros((0, 3), np.float32),
    }
    write_torch_file(tmp_path / "x.pt", content)
    found = read_torch_file(tmp_path / "x.pt")
    assert found["list"] == content["list"]
    for name in ("whole", "view", "turned", "int", "flag", "empty"):
        assert np.array_equal(found[name], content[name]) and found[name].dtype == content[name].dtype, name
    assert not found["whole"].flags.writeable


class Trap:
    """What a malicious file would hold: its loading runs code."""

    def __reduce__(self) -> Any:
        return pathlib.Path.touch, (pathlib.Path("sprung"),)


def test_no_code_of_a_file_is_ever_run(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with zipfile.ZipFile(tmp_path / "x.pt", "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({"param": Trap()}, protocol=2))
    with pytest.raises(zj.CheckpointError, match="no code from a file is ever run"):
        read_torch_file(tmp_path / "x.pt")
    assert not (tmp_path / "sprung").exists()


def test_tensors_that_reach_beyond_their_storage_are_refused(tmp_path: pathlib.Path) -> None:
    write_torch_file(tmp_path / "x.pt", np.arange(64, dtype=np.float32))
    whole = (tmp_path / "x.pt").read_bytes()
    with zipfile.ZipFile(tmp_path / "x.pt") as old, zipfile.ZipFile(tmp_path / "y.pt", "w") as new:
        for name in old.namelist():
            data = old.read(name)
            new.writestr(name, data.replace(b"K@\x85", b"K\x7f\x85") if name.endswith("pkl") else data)
    with pytest.raises(zj.CheckpointError, match="beyond its storage"):
        read_torch_file(tmp_path / "y.pt")
    (tmp_path / "x.pt").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(zj.CheckpointError, match=r"no \.pt file"):
        read_torch_file(tmp_path / "x.pt")
    with pytest.raises(zj.CheckpointError, match="no whole"):
        read_torch_file(tmp_path / "absent.pt")
