"""Program forms and kinds of parameters: name -> (params, loss, batch), small and with odd shapes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

Form = tuple[Any, Callable[..., Any], Any]
FORMS: dict[str, Callable[[], Form]] = {}
D, L, B = 8, 3, 16


def form(make: Callable[[], Form]) -> Callable[[], Form]:
    """Registers a form under its function's name."""
    FORMS[make.__name__] = make
    return make


def normal(seed: int, *shape: int, scale: float = 0.5) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * scale, jnp.float32)


def data(*shape: int) -> jax.Array:
    return normal(99, *(shape or (B, D)), scale=1.0)


def square(y: jax.Array) -> jax.Array:
    return jnp.mean(jnp.square(y))


def stack(*shape: int) -> dict[str, jax.Array]:
    return {"w": normal(1, *shape, D, 2 * D), "v": normal(2, *shape, 2 * D, D), "b": normal(3, *shape, D)}


def block(x: jax.Array, p: Any) -> jax.Array:
    return x + jnp.tanh(x @ p["w"]) @ p["v"] + p["b"]


@form
def plain_layers() -> Form:
    return [stack() for _ in range(L)], lambda p, x: square(layers(p, x)), data()


def layers(p: Any, x: jax.Array, f: Callable[..., Any] = block) -> jax.Array:
    for q in p:
        x = f(x, q)
    return x


@form
def remat_layers() -> Form:
    f = jax.checkpoint(block)
    return [stack() for _ in range(L)], lambda p, x: square(layers(p, x, f)), data()


@form
def remat_dots_saveable() -> Form:
    f = jax.checkpoint(block, policy=jax.checkpoint_policies.dots_saveable)
    return [stack() for _ in range(L)], lambda p, x: square(layers(p, x, f)), data()


@form
def remat_dots_no_batch() -> Form:
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    f = jax.checkpoint(block, policy=policy)
    return [stack() for _ in range(L)], lambda p, x: square(layers(p, x, f)), data()


@form
def remat_everything_saveable() -> Form:
    f = jax.checkpoint(block, policy=jax.checkpoint_policies.everything_saveable)
    return [stack() for _ in range(L)], lambda p, x: square(layers(p, x, f)), data()


@form
def remat_names() -> Form:
    def named(x: jax.Array, p: Any) -> jax.Array:
        h = checkpoint_name(jnp.tanh(x @ p["w"]), "h")
        return x + h @ p["v"] + p["b"]

    f = jax.checkpoint(named, policy=jax.checkpoint_policies.save_only_these_names("h"))
    return [stack() for _ in range(L)], lambda p, x: square(layers(p, x, f)), data()


@form
def remat_whole_loss() -> Form:
    inner = jax.checkpoint(lambda p, x: square(layers(p, x, jax.checkpoint(block))))
    return [stack() for _ in range(L)], inner, data()


@form
def nested_jit() -> Form:
    return [stack() for _ in range(L)], lambda p, x: square(layers(p, x, jax.jit(block))), data()


def scanned(f: Callable[..., Any] = block, **options: Any) -> Callable[..., Any]:
    def loss(p: Any, x: jax.Array) -> jax.Array:
        return square(jax.lax.scan(lambda c, q: (f(c, q), None), x, p, **options)[0])

    return loss


@form
def scan_layers() -> Form:
    return stack(L), scanned(), data()


@form
def scan_remat() -> Form:
    return stack(L), scanned(jax.checkpoint(block, prevent_cse=False)), data()


@form
def scan_remat_barrier() -> Form:
    return stack(L), scanned(jax.checkpoint(block)), data()


@form
def scan_reverse_unrolled() -> Form:
    return stack(4), scanned(reverse=True, unroll=2), data()


@form
def scan_casts_inside() -> Form:
    def half(x: jax.Array, p: Any) -> jax.Array:
        p = jax.tree.map(lambda w: w.astype(jnp.bfloat16), p)
        return x + block(x.astype(jnp.bfloat16), p).astype(jnp.float32)

    return stack(L), scanned(half), data()


@form
def scan_casts_before() -> Form:
    def loss(p: Any, x: jax.Array) -> jax.Array:
        p = jax.tree.map(lambda w: w.astype(jnp.bfloat16), p)
        y, _ = jax.lax.scan(lambda c, q: (block(c, q), None), x.astype(jnp.bfloat16), p)
        return square(y.astype(jnp.float32))

    return stack(L), loss, data()


