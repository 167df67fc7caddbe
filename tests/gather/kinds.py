"""Kinds of parameters and whole models: more of the table of ``forms.py``."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tests.gather.forms import FORMS, B, D, Form, L, block, data, form, normal, square, stack

__all__ = ["FORMS"]


@form
def vmapped_heads() -> Form:
    def loss(p: Any, x: jax.Array) -> jax.Array:
        return square(jax.vmap(lambda w, b: jnp.tanh(x @ w + b))(p["w"], p["b"]))

    return {"w": normal(1, 5, D, D), "b": normal(2, 5, D)}, loss, data()


@form
def attention() -> Form:
    def loss(p: Any, x: jax.Array) -> jax.Array:
        q, k, v = jnp.split(x @ p["qkv"], 3, -1)
        heads = [t.reshape(*t.shape[:2], 2, D // 2) for t in (q, k, v)]
        y = jax.nn.dot_product_attention(*heads, is_causal=True).reshape(x.shape)
        return square(x + y @ p["out"])

    return {"qkv": normal(1, D, 3 * D), "out": normal(2, D, D)}, loss, data(B, 4, D)


@form
def tied_embedding() -> Form:
    def loss(p: Any, tokens: jax.Array) -> jax.Array:
        h = jnp.tanh(p["emb"][tokens] @ p["w"])
        logits = h @ p["emb"].T
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], -1))

    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 13, (B, 5)))
    return {"emb": normal(1, 13, D), "w": normal(2, D, D)}, loss, tokens


@form
def one_hot_embedding() -> Form:
    def loss(p: Any, tokens: jax.Array) -> jax.Array:
        return square(jax.nn.one_hot(tokens, 13) @ p["emb"])

    return {"emb": normal(1, 13, D)}, loss, jnp.arange(B) % 13


@form
def used_never_and_twice() -> Form:
    def loss(p: Any, x: jax.Array) -> jax.Array:
        return square(jnp.tanh(x @ p["twice"]) @ p["twice"])

    return {"twice": normal(1, D, D), "never": normal(2, 11, 7)}, loss, data()


@form
def lora() -> Form:
    def loss(p: Any, x: jax.Array) -> jax.Array:
        return square(x @ (p["w"] + p["a"] @ p["b"] * 2.0))

    return {"w": normal(1, D, 16), "a": normal(2, D, 2), "b": normal(3, 2, 16)}, loss, data()


@form
def weight_norm() -> Form:
    def loss(p: Any, x: jax.Array) -> jax.Array:
        w = p["g"] * p["v"] / jnp.linalg.norm(p["v"], axis=0, keepdims=True)
        return square(x @ w)

    return {"g": normal(1, 16), "v": normal(2, D, 16)}, loss, data()


@form
def sliced_stack() -> Form:
    def loss(p: Any, x: jax.Array) -> jax.Array:
        for i in range(L):
            x = block(x, jax.tree.map(lambda w, i=i: w[i], p))
        return square(x)

    return stack(L), loss, data()


@form
def concatenated() -> Form:
    def loss(p: Any, x: jax.Array) -> jax.Array:
        return square(x @ jnp.concatenate([p["q"], p["k"], p["v"]], 1))

    return {k: normal(i, D, n) for i, (k, n) in enumerate({"q": 8, "k": 4, "v": 5}.items())}, loss, data()


@form
def regularised() -> Form:
    def loss(p: Any, x: jax.Array) -> jax.Array:
        return square(x @ p["w"]) + 0.1 * sum(jnp.sum(w * w) for w in jax.tree.leaves(p))

    return {"w": normal(1, D, 9), "u": normal(2, 17)}, loss, data()


@form
def scalars_and_zero_size() -> Form:
    def loss(p: Any, x: jax.Array) -> jax.Array:
        return square(x @ p["w"]) * p["s"] + jnp.sum(p["none"]) + jnp.sum(p["empty"] @ p["w"])

    params = {"w": normal(1, D, 9), "s": jnp.float32(2), "none": jnp.zeros((0,)), "empty": jnp.zeros((0, D))}
    return params, loss, data()


@form
def mixture_of_experts() -> Form:
    def loss(p: Any, x: jax.Array) -> jax.Array:
        gates = jax.nn.softmax(x @ p["router"])
        return square(jnp.einsum("be,bd,edf->bf", gates, x, p["experts"]))

    return {"router": normal(1, D, 4), "experts": normal(2, 4, D, D)}, loss, data()


@form
def ragged_experts() -> Form:
    def loss(p: Any, x: jax.Array) -> jax.Array:
        chosen = jnp.argmax(x @ p["router"], -1)
        order = jnp.argsort(chosen)
        y = jax.lax.ragged_dot(x[order], p["experts"], jnp.bincount(chosen, length=4))
        return square(y) + 0.01 * square(x @ p["router"])

    return {"router": normal(1, D, 4), "experts": normal(2, 4, D, D)}, loss, data()


@form
def linen_model() -> Form:
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x = nn.gelu(nn.Dense(19)(nn.LayerNorm()(x)))
            return nn.Dense(3, use_bias=False)(nn.remat(nn.Dense)(D)(x))

    model = Model()
    return model.init(jax.random.key(0), data()), lambda p, x: square(model.apply(p, x)), data()


@form
def nnx_model() -> Form:
    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.layers = nnx.List([nnx.Linear(D, D, rngs=rngs) for _ in range(2)])
            self.norm = nnx.LayerNorm(D, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            for layer in self.layers:
                x = x + jax.nn.gelu(layer(self.norm(x)))
            return x

    definition, params = nnx.split(Model(nnx.Rngs(0)), nnx.Param)
    return params, lambda p, x: square(nnx.merge(definition, p)(x)), data()


@form
def dataclass_module() -> Form:
    @dataclasses.dataclass
    class Affine:
        w: Any
        b: Any

        def __call__(self, x: jax.Array) -> jax.Array:
            return x @ self.w + self.b

    jax.tree_util.register_dataclass(Affine, ["w", "b"], [])
    return (
        [Affine(normal(1, D, 9), normal(2, 9)), Affine(normal(3, 9, 4), normal(4, 4))],
        lambda p, x: square(p[1](jnp.tanh(p[0](x)))),
        data(),
    )


@form
def convolution() -> Form:
    def loss(p: Any, x: jax.Array) -> jax.Array:
        y = jax.lax.conv_general_dilated(
            x, p["k"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return square(jax.nn.relu(y + p["b"]))

    return {"k": normal(1, 3, 3, 4, 8), "b": normal(2, 8)}, loss, data(B, 5, 5, 4)


@form
def prepared_in_nested_jit() -> Form:
    prepare = jax.jit(lambda w: w.T)
    return {"w": normal(1, 16, D)}, lambda p, x: square(jnp.sin(x @ prepare(p["w"]))), data()


@form
def indexed_in_rematerialised_loop() -> Form:
    def loss(p: Any, x: jax.Array) -> jax.Array:
        def body(i: Any, c: jax.Array) -> jax.Array:
            return jax.checkpoint(block)(c, jax.tree.map(lambda w: w.astype(jnp.float32)[i], p))

        return square(jax.lax.fori_loop(0, L, body, x))

    return stack(L), loss, data()


@form
def slices_of_a_scanned_stack() -> Form:
    def body(c: jax.Array, q: Any) -> tuple[jax.Array, None]:
        for i in (1, 0):
            c = block(c, jax.tree.map(lambda w, i=i: w[i], q))
        return c, None

    return stack(L, 2), lambda p, x: square(jax.lax.scan(body, x, p)[0]), data()


@form
def index_that_differs_between_devices() -> Form:
    def loss(p: Any, x: jax.Array) -> jax.Array:
        i = jnp.int32(jnp.sum(jnp.abs(x)) * 7) % 5
        return square(x @ p["w"][i]) + square(jax.lax.fori_loop(0, L, lambda _, c: jnp.sin(c @ p["v"][i]), x))

    return {"w": normal(1, 5, D, D), "v": normal(2, 5, D, D)}, loss, data()
