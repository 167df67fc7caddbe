"""The engine: what people who come from DeepSpeed call."""

from __future__ import annotations

import json
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
from zeroj import engine as engine_module

pytestmark = pytest.mark.usefixtures("compile_fast")
W = {"w": np.zeros(8, np.float32)}


def config(**sections: Any) -> dict[str, Any]:
    return {
        "train_batch_size": 32,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}},
    } | sections


def injected(params: Any, batch: Any) -> jax.Array:
    return jnp.mean(batch["g"]) * jnp.sum(params["w"].astype(jnp.float32))


def toy_engine(**sections: Any) -> zj.Engine:
    return zj.initialize(oracle.toy_loss, oracle.toy_params(), config(**sections))


@pytest.mark.parametrize("stage", (1, 3))
def test_training_from_a_file_is_plain_optax(stage: int, tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(config(zero_optimization={"stage": stage})))
    params, batches = oracle.toy_params(), oracle.toy_batches(5, 32)
    engine = zj.initialize(oracle.toy_loss, params, path)
    seen = [engine.train_batch(batch) for batch in batches]
    wanted = oracle.oracle(
        oracle.Model(oracle.toy_loss, params, batches), optax.adamw(1e-2, weight_decay=0.01), clip=1.0
    )
    np.testing.assert_allclose([float(m["loss"]) for m in seen], wanted.losses, rtol=1e-6)
    np.testing.assert_allclose(engine.get_global_grad_norm(), wanted.norms[-1], rtol=1e-6)
    assert oracle.distance(zj.full_params(engine.state, engine.plan), wanted.params) <= 1e-6
    assert engine.global_steps == 5 and engine.skipped_steps == 0 and engine.was_step_applied()
    assert engine.plan.zero.stage == stage


def test_before_the_first_step_there_is_nothing_to_report() -> None:
    engine = toy_engine()
    assert engine.global_steps == 0 and engine.get_global_grad_norm() is None
    assert not engine.was_step_applied()
    assert engine.get_batch_info() == (32, 2, 2)
    assert engine.get_lr() == [1e-2]


def test_eval_changes_nothing_and_takes_any_size_that_divides() -> None:
    engine = toy_engine()
    before = zj.full_params(engine.state, engine.plan)
    for size in (8, 64):
        batch = oracle.toy_batches(1, size)[0]
        found = engine.eval_batch(batch)
        wanted = oracle.toy_loss(oracle.toy_params(), batch)
        np.testing.assert_allclose(found["loss"], wanted, rtol=1e-5)
    assert engine.global_steps == 0
    assert oracle.distance(zj.full_params(engine.state, engine.plan), before) == 0
    with pytest.raises(zj.PlanError, match="global batch size 12"):
        engine.eval_batch(oracle.toy_batches(1, 12)[0])


@pytest.mark.parametrize("size", (16, 64))
def test_a_batch_of_another_size_than_configured(size: int) -> None:
    with pytest.raises(zj.PlanError, match=f"{size} examples, but train_batch_size is 32"):
        toy_engine().train_batch(oracle.toy_batches(1, size)[0])


def test_the_learning_rate_shown_is_the_one_that_the_next_update_uses() -> None:
    """SGD at gradient one moves by exactly the learning rate: linear warm-up, then linear decay."""
    schedule = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 3, "total_num_steps": 6,
                "warmup_max_lr": 0.5, "warmup_min_lr": 0.0, "warmup_type": "linear"}}  # fmt: skip
    sections = {"optimizer": {"type": "SGD", "params": {"lr": 0.5}}, "scheduler": schedule}
    engine = zj.initialize(
        injected,
        W,
        {"train_batch_size": 8, "gradient_clipping": 0, "zero_optimization": {"stage": 2}, **sections},
    )
    shown, moved = [], []
    for _ in range(6):
        shown.append(engine.get_lr()[0])
        before = float(np.asarray(engine.state.params["w"])[0])
        engine.train_batch({"g": np.ones(8, np.float32)})
        moved.append(before - float(np.asarray(engine.state.params["w"])[0]))
    np.testing.assert_allclose(moved, shown, rtol=1e-6, atol=1e-7)
    assert max(shown) == pytest.approx(0.5) and len(set(np.round(shown, 6))) > 3
    assert shown[-1] < max(shown)
    schedule: Any = engine.config.make_schedule()
    np.testing.assert_allclose(shown, [float(schedule(i)) for i in range(6)], rtol=1e-6)


