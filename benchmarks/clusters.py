"""A plain-JAX GPT as shapes alone, and its train step compiled by XLA:GPU for a cluster that is not here.

``python benchmarks/clusters.py 125m --stage 3 --nodes 1`` compiles one case and prints the report.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

import zeroj as zj

CLIP_NORM = 1.0
HEAD = 64


@dataclasses.dataclass(frozen=True)
class Shape:
    """A GPT and what one GPU does with it in a step.

    Args:
        layers: number of blocks.
        width: size of the residual stream.
        vocab: number of token ids; 0: no embedding, the batch holds the activations themselves.
        sequence: tokens of a sequence.
        micro: sequences per GPU and step.
        scan: whether the blocks are stacked and run by ``jax.lax.scan``.
        remat: whether each block is under ``jax.checkpoint``.
        head: width of an attention head.
    """

    layers: int
    width: int
    vocab: int = 50257
    sequence: int = 1024
    micro: int = 1
    scan: bool = True
    remat: bool = True
    head: int = HEAD

    @property
    def params(self) -> Any:
        """The params as ``jax.ShapeDtypeStruct``, fp32."""
        d, dims = self.width, (self.layers,) if self.scan else ()
        block = {
            "qkv": (d, 3 * d),
            "out": (d, d),
            "up": (d, 4 * d),
            "down": (4 * d, d),
            "ln1": (d,),
            "ln2": (d,),
        }
        one = {name: _struct(*dims, *shape) for name, shape in block.items()}
        tree: dict[str, Any] = {"blocks": one if self.scan else [dict(one) for _ in range(self.layers)]}
        if self.vocab:
            tree |= {
                "tokens": _struct(self.vocab, d),
                "positions": _struct(self.sequence, d),
                "norm": _struct(d),
            }
        return tree

    @property
    def count(self) -> int:
        """Number of params."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.params))

    def batch(self, mesh: Any, axes: tuple[str, ...]) -> dict[str, jax.ShapeDtypeStruct]:
        """The global batch as shapes, split over ``axes``."""
        rows = self.micro * math.prod(mesh.shape[a] for a in axes)
        place = NamedSharding(mesh, PartitionSpec(axes))
        if self.vocab:
            return {"tokens": jax.ShapeDtypeStruct((rows, self.sequence + 1), jnp.int32, sharding=place)}
        return {"x": jax.ShapeDtypeStruct((rows, self.sequence, self.width), jnp.bfloat16, sharding=place)}


def _struct(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Root-mean-square norm, its mean in fp32."""
    mean = jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True)
    return x * jax.lax.rsqrt(mean + 1e-6).astype(x.dtype) * scale


def block(x: jax.Array, p: dict[str, jax.Array], head: int) -> jax.Array:
    """Attention and a four times wider MLP; ``x`` is (batch, sequence, width)."""
    b, s, d = x.shape
    q, k, v = (y.reshape(b, s, d // head, head) for y in jnp.split(norm(x, p["ln1"]) @ p["qkv"], 3, -1))
    y = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(b, s, d)
    x = x + y @ p["out"]
    return x + jax.nn.gelu(norm(x, p["ln2"]) @ p["up"]) @ p["down"]


def make_loss(
    shape: Shape, around: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda f: f
) -> Callable[..., jax.Array]:
    """The loss ``(params, batch) -> mean``: cross-entropy over tokens, or a square without a vocabulary.

    Args:
        shape: the model.
        around: wraps the function ``(x, params of one block) -> x``, inside ``jax.checkpoint``.
    """
    one = around(functools.partial(block, head=shape.head))
    one = jax.checkpoint(one) if shape.remat else one

    def run(x: jax.Array, blocks: Any) -> jax.Array:
        if shape.scan:
            return jax.lax.scan(lambda x, p: (one(x, p), None), x, blocks)[0]
        for p in blocks:
            x = one(x, p)
        return x

    def loss(params: Any, batch: Any) -> jax.Array:
        if not shape.vocab:
            return jnp.mean(jnp.square(run(batch["x"], params["blocks"]).astype(jnp.float32)))
        inputs, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        x = run(params["tokens"][inputs] + params["positions"][None], params["blocks"])
        logits = (norm(x, params["norm"]) @ params["tokens"].T).astype(jnp.float32)
        picked = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)

    return loss


SIZES = {
    "125m": Shape(12, 768, micro=4),
    "125m unrolled": Shape(12, 768, micro=4, scan=False),
    "1.3b": Shape(24, 2048, sequence=2048, micro=1),
    "13b": Shape(40, 5120, sequence=2048, micro=1, head=128),
}
"""GPT-3's shapes (Brown et al. 2020, table 2.1)."""


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A case, compiled: its plan, and the report on XLA:GPU's program."""

    shape: Shape
    plan: zj.Plan
    batch_bytes: int
    report: zj.aot.Report

    def units(self, *ops: str) -> float:
        """Bytes that one GPU sends in a step, in units of params x 2 bytes x (N - 1) / N.

        Args:
            *ops: only these ops; none: all.
        """
        n = self.plan.degree
        unit = 2 * self.shape.count * (n - 1) / n
        return sum(self.report.wire_bytes(op) for op in ops or (None,)) / unit


def compile_zeroj(
    shape: Shape,
    stage: int,
    nodes: int,
    gpus: int = 8,
    profile: str = "default",
    gpu: str = "h100",
    offload_activations: bool = False,
    accumulation: int = 1,
    clipped: bool = True,
    rotate: bool = False,
    **zero: Any,
) -> Compiled:
    """zeroj's own train step for ``nodes`` x ``gpus`` GPUs; bf16, adamw.

    Args:
        shape: the model and the batch.
        stage: ZeRO stage.
        nodes: number of nodes.
        gpus: GPUs per node.
        profile: the compiler's flags.
        gpu: which GPU.
        offload_activations: whether the layers' inputs wait in host memory.
        accumulation: micro-batches of ``shape.micro`` sequences per step.
        clipped: whether gradients are clipped, and their finiteness is checked.
        rotate: whether the update of the layers is left to the next step; compiled is a step that has one to make.
        **zero: further fields of :class:`zeroj.Zero`.
    """
    target = zj.aot.Target(gpu, nodes=nodes, gpus_per_node=gpus)
    mesh, tx = target.mesh(), optax.adamw(1e-3)
    scanned = ["blocks"] if shape.scan else None
    plan = zj.make_plan(
        shape.params, tx, mesh, zj.Zero(stage=stage, **zero), precision="bf16", scanned=scanned
    )
    step = zj.make_train_step(
        make_loss(shape),
        tx,
        plan,
        accumulation_steps=accumulation,
        clip_norm=CLIP_NORM if clipped else None,
        skip_nonfinite=None if clipped else False,
        offload_activations=offload_activations,
        rotate=rotate,
    )
    whole = dataclasses.replace(shape, micro=shape.micro * accumulation)
    batch = whole.batch(plan.mesh, plan.zero_axes)
    state = zj.abstract_state(tx, plan)
    state = step.pending_state(state, batch) if rotate else state
    found = target.compile(step, state, batch, profile=profile)
    held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(batch)) // plan.degree
    return Compiled(shape, plan, held, found)


def main() -> None:
    """Compile one case and print its report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("size", choices=list(SIZES))
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--profile", default="default")
    args = parser.parse_args()
    case = compile_zeroj(SIZES[args.size], args.stage, args.nodes, profile=args.profile)
    print(case.plan, case.report, sep="\n\n")


if __name__ == "__main__":
    main()
