"""Random losses over random parameter trees, as data: what Hypothesis draws, and what plain JAX runs.

A program is a tuple of steps, each of which maps activations (batch, width) to the same shape. A step is the
name of a leaf step (``LEAVES``: it has params of its own, or uses shared ones) or ``(wrapper, steps)``: steps
inside a scan, a rematerialised region, a branch, a custom rule. ``init`` makes params for a program,
``loss_of`` the loss; both follow the same tree, so a failing example reads as the program it is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax.ad_checkpoint import checkpoint_name

Steps = tuple[Any, ...]
#: (rng of numpy, width) -> params; (params, shared params, activations) -> (activations, penalty).
Leaf = tuple[Callable[..., Any], Callable[..., Any]]
LEAVES: dict[str, Leaf] = {}
REPEATS = 3


def normal(r: np.random.Generator, *shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.asarray(r.normal(size=shape) / np.sqrt(max(shape[-2:-1] or (1,))), dtype)


def leaf(make: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a leaf step, with the function that makes its params."""

    def register(run: Callable[..., Any]) -> Callable[..., Any]:
        LEAVES[run.__name__] = (make, run)
        return run

    return register


def nothing(r: np.random.Generator, d: int) -> dict[str, np.ndarray]:
    return {}


def square(r: np.random.Generator, d: int) -> dict[str, np.ndarray]:
    return {"w": normal(r, d, d)}


def wide(r: np.random.Generator, d: int) -> dict[str, np.ndarray]:
    return {"w": normal(r, d, 13), "b": normal(r, 13), "v": normal(r, 13, d)}


def vector(r: np.random.Generator, d: int) -> dict[str, np.ndarray]:
    return {"g": np.float32(1) + np.float32(0.1) * normal(r, d)}


@leaf(wide)
def dense(p: Any, shared: Any, x: jax.Array) -> Any:
    return x + jnp.tanh(x @ p["w"] + p["b"]) @ p["v"]


@leaf(square)
def used_twice(p: Any, shared: Any, x: jax.Array) -> Any:
    return jnp.tanh(x @ p["w"]) @ p["w"].T


@leaf(nothing)
def tied(p: Any, shared: Any, x: jax.Array) -> Any:
    return jnp.sin(x @ shared["table"].T[:, :9]) @ shared["table"][:9]


@leaf(nothing)
def lookup(p: Any, shared: Any, x: jax.Array) -> Any:
    return x + shared["table"][jnp.int32(jnp.abs(x[:, 0]) * 7) % shared["table"].shape[0]]


@leaf(nothing)
def tied_square(p: Any, shared: Any, x: jax.Array) -> Any:
    return jnp.tanh(x @ shared["square"]) + x


@leaf(wide)
def prepared(p: Any, shared: Any, x: jax.Array) -> Any:
    w, v = jax.jit(lambda p: (p["w"].T * 0.5, p["v"].T + 0.1))(p)
    return jnp.tanh(x @ w.T) @ v.T + x


@leaf(vector)
def norm(p: Any, shared: Any, x: jax.Array) -> Any:
    return x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 0.1) * p["g"]


@leaf(lambda r, d: {"w": normal(r, d, d), "a": normal(r, d, 2), "b": normal(r, 2, d), "s": normal(r)})
def low_rank(p: Any, shared: Any, x: jax.Array) -> Any:
    return jnp.tanh(x @ (jax.lax.stop_gradient(p["w"]) + p["a"] @ p["b"] * p["s"]))


@leaf(lambda r, d: {"g": normal(r, d), "v": normal(r, d, d)})
def weight_norm(p: Any, shared: Any, x: jax.Array) -> Any:
    return x @ (p["g"] * p["v"] / (0.1 + jnp.linalg.norm(p["v"], axis=0)))


@leaf(lambda r, d: {"q": normal(r, d, 4), "k": normal(r, d, 5), "out": normal(r, 11, d)})
def concatenated(p: Any, shared: Any, x: jax.Array) -> Any:
    return jnp.tanh(x @ jnp.concatenate([p["q"], p["k"], p["q"][:, 1:3]], 1)) @ p["out"] + x


