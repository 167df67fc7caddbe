"""Plan the ZeRO-3 step of a Llama of 405 B params for 16,384 H100s, or of 70 B for 512, on a laptop.

    pip install -e '.[aot]'
    JAX_PLATFORMS=cpu zeroj plan examples.plan_llama:build_405b --gpu h100 --nodes 2048 --profile overlap
    JAX_PLATFORMS=cpu zeroj plan examples.plan_llama:build_70b --gpu h100 --nodes 64 --profile overlap

The model is plain JAX: grouped attention with rotary positions and a gated feed-forward (Llama 3, arXiv 2407.21783,
table 3). The 405 B one scans over its layers, the 70 B one is unrolled. Nothing of it is allocated.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

import zeroj as zj


@dataclasses.dataclass(frozen=True)
class Llama:
    """The shape of the model, and whether its layers are a scanned stack."""

    layers: int
    width: int
    heads: int
    inner: int
    kv_heads: int = 8
    vocab: int = 128256
    sequence: int = 8192
    scan: bool = True

    def params(self) -> dict[str, Any]:
        """The params as shapes, fp32."""
        d, kv = self.width, self.width // self.heads * self.kv_heads
        layer = {"q": (d, d), "k": (d, kv), "v": (d, kv), "o": (d, d), "norm1": (d,), "norm2": (d,)}
        layer |= {"gate": (d, self.inner), "up": (d, self.inner), "down": (self.inner, d)}
        stack = (self.layers,) if self.scan else ()
        one = {name: jax.ShapeDtypeStruct(stack + shape, jnp.float32) for name, shape in layer.items()}
        rest = {"embedding": (self.vocab, d), "head": (d, self.vocab), "norm": (d,)}
        tree: dict[str, Any] = {n: jax.ShapeDtypeStruct(shape, jnp.float32) for n, shape in rest.items()}
        return tree | {"layers": one if self.scan else [dict(one) for _ in range(self.layers)]}


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Root-mean-square norm."""
    mean = jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True)
    return x * jax.lax.rsqrt(mean + 1e-5).astype(x.dtype) * scale


def rotate(x: jax.Array) -> jax.Array:
    """Rotary positions of (batch, sequence, heads, width of a head)."""
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1])[:, None] / 500000.0 ** (jnp.arange(half) / half)
    sin, cos = (f(angle)[:, None, :].astype(x.dtype) for f in (jnp.sin, jnp.cos))
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def layer(x: jax.Array, p: dict[str, jax.Array], heads: int) -> jax.Array:
    """One decoder layer; ``x`` is (batch, sequence, width)."""
    b, s, d = x.shape
    h = norm(x, p["norm1"])
    q, k, v = ((h @ p[name]).reshape(b, s, -1, d // heads) for name in "qkv")
    y = jax.nn.dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
    x = x + y.reshape(b, s, d) @ p["o"]
    h = norm(x, p["norm2"])
    return x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]


def make_loss_fn(shape: Llama) -> Any:
    """Mean next-token cross-entropy; each layer is recomputed in the backward pass."""

    @jax.checkpoint
    def one(x: jax.Array, p: dict[str, jax.Array]) -> jax.Array:
        return layer(x, p, shape.heads)

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        inputs, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        x = params["embedding"][inputs]
        if shape.scan:
            x, _ = jax.lax.scan(lambda x, p: (one(x, p), None), x, params["layers"])
        else:
            for p in params["layers"]:
                x = one(x, p)
        logits = (norm(x, params["norm"]) @ params["head"]).astype(jnp.float32)
        picked = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)

    return loss_fn


def build(shape: Llama, target: zj.aot.Target) -> tuple[Any, ...]:
    """zeroj's own train step at stage 3, its state and its batch as shapes: one sequence for each GPU."""
    tx = optax.adamw(1e-4)
    scanned = ["layers"] if shape.scan else None
    layer_size = 3 * shape.width * shape.inner + 3 * shape.width**2  # more than enough for one layer
    # Two layers may be whole at once: this one, and the next, which is gathered ahead.
    zero = zj.Zero(stage=3, stage3_max_live_parameters=max(10**9, 2 * layer_size))
    plan = zj.make_plan(shape.params(), tx, target.mesh(), zero, precision="bf16", scanned=scanned)
    step = zj.make_train_step(make_loss_fn(shape), tx, plan, clip_norm=1.0)
    batch = {"tokens": jax.ShapeDtypeStruct((target.num_devices, shape.sequence + 1), jnp.int32)}
    return step, zj.abstract_state(tx, plan), batch


def build_405b(target: zj.aot.Target) -> tuple[Any, ...]:
    """405 B params in 126 scanned layers, 2k tokens per GPU: 33 M tokens per step on 16,384 GPUs."""
    return build(Llama(126, 16384, 128, 53248, sequence=2048), target)


def build_70b(target: zj.aot.Target) -> tuple[Any, ...]:
    """70 B params in 80 unrolled layers, 2k tokens per GPU."""
    return build(Llama(80, 8192, 64, 28672, sequence=2048, scan=False), target)
