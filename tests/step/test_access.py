"""Single leaves by path: whole and by shard, params, gradients and optimizer state, at every stage."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zeroj as zj
from tests import oracle

pytestmark = pytest.mark.usefixtures("compile_fast")
#: 37 and 9 are divided by no number of devices: shards are padded
PARAMS = {
    "embed": {"w": np.arange(37 * 5, dtype=np.float32).reshape(37, 5)},
    "b": np.linspace(-1, 1, 9, dtype=np.float32),
    "frozen": np.full(8, 7.0, np.float32),
}


def loss(params: Any, batch: Any) -> jax.Array:
    squares = [jnp.sum(x.astype(jnp.float32) ** 2) for x in jax.tree.leaves(params)]
    return jnp.mean(batch["x"]) * sum(squares) / 2


def run(
    stage: int, precision: str = "fp32", tx: Any = None, **zero_fields: Any
) -> tuple[Any, zj.Plan, zj.TrainState]:
    tx = optax.adam(0.125) if tx is None else tx
    zero = zj.Zero(stage=stage, stage3_param_persistence_threshold=0, **zero_fields)
    plan = zj.make_plan(
        PARAMS, tx, oracle.mesh_of(8), zero, precision=precision, trainable=lambda path, _: path != "frozen"
    )
    return tx, plan, zj.init_state(PARAMS, tx, plan)


BATCH = {"x": np.ones(8, np.float32)}


@pytest.mark.parametrize("precision", ("fp32", "bf16"))
@pytest.mark.parametrize("stage", (0, 1, 2, 3))
def test_every_part_of_a_leaf_is_got_whole(stage: int, precision: str) -> None:
    tx, plan, state = run(stage, precision)
    state, _ = zj.make_train_step(loss, tx, plan)(state, BATCH)
    w = zj.get_full(state, plan, "embed/w")
    assert w.dtype == np.float32 and w.shape == (37, 5)  # the master, not its rounding
    np.testing.assert_array_equal(w, zj.full_params(state, plan)["embed"]["w"])
    rounded = PARAMS["embed"]["w"].astype(jnp.bfloat16) if precision == "bf16" else PARAMS["embed"]["w"]
    np.testing.assert_allclose(
        zj.get_full(state, plan, "embed/w", "exp_avg"), 0.1 * np.float32(rounded), rtol=1e-5
    )
    squares = zj.get_full(state, plan, "embed/w", "exp_avg_sq")
    np.testing.assert_allclose(squares, 0.001 * np.float32(rounded) ** 2, rtol=1e-5)
    np.testing.assert_array_equal(squares, zj.get_full(state, plan, "embed/w", "0/nu"))
    _, grads = jax.jit(zj.value_and_grad(loss, plan))(state.params, BATCH)
    np.testing.assert_allclose(zj.get_full(grads, plan, "embed/w", "grad"), w, rtol=1e-2)
    assert zj.get_full(state, plan, "frozen").tolist() == [7.0] * 8


@pytest.mark.parametrize("precision", ("fp32", "bf16"))
@pytest.mark.parametrize("stage", (0, 1, 2, 3))
def test_what_is_set_is_what_training_goes_on_with(stage: int, precision: str) -> None:
    """SGD at rate zero leaves params as they are: a stale master would overwrite what was set."""
    tx, plan, state = run(stage, precision, optax.sgd(0.0, momentum=0.5))
    new = np.linspace(3, 4, 37 * 5, dtype=np.float32).reshape(37, 5)
    changed = zj.set_full(state, plan, "embed/w", new)
    changed = zj.set_full(changed, plan, "b", np.ones(9), "momentum_buffer")
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(changed), strict=True):
        assert a.sharding == b.sharding and a.dtype == b.dtype and a.shape == b.shape
    np.testing.assert_array_equal(zj.get_full(state, plan, "embed/w"), PARAMS["embed"]["w"])
    np.testing.assert_array_equal(zj.get_full(changed, plan, "b", "trace"), np.ones(9))
    stored = np.asarray(changed.params["embed"]["w"], np.float32)[:37, :5]
    np.testing.assert_array_equal(stored, np.float32(new.astype(stored_dtype(plan))))
    changed, _ = zj.make_train_step(loss, tx, plan)(changed, BATCH)
    np.testing.assert_array_equal(zj.get_full(changed, plan, "embed/w"), new)


def test_leaves_in_host_memory_are_reached_and_stay_there() -> None:
    host = {"device": "cpu"}
    tx, plan, state = run(3, "bf16", offload_optimizer=host, offload_param=host)
    state, _ = zj.make_train_step(loss, tx, plan)(state, BATCH)
    moments = zj.get_full(state, plan, "embed/w", "mu")
    changed = zj.set_full(state, plan, "embed/w", np.full((37, 5), 3.0))
    changed = zj.set_full(changed, plan, "embed/w", 2 * moments, "mu")
    shard = zj.get_local(changed, plan, "b", "nu")[0]
    changed = zj.set_local(
        changed, plan, "b", [zj.LocalShard(shard.device, shard.index, shard.data + 1)], "nu"
    )
    assert zj.get_full(changed, plan, "b", "nu")[0] > 1
    np.testing.assert_array_equal(zj.get_full(changed, plan, "embed/w", "mu"), 2 * moments)
    assert np.all(zj.get_full(changed, plan, "embed/w") == 3)
    assert changed.params["embed"]["w"].sharding.memory_kind == "pinned_host"
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(changed), strict=True):
        assert a.sharding == b.sharding
    zj.make_train_step(loss, tx, plan)(changed, BATCH)


def test_leaves_in_files_are_read_whole_and_no_more(tmp_path: Path) -> None:
    params = {
        "w": np.linspace(0, 1, 8 * 2**19, dtype=np.float32).reshape(8, -1)
    }  # 2 MiB a device: a file of its own
    config = {
        "train_batch_size": 8,
        "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)},
        },
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = zj.initialize(lambda p, b: jnp.mean(b["x"]) * jnp.mean(p["w"]), params, config)
    assert engine.get_full("w", "exp_avg").shape == params["w"].shape
    for reach in (lambda: engine.get_local("w", "mu"), lambda: engine.set_full("w", params["w"], "mu")):
        with pytest.raises(zj.PlanError, match=r"w \(mu\) lies in files"):
            reach()


def stored_dtype(plan: zj.Plan) -> Any:
    return plan.param_dtype(next(leaf for leaf in plan.leaves if leaf.path == "embed/w"))


@pytest.mark.parametrize("what", ("param", "mu", "grad"))
@pytest.mark.parametrize("stage", (1, 3))
def test_shards_make_up_the_leaf_and_can_be_written(stage: int, what: str) -> None:
    tx, plan, state = run(stage, "bf16")
    state, _ = zj.make_train_step(loss, tx, plan)(state, BATCH)
    held = jax.jit(zj.value_and_grad(loss, plan))(state.params, BATCH)[1] if what == "grad" else state
    whole = zj.get_full(held, plan, "embed/w", what)
    shards = zj.get_local(held, plan, "embed/w", what)
    found = np.zeros_like(whole)
    for shard in shards:
        found[shard.index] = shard.data
    np.testing.assert_array_equal(found, whole)
    assert len({shard.device for shard in shards}) == 8
    assert sum(shard.data.size for shard in shards) == 37 * 5  # none twice, and no padding
    first = next(shard for shard in shards if shard.data.size)
    held = zj.set_local(
        held, plan, "embed/w", [zj.LocalShard(first.device, first.index, first.data * 0 + 2)], what
    )
    wanted = whole.copy()
    wanted[first.index] = 2
    np.testing.assert_array_equal(zj.get_full(held, plan, "embed/w", what), wanted)
    if what == "param":  # what the loss computes with follows the master
        stored = np.asarray(held.params["embed"]["w"], np.float32)[:37, :5]
        np.testing.assert_array_equal(stored, np.float32(wanted.astype(stored_dtype(plan))))


def test_gathered_writes_back_what_the_block_leaves() -> None:
    tx, plan, state = run(3, "bf16")
    with zj.gathered(state, plan, ["embed", "b"]) as leaves:
        assert set(leaves) == {"embed/w", "b"}
        leaves["embed/w"][0] = -5
        leaves["b"] = leaves["b"] * 2
    new = leaves.state
    assert zj.get_full(new, plan, "embed/w")[0].tolist() == [-5] * 5
    np.testing.assert_array_equal(zj.get_full(new, plan, "embed/w")[1:], PARAMS["embed"]["w"][1:])
    np.testing.assert_array_equal(zj.get_full(new, plan, "b"), PARAMS["b"] * 2)
    np.testing.assert_array_equal(zj.get_full(state, plan, "b"), PARAMS["b"])
    with pytest.raises(RuntimeError, match="mine"), zj.gathered(state, plan, "b") as leaves:
        leaves["b"][:] = 0
        raise RuntimeError("mine")
    assert leaves.state is None


def test_the_engine_has_the_same_by_method() -> None:
    config = {
        "train_batch_size": 8,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "gradient_clipping": 0,
    }
    engine = zj.initialize(loss, PARAMS, config | {"zero_optimization": {"stage": 3}})
    with engine.gathered("b") as leaves:
        leaves["b"][:] = 1
    value, grads = engine.compute_gradients(BATCH)
    assert zj.get_full(grads, engine.plan, "b", "grad").tolist() == [1] * 9
    before = engine.get_full("b")
    metrics = engine.train_batch(BATCH)
    assert float(metrics["loss"]) == pytest.approx(float(value))
    assert before.tolist() == [1] * 9 and engine.get_full("b").tolist() == [0] * 9
    engine.set_full("b", np.arange(9))
    engine.offload_states(["params"])
    assert engine.state.params["b"].sharding.memory_kind == "pinned_host"
    engine.reload_states()
    assert engine.state.params["b"].sharding == engine.plan.params["b"]
    shard = engine.get_local("b")[0]
    engine.set_local("b", [zj.LocalShard(shard.device, shard.index, shard.data - 1)])
    assert engine.get_full("b")[0] == -1 and engine.get_full("b")[8] in (7, 8)


def test_other_optimizers_states_are_found_by_name() -> None:
    tx, plan, state = run(2, tx=optax.adafactor(0.1, min_dim_size_to_factor=4))
    assert zj.get_full(state, plan, "embed/w", "v_row").shape == (5,)
    assert zj.get_full(state, plan, "embed/w", "v_col").shape == (37,)
    both = optax.chain(optax.trace(0.5), optax.trace(0.9), optax.sgd(1.0))
    _, plan, state = run(2, tx=both)
    with pytest.raises(zj.PlanError, match=r"named 'trace': several: \['0/trace', '1/trace'\]"):
        zj.get_full(state, plan, "b", "trace")
    assert zj.get_full(state, plan, "b", "1/trace").shape == (9,)


def test_what_cannot_be_is_said() -> None:
    _, plan, state = run(2)
    with pytest.raises(zj.PlanError, match=r"no leaf 'embed/v' among the 3 .*Near it: embed/w"):
        zj.get_full(state, plan, "embed/v")
    with pytest.raises(zj.PlanError, match=r"named 'momentum': none. There is: \['0/mu', '0/nu'\]"):
        zj.get_full(state, plan, "b", "momentum")
    with pytest.raises(zj.PlanError, match="holds no gradients"):
        zj.get_full(state, plan, "b", "grad")
    with pytest.raises(zj.PlanError, match="frozen"):
        zj.get_full(state.params, plan, "frozen", "grad")
    with pytest.raises(zj.PlanError, match=r"none. There is: \[\]"):
        zj.get_full(state, plan, "frozen", "mu")
    with pytest.raises(zj.PlanError, match=r"b \(param\) has shape \(9,\); the new value has \(3,\)"):
        zj.set_full(state, plan, "b", np.ones(3))
    with pytest.raises(zj.PlanError, match="pass a TrainState"):
        zj.get_full(state.params, plan, "b")
    with pytest.raises(zj.PlanError, match="no leaf 'emb'"), zj.gathered(state, plan, ["b", "emb"]):
        pass
    with (
        pytest.raises(zj.PlanError, match="at the end of the block"),
        zj.gathered(state, plan, "b") as leaves,
    ):
        leaves["c"] = leaves["b"]
    shard = zj.get_local(state, plan, "b")[0]
    with pytest.raises(zj.PlanError, match="holds no shard"):
        zj.set_local(state, plan, "b", [zj.LocalShard(shard.device, (slice(1, 3),), shard.data)])
    with pytest.raises(zj.PlanError, match="has shape"):
        zj.set_local(state, plan, "b", [zj.LocalShard(shard.device, shard.index, shard.data[:1])])
