"""The benchmarks: that targets are judged rightly, and that the hand-written steps do the same work."""

from __future__ import annotations

import pathlib
import sys

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "benchmarks"))

import baselines
import workload
from figure import Figure


def test_a_figure_is_judged_by_its_ratio_or_by_its_value() -> None:
    assert Figure("x", 11.0, "ms", 10.0, 1.1).met is True
    assert Figure("x", 11.1, "ms", 10.0, 1.1).met is False
    assert Figure("x", 11.1, "ms", 10.0).met is None
    assert Figure("x", 0.8, "", target=0.7, better="higher", of="value").met is True
    assert Figure("x", 0.6, "", target=0.7, better="higher", of="value").met is False
    assert Figure("x", 11.0, "ms", 10.0, 1.1).as_dict()["ratio"] == pytest.approx(1.1)


def test_bytes_on_the_first_device_counts_shards() -> None:
    mesh = jax.make_mesh((8,), ("local",), axis_types=(AxisType.Auto,))
    split, whole = (
        jax.device_put(np.zeros((16, 4), np.float32), NamedSharding(mesh, PartitionSpec(axis)))
        for axis in ("local", None)
    )
    assert workload.bytes_on_first_device({"a": split, "b": whole}) == 16 * 4 * 4 // 8 + 16 * 4 * 4


@pytest.mark.parametrize("stage", [*(pytest.param(s, marks=pytest.mark.full) for s in (0, 1)), 3])
def test_both_hand_written_steps_give_the_trajectory_of_plain_optax(stage: int) -> None:
    mesh = jax.make_mesh((2, 4), ("node", "local"), axis_types=(AxisType.Auto,) * 2)
    work = workload.small_gpt(layers=2, heads=2, width=32, context=16)
    shapes = jax.eval_shape(work.init_fn)

    def place(leaf: jax.ShapeDtypeStruct, split: bool) -> NamedSharding:
        dims = [None] * len(leaf.shape)
        if split and leaf.size > 500:
            dims[-1] = ("node", "local")
        return NamedSharding(mesh, PartitionSpec(*dims))

    def shardings(tree: object, split: bool) -> object:
        return jax.tree.map(lambda leaf: place(leaf, split), tree)

    params, grads = shardings(shapes, stage == 3), shardings(shapes, stage > 0)
    opt_state = shardings(jax.eval_shape(work.tx.init, shapes), stage > 0)
    batch = baselines.place_batch(mesh)
    results = []
    for make_step in (baselines.jit_step, baselines.shard_map_step):
        step = make_step(work.loss_fn, work.tx, batch, params, grads, opt_state, workload.CLIP_NORM)
        values, state = baselines.init(work.init_fn, work.tx, params, opt_state)
        for _ in range(3):
            values, state, _loss = step(values, state, jax.device_put(work.batch, batch))
        results.append(jax.device_get(values))
    results.append(plain(work))
    for result in results[:2]:
        found, wanted = (
            np.concatenate([x.ravel() for x in jax.tree.leaves(t)]) for t in (result, results[2])
        )
        assert np.linalg.norm(found - wanted) < 1e-5 * np.linalg.norm(wanted)


def plain(work: workload.Workload) -> object:
    """Three steps of optax on one device."""
    tx = optax.chain(optax.clip_by_global_norm(workload.CLIP_NORM), work.tx)
    values = jax.jit(work.init_fn)()
    state = jax.jit(tx.init)(values)

    @jax.jit
    def step(values: object, state: object) -> tuple[object, object]:
        updates, state = tx.update(jax.grad(work.loss_fn)(values, work.batch), state, values)
        return optax.apply_updates(values, updates), state

    for _ in range(3):
        values, state = step(values, state)
    return jax.device_get(values)
