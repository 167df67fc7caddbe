"""FSDP (ZeRO-3) for the GPT of clusters.py as people write it by hand in JAX, in two forms; zeroj is not used.

- ``annotations``: params, gradients and state are sharded by ``jax.jit``'s shardings; each block constrains its
  params to be whole and its activations to stay split over the batch; the partitioner does the rest.
- ``recipe``: the loss under ``jax.shard_map``; each param is gathered in bf16 where a block uses it, by a function
  whose ``custom_vjp`` reduce-scatters the gradient; ``jax.checkpoint`` around the block gathers again in the
  backward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from baselines import update
from clusters import CLIP_NORM, Shape, make_loss
from jax.sharding import NamedSharding, PartitionSpec

import zeroj as zj

FORMS = ("annotations", "recipe")


def compile_by_hand(
    shape: Shape, form: str, nodes: int, gpus: int = 8, profile: str = "default"
) -> zj.aot.Report:
    """A hand-written ZeRO-3 step for ``nodes`` x ``gpus`` H100s; the same model, optimizer and batch.

    Args:
        shape: the model and the batch.
        form: one of ``FORMS``.
        nodes: number of nodes.
        gpus: GPUs per node.
        profile: the compiler's flags.
    """
    target = zj.aot.Target("h100", nodes=nodes, gpus_per_node=gpus)
    mesh, tx = target.mesh(), optax.adamw(1e-3)
    axes = mesh.axis_names
    specs = jax.tree.map(lambda leaf: _spec(leaf.shape, target.num_devices, axes, shape), shape.params)
    params = _placed(shape.params, specs, mesh)
    state = _placed_like(jax.eval_shape(tx.init, shape.params), shape.params, specs, mesh)
    make_grad = {"annotations": _annotations, "recipe": _recipe}[form]
    grad = make_grad(shape, mesh, specs)

    def step(values: Any, state: Any, batch: Any) -> Any:
        loss, grads = grad(values, batch)
        return (*update(tx, values, state, grads, CLIP_NORM), loss)

    shardings = jax.tree.map(lambda leaf: leaf.sharding, (params, state))
    whole = NamedSharding(mesh, PartitionSpec())
    jitted = jax.jit(step, out_shardings=(*shardings, whole), donate_argnums=(0, 1))
    return target.compile(jitted, params, state, shape.batch(mesh, axes), profile=profile)


def units(report: zj.aot.Report, shape: Shape, *ops: str) -> float:
    """Bytes that one GPU sends in a step, in units of params x 2 bytes x (N - 1) / N."""
    n = report.cluster.num_devices
    return sum(report.wire_bytes(op) for op in ops or (None,)) / (2 * shape.count * (n - 1) / n)


def _spec(dims: tuple[int, ...], n: int, axes: tuple[str, ...], shape: Shape) -> PartitionSpec:
    """The first dim that divides evenly, behind the stack of layers."""
    stacked = 1 if shape.scan and dims[0] == shape.layers else 0
    for dim in range(stacked, len(dims)):
        if dims[dim] % n == 0 and len(dims) - stacked > 1:
            return PartitionSpec(*[None] * dim, axes)
    return PartitionSpec()


def _placed(tree: Any, specs: Any, mesh: Any) -> Any:
    def place(leaf: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(place, tree, specs)


def _placed_like(state: Any, params: Any, specs: Any, mesh: Any) -> Any:
    """The optimizer's state: what mirrors a param lies where it lies, the rest is whole."""
    by_shape = {p.shape: s for p, s in zip(jax.tree.leaves(params), _leaves(specs), strict=True)}
    return _placed(state, jax.tree.map(lambda x: by_shape.get(x.shape, PartitionSpec()), state), mesh)


def _leaves(specs: Any) -> list[PartitionSpec]:
    return jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, PartitionSpec))


def _half(tree: Any) -> Any:
    return jax.tree.map(lambda p: p.astype(jnp.bfloat16), tree)


def _annotations(shape: Shape, mesh: Any, specs: Any) -> Callable[..., Any]:
    split = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    whole = NamedSharding(mesh, PartitionSpec())

    def around(block: Callable[..., Any]) -> Callable[..., Any]:
        def run(x: jax.Array, p: Any) -> jax.Array:
            p = jax.tree.map(lambda w: jax.lax.with_sharding_constraint(w, whole), _half(p))
            return jax.lax.with_sharding_constraint(block(x, p), split)

        return run

    loss = make_loss(shape, around)
    shardings = jax.tree.map(lambda s: NamedSharding(mesh, s), specs)

    def cast(params: Any, batch: Any) -> jax.Array:
        rest = {k: v if k == "blocks" else _half(v) for k, v in params.items()}
        return loss(rest, batch)

    def grad(params: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(cast)(params, batch)
        return value, jax.lax.with_sharding_constraint(grads, shardings)

    return grad


def _recipe(shape: Shape, mesh: Any, specs: Any) -> Callable[..., Any]:
    axes = mesh.axis_names
    one = jax.tree.map(lambda s: PartitionSpec(*s[1:]), specs["blocks"]) if shape.scan else specs["blocks"][0]
    gather_block = lambda p: jax.tree.map(lambda w, s: _gather(w, s, axes), p, one)  # noqa: E731
    loss = make_loss(shape, lambda block: lambda x, p: block(x, gather_block(p)))

    def local(params: Any, batch: Any) -> Any:
        def full(params: Any) -> jax.Array:
            rest = {
                k: v if k == "blocks" else jax.tree.map(lambda w, s: _gather(w, s, axes), v, specs[k])
                for k, v in params.items()
            }
            return loss(rest, batch) / mesh.size

        value, grads = jax.value_and_grad(full)(params)
        return jax.lax.psum(value, axes), grads

    batch_spec = PartitionSpec(axes)
    return jax.shard_map(
        local, mesh=mesh, in_specs=(specs, batch_spec), out_specs=(PartitionSpec(), specs), check_vma=False
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather(w: jax.Array, spec: PartitionSpec, axes: tuple[str, ...]) -> jax.Array:
    w = w.astype(jnp.bfloat16)
    dims = [dim for dim, names in enumerate(spec) if names]
    return jax.lax.all_gather(w, axes, axis=dims[0], tiled=True) if dims else w


def _gather_forward(w: jax.Array, spec: PartitionSpec, axes: tuple[str, ...]) -> tuple[jax.Array, None]:
    return _gather(w, spec, axes), None


def _gather_backward(spec: PartitionSpec, axes: tuple[str, ...], _: None, ct: jax.Array) -> tuple[jax.Array]:
    dims = [dim for dim, names in enumerate(spec) if names]
    ct = ct.astype(jnp.bfloat16)
    if dims:
        ct = jax.lax.psum_scatter(ct, axes, scatter_dimension=dims[0], tiled=True)
    else:
        ct = jax.lax.psum(ct, axes)
    return (ct.astype(jnp.float32),)


_gather.defvjp(_gather_forward, _gather_backward)