@leaf(lambda r, d: {"w": normal(r, 3, 2 * d * d)})
def reshaped(p: Any, shared: Any, x: jax.Array) -> Any:
    w = p["w"].reshape(6, d := x.shape[1], d)
    return jnp.tanh(jnp.einsum("bd,nde->be", x, w[::2])) + x @ w[1].T


@leaf(lambda r, d: {"w": normal(r, 2 * d + 1, d + 3)})
def sliced(p: Any, shared: Any, x: jax.Array) -> Any:
    d = x.shape[1]
    return jnp.sin(x @ p["w"][1 : 1 + d, 3:]) - x @ jnp.flip(p["w"], 0)[:d, :d] * 0.5


@leaf(lambda r, d: {"w": normal(r, 4, d, d)})
def sliced_stack(p: Any, shared: Any, x: jax.Array) -> Any:
    for i in (0, 2, 0):
        x = jnp.tanh(x @ p["w"][i]) + x * 0.5
    return x


@leaf(lambda r, d: {"w": normal(r, 4, d, d)})
def traced_index(p: Any, shared: Any, x: jax.Array) -> Any:
    return x @ p["w"][jnp.int32(jnp.sum(jnp.abs(x)) * 5) % 4] + x


@leaf(lambda r, d: {"w": normal(r, d, d), "half": normal(r, d, d, dtype=jnp.bfloat16)})
def casts(p: Any, shared: Any, x: jax.Array) -> Any:
    w = p["w"].astype(jnp.bfloat16).astype(jnp.float32) + p["half"].astype(jnp.float32)
    return jnp.tanh(x @ w)


@leaf(lambda r, d: {"router": normal(r, d, 4), "experts": normal(r, 4, d, d)})
def experts(p: Any, shared: Any, x: jax.Array) -> Any:
    return jnp.einsum("be,bd,edf->bf", jax.nn.softmax(x @ p["router"]), x, p["experts"])


@leaf(lambda r, d: {"order": np.asarray(r.permutation(d), np.int32), "keep": np.arange(d) % 3 > 0})
def integers(p: Any, shared: Any, x: jax.Array) -> Any:
    return jnp.where(p["keep"], x[:, p["order"]], x * 0.5)


@leaf(lambda r, d: {"w": normal(r, d, d), "u": normal(r, 17)})
def penalised(p: Any, shared: Any, x: jax.Array) -> Any:
    return x @ jnp.tanh(p["w"] * 2 + 0.1), 0.1 * jnp.sum(p["u"] ** 2) + jnp.sum(
        jax.nn.softmax(p["w"])[0] ** 2
    )


@leaf(lambda r, d: {"s": normal(r), "none": np.zeros((0, d), np.float32), "never": normal(r, 11, 7)})
def scalars(p: Any, shared: Any, x: jax.Array) -> Any:
    return x * p["s"] + jnp.sum(p["none"])


@leaf(lambda r, d: {"u": normal(r, d, d), "h": normal(r, d)})
def recurrent(p: Any, shared: Any, x: jax.Array) -> Any:
    def cell(h: jax.Array, t: jax.Array) -> tuple[jax.Array, jax.Array]:
        h = jnp.tanh(h @ p["u"] + x * t)
        return h, jnp.sum(h * p["h"])

    h, ys = jax.lax.scan(cell, jnp.broadcast_to(p["h"], x.shape), jnp.arange(3.0))
    return h, 0.01 * jnp.mean(ys) / x.shape[0]


@leaf(lambda r, d: {"w": normal(r, d, d)})
def where_constant(p: Any, shared: Any, x: jax.Array) -> Any:
    mask = jnp.asarray(np.tri(x.shape[1], dtype=bool))
    return x @ jnp.where(mask, p["w"], 0.0) + jnp.cumsum(p["w"], 0)[-1]


