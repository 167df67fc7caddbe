"""Bytes on the wire of a few program forms, read from XLA:GPU's own program for 8 H100s."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import zeroj as zj

pytestmark = pytest.mark.slow
LAYERS, WIDTH = 4, 256
STACK = {"w": (LAYERS, WIDTH, 2 * WIDTH), "v": (LAYERS, 2 * WIDTH, WIDTH)}


def block(x: jax.Array, p: Any) -> jax.Array:
    return x + jnp.tanh(x @ p["w"]) @ p["v"]


def one(p: Any, i: Any) -> Any:
    return jax.tree.map(lambda w: w[i], p)


def unrolled(p: Any, x: jax.Array) -> jax.Array:
    for i in range(LAYERS):
        x = block(x, one(p, i))
    return x


def indexed(p: Any, x: jax.Array) -> jax.Array:
    return jax.lax.fori_loop(0, LAYERS, lambda i, c: block(c, one(p, i)), x)


def scanned(p: Any, x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda c, q: (jax.checkpoint(block)(c, q), None), x, p)[0]


def report(run: Callable[..., Any], accumulation: int = 1, **zero: Any) -> tuple[zj.aot.Report, float]:
    """The compiled step's report, and the bytes that a device sends to gather or scatter all params once."""
    target, tx = zj.aot.Target("h100", nodes=1, gpus_per_node=8), optax.sgd(1e-3)
    params = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in STACK.items()}
    plan = zj.make_plan(
        params, tx, target.mesh(), zj.Zero(stage=3, **zero), precision="bf16", scanned=list(STACK)
    )
    loss = lambda p, x: jnp.mean(jnp.square(run(p, x).astype(jnp.float32)))  # noqa: E731
    step = zj.make_train_step(loss, tx, plan, accumulation)
    split = NamedSharding(plan.mesh, PartitionSpec(plan.zero_axes))
    batch = jax.ShapeDtypeStruct((1024, WIDTH), jnp.bfloat16, sharding=split)
    unit = 2 * LAYERS * 4 * WIDTH * WIDTH * 7 / 8
    return target.compile(step, zj.abstract_state(tx, plan), batch), unit


@pytest.mark.parametrize("run", [unrolled, indexed])
def test_a_slice_of_a_stack_is_gathered_and_reduced_not_the_stack(run: Callable[..., Any]) -> None:
    found, unit = report(run)
    assert found.wire_bytes("reduce-scatter") / unit == pytest.approx(1, rel=5e-3)
    # The last layer, whose backward follows its forward at once, may be gathered once for both.
    assert 2 - 1 / LAYERS <= found.wire_bytes("all-gather") / unit * 1.005 <= 2.01
    largest = max(row.payload for row in found.collectives)
    assert largest <= 2 * 2 * 2 * WIDTH * WIDTH, "two matrices of one layer at most"


def test_a_slice_of_a_stack_on_the_host_is_fetched_slice_by_slice() -> None:
    found, unit = report(indexed, offload_param={"device": "cpu"})
    assert found.wire_bytes("all-gather") / unit == pytest.approx(2, rel=5e-3)
    assert found.wire_bytes("reduce-scatter") / unit == pytest.approx(1, rel=5e-3)


@pytest.mark.parametrize(
    ("run", "accumulation"), [(unrolled, 1), (indexed, 1), (scanned, 1), (indexed, 2), (scanned, 2)]
)
def test_params_that_are_kept_are_gathered_once_a_step(run: Callable[..., Any], accumulation: int) -> None:
    found, unit = report(run, accumulation, reshard_after_forward=False)
    assert found.wire_bytes("all-gather") / unit == pytest.approx(1, rel=5e-3)
    assert found.wire_bytes("reduce-scatter") / unit == pytest.approx(accumulation, rel=5e-3)
    if run is not unrolled:
        gathers = [row for row in found.collectives if row.op == "all-gather"]
        assert max(row.payload for row in gathers) <= 2 * 2 * 2 * WIDTH * WIDTH, "layer by layer, in the loop"


def test_params_that_are_kept_as_int8_travel_so() -> None:
    found, unit = report(scanned, reshard_after_forward=False, zero_quantized_weights=True)
    assert found.wire_bytes("all-gather") / unit == pytest.approx(0.5, rel=0.02)
