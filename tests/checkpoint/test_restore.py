"""A checkpoint of any plan opens on any other plan, each leaf in its place; what does not fit is named."""

from __future__ import annotations

import pathlib
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zeroj as zj
from tests.checkpoint.toy import (
    PARAMS,
    TX,
    assert_in_place,
    assert_same,
    flat,
    loss,
    normal,
    plan_of,
    train,
)
from zeroj.checkpoint.arrays import chunk_shape

MESHES = ("1", "2", "4", "5", "8", "8r", "2x4")
TABLE = [(saved, stage, mesh) for saved in range(4) for stage in range(4) for mesh in MESHES]
#: Every stage is saved, every stage and every mesh is restored onto.
SOME = [row for i, row in enumerate(TABLE) if i % 7 == (3 * row[0] + row[1]) % 7]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """For each stage and precision: the folder of a checkpoint after 3 steps, the state, and 3 more losses."""
    made: dict[Any, Any] = {}

    def make(stage: int, precision: str) -> Any:
        key = stage, precision
        if key not in made:
            plan = plan_of(stage, "8", precision)
            state, _ = train(zj.init_state(PARAMS, TX, plan), plan, 0, 3)
            folder = tmp_path_factory.mktemp(f"stage{stage}{precision}")
            with zj.Checkpointer(folder) as checkpoints:
                checkpoints.save(state, plan, wait=True)
            expected = flat(state, plan)
            made[key] = folder, expected, train(state, plan, 3, 6)[1]
        return made[key]

    return make


def check(saved: Any, stage: int, onto: int, mesh: str, precision: str, *, steps: bool) -> None:
    folder, expected, losses = saved(stage, precision)
    plan = plan_of(onto, mesh, precision)
    with zj.Checkpointer(folder) as checkpoints:
        state, _ = checkpoints.restore(plan)
    assert_in_place(state, plan)
    assert_same(flat(state, plan), expected)
    if steps:
        tolerance = 2e-6 if precision == "fp32" else 2e-2
        np.testing.assert_allclose(train(state, plan, 3, 6)[1], losses, rtol=tolerance)


@pytest.mark.parametrize(("stage", "onto", "mesh"), SOME)
def test_every_leaf_comes_back_on_another_stage_and_mesh(
    saved: Any, stage: int, onto: int, mesh: str
) -> None:
    check(saved, stage, onto, mesh, "fp32", steps=False)


@pytest.mark.parametrize(("stage", "onto", "mesh"), [(0, 3, "8r"), (1, 3, "5"), (3, 2, "2x4"), (2, 0, "1")])
def test_further_steps_equal_the_undisturbed_run(saved: Any, stage: int, onto: int, mesh: str) -> None:
    """H1, with the same global batches."""
    check(saved, stage, onto, mesh, "fp32", steps=True)


@pytest.mark.full
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(("stage", "onto", "mesh"), TABLE)
def test_the_whole_table(saved: Any, stage: int, onto: int, mesh: str, precision: str) -> None:
    check(saved, stage, onto, mesh, precision, steps=True)


@pytest.mark.parametrize(("stage", "onto", "mesh"), [(1, 3, "5"), (3, 1, "8"), (0, 2, "2x4")])
def test_masters_come_back_bit_by_bit_in_bf16(saved: Any, stage: int, onto: int, mesh: str) -> None:
    check(saved, stage, onto, mesh, "bf16", steps=stage == 1)


def test_a_checkpoint_holds_the_users_shapes_and_nothing_of_the_mesh(saved: Any) -> None:
    folder, expected, _ = saved(3, "fp32")
    manifest = zj.Checkpointer(folder).restore(plan_of(0, "1"))[0]
    del manifest
    assert {k: v.shape for k, v in expected.items() if k.startswith("params/")} == {
        f"params/{k}": v.shape for k, v in PARAMS.items()
    }
    assert any(leaf.placement.padded != leaf.shape for leaf in plan_of(3).leaves), "TOY tests no padding"


@pytest.mark.parametrize(("before", "after"), [("bf16", "fp32"), ("fp32", "bf16"), ("fp16", "bf16")])
def test_another_precision(saved: Any, before: str, after: str) -> None:
    folder, expected, _ = saved(1, before)
    plan = plan_of(2, "4", after)
    with zj.Checkpointer(folder) as checkpoints:
        state, _ = checkpoints.restore(plan)
    assert_in_place(state, plan)
    found = flat(state, plan)
    scale = {name for name in expected if before == "fp16" and name.startswith("scale/")}
    assert_same(
        {k: v for k, v in found.items() if k not in scale},
        {k: v for k, v in expected.items() if k not in scale},
    )
    assert float(state.scale.scale) == 1.0, "only fp16 scales the loss"


