"""Export to safetensors and import from them, held against the safetensors library."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import zeroj as zj
from tests.checkpoint.processes import pair, said
from tests.checkpoint.toy import PARAMS, TX, flat, normal, plan_of, save_first, train
from zeroj.checkpoint.inspect import convert, inspect

TREE = {
    **PARAMS,
    "blocks": [{"kernel": normal(9, 11)}, {"kernel": normal(9, 11)}],
    "steps": np.arange(5, dtype=np.int32),
}
NAMES = {
    jax.tree_util.keystr(k, simple=True, separator="."): v
    for k, v in jax.tree_util.tree_leaves_with_path(TREE)
}


def read(files: list[pathlib.Path]) -> dict[str, np.ndarray]:
    return {name: value for file in files for name, value in safetensors.numpy.load_file(file).items()}


@pytest.fixture(params=[(3, "bf16"), (1, "fp32"), (0, "fp16")], ids=str)
def run(request: Any, tmp_path: pathlib.Path) -> Any:
    """A state, its plan, and a folder with its checkpoint."""
    stage, precision = request.param
    plan = plan_of(stage, "8", precision, params=TREE)
    state = zj.init_state(TREE, TX, plan)
    with zj.Checkpointer(tmp_path / "run") as checkpoints:
        checkpoints.save(state, plan, {"epoch": 1}, tag="first", wait=True)
    return state, plan, tmp_path / "run"


@pytest.mark.parametrize("shard_bytes", [10**9, 800])
@pytest.mark.parametrize("dtype", [None, "bf16", np.float16])
def test_the_library_reads_what_was_exported(
    run: Any, shard_bytes: int, dtype: Any, tmp_path: pathlib.Path
) -> None:
    state, plan, folder = run
    for name, source, kw in (("state", state, {"plan": plan}), ("folder", folder, {})):
        out = tmp_path / name
        files = zj.export_safetensors(source, out, dtype, shard_bytes=shard_bytes, **kw)
        found = read(files)
        assert found.keys() == NAMES.keys()
        for key, value in found.items():
            wanted = {None: np.float32, "bf16": jnp.bfloat16}.get(dtype, dtype)
            assert value.dtype == (np.int32 if key == "steps" else wanted)
            assert np.array_equal(value, np.asarray(NAMES[key]).astype(value.dtype)), key
        names = sorted(p.name for p in out.iterdir())
        if len(files) == 1:
            assert names == ["model.safetensors"]
        else:
            index = json.loads((out / "model.safetensors.index.json").read_text())
            assert index["weight_map"].keys() == NAMES.keys()
            assert names == sorted({*index["weight_map"].values(), "model.safetensors.index.json"})
            assert index["metadata"]["total_size"] == sum(v.nbytes for v in found.values())
        back = zj.load_safetensors(out, plan)
        assert all(isinstance(v, np.memmap) for v in jax.tree.leaves(back))
        again = zj.init_state(back, TX, plan)
        if dtype is None:
            assert flat(again, plan)["params/w1"].tobytes() == flat(state, plan)["params/w1"].tobytes()


def test_a_new_export_is_not_mixed_with_an_older_one(run: Any, tmp_path: pathlib.Path) -> None:
    state, plan, _ = run
    zj.export_safetensors(state, tmp_path / "out", plan=plan, shard_bytes=800)
    later, _ = train(state, plan, 0, 0)
    zj.export_safetensors(later, tmp_path / "out", "bf16", plan=plan)
    assert zj.load_safetensors(tmp_path / "out", plan)["w1"].dtype == jnp.bfloat16


def test_frozen_and_tied_leaves_and_names(tmp_path: pathlib.Path) -> None:
    params = {**PARAMS, "head": PARAMS["emb"]}
    plan = plan_of(2, params=params, trainable=lambda path, leaf: path != "w2")
    state = zj.init_state(params, TX, plan)
    files = zj.export_safetensors(
        state, tmp_path, plan=plan, frozen=False, tied={"head": "emb"}, names=lambda path: f"model.{path}"
    )
    assert sorted(read(files)) == ["model.b1", "model.emb", "model.gate", "model.scale", "model.w1"]


def test_what_does_not_fit_is_listed(run: Any, tmp_path: pathlib.Path) -> None:
    state, plan, _ = run
    zj.export_safetensors(state, tmp_path / "out", plan=plan)
    other = plan_of(3, params={**PARAMS, "w1": normal(6, 36), "new": normal(3)})
    with pytest.raises(zj.CheckpointError) as error:
        zj.load_safetensors(tmp_path / "out", other)
    assert "new: no tensor 'new'" in str(error.value)
    assert "w1: tensor 'w1' has shape (5, 36), wanted (6, 36)" in str(error.value)
    with pytest.raises(zj.CheckpointError, match="plan=plan"):
        zj.export_safetensors(state, tmp_path / "out")
    with pytest.raises(zj.CheckpointError, match="no dtype int4"):
        zj.export_safetensors(state, tmp_path / "out", "int4", plan=plan)
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "model.safetensors").write_bytes(
        (tmp_path / "out" / "model.safetensors").read_bytes()[:900]
    )
    with pytest.raises(zj.CheckpointError, match="no whole safetensors file"):
        zj.load_safetensors(tmp_path / "cut", plan)
    with pytest.raises(zj.CheckpointError, match=r"holds no .safetensors"):
        zj.load_safetensors(tmp_path, plan)


def test_convert_and_inspect(run: Any, tmp_path: pathlib.Path) -> None:
    _, _, folder = run
    found = read(convert(folder, tmp_path / "out", tag="first"))
    assert all(np.array_equal(found[k], np.asarray(v).astype(found[k].dtype)) for k, v in NAMES.items())
    text = inspect(folder, verify=True)
    for part in (
        "1 checkpoints",
        "tag 'first'",
        "params/blocks/1/kernel",
        "(9, 11)",
        "extra: epoch",
        "N = 8",
        "every chunk",
    ):
        assert part in text
    with pytest.raises(zj.CheckpointError, match="of step 9"):
        inspect(folder, step=9)


@pytest.mark.slow
def test_two_processes_export_what_one_does(tmp_path: pathlib.Path) -> None:
    """L1"""
    save_first(tmp_path)
    for process in pair(tmp_path, "export"):
        said(process)
    two = (tmp_path / "exported" / "model.safetensors").read_bytes()
    zj.export_safetensors(tmp_path, tmp_path / "one")
    assert two == (tmp_path / "one" / "model.safetensors").read_bytes()
