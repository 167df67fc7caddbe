"""The collectives of the compiled CPU step: what the stage table says, how much, and inside which loop."""

from __future__ import annotations

import functools
import math
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zeroj as zj
from tests import oracle
from zeroj.aot import hlo, shapes

LAYERS, WIDTH, SMALL = 2, 16, 3
PARAMS = {
    **{f"w{i}": jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32) for i in range(LAYERS)},
    "odd": jax.ShapeDtypeStruct((WIDTH, 9), jnp.float32),
    "small": jax.ShapeDtypeStruct((SMALL,), jnp.float32),
}
#: Elements of the leaves that are sharded, and of what they are stored in: (16, 9) needs no padding in dim 0.
BIG = LAYERS * WIDTH * WIDTH + WIDTH * 9


def loss(params: Any, x: jax.Array) -> jax.Array:
    for i in range(LAYERS):
        x = jnp.tanh(x @ params[f"w{i}"])
    return jnp.mean((x @ params["odd"]) ** 2) + jnp.sum(params["small"]) * jnp.mean(x)


@functools.cache
def collectives(stage: int, accumulation: int) -> Counter:
    """(op, inside a loop) -> elements that go in, of everything larger than the whole leaves and scalars."""
    tx = optax.adamw(1e-3)
    plan = zj.make_plan(
        PARAMS, tx, oracle.mesh_of(8), zj.Zero(stage=stage, stage3_param_persistence_threshold=3)
    )
    assert [leaf.placement.sharded for leaf in plan.leaves] == [True, False, True, True]
    step = zj.make_train_step(loss, tx, plan, accumulation_steps=accumulation, clip_norm=1.0)
    batch = jax.ShapeDtypeStruct((8 * accumulation * 2, WIDTH), jnp.float32)
    module = hlo.parse(step.lower(zj.abstract_state(tx, plan), batch).compile().as_text())
    in_loops = inside_loops(module)
    found: Counter = Counter()
    for name, computation in module.computations.items():
        for instruction in computation.instructions.values():
            op = instruction.op.removesuffix("-start")
            if op in ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "collective-permute"):
                operands = [a for s in computation.operand_shapes(instruction) for a in shapes.leaves(s)]
                sizes = [math.prod(a.dims) for a in operands]
                found[op, name in in_loops] += sum(size for size in sizes if size > SMALL)
    return +found


def inside_loops(module: hlo.Module) -> set[str]:
    """Names of the computations that run as a part of a loop's body."""
    todo = [
        name
        for computation in module.computations.values()
        for instruction in computation.instructions.values()
        if instruction.op == "while"
        for name in instruction.called
    ]
    found: set[str] = set()
    while todo:
        name = todo.pop()
        if name in found or name not in module.computations:
            continue
        found.add(name)
        for instruction in module.computations[name].instructions.values():
            todo += instruction.called
    return found


@pytest.mark.parametrize("stage", (1, 2, 3))
@pytest.mark.parametrize("accumulation", (1, 4))
def test_gradients_are_reduce_scattered_and_never_all_reduced(stage: int, accumulation: int) -> None:
    found = collectives(stage, accumulation)
    assert {op for op, _ in found} == {"reduce-scatter", "all-gather"}, found


@pytest.mark.parametrize("stage", (0, 1))
@pytest.mark.parametrize("accumulation", (1, 4))
def test_stages_0_and_1_reduce_once_per_update_whatever_the_accumulation(
    stage: int, accumulation: int
) -> None:
    found = collectives(stage, accumulation)
    op = "reduce-scatter" if stage else "all-reduce"
    assert scattered(found, op, False) == BIG, found
    assert not any(looped for _, looped in found), f"inside the loop over micro-batches: {found}"
    if stage == 0:
        assert {op for op, _ in found} == {"all-reduce"}


@pytest.mark.parametrize("stage", (2, 3))
def test_stages_2_and_3_reduce_scatter_every_micro_batch_inside_the_loop(stage: int) -> None:
    found = collectives(stage, 4)
    assert scattered(found, "reduce-scatter", True) == BIG, found
    assert not found["reduce-scatter", False]


def scattered(found: Counter, op: str, looped: bool) -> int:
    """Elements of whole gradients that enter: a leaf split over two dims enters its second axis as a part."""
    count = found[op, looped]
    second = sum(math.prod(leaf.placement.padded) // extent for leaf, extent in split_twice())
    return count - (second if op == "reduce-scatter" else 0)


def split_twice() -> list[tuple[Any, int]]:
    """Leaves that take two reduce-scatters, with the size of the axis that goes first."""
    plan = zj.make_plan(
        PARAMS, optax.adamw(1e-3), oracle.mesh_of(8), zj.Zero(stage=2, stage3_param_persistence_threshold=3)
    )
    pairs = [(leaf, leaf.placement.dims) for leaf in plan.leaves if len(leaf.placement.dims) > 1]
    return [(leaf, int(np.prod([plan.mesh.shape[a] for a in dims[-1][1]]))) for leaf, dims in pairs]


@pytest.mark.parametrize("stage", (1, 2))
def test_params_are_gathered_once_per_update(stage: int) -> None:
    found = collectives(stage, 4)
    assert found["all-gather", False] == BIG // 8, found