def test_a_skipped_step_is_counted_but_takes_no_step_of_the_schedule() -> None:
    sections = {"fp16": {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}}
    engine = zj.initialize(
        injected, W, {"train_batch_size": 8, "gradient_clipping": 0, **sections}, tx=optax.sgd(1.0)
    )
    ones, bad = np.ones(8, np.float32), np.array([1, 1, 1, np.inf, 1, 1, 1, 1], np.float32)
    engine.train_batch({"g": ones})
    assert engine.was_step_applied() and engine.skipped_steps == 0
    metrics = engine.train_batch({"g": bad})
    assert not engine.was_step_applied()
    assert (engine.global_steps, engine.skipped_steps, int(metrics["step"])) == (2, 1, 1)
    assert float(metrics["loss_scale"]) == 16
    metrics = engine.train_batch({"g": ones})
    assert engine.was_step_applied() and float(metrics["loss_scale"]) == 8
    assert (engine.global_steps, engine.skipped_steps, int(metrics["step"])) == (3, 1, 2)
    assert np.all(np.asarray(engine.state.params["w"], np.float32) == -2)


def test_a_resumed_run_goes_on_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    batches = oracle.toy_batches(4, 32)
    straight, first = toy_engine(), toy_engine()
    for batch in batches:
        straight.train_batch(batch)
    for batch in batches[:2]:
        first.train_batch(batch)
    tag = first.save_checkpoint(tmp_path, client_state={"epoch": 7})
    first.close()
    assert tag == "global_step2"
    second = toy_engine()
    _, client = second.load_checkpoint(tmp_path)
    assert client == {"epoch": 7} and second.global_steps == 2
    for batch in batches[2:]:
        second.train_batch(batch)
    second.close()
    for a, b in zip(
        jax.tree.leaves((straight.state.params, straight.state.opt_state)),
        jax.tree.leaves((second.state.params, second.state.opt_state)),
        strict=True,
    ):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    assert second.global_steps == 4
    third = toy_engine(zero_optimization={"stage": 1})
    third.load_checkpoint(tmp_path, tag, load_module_only=True)
    third.close()
    assert third.global_steps == 0 and int(third.state.step) == 0
    assert (
        oracle.distance(zj.full_params(third.state, third.plan), zj.full_params(second.state, second.plan))
        > 0
    )


