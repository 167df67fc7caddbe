"""The same training step written by hand in plain JAX and optax: what zeroj's figures are held against.

Nothing here uses zeroj. Both steps clip by the global norm and donate their state, as zeroj's step does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

LossFn = Callable[[Any, Any], jax.Array]
Step = Callable[[Any, Any, Any], tuple[Any, Any, jax.Array]]


def init(init_fn: Callable[[], Any], tx: optax.GradientTransformation, params: Any, opt_state: Any) -> Any:
    """Params and optimizer state, born in the shardings ``params`` and ``opt_state``."""
    made = jax.jit(init_fn, out_shardings=params)()
    return made, jax.jit(tx.init, out_shardings=opt_state)(made)


def jit_step(
    loss_fn: LossFn,
    tx: optax.GradientTransformation,
    batch: NamedSharding,
    params: Any,
    grads: Any,
    opt_state: Any,
    clip_norm: float,
) -> Step:
    """A step by ``jax.jit`` and shardings alone; the partitioner places the communication.

    Args:
        loss_fn: (params, batch) -> mean loss.
        tx: the optimizer.
        batch: sharding of every leaf of the batch.
        params: tree of the params' shardings.
        grads: tree of the gradients' shardings.
        opt_state: tree of the optimizer state's shardings.
        clip_norm: bound on the global norm of the gradients.

    Returns:
        The jitted step (params, opt_state, batch) -> (params, opt_state, loss).
    """

    def step(values: Any, state: Any, data: Any) -> tuple[Any, Any, jax.Array]:
        loss, found = jax.value_and_grad(loss_fn)(values, data)
        found = jax.lax.with_sharding_constraint(found, grads)
        return (*update(tx, values, state, found, clip_norm), loss)

    whole = NamedSharding(batch.mesh, PartitionSpec())
    return jax.jit(
        step,
        in_shardings=(params, opt_state, batch),
        out_shardings=(params, opt_state, whole),
        donate_argnums=(0, 1),
    )


def shard_map_step(
    loss_fn: LossFn,
    tx: optax.GradientTransformation,
    batch: NamedSharding,
    params: Any,
    grads: Any,
    opt_state: Any,
    clip_norm: float,
) -> Step:
    """The same step with its communication written out: gathers at the start, ``psum_scatter`` at the end.

    Params are gathered whole before the loss, so this holds more memory than gathering on use does.
    """
    mesh = batch.mesh
    axes = mesh.axis_names
    specs = [jax.tree.map(lambda s: s.spec, tree) for tree in (params, grads)]

    def local(values: Any, data: Any) -> tuple[jax.Array, Any]:
        gathered = jax.tree.map(lambda x, spec: _gather(x, spec), values, specs[0])
        loss, found = jax.value_and_grad(loss_fn)(gathered, data)
        found = jax.tree.map(lambda g, spec: _reduce(g / mesh.size, spec, axes), found, specs[1])
        return jax.lax.pmean(loss, axes), found

    def step(values: Any, state: Any, data: Any) -> tuple[Any, Any, jax.Array]:
        loss, found = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(specs[0], batch.spec),
            out_specs=(PartitionSpec(), specs[1]),
            check_vma=False,
        )(values, data)
        return (*update(tx, values, state, found, clip_norm), loss)

    return jax.jit(step, out_shardings=(params, opt_state, None), donate_argnums=(0, 1))


def place_batch(mesh: Mesh) -> NamedSharding:
    """The sharding of a batch: its first dim over all axes of the mesh."""
    return NamedSharding(mesh, PartitionSpec(mesh.axis_names))


def update(
    tx: optax.GradientTransformation, params: Any, state: Any, grads: Any, clip_norm: float
) -> tuple[Any, Any]:
    norm = optax.tree.norm(grads)
    factor = jnp.minimum(1.0, clip_norm / jnp.maximum(norm, 1e-6))
    updates, state = tx.update(jax.tree.map(lambda g: g * factor, grads), state, params)
    return optax.apply_updates(params, updates), state


def _gather(x: jax.Array, spec: PartitionSpec) -> jax.Array:
    for dim, axes in enumerate(spec):
        if axes:
            x = jax.lax.all_gather(x, axes, axis=dim, tiled=True)
    return x


def _reduce(x: jax.Array, spec: PartitionSpec, axes: tuple[str, ...]) -> jax.Array:
    scattered: set[str] = set()
    for dim, names in enumerate(spec):
        if names:
            x = jax.lax.psum_scatter(x, names, scatter_dimension=dim, tiled=True)
            scattered.update([names] if isinstance(names, str) else names)
    rest = tuple(axis for axis in axes if axis not in scattered)
    return jax.lax.psum(x, rest) if rest else x
