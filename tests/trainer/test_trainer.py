"""The Trainer against a plain optax loop over the same examples, one device, one batch per update."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zeroj as zj
from tests.trainer import toy
from zeroj.trainer.data import order_of

pytestmark = pytest.mark.usefixtures("compile_fast")


def full(*values: Any) -> Any:
    """A case for the whole table alone."""
    return pytest.param(*values, marks=pytest.mark.full)


SHARDED = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}


def arguments(folder: pathlib.Path, **given: Any) -> zj.TrainingArguments:
    base: dict[str, Any] = {
        "deepspeed": SHARDED,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": 3,
    }
    return zj.TrainingArguments(str(folder), **base | given)


def losses_of(trainer: zj.Trainer) -> list[float]:
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


def text_losses(rows: list[Any], size: int, updates: int, rate: float) -> list[float]:
    """Losses of ``updates`` steps of AdamW with a linear schedule and clipping to 1, all in one batch."""
    definition, params = nnx.split(toy.net())
    schedule = optax.linear_schedule(rate, 0.0, updates)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.0))
    state, found = tx.init(params), []

    def loss_fn(params: Any, ids: jax.Array, count: jax.Array) -> jax.Array:
        logits = nnx.merge(definition, params)(ids)[:, :-1]
        targets, valid = ids[:, 1:], jnp.arange(1, ids.shape[1]) < count[:, None]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return jnp.sum(losses * valid) / jnp.sum(valid)

    @jax.jit
    def step(params: Any, state: Any, ids: jax.Array, count: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, ids, count)
        change, state = tx.update(grads, state, params)
        return optax.apply_updates(params, change), state, loss

    epoch = 0
    while len(found) < updates:
        order = order_of(len(rows), epoch, 3)
        for start in range(0, len(rows), size):
            chosen = [rows[i]["input_ids"] for i in order[start : start + size]]
            chosen += [[0, 0]] * (size - len(chosen))
            count = np.array([len(r) if any(r) or len(r) > 2 else 0 for r in chosen])
            ids = np.stack([np.pad(r, (0, 16 - len(r))) for r in chosen])
            params, state, loss = step(params, state, ids, count)
            found.append(float(loss))
        epoch += 1
    return found[:updates]


@pytest.mark.parametrize("accumulation", (full(1), 8))
def test_losses_are_those_of_a_plain_loop(accumulation: int, tmp_path: pathlib.Path) -> None:
    """Twenty updates, ragged lengths, and a last window of each epoch that is not full."""
    size = 16 * accumulation
    rows = toy.text(3 * size + size // 2 + 3)
    args = arguments(tmp_path, gradient_accumulation_steps=accumulation, max_steps=20)
    trainer = zj.Trainer(toy.net(), args, train_dataset=rows)
    output = trainer.train()
    wanted = text_losses(rows, size, 20, 1e-2)
    assert output.global_step == 20
    np.testing.assert_allclose(losses_of(trainer), wanted, rtol=0, atol=1e-5)
    assert wanted[-1] < 0.8 * wanted[0]


def plain_losses(rows: list[Any], size: int, updates: int) -> list[float]:
    params, tx = toy.plain_params(), optax.adamw(optax.linear_schedule(1e-2, 0.0, updates), weight_decay=0.0)
    tx = optax.chain(optax.clip_by_global_norm(1.0), tx)
    state, found, epoch = tx.init(params), [], 0
    while len(found) < updates:
        order = order_of(len(rows), epoch, 3)
        for start in range(0, len(rows), size):
            chosen = [rows[i] for i in order[start : start + size]]
            batch = {name: np.stack([row[name] for row in chosen]) for name in ("x", "y")}
            loss, grads = jax.value_and_grad(toy.plain_loss)(params, batch)
            change, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, change)
            found.append(float(loss))
        epoch += 1
    return found[:updates]


@pytest.mark.parametrize(
    "rest", (full(16), 21, full(3)), ids=("whole micro-batches", "ragged", "fewer than devices")
)
def test_a_plain_mean_is_exact_in_the_last_window(rest: int, tmp_path: pathlib.Path) -> None:
    rows = toy.plain_rows(64 + rest)
    args = arguments(tmp_path, gradient_accumulation_steps=4, max_steps=6)
    trainer = zj.Trainer(
        toy.plain_loss, args, params=toy.plain_params(), train_dataset=rows, eval_dataset=rows
    )
    trainer.train()
    np.testing.assert_allclose(losses_of(trainer), plain_losses(rows, 64, 6), rtol=1e-5)
    batch = {name: np.stack([row[name] for row in rows]) for name in ("x", "y")}
    wanted = float(toy.plain_loss(zj.full_params(trainer.engine.state, trainer.engine.plan), batch))
    assert trainer.evaluate()["eval_loss"] == pytest.approx(wanted, rel=1e-5)


CPU = {"device": "cpu", "pin_memory": True}
WHOLE = {"stage": 3, "stage3_param_persistence_threshold": 0}
#: What differs in the JSON -> how far losses may be from those of stage 0.
VARIANTS: dict[str, tuple[dict[str, Any], float]] = {
    "stage 1": ({"stage": 1}, 1e-5),
    "stage 2": ({"stage": 2}, 1e-5),
    "stage 3": (WHOLE, 1e-5),
    "stage 2, offload": ({"stage": 2, "offload_optimizer": CPU}, 1e-5),
    "stage 3, offload": (WHOLE | {"offload_optimizer": CPU, "offload_param": CPU}, 1e-5),
    "hpZ": (WHOLE | {"zero_hpz_partition_size": 4}, 1e-5),
    "ZeRO++": (
        WHOLE
        | {"zero_hpz_partition_size": 4, "zero_quantized_weights": True, "zero_quantized_gradients": True},
        3e-2,
    ),
}


@pytest.mark.slow
@pytest.mark.full
def test_the_same_script_under_every_json(tmp_path: pathlib.Path) -> None:
    """Losses are those of stage 0, at once or to the precision of quantised communication."""
    mesh = zj.make_mesh(node=2, local=4)

    def run(zero: dict[str, Any]) -> list[float]:
        args = arguments(tmp_path, deepspeed={"zero_optimization": zero}, max_steps=6)
        trainer = zj.Trainer(toy.net(), args, train_dataset=toy.text(80), mesh=mesh)
        trainer.train()
        return losses_of(trainer)

    wanted = run({"stage": 0})
    assert wanted[-1] < 0.8 * wanted[0]
    for name, (zero, tolerance) in VARIANTS.items():
        np.testing.assert_allclose(run(zero), wanted, rtol=tolerance, err_msg=name)


@pytest.mark.parametrize(
    "micro, accumulation, devices, length",
    (full(1, 1, 8, 9), (2, 3, 8, 16), (3, 2, 2, 12), full(4, 5, 1, 7)),
)
def test_a_constant_loss_is_logged_as_it_is(
    micro: int, accumulation: int, devices: int, length: int, tmp_path: pathlib.Path
) -> None:
    """Two nats for each token, however the batch is cut: training, the last window and evaluation."""

    class Constant(nnx.Module):
        def __init__(self) -> None:
            self.w = nnx.Param(jnp.zeros((8,)))

        def __call__(self, input_ids: jax.Array) -> jax.Array:
            """Logits of two classes, the right one e^-2 likely: its score is what the loss is to be."""
            right = jnp.log(jnp.exp(-2.0) / (1 - jnp.exp(-2.0)))
            return (
                jnp.stack([jnp.full(input_ids.shape, right), jnp.zeros(input_ids.shape)], -1)
                + 0 * self.w.sum()
            )

    rows = [
        {"input_ids": [1] * n, "labels": [0] * n} for n in np.random.default_rng(0).integers(2, length, 41)
    ]
    args = arguments(
        tmp_path,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=accumulation,
        num_train_epochs=2,
    )
    mesh = zj.make_mesh(node=1, local=devices, devices=jax.devices()[:devices])
    trainer = zj.Trainer(Constant(), args, train_dataset=rows, eval_dataset=rows[:13], mesh=mesh)
    output = trainer.train()
    np.testing.assert_allclose(losses_of(trainer), 2.0, rtol=1e-6)
    assert output.training_loss == pytest.approx(2.0, rel=1e-6)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(2.0, rel=1e-6)


@pytest.mark.parametrize("devices", (full(1), 2, full(4)))
def test_the_schedule_counts_updates(devices: int, tmp_path: pathlib.Path) -> None:
    """320 examples, 64 an update: five updates an epoch, ten rates, whatever the devices."""
    args = arguments(
        tmp_path,
        per_device_train_batch_size=16 // devices,
        gradient_accumulation_steps=4,
        num_train_epochs=2,
        warmup_steps=2,
        deepspeed={
            "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
            "scheduler": {
                "type": "WarmupDecayLR",
                "params": {
                    "warmup_num_steps": "auto",
                    "total_num_steps": "auto",
                    "warmup_max_lr": "auto",
                    "warmup_type": "linear",
                },
            },
        },
    )
    mesh = zj.make_mesh(node=1, local=devices, devices=jax.devices()[:devices])
    trainer = zj.Trainer(
        toy.plain_loss, args, params=toy.plain_params(), train_dataset=toy.plain_rows(320), mesh=mesh
    )
    trainer.train()
    rates = [log["learning_rate"] for log in trainer.state.log_history if "loss" in log]
    assert trainer.state.max_steps == 10 and int(trainer.engine.state.step) == 10
    # DeepSpeed's scheduler lags its optimizer by one update, and starts at the smallest rate
    wanted = [0.0, 0.0, 0.5, *(1 - k / 8 for k in range(7))]
    np.testing.assert_allclose(rates, np.array(wanted) * 1e-2, rtol=1e-6)


def test_metrics_predictions_and_the_best_model(tmp_path: pathlib.Path) -> None:
    def accuracy(found: zj.EvalPrediction) -> dict[str, float]:
        right = found.predictions[:, :-1] == found.label_ids[:, 1:]
        return {"accuracy": right[found.label_ids[:, 1:] != -100].mean()}

    args = arguments(
        tmp_path,
        max_steps=6,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        save_total_limit=1,
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        learning_rate=0.05,
    )
    held = toy.text(21, seed=9)
    trainer = zj.Trainer(
        toy.net(),
        args,
        train_dataset=toy.text(64),
        eval_dataset=held,
        compute_metrics=accuracy,
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
    )
    trainer.train()
    scores = {
        log["step"]: log["eval_accuracy"] for log in trainer.state.log_history if "eval_accuracy" in log
    }
    best = max(scores, key=lambda step: (scores[step], -step))
    assert sorted(scores) == [2, 4, 6] and trainer.state.best_global_step == best
    assert trainer.state.best_metric == scores[best]
    left = sorted(path.name for path in tmp_path.glob("checkpoint-*"))
    assert f"checkpoint-{best}" in left and len(left) <= 2, left
    output = trainer.predict(held)
    assert output.predictions.shape[0] == len(held)
    assert output.metrics["test_accuracy"] == pytest.approx(scores[best], abs=1e-6)
    params = zj.full_params(trainer.engine.state, trainer.engine.plan)
    definition = nnx.split(toy.net())[0]
    logits = nnx.merge(definition, params)(jnp.array([held[0]["input_ids"]]))
    np.testing.assert_array_equal(output.predictions[0][: logits.shape[1]], logits[0].argmax(-1))
    state = json.loads((tmp_path / "trainer_state.json").read_text())
    assert state["best_model_checkpoint"] == str(tmp_path / f"checkpoint-{best}")


def test_linen_iterables_and_callbacks(tmp_path: pathlib.Path) -> None:
    events: list[str] = []

    class Watch(zj.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            events.append(f"step {state.global_step}")
            control.should_evaluate = state.global_step == 2

        def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            events.append(f"evaluated {kwargs['metrics']['eval_loss']:.1f}"[:9])

        def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            events.append("epoch")

    module = toy.LinenNet()
    variables = module.init(jax.random.key(0), jnp.zeros((1, 4), jnp.int32))
    rows = toy.text(40)

    class Stream:
        def __iter__(self) -> Any:
            return iter(rows)

    args = arguments(tmp_path, max_steps=5)
    trainer = zj.Trainer(
        module, args, params=variables, train_dataset=Stream(), eval_dataset=rows[:9], callbacks=[Watch]
    )
    trainer.train()
    assert events == ["step 1", "step 2", "evaluated", "step 3", "epoch", "step 4", "step 5", "epoch"]
    assert losses_of(trainer)[-1] < losses_of(trainer)[0]


def test_early_stopping(tmp_path: pathlib.Path) -> None:
    """A rate of zero never improves: the first evaluation is the best, two more end the run."""
    args = arguments(
        tmp_path,
        max_steps=20,
        learning_rate=0.0,
        eval_strategy="steps",
        eval_steps=1,
        metric_for_best_model="loss",
    )
    trainer = zj.Trainer(
        toy.net(),
        args,
        train_dataset=toy.text(64),
        eval_dataset=toy.text(8),
        callbacks=[zj.EarlyStoppingCallback(early_stopping_patience=2)],
    )
    assert trainer.train().global_step == 3


def test_dropout_differs_by_step_and_is_off_in_evaluation(tmp_path: pathlib.Path) -> None:
    rows = toy.text(16, varied=False)
    args = arguments(tmp_path, max_steps=3, learning_rate=0.0)
    trainer = zj.Trainer(toy.net(dropout=0.5), args, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    assert len(set(losses_of(trainer))) == 3
    plain = zj.Trainer(toy.net(), args, train_dataset=rows, eval_dataset=rows)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], rel=1e-5)
