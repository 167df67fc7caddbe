"""A step that is compiled again is told of, with the arguments that made it so."""

from __future__ import annotations

import warnings
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zeroj as zj

pytestmark = pytest.mark.usefixtures("compile_fast")


def loss(params: Any, batch: Any) -> Any:
    return jnp.mean((batch["x"].astype(jnp.float32) @ params["w"]) ** 2) + 0 * jnp.mean(batch["ids"])


def engine() -> zj.Engine:
    params = {"w": np.ones((4, 16), np.float32)}
    config = {"train_batch_size": 8, "zero_optimization": {"stage": 3}}
    return zj.initialize(loss, params, config, tx=optax.adam(0.1))


def batch(length: int = 5, dtype: Any = np.float32) -> Any:
    return {"ids": np.zeros((8, length), np.int32), "x": np.ones((8, 4), dtype)}


def told(run: zj.Engine, value: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.train_batch(value)
    return [str(w.message) for w in caught if "compiled anew" in str(w.message)]


def test_another_shape_and_dtype_are_named_once() -> None:
    run = engine()
    assert [told(run, batch()) for _ in range(3)] == [[], [], []]
    (text,) = told(run, batch(7, np.float16))
    assert "Step 4" in text and "batch/ids is (8, 7) int32" in text and "was (8, 5) int32" in text
    assert "batch/x is (8, 4) float16" in text and "state" not in text
    assert told(run, batch(9)) == [] and told(run, batch()) == []


def test_a_state_that_was_changed_by_hand_is_named() -> None:
    run = engine()
    told(run, batch())
    run.state = run.state._replace(step=jnp.int32(5), skipped=jnp.zeros((), jnp.float32))
    (text,) = told(run, batch())
    assert "Step 2" in text and "state/skipped is () float32" in text and "was () int32" in text
    assert "state/step is () int32" in text and "batch" not in text.split("\n", 1)[1].split("Something")[0]
    assert "params" not in text
