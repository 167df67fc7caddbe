"""The user's arrays stay the user's: a state made from them neither takes them over nor changes with them."""

from __future__ import annotations

import warnings
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zeroj as zj

pytestmark = pytest.mark.usefixtures("compile_fast")


def aligned(shape: tuple[int, ...], value: float) -> np.ndarray:
    """An array at an address that a CPU device can use as it is."""
    size = int(np.prod(shape)) * 4
    raw = np.zeros(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    array = raw[start : start + size].view(np.float32).reshape(shape)
    array[...] = value
    return array


@pytest.mark.parametrize("stage, precision", ((0, "fp32"), (3, "fp32"), (2, "bf16"), (3, "bf16")))
def test_a_state_shares_nothing_with_the_users_arrays(stage: int, precision: str) -> None:
    given: dict[str, Any] = {
        "a": aligned((64, 16), 1.0),
        "b": jnp.full((64, 16), 2.0),
        "c": aligned((8,), 3.0),
    }
    before = {name: np.array(value) for name, value in given.items()}
    tx = optax.adam(0.1)
    zero = zj.Zero(stage=stage, param_persistence_threshold=0)
    plan = zj.make_plan(
        given, tx, zj.make_mesh(), zero, precision=zj.Precision(precision), trainable=lambda p, x: p != "b"
    )

    def loss(params: Any, batch: Any) -> Any:
        return sum(jnp.sum(x.astype(jnp.float32) ** 2) for x in params.values()) * jnp.mean(batch)

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as a donated buffer of which nothing could be made
        state = zj.init_state(given, tx, plan)
        stored = zj.full_params(state, plan)
    given["a"][...], given["c"][...] = 7.0, 7.0
    for name, value in zj.full_params(state, plan).items():
        np.testing.assert_array_equal(value, before[name])
        np.testing.assert_array_equal(stored[name], before[name])
    state, _ = zj.make_train_step(loss, tx, plan)(state, np.ones((8,), np.float32))
    assert float(jnp.mean(state.params["a"])) == pytest.approx(0.9, abs=0.01)
    assert (given["a"] == 7.0).all() and (given["c"] == 7.0).all()
    np.testing.assert_array_equal(given["b"], before["b"])