@leaf(lambda r, d: {"w": normal(r, d, 2, d), "n": normal(r, d)})
def named(p: Any, shared: Any, x: jax.Array) -> Any:
    h = checkpoint_name(jnp.einsum("bd,dhe->bhe", x, p["w"]), "h")
    return jnp.tanh(h).sum(1) + checkpoint_name(p["n"] * 2, "n")


# ------------------------------------------------------------------------------------------------ wrappers

Body = Callable[[Any, Any, jax.Array], tuple[jax.Array, jax.Array]]
WRAPPERS: dict[str, Callable[[Body, Any, Any, jax.Array], tuple[jax.Array, jax.Array]]] = {}
STACKED = {"scan", "scan_reverse", "scan_cast", "scan_scaled", "unrolled", "fori", "vmap", "scan_ys", "map"}
POLICIES = {
    "remat": None,
    "remat_dots": jax.checkpoint_policies.dots_saveable,
    "remat_no_batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "remat_everything": jax.checkpoint_policies.everything_saveable,
    "remat_names": jax.checkpoint_policies.save_only_these_names("h", "n"),
    "remat_not_names": jax.checkpoint_policies.save_anything_except_these_names("n"),
}


def wrapper(run: Callable[..., Any]) -> Callable[..., Any]:
    WRAPPERS[run.__name__] = run
    return run


def _remat(policy: Any, body: Body, p: Any, shared: Any, x: jax.Array) -> Any:
    return jax.checkpoint(lambda p, x: body(p, shared, x), policy=policy)(p, x)


WRAPPERS.update({name: partial(_remat, policy) for name, policy in POLICIES.items()})


@wrapper
def jit(body: Body, p: Any, shared: Any, x: jax.Array) -> Any:
    return jax.jit(body)(p, shared, x)


def _scan(body: Body, p: Any, shared: Any, x: jax.Array, **options: Any) -> Any:
    def one(carry: Any, q: Any) -> tuple[Any, None]:
        y, more = body(q, shared, carry[0])
        return (y, carry[1] + more), None

    return jax.lax.scan(one, (x, jnp.float32(0)), p, length=REPEATS, **options)[0]


@wrapper
def scan(body: Body, p: Any, shared: Any, x: jax.Array) -> Any:
    return _scan(body, p, shared, x)


@wrapper
def scan_reverse(body: Body, p: Any, shared: Any, x: jax.Array) -> Any:
    return _scan(body, p, shared, x, reverse=True, unroll=2)


@wrapper
def scan_cast(body: Body, p: Any, shared: Any, x: jax.Array) -> Any:
    half = jax.tree.map(lambda a: a.astype(jnp.bfloat16) if a.dtype == jnp.float32 else a, p)
    full = lambda q: jax.tree.map(lambda a: a.astype(jnp.float32) if a.dtype == jnp.bfloat16 else a, q)  # noqa: E731
    return _scan(lambda q, shared, x: body(full(q), shared, x), half, shared, x)


@wrapper
def scan_scaled(body: Body, p: Any, shared: Any, x: jax.Array) -> Any:
    scaled = jax.tree.map(lambda a: a * 0.5 + 0.1 if jnp.issubdtype(a.dtype, jnp.floating) else a, p)
    return _scan(body, scaled, shared, x)


@wrapper
def scan_ys(body: Body, p: Any, shared: Any, x: jax.Array) -> Any:
    def one(c: jax.Array, q: Any) -> tuple[Any, Any]:
        y, more = body(q, shared, c)
        return y, (more, [a * 2 for a in jax.tree.leaves(q) if jnp.issubdtype(a.dtype, jnp.floating)])

    y, (more, seen) = jax.lax.scan(one, x, p, length=REPEATS)
    return y, jnp.sum(more) + sum((0.01 * jnp.sum(jnp.sin(a)) for a in seen), jnp.float32(0))


@wrapper
def scan_consts(body: Body, p: Any, shared: Any, x: jax.Array) -> Any:
    return _scan(lambda _, shared, x: body(p, shared, x), None, shared, x)


