"""Updates in the backward pass: the trajectory of the same plan without offload, whatever the program's form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zeroj as zj
from tests import oracle
from tests.test_contract import optimizer
from zeroj.optimizer import layerwise

pytestmark = pytest.mark.usefixtures("compile_fast")

LAYERS, WIDTH, ROWS, STEPS = 4, 16, 16, 5
HOST = {"device": "cpu"}
STACKS = ["blocks/a", "blocks/b"]


def params() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    shapes = {"a": (LAYERS, WIDTH, WIDTH), "b": (LAYERS, WIDTH, WIDTH), "c": (LAYERS, WIDTH)}
    blocks = {name: 0.3 * rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    return {"in": 0.3 * rng.standard_normal((WIDTH, WIDTH), np.float32), "blocks": blocks}


def batches() -> list[dict[str, np.ndarray]]:
    """The second batch counts nothing, under a loss that looks at counts."""
    rng = np.random.default_rng(1)
    return [
        {
            "x": rng.standard_normal((ROWS, WIDTH), np.float32),
            "counts": np.full((ROWS,), number != 1, np.float32),
        }
        for number in range(STEPS)
    ]


def block(x: jax.Array, p: dict[str, jax.Array]) -> jax.Array:
    return x + jnp.tanh(x @ p["a"] + p["c"]) @ p["b"]


def scanned(p: Any, batch: Any) -> jax.Array:
    x, _ = jax.lax.scan(lambda x, w: (block(x, w), None), batch["x"] @ p["in"], p["blocks"])
    return jnp.mean(jnp.square(x))


def remat(p: Any, batch: Any) -> jax.Array:
    one = jax.checkpoint(block)
    x, _ = jax.lax.scan(lambda x, w: (one(x, w), None), batch["x"] @ p["in"], p["blocks"])
    return jnp.mean(jnp.square(x))


def backwards(p: Any, batch: Any) -> jax.Array:
    x = jax.lax.scan(lambda x, w: (block(x, w), None), batch["x"] @ p["in"], p["blocks"], reverse=True)[0]
    return jnp.mean(jnp.square(x))


def twice(p: Any, batch: Any) -> jax.Array:
    """Every stack is used by two loops: its gradient is a sum, and arises in neither."""
    return scanned(p, batch) + scanned(p, {"x": -batch["x"]})


def nested(p: Any, batch: Any) -> jax.Array:
    """A loop over pairs of layers around one over the layers of a pair."""
    pairs = jax.tree.map(lambda w: w.reshape(2, LAYERS // 2, *w.shape[1:]), p["blocks"])

    def pair(x: jax.Array, two: Any) -> tuple[jax.Array, None]:
        return jax.lax.scan(lambda x, w: (block(x, w), None), x, two)[0], None

    return jnp.mean(jnp.square(jax.lax.scan(pair, batch["x"] @ p["in"], pairs)[0]))


def by_index(p: Any, batch: Any) -> jax.Array:
    """The stacks are constants of the loop, which takes a layer of them by its index."""

    def body(x: jax.Array, i: jax.Array) -> tuple[jax.Array, None]:
        return block(x, jax.tree.map(lambda w: w[i], p["blocks"])), None

    return jnp.mean(jnp.square(jax.lax.scan(body, batch["x"] @ p["in"], jnp.arange(LAYERS))[0]))


def counted(p: Any, batch: Any) -> zj.Mean:
    x, _ = jax.lax.scan(lambda x, w: (block(x, w), None), batch["x"] @ p["in"], p["blocks"])
    return zj.Mean(jnp.sum(jnp.mean(jnp.square(x), -1) * batch["counts"]), jnp.sum(batch["counts"]))


def counted_by_params(p: Any, batch: Any) -> zj.Mean:
    """How much counts is known only when the params are looked at."""
    mean = counted(p, batch)
    return zj.Mean(mean.total, mean.count * (1 + jnp.sum(jnp.abs(jax.lax.stop_gradient(p["in"])) > 1e9)))


def plan_for(
    tx: optax.GradientTransformation, precision: str, scanned: Any = "blocks", **zero: Any
) -> zj.Plan:
    section = zj.Zero(stage=3, stage3_param_persistence_threshold=WIDTH * LAYERS, **zero)
    return zj.make_plan(params(), tx, zj.make_mesh(), section, precision=precision, scanned=[scanned])


def taken(tx: optax.GradientTransformation, plan: zj.Plan) -> list[str]:
    found = layerwise.taking(zj.wrap_optimizer(tx, plan), plan.opt_state_struct())
    return sorted(found.values) if found else []


def train(
    loss: Callable[..., Any], tx: optax.GradientTransformation, plan: zj.Plan
) -> tuple[zj.TrainState, list[tuple[float, float]]]:
    state, seen = zj.init_state(params(), tx, plan), []
    step = zj.make_train_step(loss, tx, plan, skip_nonfinite=False)
    for batch in batches():
        state, metrics = step(state, batch)
        seen.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    return state, seen


def check(loss: Callable[..., Any], tx: optax.GradientTransformation, precision: str, **zero: Any) -> None:
    """Offloaded and not: the same losses, norms, params and state."""
    plan, plain = plan_for(tx, precision, offload_optimizer=HOST, **zero), plan_for(tx, precision)
    (state, seen), (wanted, by_hand) = train(loss, tx, plan), train(loss, tx, plain)
    np.testing.assert_allclose(seen, by_hand, rtol=2e-6)
    assert oracle.distance(zj.full_params(state, plan), zj.full_params(wanted, plain)) <= 1e-6
    for leaf, planned in zip(jax.tree.leaves(state.opt_state.inner), plan.state_leaves, strict=True):
        assert leaf.sharding.memory_kind == (planned.placement.memory or "device"), planned.path
    for leaf, planned in zip(jax.tree.leaves(state.params), plan.leaves, strict=True):
        assert leaf.sharding.memory_kind == (planned.param_memory or "device"), planned.path


ELEMENTWISE = ("adamw", "lion", "sgd", "multi_transform")


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_updates_are_made_in_the_backward_pass(name: str) -> None:
    plan = plan_for(optimizer(name), "bf16", offload_optimizer=HOST)
    assert taken(optimizer(name), plan) == STACKS  # "c" is at most the persistence threshold: it stays


MIXED = {
    "muon": optimizer("muon"),
    "adafactor": optimizer("adafactor"),
    "lamb": optimizer("lamb"),
    "apply_if_finite": optimizer("apply_if_finite"),
    "clipped by itself": optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-3)),
    "centred": optax.chain(optax.centralize(), optax.sgd(0.1, momentum=0.9)),
}


@pytest.mark.parametrize("name", MIXED)
def test_updates_that_mix_elements_or_leaves_are_not(name: str) -> None:
    plan = plan_for(MIXED[name], "bf16", offload_optimizer=HOST)
    assert taken(MIXED[name], plan) == []


def test_nor_are_leaves_that_are_no_stacks_or_are_padded_or_stay_on_the_device() -> None:
    tx = optimizer("adamw")
    assert taken(tx, plan_for(tx, "bf16", scanned="none", offload_optimizer=HOST)) == []
    assert taken(tx, plan_for(tx, "bf16")) == []
    half = plan_for(tx, "bf16", offload_optimizer={**HOST, "ratio": 0.5})
    assert (
        [leaf.path for leaf in half.leaves if leaf.state_memory and leaf.stack] == taken(tx, half) != STACKS
    )
    small = {"blocks": {"a": np.ones((LAYERS, 13, 13), np.float32)}}
    zero = zj.Zero(stage=3, stage3_param_persistence_threshold=0, offload_optimizer=HOST)
    assert taken(tx, zj.make_plan(small, tx, zj.make_mesh(), zero, scanned=["blocks"])) == []


def test_nor_are_layers_larger_than_the_pieces_that_may_be_on_the_device() -> None:
    tx = optimizer("adamw")
    plan = plan_for(tx, "bf16", offload_optimizer=HOST, sub_group_size=4)
    assert taken(tx, plan) == []


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["adamw", "multi_transform"])
def test_offloaded_steps_without_clipping_equal_steps_on_the_device(name: str, precision: str) -> None:
    check(remat, optimizer(name), precision)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_with_params_offloaded_too(precision: str) -> None:
    check(remat, optimizer("adamw"), precision, offload_param=HOST)


def test_with_a_schedule_and_only_some_of_the_state_offloaded() -> None:
    tx = optax.adamw(optax.cosine_decay_schedule(1e-2, STEPS), weight_decay=0.1)
    plan, plain = plan_for(tx, "fp32", offload_optimizer={**HOST, "ratio": 0.5}), plan_for(tx, "fp32")
    found, wanted = train(scanned, tx, plan), train(scanned, tx, plain)
    np.testing.assert_allclose(found[1], wanted[1], rtol=2e-6)
    assert oracle.distance(zj.full_params(found[0], plan), zj.full_params(wanted[0], plain)) <= 1e-6


FORMS = (scanned, backwards, twice, nested, by_index)


@pytest.mark.parametrize("loss", FORMS, ids=lambda loss: loss.__name__)
def test_whatever_the_loop_that_makes_the_gradient(loss: Callable[..., Any]) -> None:
    check(loss, optimizer("adamw"), "fp32")


@pytest.mark.parametrize("loss", [counted, counted_by_params], ids=lambda loss: loss.__name__)
@pytest.mark.parametrize("more", [{}, {"offload_param": HOST}], ids=["state", "params"])
def test_nothing_changes_where_the_loss_counted_nothing(
    loss: Callable[..., Any], more: dict[str, Any]
) -> None:
    check(loss, optimizer("adamw"), "bf16", **more)


def stack_of_stacks(p: Any, batch: Any) -> jax.Array:
    def pair(x: jax.Array, two: Any) -> tuple[jax.Array, None]:
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, two)[0], None

    return jnp.mean(jnp.square(jax.lax.scan(pair, batch["x"], p["pairs"])[0]))


@pytest.mark.parametrize("more", [{}, {"offload_param": HOST}], ids=["state", "params"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_stack_of_stacks_is_updated_in_the_inner_loop(precision: str, more: dict[str, Any]) -> None:
    first = {"pairs": 0.5 * np.random.default_rng(2).standard_normal((2, 3, WIDTH, WIDTH), np.float32)}
    tx, results = optimizer("adamw"), []
    for zero in ({"offload_optimizer": HOST, **more}, {}):
        section = zj.Zero(stage=3, stage3_param_persistence_threshold=0, **zero)
        plan = zj.make_plan(first, tx, zj.make_mesh(), section, precision=precision, scanned=["pairs"])
        assert taken(tx, plan) == (["pairs"] if zero else [])
        step, state = (
            zj.make_train_step(stack_of_stacks, tx, plan, skip_nonfinite=False),
            zj.init_state(first, tx, plan),
        )
        for batch in batches():
            state, metrics = step(state, batch)
        results.append((float(metrics["grad_norm"]), zj.full_params(state, plan)))
    (norm, found), (wanted_norm, wanted) = results
    assert norm == pytest.approx(wanted_norm, rel=2e-6)
    assert oracle.distance(found, wanted) <= 1e-6


def test_with_an_optimizer_that_has_no_state() -> None:
    check(remat, optax.sgd(0.1), "fp32", offload_param=HOST)
    check(remat, optax.sgd(0.1), "bf16")


def test_second_shards_in_a_node_beside_it() -> None:
    """hpZ, whose near shards of offloaded params wait in host memory, with params changed in place."""
    tx, results = optimizer("adamw"), []
    for zero in ({"offload_optimizer": HOST, "offload_param": HOST}, {}):
        section = zj.Zero(
            stage=3,
            stage3_param_persistence_threshold=WIDTH * LAYERS,
            zero_hpz_partition_size=4,
            zero_quantized_weights=True,
            **zero,
        )
        mesh = zj.make_mesh(node=2, local=4)
        plan = zj.make_plan(params(), tx, mesh, section, precision="bf16", scanned=["blocks"])
        state, seen = train(remat, tx, plan)
        results.append((seen, zj.full_params(state, plan)))
    np.testing.assert_allclose(results[0][0], results[1][0], rtol=2e-6)
    assert oracle.distance(results[0][1], results[1][1]) <= 1e-6


def test_quantised_reductions_with_feedback_come_before_it() -> None:
    plus = {"zero_quantized_gradients": True, "zeropp_loco_param": {}}
    tx = optimizer("adamw")
    plan, plain = plan_for(tx, "bf16", offload_optimizer=HOST, **plus), plan_for(tx, "bf16", **plus)
    assert taken(tx, plan) == STACKS
    found, wanted = train(remat, tx, plan), train(remat, tx, plain)
    np.testing.assert_allclose(found[1], wanted[1], rtol=1e-5)
    assert oracle.distance(zj.full_params(found[0], plan), zj.full_params(wanted[0], plain)) <= 1e-5
