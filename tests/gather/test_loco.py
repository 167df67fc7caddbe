"""LoCo: what quantising loses of a gradient is sent later, so that sums over steps are right."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import zeroj as zj
from tests import oracle
from tests.collectives.test_plain import mesh_of
from tests.collectives.test_quantized import AXES, placed
from tests.gather.test_zeropp import ALL, QGZ, batches, first_params, loss_fn, plan_of
from zeroj.collectives import quantized

pytestmark = pytest.mark.usefixtures("compile_fast")
LOCO = QGZ | {"zeropp_loco_param": {"err_beta": 0.5}}
SGD = optax.sgd(1.0)


@pytest.mark.parametrize("beta", [0.0, 0.8])
def test_the_mean_of_what_arrives_converges_to_the_true_mean(beta: float) -> None:
    """Like 1 / T; without feedback the error of int4 stays, however many steps are averaged."""
    placement, steps = placed((12, 200), (2, 4), 4), (20, 80)
    each = jnp.asarray(np.random.default_rng(3).normal(size=(8, 12, 200)), jnp.float32)

    def reduced(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        def one(errors: list[jax.Array], _: Any) -> tuple[list[jax.Array], jax.Array]:
            feedback = quantized.Feedback(errors, beta, jnp.float32(1), jnp.bool_(True))
            out, errors = quantized.reduce_with_feedback(x[0], placement, AXES, feedback)
            return errors, out

        dim, axes = placement.dims[0]
        assert "local" in axes
        second = list(placement.padded)
        second[dim] //= 4
        zeros = [jnp.zeros(placement.padded), jnp.zeros(second)]
        return jax.lax.scan(one, zeros, length=steps[-1])[1], quantized.reduce(x[0], placement, AXES)

    spec = placement.zero_spec
    outs = (PartitionSpec(None, *spec), spec)
    mapped = jax.shard_map(
        reduced, mesh=mesh_of((2, 4)), in_specs=PartitionSpec(AXES), out_specs=outs, check_vma=False
    )
    found, plain = jax.jit(mapped)(each)
    true = np.asarray(each).sum(0)
    cut = tuple(slice(n) for n in true.shape)
    apart = [np.abs(np.asarray(found)[:n].mean(0)[cut] - true).max() for n in steps]
    alone = np.abs(np.asarray(plain)[cut] - true).max()
    assert apart[1] <= apart[0] / 3 and apart[1] <= alone / 10, (apart, alone)


def moved(zero: Any, stacked: bool, steps: int, accumulation: int = 1) -> dict[str, np.ndarray]:
    """How far the mean gradient of a loss that is linear in the params is from the true one, by leaf."""
    rng = np.random.default_rng(0)
    shapes = {"up": (64, 130), "down": (130, 64)}
    weights = {k: rng.normal(size=(16, 2, *s)).astype(np.float32) for k, s in shapes.items()}
    params: Any = {k: np.zeros((2, *s), np.float32) for k, s in shapes.items()}
    if not stacked:
        params = {"0": {k: v[0] for k, v in params.items()}, "1": {k: v[1] for k, v in params.items()}}

    def linear(params: Any, batch: Any) -> jax.Array:
        if stacked:
            given = jax.tree.map(lambda w: jnp.moveaxis(w, 1, 0), batch)
            add = lambda c, x: (c + sum(jnp.vdot(p, w.sum(0)) for p, w in zip(*x)), None)  # noqa: E731
            stacks = ([params[k] for k in shapes], [given[k] for k in shapes])
            return jax.lax.scan(add, jnp.float32(0), stacks)[0] / batch["up"].shape[0]
        return sum(
            jnp.vdot(params[str(i)][k], batch[k][:, i].sum(0)) for i in range(2) for k in shapes
        ) / len(batch["up"])

    settings = zj.Zero(stage=3, stage3_param_persistence_threshold=0, **zero)
    scanned = list(shapes) if stacked else None
    plan = zj.make_plan(params, SGD, zj.make_mesh(node=2, local=4), settings, scanned=scanned)
    step, state = zj.make_train_step(linear, SGD, plan, accumulation), zj.init_state(params, SGD, plan)
    for _ in range(steps):
        state, metrics = step(state, weights)
        float(metrics["loss"])
    whole = zj.full_params(state, plan)
    found = whole if stacked else {k: np.stack([whole[i][k] for i in "01"]) for k in shapes}
    return {k: np.abs(-found[k] / steps - weights[k].mean(0)).max() for k in shapes}


@pytest.mark.parametrize(("stacked", "accumulation"), [(True, 2), (False, 1)])
def test_the_mean_update_of_the_step_converges_too(stacked: bool, accumulation: int) -> None:
    """Layers in a loop and micro-batches take their errors with them; int4 alone does not converge."""
    few, many = (moved(LOCO, stacked, steps, accumulation) for steps in (5, 25))
    alone = moved(QGZ, stacked, 5, accumulation)
    for leaf in many:
        assert many[leaf] <= few[leaf] / 3 and many[leaf] <= alone[leaf] / 4, (leaf, few, many, alone)


def trained(plan: zj.Plan, data: list[Any], state: Any = None, tx: Any = SGD, **options: Any) -> Any:
    params = first_params(stacked=True)
    step = zj.make_train_step(loss_fn, tx, plan, **options)
    state = zj.init_state(params, tx, plan) if state is None else state
    for batch in data:
        state, metrics = step(state, batch)
        float(metrics["loss"])
    return state


def leaves_of(tree: Any) -> list[np.ndarray]:
    return [np.asarray(x, np.float32) for x in jax.tree.leaves(jax.device_get(tree))]


def owed(state: Any) -> list[np.ndarray]:
    """What the next step feeds back."""
    return [x * bool(state.feeds) for x in leaves_of(state.errors)]


def test_a_skipped_update_leaves_no_error_and_no_poison() -> None:
    plan = plan_of(first_params(True), tx=SGD, **LOCO)
    first, bad, last = batches(3)
    bad = bad | {"by": np.full_like(bad["by"], np.inf)}
    before = trained(plan, [first], skip_nonfinite=True)
    assert all(np.abs(x).max() > 0 for x in leaves_of(before.errors))
    params = leaves_of(before.params)
    state = trained(plan, [bad], before, skip_nonfinite=True)
    assert int(state.skipped) == 1 and all((x == 0).all() for x in owed(state))
    jax.tree.map(np.testing.assert_array_equal, leaves_of(state.params), params)
    state = trained(plan, [last], state, skip_nonfinite=True)
    assert int(state.step) == 2 and all(np.isfinite(x).all() for x in leaves_of((state.errors, state.params)))


def test_a_skip_is_not_needed_for_errors_to_stay_finite() -> None:
    bad = batches(1)[0]
    bad = bad | {"by": np.full_like(bad["by"], np.inf)}
    state = trained(plan_of(first_params(True), tx=SGD, **LOCO), [bad], skip_nonfinite=False)
    assert not all(np.isfinite(x).all() for x in leaves_of(state.params))
    assert all(np.isfinite(x).all() for x in leaves_of(state.errors))


def test_errors_are_kept_without_the_loss_scale() -> None:
    """So a scale that changes does not change them: those of fp16 are near those of fp32, after one step."""
    data = batches(1)
    runs = [
        trained(plan_of(first_params(True), tx=SGD, precision=p, **LOCO), data, skip_nonfinite=False)
        for p in ("fp32", "fp16")
    ]
    for exact, half in zip(*(leaves_of(state.errors) for state in runs), strict=True):
        assert 0.5 < np.abs(half).max() / np.abs(exact).max() < 2


def test_reset_t_sets_the_error_to_zero() -> None:
    """With 2 the third step starts from no error; with 3 it does not."""
    data, ends = batches(3), {}
    for reset_t in (2, 3):
        zero = QGZ | {"zeropp_loco_param": {"reset_T": reset_t}}
        plan = plan_of(first_params(True), tx=SGD, **zero)
        half = trained(plan, data[:2], donate=False)
        assert bool(half.feeds) is (reset_t == 3)
        none = half._replace(errors=jax.tree.map(jnp.zeros_like, half.errors))
        ends[reset_t] = [leaves_of(trained(plan, data[2:], x, donate=False).params) for x in (half, none)]
    jax.tree.map(np.testing.assert_array_equal, *ends[2])
    assert oracle.distance(*ends[3]) > 0


def test_a_run_that_is_resumed_is_the_same_to_the_bit(tmp_path: Any) -> None:
    params, data = first_params(stacked=True), batches(4)
    plan = plan_of(params, tx=SGD, **LOCO)
    half = trained(plan, data[:2])
    with zj.Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(half, plan, wait=True)
        whole = trained(plan, data[2:], half)
        resumed, _ = checkpoints.restore(plan)
        resumed = trained(plan, data[2:], resumed)
        for part in ("params", "errors"):
            pair = (leaves_of(getattr(x, part)) for x in (resumed, whole))
            jax.tree.map(np.testing.assert_array_equal, *pair)
        other = plan_of(params, zj.make_mesh(node=4, local=2), tx=SGD, **LOCO)
        with pytest.warns(UserWarning, match=r"start from zero: they are those of mesh .*'node': 2"):
            elsewhere, _ = checkpoints.restore(other)
        assert elsewhere.errors and all((x == 0).all() for x in leaves_of(elsewhere.errors))
        trained(other, data[2:3], elsewhere)


def test_a_checkpoint_without_errors_says_so(tmp_path: Any) -> None:
    params = first_params(stacked=True)
    plain, plan = plan_of(params, tx=SGD, **QGZ), plan_of(params, tx=SGD, **LOCO)
    with zj.Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(zj.init_state(params, SGD, plain), plain, wait=True)
        with pytest.warns(UserWarning, match="the checkpoint holds none"):
            checkpoints.restore(plan)
        checkpoints.save(zj.init_state(params, SGD, plan), plan, step=1, wait=True)
        state, _ = checkpoints.restore(plain, step=1)
    assert state.errors == ()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_memory_counts_the_errors(precision: str) -> None:
    """A whole gradient on every device for the hop in a node, a fourth of it for the one across."""
    params = first_params(stacked=True)
    plan = plan_of(params, precision=precision, **LOCO)
    planned = plan.memory().device["errors"]
    state = zj.init_state(params, optax.adamw(1e-3), plan)
    device = jax.devices()[0]
    held = sum(
        x.data.nbytes
        for e in jax.tree.leaves(state.errors)
        for x in e.addressable_shards
        if x.device == device
    )
    matrices = sum(x.size for x in (params["tokens"], params["blocks"]["up"], params["blocks"]["down"]))
    assert planned == held == matrices * 5 // 4 * (4 if precision == "fp32" else 2)
    assert jax.tree.map(
        lambda x: x.sharding, zj.abstract_state(optax.adamw(1e-3), plan).errors
    ) == jax.tree.map(lambda x: x.sharding, state.errors)


def away(where: str, folder: Any) -> dict[str, Any]:
    part = {"device": where} | ({"nvme_path": str(folder)} if where == "nvme" else {})
    return {"offload_optimizer": part}


def kinds(errors: Any) -> set[str]:
    return {x.sharding.memory_kind for x in jax.tree.leaves(errors)}


@pytest.mark.parametrize(
    ("where", "stacked", "accumulation"),
    [
        ("cpu", True, 2),
        ("nvme", True, 1),
        pytest.param("cpu", False, 1, marks=pytest.mark.full),
        pytest.param("nvme", False, 2, marks=pytest.mark.full),
    ],
)
def test_errors_in_host_memory_change_no_bit(
    where: str, stacked: bool, accumulation: int, tmp_path: Any
) -> None:
    """Of two plans with the optimizer elsewhere, one keeps the errors on the device. One update is skipped."""
    tx, data, ends = optax.adamw(1e-2), batches(5), []
    data[2] = data[2] | {"by": np.full_like(data[2]["by"], np.inf)}
    params = first_params(stacked)
    for host in (False, True):
        plan = plan_of(params, tx=tx, **(ALL | LOCO), **away(where, tmp_path))
        if not host:
            plan = replace(plan, leaves=tuple(replace(x, error_memory="") for x in plan.leaves))
        step = zj.make_train_step(loss_fn, tx, plan, accumulation, clip_norm=1.0, skip_nonfinite=True)
        state = zj.init_state(params, tx, plan)
        for batch in data:
            state, _ = step(state, batch)
            assert kinds(state.errors) == {"pinned_host" if host else "device"}
        assert int(state.skipped) == 1 and bool(state.feeds)
        ends.append([zj.full_params(state, plan), leaves_of(state.errors)])
    jax.tree.map(np.testing.assert_array_equal, *ends)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["cpu", "nvme"])
def test_with_the_optimizer_elsewhere_the_steps_are_the_same(where: str, tmp_path: Any) -> None:
    """As without offload: params and errors alike, but for roundings of int4 that the last bit of a sum turns."""
    tx, ends = optax.adamw(1e-2), []
    for more in ({}, away(where, tmp_path)):
        plan = plan_of(first_params(True), tx=tx, **(ALL | LOCO), **more)
        state = trained(plan, batches(3), tx=tx)
        ends.append((zj.full_params(state, plan), leaves_of(state.errors)))
    (params, errors), (other_params, other_errors) = ends
    assert oracle.distance(other_params, params) <= 1e-5
    for here, there in zip(errors, other_errors, strict=True):
        off = np.abs(there - here) > 1e-6 + 1e-3 * np.abs(here).max()
        assert off.mean() <= 1e-3


def test_without_state_of_its_own_a_leaf_keeps_its_errors_on_the_host_too(tmp_path: Any) -> None:
    """Plain SGD has no moments, and in fp32 no master either; with a ratio of 0 nothing is moved."""
    plans = [
        plan_of(first_params(True), tx=SGD, **LOCO, offload_optimizer={"device": "cpu", "ratio": ratio})
        for ratio in (1.0, 0.0)
    ]
    states = [trained(plan, batches(2)) for plan in plans]
    assert [kinds(state.errors) for state in states] == [{"pinned_host"}, {"device"}]
    for there, here in zip(*(leaves_of((s.params, s.errors)) for s in states), strict=True):
        np.testing.assert_array_equal(there, here)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_memory_counts_errors_where_they_are(precision: str) -> None:
    tx, params = optax.adamw(1e-3), first_params(stacked=True)
    here, there = (
        plan_of(params, precision=precision, tx=tx, **LOCO, **more) for more in ({}, away("cpu", None))
    )
    assert "errors" not in there.memory().device and "errors" not in here.memory().host
    assert there.memory().host["errors"] == 8 * here.memory().device["errors"]
    state = zj.init_state(params, tx, there)
    assert there.memory().host["errors"] == sum(x.nbytes for x in jax.tree.leaves(state.errors))
    wanted = jax.tree.map(lambda x: x.sharding, state.errors)
    assert wanted == jax.tree.map(lambda x: x.sharding, zj.abstract_state(tx, there).errors)


@pytest.mark.parametrize("offloaded", [False, True])
def test_errors_go_to_the_host_and_back_with_the_state(offloaded: bool) -> None:
    plan = plan_of(first_params(True), tx=SGD, **LOCO, **(away("cpu", None) if offloaded else {}))
    first, last = batches(2)
    state = trained(plan, [first])
    planned = kinds(state.errors)
    moved = zj.offload_states(state)
    assert kinds(moved.errors) == {"pinned_host"}
    only = zj.offload_states(state, include=("params",))
    assert kinds(only.errors) == planned
    if not offloaded:
        gone = zj.offload_states(state, include=("errors",))
        with pytest.raises(zj.PlanError, match="errors/blocks/down/0: in host memory, planned on the device"):
            trained(plan, [last], gone)
    back = zj.reload_states(moved, plan)
    assert kinds(back.errors) == planned
    ends = [leaves_of(trained(plan, [last], x, donate=False).errors) for x in (back, state)]
    jax.tree.map(np.testing.assert_array_equal, *ends)


@pytest.mark.parametrize("skipped", [False, True])
def test_a_checkpoint_of_one_tier_opens_on_another(skipped: bool, tmp_path: Any) -> None:
    """From the device to the host and back: the same errors; none where the last update was skipped."""
    params, data = first_params(stacked=True), batches(2)
    data[1] = data[1] | {"by": np.full_like(data[1]["by"], np.inf if skipped else 1)}
    plans = [plan_of(params, tx=SGD, **LOCO, **more) for more in ({}, away("cpu", None))]
    for number, (plan, other) in enumerate((plans, plans[::-1])):
        with zj.Checkpointer(tmp_path / str(number)) as checkpoints:
            state = trained(plan, data, skip_nonfinite=True)
            checkpoints.save(state, plan, wait=True)
            found, _ = checkpoints.restore(other)
        assert kinds(found.errors) == {"pinned_host" if other is plans[1] else "device"}
        jax.tree.map(np.testing.assert_array_equal, owed(found), owed(state))
        assert all(np.abs(x).max() > 0 for x in owed(state)) is not skipped
        ends = [
            trained(*given, skip_nonfinite=True)
            for given in ((plan, data[:1], state), (other, data[:1], found))
        ]
        jax.tree.map(np.testing.assert_array_equal, *(leaves_of((s.params, s.errors)) for s in ends))


def test_gradients_alone_have_no_feedback_and_say_so() -> None:
    plan = plan_of(first_params(True), **LOCO)
    with pytest.warns(UserWarning, match="zeropp_loco_param.*without feedback"):
        zj.value_and_grad(loss_fn, plan)
