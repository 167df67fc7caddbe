"""A module whose params lie on disk: devices read their own slices, and nothing else is read."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from safetensors.numpy import save_file

import zeroj as zj
from zeroj.checkpoint.on_read import CastOnRead

pytestmark = pytest.mark.usefixtures("compile_fast")


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(64, 128, use_bias=False, rngs=rngs)
        self.adapter = nnx.Param(jax.random.normal(rngs.params(), (4, 4)))


def name_of(path: str) -> str:
    return path.removesuffix("/value").replace("/", ".")


def stored(folder: pathlib.Path) -> dict[str, np.ndarray]:
    tensors = {"up.kernel": np.random.default_rng(0).normal(size=(64, 128)).astype(np.float32)}
    save_file(tensors, folder / "model.safetensors")
    return tensors


def load(folder: pathlib.Path, **given: Any) -> Any:
    return zj.load_module(
        folder, lambda: Net(nnx.Rngs(3)), names=name_of, fresh=lambda path: "adapter" in path, **given
    )


def test_only_slices_are_read_and_cast(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = stored(tmp_path)
    model = load(tmp_path, dtype="bfloat16")
    read: list[int] = []
    whole = CastOnRead.__getitem__

    def part(self: CastOnRead, index: Any) -> np.ndarray:
        found = whole(self, index)
        read.append(found.size)
        return found

    def never(self: CastOnRead, *args: Any, **kwargs: Any) -> np.ndarray:
        raise AssertionError("the whole tensor was read")

    monkeypatch.setattr(CastOnRead, "__getitem__", part)
    monkeypatch.setattr(CastOnRead, "__array__", never)
    params, tx = nnx.state(model, nnx.Param), optax.sgd(0.1)
    zero = zj.Zero(stage=3, stage3_param_persistence_threshold=0)
    plan = zj.make_plan(params, tx, zj.make_mesh(), zero)
    state = zj.init_state(params, tx, plan)
    assert len(read) == 8 and set(read) == {64 * 128 // 8}
    found = zj.full_params(state, plan)
    wanted = tensors["up.kernel"].astype(jnp.bfloat16)
    np.testing.assert_array_equal(found["up"]["kernel"].get_value(), wanted)
    np.testing.assert_array_equal(found["adapter"].get_value(), Net(nnx.Rngs(3)).adapter[...])


def test_what_is_missing_is_told(tmp_path: pathlib.Path) -> None:
    save_file({"down.kernel": np.zeros((2, 2), np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(zj.CheckpointError, match=r"up/kernel.*no tensor 'up.kernel'"):
        load(tmp_path)