@wrapper
def unrolled(body: Body, p: Any, shared: Any, x: jax.Array) -> Any:
    total = jnp.float32(0)
    for i in range(REPEATS):
        x, more = body(jax.tree.map(lambda a, i=i: a[i], p), shared, x)
        total = total + more
    return x, total


@wrapper
def fori(body: Body, p: Any, shared: Any, x: jax.Array) -> Any:
    def one(i: Any, carry: Any) -> Any:
        y, more = body(jax.tree.map(lambda a: a[i], p), shared, carry[0])
        return y, carry[1] + more

    return jax.lax.fori_loop(0, REPEATS, one, (x, jnp.float32(0)))


@wrapper
def vmap(body: Body, p: Any, shared: Any, x: jax.Array) -> Any:
    ys, more = (
        jax.vmap(lambda q: body(q, shared, x))(p) if jax.tree.leaves(p) else body(p, shared, x[None][0])
    )
    return (ys.mean(0), more.sum()) if jax.tree.leaves(p) else (ys, more)


@wrapper
def map(body: Body, p: Any, shared: Any, x: jax.Array) -> Any:
    if not jax.tree.leaves(p):
        return body(p, shared, x)
    ys, more = jax.lax.map(lambda q: body(q, shared, x), p)
    return jnp.sum(ys * jnp.arange(1.0, 1 + REPEATS)[:, None, None], 0) / REPEATS, more.sum()


@wrapper
def vmap_batch(body: Body, p: Any, shared: Any, x: jax.Array) -> Any:
    ys, more = jax.vmap(lambda row: body(p, shared, row[None]))(x)
    return ys[:, 0], more.mean()


@wrapper
def cond(body: Body, p: Any, shared: Any, x: jax.Array) -> Any:
    other = lambda p, shared, x: (jnp.sin(x) + shared["square"][0], jnp.float32(0))  # noqa: E731
    return jax.lax.cond(x.sum() > 0, body, other, p, shared, x)


@wrapper
def cond_on_params(body: Body, p: Any, shared: Any, x: jax.Array) -> Any:
    other = lambda p, shared, x: (x @ shared["square"], jnp.float32(0.5))  # noqa: E731
    return jax.lax.cond(shared["table"][0, 0] > 0, body, other, p, shared, x)


@wrapper
def switch(body: Body, p: Any, shared: Any, x: jax.Array) -> Any:
    branches = [
        body,
        lambda p, shared, x: (x * 0.5, jnp.float32(0)),
        lambda p, shared, x: (body(p, shared, -x)[0], jnp.float32(1)),
    ]
    return jax.lax.switch(jnp.int32(jnp.abs(x[0, 0]) * 10) % 3, branches, p, shared, x)


@wrapper
def custom_vjp(body: Body, p: Any, shared: Any, x: jax.Array) -> Any:
    @jax.custom_vjp
    def f(p: Any, shared: Any, x: jax.Array) -> Any:
        return body(p, shared, x)

    def forward(p: Any, shared: Any, x: jax.Array) -> Any:
        return body(p, shared, x), (p, shared, x)

    def backward(saved: Any, ct: Any) -> Any:
        return jax.vjp(body, *saved)[1](jax.tree.map(lambda g: 0.7 * g, ct))

    f.defvjp(forward, backward)
    return f(p, shared, x)


@wrapper
def custom_jvp(body: Body, p: Any, shared: Any, x: jax.Array) -> Any:
    @jax.custom_jvp
    def f(p: Any, shared: Any, x: jax.Array) -> Any:
        return body(p, shared, x)

    @f.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        out, dot = jax.jvp(body, primals, tangents)
        return out, jax.tree.map(lambda g: 0.7 * g, dot)

    return f(p, shared, x)


@wrapper
def penalty_of_gradient(body: Body, p: Any, shared: Any, x: jax.Array) -> Any:
    y, more = body(p, shared, x)
    slope = jax.grad(lambda x: jnp.sum(body(p, shared, x)[0] ** 2) / x.size)(x)
    return y, more + jnp.sum(slope**2)