def test_the_loss_scale_goes_on_in_fp16_and_starts_where_it_was_not(
    saved: Any, tmp_path: pathlib.Path
) -> None:
    plan = plan_of(3, precision="fp16")
    state = zj.init_state(PARAMS, TX, plan)
    state = state._replace(scale=jax.tree.map(lambda x: x + jnp.ones_like(x), state.scale))
    with zj.Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(state, plan, wait=True)
        again, _ = checkpoints.restore(plan)
        assert jax.tree.map(float, again.scale) == jax.tree.map(float, state.scale)
    folder, _, _ = saved(1, "fp32")
    with zj.Checkpointer(folder) as checkpoints:
        fresh, _ = checkpoints.restore(plan)
        given, _ = checkpoints.restore(plan, loss_scale=zj.LossScale(initial_power=4))
    assert float(fresh.scale.scale) == 2.0**16 and float(given.scale.scale) == 16.0


OPTIMIZERS = {
    "adafactor": optax.adafactor(1e-2),
    "muon": optax.contrib.muon(1e-2),
    "multisteps": optax.MultiSteps(optax.adam(1e-2), 3),
    "hyperparams": optax.inject_hyperparams(optax.sgd)(learning_rate=0.1, momentum=0.9),
    "finite": optax.apply_if_finite(optax.lion(1e-3), 2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optax_state_comes_back(name: str, tmp_path: pathlib.Path) -> None:
    tx: Any = OPTIMIZERS[name]
    tx = tx.gradient_transformation() if isinstance(tx, optax.MultiSteps) else tx
    plan, other = plan_of(2, "8", tx=tx), plan_of(3, "5", tx=tx)
    state, _ = train(zj.init_state(PARAMS, tx, plan), plan, 0, 2, tx)
    with zj.Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(state, plan, wait=True)
        expected = flat(state, plan)
        again, _ = checkpoints.restore(other)
    assert_in_place(again, other, tx)
    assert_same(flat(again, other), expected)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_frozen_integer_and_buffer_leaves_come_back(precision: str, tmp_path: pathlib.Path) -> None:
    """H4: the whole tree is saved, whatever trains."""
    params = {
        **PARAMS,
        "steps": np.arange(11),
        "stats": {"mean": normal(13)},
        "flag": np.array([True, False]),
    }
    trains = lambda path, leaf: path in ("w1", "b1", "gate")  # noqa: E731
    plan = plan_of(2, "8", precision, params=params, trainable=trains)
    state = zj.init_state(params, TX, plan)
    other = plan_of(3, "5", precision, params=params, trainable=trains)
    with zj.Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(state, plan, wait=True)
        again, _ = checkpoints.restore(other)
    assert_in_place(again, other)
    assert_same(flat(again, other), flat(state, plan))
    whole = zj.full_params(again, other)
    assert np.array_equal(whole["steps"], params["steps"]) and np.array_equal(whole["flag"], params["flag"])


def test_missing_and_misshapen_leaves_are_all_named(saved: Any) -> None:
    folder, _, _ = saved(0, "fp32")
    other = {**{k: v for k, v in PARAMS.items() if k != "gate"}, "w1": normal(6, 36), "new": normal(3)}
    with zj.Checkpointer(folder) as checkpoints, pytest.raises(zj.CheckpointError) as error:
        checkpoints.restore(plan_of(3, params=other))
    for part in (
        "params/gate: saved (1,)",
        "params/w1: saved (5, 36), planned (6, 36)",
        "params/new: planned (3,)",
    ):
        assert part in str(error.value)


def test_a_missing_leaf_is_filled_only_on_request(saved: Any) -> None:
    folder, expected, _ = saved(3, "fp32")
    wider = {**PARAMS, "new": normal(9)}
    plan = plan_of(1, params=wider)
    with zj.Checkpointer(folder) as checkpoints:
        with pytest.raises(zj.CheckpointError, match="params/new"):
            checkpoints.restore(plan, partial=True, tx=TX)
        with pytest.warns(UserWarning) as notes:
            state, _ = checkpoints.restore(plan, partial=True, tx=TX, fill=wider)
    text = " ".join(str(note.message) for note in notes)
    assert "params/new" in text and "opt_state/0/mu/new" in text, "both that were left out are listed"
    found = flat(state, plan)
    assert np.array_equal(found["params/new"], wider["new"])
    assert found["params/w1"].tobytes() == expected["params/w1"].tobytes()
    assert int(state.step) == 3


def test_another_optimizer_is_refused_unless_partial(saved: Any) -> None:
    folder, expected, _ = saved(2, "bf16")
    sgd = optax.sgd(0.1, momentum=0.9)
    plan = plan_of(1, precision="bf16", tx=sgd)
    with zj.Checkpointer(folder) as checkpoints:
        with pytest.raises(zj.CheckpointError, match=r"opt_state/0/mu/w1.*not planned"):
            checkpoints.restore(plan)
        with pytest.raises(zj.CheckpointError, match="tx=tx"):
            checkpoints.restore(plan, partial=True)
        with pytest.warns(UserWarning, match="opt_state/0/nu/w1"):
            state, _ = checkpoints.restore(plan, partial=True, tx=sgd)
    assert_in_place(state, plan, sgd)
    found = flat(state, plan)
    assert found["params/w1"].tobytes() == expected["params/w1"].tobytes()
    assert not found["opt_state/0/trace/w1"].any() and int(state.step) == 3


def test_the_same_shapes_in_another_kind_of_dtype_are_refused(tmp_path: pathlib.Path) -> None:
    plan = plan_of(0, params={"w": normal(8), "n": np.arange(4)})
    with zj.Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(zj.init_state({"w": normal(8), "n": np.arange(4)}, TX, plan), plan, wait=True)
        other = plan_of(0, params={"w": normal(8), "n": normal(4)}, trainable=lambda path, leaf: path == "w")
        with pytest.raises(zj.CheckpointError, match="params/n: saved as int"):
            checkpoints.restore(other)


@pytest.mark.parametrize(("stage", "precision"), [(1, "bf16"), (2, "bf16"), (3, "bf16"), (3, "fp32")])
def test_weights_alone_leave_no_stale_master(saved: Any, stage: int, precision: str) -> None:
    """H3: masters are derived from the loaded weights; moments and counts start anew."""
    folder, expected, _ = saved(0, "fp32")
    still = optax.adamw(0.0, weight_decay=0.0)
    plan = plan_of(stage, precision=precision, tx=still)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with zj.Checkpointer(folder) as checkpoints:
            state, _ = checkpoints.restore(plan, weights_only=True, tx=still)
    assert_in_place(state, plan, still)
    found = flat(state, plan)
    assert not any(v.any() for k, v in found.items() if k.startswith("opt_state/"))
    assert int(state.step) == 0
    after, _ = train(state, plan, 0, 1, still)
    for name, value in flat(after, plan).items():
        if name.startswith("params/"):
            assert value.tobytes() == expected[name].tobytes(), name


def test_an_optimizer_whose_init_needs_values_starts_anew_too(saved: Any) -> None:
    prodigy = optax.contrib.prodigy(1.0)
    folder, _, _ = saved(0, "fp32")
    plan = plan_of(3, tx=prodigy)
    with zj.Checkpointer(folder) as checkpoints:
        state, _ = checkpoints.restore(plan, weights_only=True, tx=prodigy)
    assert_in_place(state, plan, prodigy)


def test_nothing_is_ever_whole_on_a_device(saved: Any, tmp_path: pathlib.Path) -> None:
    """K3, H15: at stage 3 a restored leaf of 4 MiB lies in shards of 512 KiB, and never was anything larger."""
    params = {"w": normal(1024, 1024)}
    sgd = optax.sgd(0.1, momentum=0.9)
    plan = plan_of(3, params=params, tx=sgd)
    with zj.Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(zj.init_state(params, sgd, plan), plan, wait=True)
        before = {id(a) for a in jax.live_arrays()}
        state, _ = checkpoints.restore(plan)
    made = [a for a in jax.live_arrays() if id(a) not in before]
    assert max(s.data.nbytes for a in made for s in a.addressable_shards) == params["w"].nbytes // 8
    assert np.array_equal(flat(state, plan)["params/w"], params["w"])


@pytest.mark.parametrize(
    ("shard", "itemsize"), [((50257, 1600), 4), ((7919, 3), 8), ((1,), 4), ((0, 4), 4), ((), 4)]
)
def test_chunks_divide_shards(shard: tuple[int, ...], itemsize: int) -> None:
    chunk = chunk_shape(shard, itemsize)
    assert all(n % c == 0 for n, c in zip(shard, chunk, strict=True))
    assert np.prod(chunk) * itemsize <= 32 * 2**20


def test_loss_fn_of_the_toy_depends_on_every_leaf() -> None:
    """Else the five further steps above would not see a leaf that was lost."""
    batch = {"x": np.arange(7), "y": normal(7, 4)}
    grads = jax.grad(loss)(jax.tree.map(jnp.asarray, PARAMS), batch)
    assert all(np.any(g) for g in jax.tree.leaves(grads))
