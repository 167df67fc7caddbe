"""Program forms and kinds of parameters: name -> (params, loss, batch), small and with odd shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas

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
def fori_loop_slices_remat() -> Form:
    """The stack is handed on by the loop's body, to a region and a call, which take a layer of it by index."""

    def loss(p: Any, x: jax.Array) -> jax.Array:
        @jax.checkpoint
        def body(i: Any, c: jax.Array) -> jax.Array:
            return block(c, jax.jit(lambda p, i: jax.tree.map(lambda w: w[i], p))(p, i))

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


def _offloading(kind: str) -> Any:
    """A policy of the user's own that keeps a layer's input, or its products, in host memory."""
    policies = jax.checkpoint_policies
    if kind == "names":
        return policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=["x"],
            offload_src="device",
            offload_dst="pinned_host",
        )
    return policies.offload_dot_with_no_batch_dims("device", "pinned_host")


def _named_block(x: jax.Array, p: Any) -> jax.Array:
    return block(checkpoint_name(x, "x"), p)


@form
def remat_offloads_named_scan() -> Form:
    f = jax.checkpoint(_named_block, policy=_offloading("names"))
    return stack(L), lambda p, x: square(jax.lax.scan(lambda x, q: (f(x, q), None), x, p)[0]), data()


@form
def remat_offloads_named_layers() -> Form:
    f = jax.checkpoint(_named_block, policy=_offloading("names"))
    return [stack() for _ in range(L)], lambda p, x: square(layers(p, x, f)), data()


@form
def remat_offloads_products_scan() -> Form:
    f = jax.checkpoint(_named_block, policy=_offloading("dots"))
    return stack(L), lambda p, x: square(jax.lax.scan(lambda x, q: (f(x, q), None), x, p)[0]), data()


@form
def remat_offloads_products_layers() -> Form:
    f = jax.checkpoint(_named_block, policy=_offloading("dots"))
    return [stack() for _ in range(L)], lambda p, x: square(layers(p, x, f)), data()


def _product_kernel(x_ref: Any, w_ref: Any, out_ref: Any) -> None:
    out_ref[...] = x_ref[...] @ w_ref[...]


def _kernel_product(x: jax.Array, w: jax.Array) -> jax.Array:
    shape = jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), x.dtype)
    return pallas.pallas_call(_product_kernel, out_shape=shape, interpret=True)(x, w)


@jax.custom_vjp
def _product(x: jax.Array, w: jax.Array) -> jax.Array:
    return _kernel_product(x, w)


_product.defvjp(
    lambda x, w: (_kernel_product(x, w), (x, w)),
    lambda kept, ct: (_kernel_product(ct, kept[1].T), _kernel_product(kept[0].T, ct)),
)


def _pallas_block(x: jax.Array, p: Any) -> jax.Array:
    return x + _product(jnp.tanh(_product(x, p["w"])), p["v"]) + p["b"]


@form
def pallas_kernels_in_a_rematerialised_loop() -> Form:
    f = jax.checkpoint(_pallas_block)
    return stack(L), lambda p, x: square(jax.lax.scan(lambda x, q: (f(x, q), None), x, p)[0]), data()


@form
def custom_batching() -> Form:
    @jax.custom_batching.custom_vmap
    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.tanh(x @ w)

    @f.def_vmap
    def _rule(size: int, batched: list[bool], x: jax.Array, w: jax.Array) -> tuple[jax.Array, bool]:
        assert batched == [True, False]
        return jnp.tanh(jnp.einsum("bi,ij->bj", x, w)), True

    return stack(), lambda p, x: square(jax.vmap(f, (0, None))(x, p["w"]) @ p["v"] + p["b"]), data()