@wrapper
def forward_mode(body: Body, p: Any, shared: Any, x: jax.Array) -> Any:
    (y, more), (dy, _) = jax.jvp(lambda x: body(p, shared, x), (x,), (jnp.ones_like(x),))
    return y + 0.1 * dy, more


@wrapper
def no_gradient(body: Body, p: Any, shared: Any, x: jax.Array) -> Any:
    y, more = body(jax.lax.stop_gradient(p), shared, x)
    return y + x, more


@wrapper
def while_without_gradient(body: Body, p: Any, shared: Any, x: jax.Array) -> Any:
    p, shared, start = jax.lax.stop_gradient((p, shared, x))
    one = lambda s: (s[0] + 1, body(p, shared, s[1])[0])  # noqa: E731
    _, y = jax.lax.while_loop(lambda s: (s[0] < 3) & (jnp.sum(s[1] ** 2) < 1e3), one, (0, start))
    return x + jnp.tanh(y), jnp.float32(0)


@wrapper
def named_scope(body: Body, p: Any, shared: Any, x: jax.Array) -> Any:
    with jax.named_scope("block"):
        return body(p, shared, x)


@wrapper
def residual_of_batch(body: Body, p: Any, shared: Any, x: jax.Array) -> Any:
    y, more = body(p, shared, (x - x.mean(0)) / (x.std(0) + 0.5))
    return x + jnp.tanh(y), more


# ------------------------------------------------------------------------------------------------ programs


def init(steps: Steps, r: np.random.Generator, width: int) -> Any:
    """Params for the steps: one entry per step, stacked where a wrapper runs over them."""
    made = {}
    for i, step in enumerate(steps):
        if isinstance(step, str):
            made[f"{i}_{step}"] = LEAVES[step][0](r, width)
        else:
            name, inner = step
            copies = [init(inner, r, width) for _ in range(REPEATS if name in STACKED else 1)]
            made[f"{i}_{name}"] = (
                jax.tree.map(lambda *a: np.stack(a), *copies) if len(copies) > 1 else copies[0]
            )
    return made


def shared_params(r: np.random.Generator, width: int) -> dict[str, np.ndarray]:
    return {"table": normal(r, 19, width), "square": normal(r, width, width)}


def run(steps: Steps, p: Any, shared: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Runs the steps one after the other; (activations, sum of penalties)."""
    penalty = jnp.float32(0)
    for i, step in enumerate(steps):
        if isinstance(step, str):
            out = LEAVES[step][1](p[f"{i}_{step}"], shared, x)
        else:
            out = WRAPPERS[step[0]](partial(run, step[1]), p[f"{i}_{step[0]}"], shared, x)
        x, more = out if isinstance(out, tuple) else (out, jnp.float32(0))
        x = x / (1 + 0.1 * jnp.sqrt(jnp.mean(x * x, -1, keepdims=True)))  # keeps deep programs tame
        penalty = penalty + more
    return x, penalty


def loss_of(steps: Steps) -> Callable[[Any, jax.Array], jax.Array]:
    """The loss of a program: ``loss({"steps": ..., "shared": ...}, x)``."""

    def loss(p: Any, x: jax.Array) -> jax.Array:
        y, penalty = run(steps, p["steps"], p["shared"], x)
        return jnp.mean(jnp.cos(y) * jnp.arange(1.0, 1 + y.shape[1]) ** 0.5) + penalty

    return loss


def step_strategy() -> st.SearchStrategy[Any]:
    leaves = st.sampled_from(sorted(LEAVES))

    def wrapped(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.tuples(
            st.sampled_from(sorted(WRAPPERS)), st.lists(inner, min_size=1, max_size=2).map(tuple)
        )

    return st.recursive(leaves, wrapped, max_leaves=4)


PROGRAMS = st.lists(step_strategy(), min_size=1, max_size=3).map(tuple)
