"""Modules of nnx and linen with running statistics: trained as plain JAX does, saved, resumed, evaluated by them."""

from __future__ import annotations

import pathlib
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zeroj as zj
from zeroj.plan import tree

pytestmark = pytest.mark.usefixtures("compile_fast")
MICRO, ACCUMULATION, UPDATES, RATE = 4, 2, 3, 1e-2


class NnxNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(6, 16, use_bias=False, rngs=rngs)  # a bias would be normed away
        self.norm = nnx.BatchNorm(16, momentum=0.8, rngs=rngs)
        self.last = nnx.Linear(16, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> dict[str, jax.Array]:
        return {"logits": self.last(nnx.relu(self.norm(self.first(x))))}


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, train: bool = True) -> dict[str, jax.Array]:
        x = nn.BatchNorm(use_running_average=not train, momentum=0.8)(nn.Dense(16, use_bias=False)(x))
        return {"logits": nn.Dense(3)(nn.relu(x))}


def rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    inputs = (3 * rng.normal(size=(count, 6)) + 1).astype(np.float32)
    return [{"x": x, "labels": int(np.abs(x).argmax() % 3)} for x in inputs]


def variables() -> Any:
    return LinenNet().init(jax.random.key(0), jnp.ones((4, 6)))


def forms(kind: str) -> tuple[dict[str, Any], Any, Any, Any]:
    """(a Trainer's arguments; params; statistics; plain ``(params, statistics, x, train)`` -> logits, statistics)."""
    if kind == "linen":
        given = {"params": variables()["params"]}, {"batch_stats": variables()["batch_stats"]}

        def linen(params: Any, carried: Any, x: Any, train: bool) -> Any:
            out = LinenNet().apply({**params, **carried}, x, train, mutable=["batch_stats"])
            return out[0]["logits"], out[1]

        return {"model": LinenNet(), "params": variables()}, *given, linen
    graph, params, rest = nnx.split(NnxNet(nnx.Rngs(0)), nnx.Param, ...)

    def plain(params: Any, carried: Any, x: Any, train: bool) -> Any:
        model = nnx.merge(graph, params, jax.tree.map(lambda x: x, carried))
        model.train() if train else model.eval()
        return model(x)["logits"], nnx.state(model, nnx.Not(nnx.Param))

    made = {"model": NnxNet(nnx.Rngs(0))} if kind == "nnx" else {"model_init": lambda: NnxNet(nnx.Rngs(0))}
    return made, params, rest, plain


def crossed(logits: Any, labels: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def plain_run(kind: str, data: list[Any], count: int) -> tuple[list[float], Any, Any]:
    """Losses, params and statistics of plain JAX: each of 8 devices its micro-batches in turn, then means."""
    _, params, carried, apply = forms(kind)
    tx = optax.adamw(RATE, weight_decay=0.0)
    opt = tx.init(params)

    def device(params: Any, carried: Any, x: Any, labels: Any) -> Any:
        total = 0.0
        for i in range(ACCUMULATION):
            logits, carried = apply(params, carried, x[i], True)
            total += crossed(logits, labels[i]) / ACCUMULATION
        return total, carried

    @jax.jit
    def step(params: Any, carried: Any, opt: Any, x: Any, labels: Any) -> Any:
        def mean(params: Any) -> Any:
            losses, new = jax.vmap(lambda x, y: device(params, carried, x, y))(x, labels)
            return losses.mean(), jax.tree.map(lambda s: s.mean(0), new)

        (loss, new), grads = jax.value_and_grad(mean, has_aux=True)(params)
        updates, opt = tx.update(grads, opt, params)
        return optax.apply_updates(params, updates), new, opt, loss

    losses, size = [], 8 * MICRO * ACCUMULATION
    for update in range(count):
        part = data[update * size : (update + 1) * size]
        x = np.stack([row["x"] for row in part]).reshape(8, ACCUMULATION, MICRO, 6)
        labels = np.array([row["labels"] for row in part]).reshape(8, ACCUMULATION, MICRO)
        params, carried, opt, loss = step(params, carried, opt, x, labels)
        losses.append(float(loss))
    return losses, params, carried


def trainer(kind: str, folder: pathlib.Path, data: Any, **given: Any) -> zj.Trainer:
    base: dict[str, Any] = {
        "deepspeed": {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}},
        "per_device_train_batch_size": MICRO,
        "per_device_eval_batch_size": 2,
        "gradient_accumulation_steps": ACCUMULATION,
        "max_steps": UPDATES,
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "train_sampling_strategy": "sequential",
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "save_steps": 1,
        "disable_tqdm": True,
        "report_to": "none",
    }
    args = zj.TrainingArguments(str(folder), **base | given)
    return zj.Trainer(args=args, train_dataset=data, eval_dataset=rows(21, 1), **forms(kind)[0])


def same(found: Any, wanted: Any) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    "kind", ("nnx", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("linen", "born")))
)
def test_trained_as_plain_jax_resumed_and_evaluated(kind: str, tmp_path: pathlib.Path) -> None:
    data = rows(8 * MICRO * ACCUMULATION * UPDATES)
    losses, params, carried = plain_run(kind, data, UPDATES)
    run = trainer(kind, tmp_path, data)
    run.train()
    logged = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
    np.testing.assert_allclose(logged, losses, rtol=1e-5)
    same(zj.full_params(run.engine.state, run.engine.plan), params)
    same(run.engine.state.model_state, carried)
    # the running averages, and the rows alone: 21 do not fill the last batch
    held = rows(21, 1)
    logits, _ = forms(kind)[3](params, carried, np.stack([row["x"] for row in held]), False)
    found = run.predict(held)
    np.testing.assert_allclose(found.predictions, logits, rtol=1e-4, atol=1e-5)
    wanted = float(crossed(logits, np.array([row["labels"] for row in held])))
    assert run.evaluate()["eval_loss"] == pytest.approx(wanted, rel=1e-5)
    again = trainer(kind, tmp_path, data)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    same(again.engine.state.model_state, carried)
    same(zj.full_params(again.engine.state, again.engine.plan), params)
    (file,) = again.save_model()
    like = {"params": params, "carried": carried}
    names = {path: path.split("/", 1)[1].replace("/", ".") for path in tree.flatten(like)[0]}
    saved = zj.load_safetensors(file, like, names=names.__getitem__)
    same(saved, like)


def test_a_last_batch_that_would_be_filled_up_is_refused(tmp_path: pathlib.Path) -> None:
    data = rows(8 * MICRO * ACCUMULATION + 8 * MICRO + 5)
    with pytest.raises(zj.PlanError, match=r"last 5 of 101 examples.*dataloader_drop_last"):
        trainer("linen", tmp_path, data).train()
    run = trainer("linen", tmp_path, data, dataloader_drop_last=True, max_steps=2)
    assert run.train().global_step == 2


def test_statistics_of_which_only_shapes_are_known_are_named() -> None:
    shapes = nnx.eval_shape(lambda: NnxNet(nnx.Rngs(0)))
    with pytest.raises(zj.PlanError, match=r"norm/mean \(BatchStat\), norm/var \(BatchStat\)"):
        zj.Trainer(shapes, params=nnx.state(NnxNet(nnx.Rngs(0)), nnx.Param))
