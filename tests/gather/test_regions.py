"""Layers that are alike are walked once, and none that differ in anything is taken for another."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zeroj as zj
from tests import oracle
from zeroj import _compat
from zeroj.gather import fingerprint

Block = Callable[[Any, jax.Array], jax.Array]


def block(p: Any, x: jax.Array, gain: float = 1.0, name: str = "block") -> jax.Array:
    with jax.named_scope(name):
        return x + gain * jnp.tanh(x @ p["w"] + p["b"]) @ p["w"].T


def loss_of(blocks: Sequence[Block]) -> Callable[[Any, Any], jax.Array]:
    def loss(params: Any, batch: Any) -> jax.Array:
        x = batch["x"]
        for run, p in zip(blocks, params["blocks"], strict=True):
            x = jax.checkpoint(run)(p, x)
        return jnp.mean((x @ params["out"]) ** 2)

    return loss


def params_of(count: int, width: int = 16) -> Any:
    rng = np.random.default_rng(3)
    blocks = [
        {"w": oracle.normal(rng, width, width, scale=0.2), "b": oracle.normal(rng, width)}
        for _ in range(count)
    ]
    return {"blocks": blocks, "out": oracle.normal(rng, width, 3)}


def lowered(blocks: Sequence[Block]) -> str:
    params, tx = params_of(len(blocks)), optax.sgd(0.1)
    zero = zj.Zero(stage=3, stage3_param_persistence_threshold=0)
    plan = zj.make_plan(params, tx, zj.make_mesh(), zero)
    batch = {"x": jax.ShapeDtypeStruct((16, 16), jnp.float32)}
    step = zj.make_train_step(loss_of(blocks), tx, plan)
    return step.lower(zj.abstract_state(tx, plan), batch).as_text()


def functions(text: str) -> int:
    """Functions that were made of regions: their name is that in regions.py."""
    return text.count("func.func private @layer")


def test_layers_that_are_alike_are_one_function() -> None:
    """Of the backward pass; the forward pass is no region, for nothing in it is recomputed."""
    few, many = (lowered([block] * count) for count in (4, 8))
    assert functions(few) == functions(many) <= 3  # the first and the last may begin and end differently
    assert many.count("call @layer") - few.count("call @layer") == 4
    scatters = [text.count("stablehlo.reduce_scatter") for text in (few, many)]
    assert scatters[0] == scatters[1] > 0


def scaled(gain: Any) -> Block:
    return functools.partial(block, gain=gain)


def constant(value: np.ndarray) -> Block:
    return lambda p, x: block(p, x) * value


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _slope(gain: float, x: jax.Array) -> jax.Array:
    return x


_slope.defvjp(lambda gain, x: (x, None), lambda gain, _, g: (gain * g,))


def sloped(gain: float) -> Block:
    """A layer whose forward pass says nothing of how its backward pass differs."""
    return lambda p, x: block(p, _slope(gain, x))


#: Layers that differ in one thing each.
DIFFERENT: dict[str, list[Block]] = {
    "literals": [scaled(0.5), scaled(2.0), scaled(0.5), scaled(-1.0)],
    "arrays": [constant(np.full(16, v, np.float32)) for v in (0.5, 2.0, 0.5, -1.0)],
    "functions": [lambda p, x: jnp.sin(block(p, x)), block, lambda p, x: jnp.cos(block(p, x)), block],
    "rules": [sloped(1.0), sloped(3.0), sloped(1.0), sloped(-2.0)],
    "axes": [
        lambda p, x, a=axis: block(p, x) - jnp.mean(block(p, x), axis=a, keepdims=True) for axis in (0, 1)
    ]
    * 2,
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_layers_that_differ_are_not_mixed_up(what: str) -> None:
    loss = loss_of(DIFFERENT[what])
    params, rng = params_of(4), np.random.default_rng(1)
    batch = {"x": oracle.normal(rng, 16, 16)}
    zero = zj.Zero(stage=3, stage3_param_persistence_threshold=0)
    devices = 1 if what == "axes" else 8  # a mean over dim 0 is one over the device's slice of the batch
    plan = zj.make_plan(params, optax.sgd(0.1), oracle.mesh_of(devices), zero)
    found = jax.jit(zj.value_and_grad(loss, plan))(zj.init_state(params, optax.sgd(0.1), plan).params, batch)
    wanted = jax.jit(jax.value_and_grad(loss))(params, batch)
    assert oracle.distance(found, wanted) <= 1e-6


def test_layers_with_names_of_their_own_keep_them() -> None:
    text = lowered([functools.partial(block, name=f"block_{i}") for i in range(3)])
    assert functions(text) == 3


def test_fingerprints_tell_programs_apart() -> None:
    def of(fun: Callable[..., Any], *shape: int) -> Any:
        return fingerprint.of_program(_compat.trace(fun, jnp.ones(shape))[0].jaxpr)

    assert of(jnp.sin, 3) == of(lambda x: jnp.sin(x), 3) != of(jnp.cos, 3)
    assert of(jnp.sin, 3) != of(jnp.sin, 4)
    assert of(lambda x: x * 2.0, 3) != of(lambda x: x * 3.0, 3)
    assert of(lambda x: x - 2 * jnp.sin(x), 3) != of(lambda x: jnp.sin(x) - 2 * x, 3)
    assert of(jax.jit(lambda x: x + 1), 3) != of(jax.jit(lambda x: x + 2), 3)
    assert of(lambda x: jax.lax.scan(lambda c, _: (c * 2, None), x, length=3)[0], 3) != of(
        lambda x: jax.lax.scan(lambda c, _: (c * 2, None), x, length=4)[0], 3
    )