@form
def scan_expression_before() -> Form:
    def loss(p: Any, x: jax.Array) -> jax.Array:
        p = jax.tree.map(lambda w: w * 0.5 + 0.1, p)
        return square(jax.lax.scan(lambda c, q: (block(c, q), None), x, p)[0])

    return stack(L), loss, data()


@form
def scan_consts() -> Form:
    def loss(p: Any, x: jax.Array) -> jax.Array:
        return square(jax.lax.scan(lambda c, _: (block(c, p), None), x, None, length=L)[0])

    return stack(), loss, data()


@form
def scan_carry_param() -> Form:
    def loss(p: Any, x: jax.Array) -> jax.Array:
        def cell(h: jax.Array, x_t: jax.Array) -> tuple[jax.Array, jax.Array]:
            h = jnp.tanh(h @ p["u"] + x_t)
            return h, h

        start = jnp.broadcast_to(p["h0"], (x.shape[0], D))
        h, ys = jax.lax.scan(cell, start, x.transpose(1, 0, 2))
        return square(h) + square(ys)

    return {"u": normal(1, D, D), "h0": normal(2, D)}, loss, data(B, 5, D)


@form
def nested_scans() -> Form:
    def outer(c: jax.Array, q: Any) -> tuple[jax.Array, None]:
        return jax.lax.scan(lambda a, r: (block(a, r), None), c, q)[0], None

    return stack(2, L), lambda p, x: square(jax.lax.scan(outer, x, p)[0]), data()


@form
def scan_returns_params() -> Form:
    def loss(p: Any, x: jax.Array) -> jax.Array:
        y, seen = jax.lax.scan(lambda c, q: (block(c, q), q["b"] * 2), x, p)
        return square(y) + square(seen)

    return stack(L), loss, data()


@form
def fori_loop_slices() -> Form:
    def loss(p: Any, x: jax.Array) -> jax.Array:
        def body(i: Any, c: jax.Array) -> jax.Array:
            return block(c, jax.tree.map(lambda w: w[i], p))

        return square(jax.lax.fori_loop(0, L, body, x))

    return stack(L), loss, data()


@form
def while_forward_only() -> Form:
    def loss(p: Any, x: jax.Array) -> jax.Array:
        def body(s: Any) -> Any:
            return s[0] + 1, jnp.tanh(s[1] @ jax.lax.stop_gradient(p["a"]))

        _, y = jax.lax.while_loop(lambda s: s[0] < 3, body, (0, jax.lax.stop_gradient(x)))
        return square(y @ p["w"])

    return {"a": normal(1, D, D), "w": normal(2, D, 9)}, loss, data()


@form
def cond_on_data() -> Form:
    def loss(p: Any, x: jax.Array) -> jax.Array:
        y = jax.lax.cond(x.sum() > 0, lambda x: x @ p["a"], lambda x: jnp.sin(x @ p["b"]), x)
        return square(y)

    return {"a": normal(1, D, D), "b": normal(2, D, D)}, loss, data()


@form
def switch_on_data() -> Form:
    def loss(p: Any, x: jax.Array) -> jax.Array:
        branches = [lambda x, i=i: x @ p[i] for i in range(3)]
        return square(jax.lax.switch(jnp.int32(jnp.abs(x[0, 0]) * 10) % 3, branches, x))

    return [normal(i, D, D) for i in range(3)], loss, data()


@form
def custom_vjp_of_params() -> Form:
    @jax.custom_vjp
    def matmul(x: jax.Array, w: jax.Array) -> jax.Array:
        return x @ w

    matmul.defvjp(lambda x, w: (x @ w, (x, w)), lambda res, g: (g @ res[1].T, res[0].T @ g))
    return {"w": normal(1, D, 13)}, lambda p, x: square(matmul(jnp.sin(x), p["w"])), data()


@form
def custom_jvp_of_params() -> Form:
    @jax.custom_jvp
    def gate(x: jax.Array, w: jax.Array) -> jax.Array:
        return x * jnp.tanh(w)

    @gate.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        (x, w), (dx, dw) = primals, tangents
        t = jnp.tanh(w)
        return x * t, dx * t + x * (1 - t * t) * dw

    return {"w": normal(1, D)}, lambda p, x: square(gate(x, p["w"])), data()


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
