"""Small programs for a described cluster of 2 nodes with 4 GPUs each, and what is known of them by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zeroj.aot import Target

TARGET = Target("h100", nodes=2, gpus_per_node=4)
MESH = TARGET.mesh()
ALL = ("node", "local")
WHOLE = P()
HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def struct(shape: tuple[int, ...], spec: P = WHOLE, dtype: Any = "float32", kind: str | None = None) -> Any:
    sharding = NamedSharding(MESH, spec, memory_kind=kind) if kind else NamedSharding(MESH, spec)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def sharded(fun: Callable[..., Any], in_specs: Any, out_specs: Any, **jit: Any) -> Any:
    mapped = jax.shard_map(fun, mesh=MESH, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return jax.jit(mapped, **jit)


def gather_layer(h: jax.Array, shard: jax.Array) -> jax.Array:
    return jnp.tanh(h @ jax.lax.all_gather(shard, ALL, tiled=True))


def scanned_loss(stack: jax.Array, x: jax.Array) -> jax.Array:
    def body(h: jax.Array, shard: jax.Array) -> tuple[jax.Array, None]:
        return gather_layer(h, shard), None

    return jnp.sum(jax.lax.scan(jax.checkpoint(body), x, stack)[0])
