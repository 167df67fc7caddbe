"""What does not fit together is refused at build or at the first call, by name, shape and remedy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zeroj as zj
from tests import oracle

TX = optax.adamw(1e-3)


def parts(stage: int = 3, mesh: Any = None, **options: Any) -> tuple[Any, zj.Plan, zj.TrainState]:
    params = oracle.toy_params()
    plan = zj.make_plan(params, TX, mesh or oracle.mesh_of(8), zj.Zero(stage=stage), **options)
    return params, plan, zj.init_state(params, TX, plan)


def toy_batch(size: int) -> Any:
    return oracle.toy_batches(1, size)[0]


@pytest.mark.parametrize("stage", (0, 1, 2, 3))
@pytest.mark.parametrize(("size", "accumulation"), ((19, 1), (4, 1), (1, 1), (24, 4)))
def test_a_batch_that_devices_and_micro_batches_do_not_divide(
    stage: int, size: int, accumulation: int
) -> None:
    _, plan, state = parts(stage)
    step = zj.make_train_step(oracle.toy_loss, TX, plan, accumulation_steps=accumulation)
    with pytest.raises(zj.PlanError) as caught:
        step(state, toy_batch(size))
    message = str(caught.value)
    assert f"global batch size {size}" in message
    assert "8 devices" in message and f"{accumulation} micro-batches" in message
    assert "node=2" in message and "local=4" in message
    if size < 8:
        assert "at least 8" in message and "axis that does not split the batch" in message


def test_eval_refuses_such_a_batch_too() -> None:
    _, plan, state = parts()
    with pytest.raises(zj.PlanError, match="global batch size 19"):
        zj.make_eval_step(oracle.toy_loss, plan)(state, toy_batch(19))


def test_leaves_that_disagree_on_the_batch_size_are_listed() -> None:
    _, plan, state = parts()
    batch = {**toy_batch(16), "y": np.zeros((8, 4), np.float32)}
    with pytest.raises(zj.PlanError) as caught:
        zj.make_train_step(oracle.toy_loss, TX, plan)(state, batch)
    assert "'y': 8" in str(caught.value) and "'x': 16" in str(caught.value)


def test_a_batch_of_one_trains_where_the_batch_axis_is_one() -> None:
    """Params of the user's own model axis, ZeRO's axis of size 1: less than a sample per device is possible."""
    mesh = zj.make_mesh(local=1, model=8)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "model"))
    params = {"w": jax.device_put(oracle.normal(np.random.default_rng(0), 8, 16), sharding)}

    def loss(p: Any, batch: Any) -> jax.Array:
        return jnp.mean((batch @ p["w"]) ** 2)

    rng = np.random.default_rng(1)
    host = jax.device_get(params)
    m = oracle.Model(loss, host, [oracle.normal(rng, 1, 8) for _ in range(5)])
    wanted = oracle.oracle(m, TX)
    for stage in (0, 3):
        plan = zj.make_plan(params, TX, mesh, zj.Zero(stage=stage))
        state = zj.init_state(params, TX, plan)
        assert state.params["w"].addressable_shards[0].data.shape == (8, 2)
        step = zj.make_train_step(loss, TX, plan)
        for batch in m.batches:
            state, _ = step(state, batch)
        assert oracle.distance(zj.full_params(state, plan), wanted.params) < 1e-6


def losses_that_are_none() -> dict[str, Any]:
    return {
        "vector": lambda p, b: jnp.ones(3) * p["scale"],
        "none": lambda p, b: None,
        "string": lambda p, b: "loss",
        "integer": lambda p, b: jnp.int32(3),
        "triple": lambda p, b: (p["scale"], 1, 2),
        "vector total": lambda p, b: zj.Mean(jnp.ones(3) * p["scale"], 3),
        "vector count": lambda p, b: zj.Mean(p["scale"], jnp.ones(3)),
        "dict": lambda p, b: {"loss": p["scale"]},
    }


@pytest.mark.parametrize("kind", losses_that_are_none())
@pytest.mark.parametrize("stage", (0, 3))
def test_a_loss_that_is_no_scalar(kind: str, stage: int) -> None:
    _, plan, state = parts(stage)
    loss = losses_that_are_none()[kind]
    for call in (
        lambda: zj.make_train_step(loss, TX, plan)(state, toy_batch(16)),
        lambda: zj.make_eval_step(loss, plan)(state, toy_batch(16)),
        lambda: jax.jit(zj.value_and_grad(loss, plan))(state.params, toy_batch(16)),
    ):
        with pytest.raises(zj.PlanError, match="loss_fn must return"):
            call()


def test_a_loss_with_the_wrong_arguments() -> None:
    _, plan, state = parts()
    for loss in (lambda p: p["scale"], lambda p, b, c, d: p["scale"]):
        with pytest.raises(zj.PlanError, match=r"must take \(params, batch\)"):
            zj.make_train_step(loss, TX, plan)(state, toy_batch(16))
    with pytest.raises(zj.PlanError, match="must be a function"):
        zj.make_train_step("loss", TX, plan)


def test_a_loss_that_raises_is_heard_unchanged() -> None:
    _, plan, state = parts()

    def loss(params: Any, batch: Any) -> Any:
        raise LookupError("no such word")

    with pytest.raises(LookupError, match="no such word"):
        zj.make_train_step(loss, TX, plan)(state, toy_batch(16))
    with pytest.raises(LookupError, match="no such word"):
        zj.make_eval_step(loss, plan)(state, toy_batch(16))


def test_params_that_do_not_fit_the_plan_are_all_listed() -> None:
    params, plan, _state = parts()
    wrong = {k: v for k, v in params.items() if k != "emb"} | {"w1": np.zeros((5, 35)), "extra": np.zeros(2)}
    for call in (
        lambda: zj.init_state(wrong, TX, plan),
        lambda: zj.init_state(lambda: jax.tree.map(jnp.asarray, wrong), TX, plan),
        lambda: zj.shard_params(plan, wrong),
        lambda: jax.jit(zj.value_and_grad(oracle.toy_loss, plan))(wrong, toy_batch(16)),
    ):
        with pytest.raises(zj.PlanError) as caught:
            call()
        message = str(caught.value)
        assert "missing: emb" in message and "not in the plan: extra" in message
        assert ("w1: shape (5, 35)" in message and "(5, 36)" in message) or "(5, 40)" in message
        assert "Make the plan from these params" in message


def test_the_remedy_for_params_that_are_not_in_the_plans_layout_is_there() -> None:
    """The message names a function: it must exist and bring the params in."""
    params, plan, _ = parts()
    grad = jax.jit(zj.value_and_grad(oracle.toy_loss, plan))
    with pytest.raises(zj.PlanError) as caught:
        grad(params, toy_batch(16))
    assert "shard_params" in str(caught.value)
    loss, _ = grad(zj.shard_params(plan, params), toy_batch(16))
    np.testing.assert_allclose(loss, oracle.toy_loss(params, toy_batch(16)), rtol=1e-5)


def test_a_state_of_another_plan() -> None:
    _, plan, _ = parts(3)
    _, _, other = parts(3, mesh=oracle.mesh_of(5))
    with pytest.raises(zj.PlanError):
        zj.make_train_step(oracle.toy_loss, TX, plan)(other, toy_batch(40))


def test_a_state_of_another_optimizer() -> None:
    params, plan, _state = parts()
    with pytest.raises(zj.PlanError, match="not the one that the plan was made for") as caught:
        zj.make_train_step(oracle.toy_loss, optax.sgd(0.1, momentum=0.9), plan)
    assert "mu" in str(caught.value) and "Make the plan with this tx" in str(caught.value)
    with pytest.raises(zj.PlanError, match="not the one that the plan was made for"):
        zj.init_state(params, optax.sgd(0.1), plan)
    wrapped = zj.wrap_optimizer(TX, plan)
    _, other, _ = parts(1)
    with pytest.raises(zj.PlanError, match="already wrapped"):
        zj.make_train_step(oracle.toy_loss, wrapped, other)


@pytest.mark.parametrize("tx", (None, 1e-3, "adam", optax.constant_schedule(1.0), optax.adamw))
def test_a_tx_that_is_no_transformation(tx: Any) -> None:
    params, plan, _ = parts()
    for call in (
        lambda: zj.make_plan(params, tx, oracle.mesh_of(8)),
        lambda: zj.wrap_optimizer(tx, plan),
        lambda: zj.make_train_step(oracle.toy_loss, tx, plan),
        lambda: zj.init_state(params, tx, plan),
    ):
        with pytest.raises(zj.PlanError, match=r"must be an optax\.GradientTransformation"):
            call()


def test_a_mesh_without_the_zero_axes() -> None:
    params = oracle.toy_params()
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    with pytest.raises(zj.PlanError, match="none of which is a ZeRO axis") as caught:
        zj.make_plan(params, TX, mesh)
    assert "'data': 8" in str(caught.value) and "zero_axes=('data',)" in str(caught.value)
    with pytest.raises(zj.PlanError, match="not all axes of the mesh"):
        zj.make_plan(params, TX, mesh, zero_axes=("data", "modle"))
    with pytest.raises(zj.PlanError):
        zj.make_plan(params, TX, mesh, zero_axes=())
    assert zj.make_plan(params, TX, mesh, zero_axes=("data",)).degree == 8


def test_params_that_are_no_arrays_are_listed() -> None:
    with pytest.raises(zj.PlanError, match="neither arrays") as caught:
        zj.make_plan({"a": "text", "b": {"c": object()}, "d": np.zeros(3)}, TX, oracle.mesh_of(8))
    assert "a: str" in str(caught.value) and "b/c: object" in str(caught.value)


def test_a_trainable_mask_of_another_structure() -> None:
    with pytest.raises(zj.PlanError, match="mask"):
        zj.make_plan(oracle.toy_params(), TX, oracle.mesh_of(8), trainable={"emb": True})


@pytest.mark.parametrize("options", ({"accumulation_steps": 0}, {"clip_norm": 0.0}, {"clip_norm": -1.0}))
def test_step_options_that_mean_nothing(options: dict[str, Any]) -> None:
    _, plan, _ = parts()
    with pytest.raises(zj.PlanError, match="accumulation_steps must be at least 1 and clip_norm positive"):
        zj.make_train_step(oracle.toy_loss, TX, plan, **options)


def test_a_precision_that_is_none() -> None:
    with pytest.raises(zj.PlanError, match="must be among 'fp32', 'bf16' and 'fp16'"):
        zj.make_plan(oracle.toy_params(), TX, oracle.mesh_of(8), precision="float8")


def test_an_update_without_params() -> None:
    _, plan, state = parts()
    with pytest.raises(zj.PlanError, match="Pass the params"):
        zj.wrap_optimizer(TX, plan).update(state.params, state.opt_state)


def test_has_aux_without_aux_and_rng_without_rng() -> None:
    _, plan, state = parts()
    with pytest.raises(zj.PlanError, match=r"must return \(loss, aux\)"):
        zj.make_train_step(oracle.toy_loss, TX, plan, has_aux=True)(state, toy_batch(16))
    with pytest.raises(zj.PlanError, match="takes an rng"):
        jax.jit(zj.value_and_grad(lambda p, b, rng: p["scale"], plan))(state.params, toy_batch(16))