def test_what_the_engine_lacks_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the table is lacking by now; a row that is added before it is built must not pass in silence."""
    monkeypatch.setattr(engine_module, "SUPPORTED", engine_module.SUPPORTED - {"offload_param:cpu"})
    cpu = {"device": "cpu"}
    with pytest.raises(zj.ConfigError) as caught:
        toy_engine(zero_optimization={"stage": 3, "offload_optimizer": cpu, "offload_param": cpu})
    assert "offload_optimizer:cpu" not in str(caught.value) and "offload_param:cpu" in str(caught.value)


def test_without_an_optimizer_it_says_where_to_name_one() -> None:
    with pytest.raises(zj.ConfigError, match=r"No optimizer: give tx=.*'optimizer'"):
        zj.initialize(injected, W, {"train_batch_size": 8})


def test_params_may_be_a_function_and_tx_the_users_own() -> None:
    engine = zj.initialize(
        injected,
        lambda: {"w": jnp.zeros(8)},
        {"train_batch_size": 8, "gradient_clipping": 0},
        tx=optax.inject_hyperparams(optax.sgd)(learning_rate=0.25),
        mesh=oracle.mesh_of(4),
    )
    assert engine.get_lr() == [0.25] and engine.get_batch_info() == (8, 2, 1)
    engine.train_batch({"g": np.ones(8, np.float32)})
    assert np.all(np.asarray(engine.state.params["w"]) == -0.25)
    bare = zj.initialize(injected, W, {"train_batch_size": 8}, tx=optax.sgd(1.0))
    with pytest.raises(zj.ConfigError, match="inject_hyperparams"):
        bare.get_lr()


def linear(params: Any, batch: Any) -> jax.Array:
    return (batch @ params["w"]).mean()


WARM_UP = {
    "type": "WarmupLR",
    "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 4, "warmup_type": "linear"},
}


def test_two_optimizers_are_refused() -> None:
    config = {"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    with pytest.raises(zj.ConfigError, match="Two optimizers"):
        zj.initialize(linear, {"w": np.ones((8, 3), np.float32)}, config, tx=optax.sgd(0.1))


@pytest.mark.parametrize("groups", [False, True])
def test_a_configured_schedule_sets_the_learning_rate_of_an_optimizer_of_ones_own(groups: bool) -> None:
    """As that of a configured optimizer does; a skipped step does not advance it."""
    params = {"w": np.ones((8, 3), np.float32), "v": np.ones((8, 3), np.float32)}
    file = {"train_batch_size": 8, "scheduler": WARM_UP, "gradient_clipping": 0}
    file |= {"zero_optimization": {"stage": 2}, "fp16": {"enabled": True, "initial_scale_power": 4}}

    def loss(p: Any, batch: Any) -> jax.Array:
        return (batch @ (p["w"] * p["v"]).astype(jnp.float32)).mean()

    def own() -> optax.GradientTransformation:
        return optax.inject_hyperparams(optax.adamw)(learning_rate=7.0, weight_decay=0.0)

    tx = optax.multi_transform({"w": own(), "v": own()}, {"w": "w", "v": "v"}) if groups else own()
    adamw = {"type": "AdamW", "params": {"lr": 0.1, "weight_decay": 0.0}}
    mine = zj.initialize(loss, params, file, tx=tx)
    theirs = zj.initialize(loss, params, file | {"optimizer": adamw})
    rng = np.random.default_rng(0)
    for n in range(6):
        batch = rng.normal(size=(8, 8)).astype(np.float32) * (np.float32(np.inf) if n == 2 else 1)
        assert mine.get_lr() == pytest.approx(theirs.get_lr() * (1 + groups))
        mine.train_batch(batch)
        theirs.train_batch(batch)
        assert mine.was_step_applied() is theirs.was_step_applied() is (n != 2)
    assert mine.get_lr() == pytest.approx([0.1] * (1 + groups))
    found, wanted = (zj.full_params(e.state, e.plan) for e in (mine, theirs))
    for name in params:
        np.testing.assert_allclose(found[name], wanted[name], rtol=1e-6)


def test_groups_of_params_have_learning_rates_of_their_own() -> None:
    params = {"w": np.ones(8, np.float32), "v": np.ones(8, np.float32)}
    rates = {"w": 0.5, "v": 0.25}
    own = {k: optax.inject_hyperparams(optax.sgd)(learning_rate=v) for k, v in rates.items()}
    tx = optax.multi_transform(own, {"w": "w", "v": "v"})
    file = {"train_batch_size": 8, "gradient_clipping": 0, "zero_optimization": {"stage": 2}}
    engine = zj.initialize(lambda p, b: jnp.mean(b) * jnp.sum(p["w"] + p["v"]), params, file, tx=tx)
    assert sorted(engine.get_lr()) == [0.25, 0.5]
    engine.train_batch(np.ones(8, np.float32))
    found = zj.full_params(engine.state, engine.plan)
    for name, rate in rates.items():
        np.testing.assert_allclose(found[name], 1 - rate)


def test_a_schedule_that_cannot_reach_the_optimizer_is_refused() -> None:
    params, file = {"w": np.ones((8, 3), np.float32)}, {"train_batch_size": 8, "scheduler": WARM_UP}
    with pytest.raises(zj.ConfigError, match=r"holds no 'learning_rate'.*optax\.inject_hyperparams"):
        zj.initialize(linear, params, file, tx=optax.sgd(0.1))
    cycle = {"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2}}
    with pytest.raises(zj.ConfigError, match="cycle_momentum"):
        own = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
        zj.initialize(linear, params, file | {"scheduler": cycle}, tx=own)
    engine = zj.initialize(linear, params, {"train_batch_size": 8}, tx=optax.sgd(0.1))
    with pytest.raises(zj.ConfigError, match="has no 'learning_rate'"):
        engine.get_lr()


def test_the_batch_can_change_size_on_the_way() -> None:
    engine = toy_engine()
    engine.train_batch(oracle.toy_batches(1, 32)[0])
    engine.set_train_batch_size(64)
    assert engine.get_batch_info() == (64, 2, 4)
    engine.train_batch(oracle.toy_batches(1, 64)[0])
    engine.set_train_micro_batch_size(1)
    assert engine.get_batch_info() == (32, 1, 4)
    engine.train_batch(oracle.toy_batches(1, 32)[0])
    assert (engine.global_steps, engine.global_samples) == (3, 128)
    with pytest.raises(zj.ConfigError, match="train_batch_size=20"):
        engine.set_train_batch_size(20)


def test_a_folder_keeps_as_many_checkpoints_as_asked(tmp_path: Path) -> None:
    engine = zj.initialize(oracle.toy_loss, oracle.toy_params(), config(), keep=2)
    for _ in range(4):
        engine.train_batch(oracle.toy_batches(1, 32)[0])
        engine.save_checkpoint(tmp_path, "mine" if engine.global_steps == 1 else None)
    engine.close()
    assert zj.Checkpointer(tmp_path).all_steps() == [1, 3, 4]  # a tag of one's own stays


def test_a_resumed_run_is_told_what_has_changed(tmp_path: Path) -> None:
    def engine(total: int, batch: int = 32) -> zj.Engine:
        schedule = {"type": "WarmupDecayLR", "params": {"total_num_steps": total, "warmup_num_steps": 2}}
        return toy_engine(scheduler=schedule, train_batch_size=batch)

    first = engine(10)
    first.train_batch(oracle.toy_batches(1, 32)[0])
    first.save_checkpoint(tmp_path)
    first.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine(10).load_checkpoint(tmp_path)
        engine(20).load_checkpoint(tmp_path, load_module_only=True)
    with pytest.warns(UserWarning) as notes:
        again = engine(20, batch=64)
        again.load_checkpoint(tmp_path)
    (text,) = [str(note.message) for note in notes]
    assert "scheduler.params.total_num_steps: 10 then, 20 now" in text
    assert "train_batch_size: 32 then, 64 now" in text and "warmup" not in text
    assert again.global_steps == 1


@pytest.mark.slow
def test_optimizer_state_in_files_from_a_config(tmp_path: Path) -> None:
    """Every way in: from scratch, saved, loaded; and the path that cannot be used is said at the start."""
    m = oracle.model("toy")
    offload = {"device": "nvme", "nvme_path": str(tmp_path / "nvme"), "pipeline_read": True}
    config = {
        "train_batch_size": oracle.BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_optimizer": offload},
        "aio": {"block_size": 4096, "thread_count": 2},
    }
    with pytest.warns(UserWarning, match="thread_count"):
        engine = zj.initialize(m.loss, m.params, config)
    assert engine.plan.spill is not None and engine.plan.spill.direct and engine.plan.spill.threads == 2
    del config["aio"]["thread_count"]
    config["aio"]["block_size"] = 1
    engine = zj.initialize(m.loss, m.params, config)
    assert engine.plan.spills
    for batch in m.batches[:2]:
        engine.train_batch(batch)
    engine.save_checkpoint(tmp_path / "saved")
    wanted = float(engine.train_batch(m.batches[2])["loss"])
    other = zj.initialize(m.loss, m.params, config)
    other.load_checkpoint(tmp_path / "saved")
    assert float(other.train_batch(m.batches[2])["loss"]) == wanted
    assert float(engine.eval_batch(m.batches[3])["loss"]) == float(other.eval_batch(m.batches[3])["loss"])
    config["zero_optimization"]["offload_optimizer"]["nvme_path"] = "/proc/nothing"
    with pytest.raises(zj.SpillError, match=r"/proc/nothing.*cannot be used"):
        zj.initialize(m.loss, m.params, config)
