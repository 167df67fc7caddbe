"""Temporary bytes of a step on XLA:GPU at stages 1 to 3, against what it cannot do without.

    python benchmarks/compiled_memory.py            all rows, kept in results/compiled_memory.json as they are made

At stage 3 at most 1.10 x (saved activations as ``jax.ad_checkpoint``'s residual report counts them + sharded gradients
+ two layers' gathered params and gradients + the largest buffer of the loss); at stage 2 no more than at stage 1.
8 blocks of width 4096, 4 x 256 tokens per GPU, 8 x H100, profile "overlap".
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import progress
from clusters import Shape, compile_zeroj, make_loss
from figure import Figure

BASE = Shape(layers=8, width=4096, vocab=0, sequence=256, micro=4, head=128)
WITHIN = 1.10
COLUMNS = {
    "temporary_gb": ".3f",
    "needed_gb": ".3f",
    "activations_gb": ".3f",
    "gradients_gb": ".3f",
    "layers_gb": ".3f",
    "loss_gb": ".3f",
    "ratio": ".3f",
    "met": "",
}


def saved_bytes(shape: Shape) -> int:
    """Bytes of residuals of the loss on one device, params and batch left out, as JAX itself reports them."""
    params = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.bfloat16), shape.params)
    batch = {"x": jax.ShapeDtypeStruct((shape.micro, shape.sequence, shape.width), jnp.bfloat16)}
    _, pullback = jax.eval_shape(lambda p: jax.vjp(lambda q: make_loss(shape)(q, batch_of(batch)), p), params)
    given = {leaf.shape for leaf in jax.tree.leaves(params)}
    saved = [leaf for leaf in jax.tree.leaves(pullback) if leaf.shape not in given]
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in saved)


def batch_of(batch: dict[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Zeros in the shapes of a batch, to be traced."""
    return {name: jnp.zeros(leaf.shape, leaf.dtype) for name, leaf in batch.items()}


def row(shape: Shape, stage: int) -> progress.Row:
    """Temporary bytes of one program, and at stage 3 the sum that bounds them."""
    case = compile_zeroj(shape, stage, nodes=1, profile="overlap")
    temporary = case.report.device.temporary
    layer = 2 * shape.count // shape.layers
    parts = {
        "activations": saved_bytes(shape),
        "gradients": 2 * shape.count // case.plan.degree,
        "layers": 4 * layer,
        "loss": 4 * shape.micro * shape.sequence * shape.width,
    }
    needed = sum(parts.values()) if stage == 3 else None
    return {
        "temporary_gb": temporary / 1e9,
        "needed_gb": needed and needed / 1e9,
        **{f"{name}_gb": count / 1e9 for name, count in parts.items() if stage == 3},
        "ratio": needed and temporary / needed,
        "met": "-" if needed is None else "yes" if temporary <= WITHIN * needed else "NO",
    }


def cases() -> dict[str, Callable[[], progress.Row]]:
    """Name of a row -> what makes it."""
    return {
        f"{'scanned' if scan else 'unrolled'}, stage {stage}": lambda s=scan, g=stage: row(
            dataclasses.replace(BASE, scan=s), g
        )
        for scan in (True, False)
        for stage in (3, 2, 1)
    }


def figures() -> list[Figure]:
    """The rows as figures for run.py."""
    rows = {r["case"]: r for r in progress.collect("compiled_memory", cases())}
    found = []
    for how in ("scanned", "unrolled"):
        third = rows[f"{how}, stage 3"]
        name = f"temporary bytes against what is needed, {how}, stage 3"
        found.append(Figure(name, third["temporary_gb"], "GB", third["needed_gb"], WITHIN))
        second, first = (rows[f"{how}, stage {stage}"]["temporary_gb"] for stage in (2, 1))
        found.append(Figure(f"temporary bytes, {how}, stage 2 against stage 1", second, "GB", first, 1.0))
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--again", action="store_true", help="make rows anew that are there")
    progress.show(
        progress.collect("compiled_memory", cases(), parser.parse_args().again),
        COLUMNS,
        "Temporary bytes per GPU",
    )
