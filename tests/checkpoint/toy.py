"""The TOY model of the checkpoint tests, and a flat view of a state in the user's shapes."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import zeroj as zj
from zeroj.checkpoint.arrays import array_spec, pieces
from zeroj.checkpoint.layout import stored_leaves
from zeroj.plan.plan import Plan

_rng = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return np.asarray(_rng.normal(size=shape), np.float32)


PARAMS: dict[str, Any] = {
    "emb": normal(7, 5),
    "w1": normal(5, 36),
    "b1": normal(36),
    "w2": normal(36, 4),
    "scale": np.ones((), np.float32),
    "gate": normal(1),
}
TX = optax.adamw(optax.linear_schedule(2e-2, 1e-3, 20))
#: 80 is divided by 1, 2, 4, 5, 8, and by 8 devices with two micro-batches.
BATCHES = [{"x": _rng.integers(0, 7, 80), "y": normal(80, 4)} for _ in range(12)]


def loss(params: dict[str, Any], batch: dict[str, Any]) -> jax.Array:
    hidden = jnp.tanh(params["emb"][batch["x"]] @ params["w1"] + params["b1"]) * params["scale"]
    return jnp.mean((hidden @ params["w2"] + params["gate"] - batch["y"]) ** 2)


def noisy_loss(params: dict[str, Any], batch: dict[str, Any], rng: jax.Array) -> jax.Array:
    """A loss that depends on the key, as dropout does."""
    return loss(params, batch) + 0.1 * jnp.sum(params["b1"] * jax.random.normal(rng, (36,)))


def mesh_of(name: str) -> Any:
    """A mesh by name: "8", "5", "2x4", or "8r" for eight devices in reverse order."""
    devices = jax.devices()
    if name == "2x4":
        return zj.make_mesh(node=2, local=4)
    if name == "8r":
        return zj.make_mesh(local=8, devices=devices[::-1])
    return zj.make_mesh(local=int(name), devices=devices[: int(name)])


def plan_of(
    stage: int,
    mesh: str = "8",
    precision: str = "fp32",
    tx: Any = TX,
    params: Any = None,
    tier: str = "none",
    nvme: str | None = None,
    nvme_params: str | None = None,
    **kw: Any,
) -> Plan:
    """A plan in which every leaf that can be sharded is, so that most are padded.

    ``tier`` is the device of optimizer state; ``nvme`` a folder, for state in files: then every leaf is there;
    ``nvme_params`` one for params.
    """
    offload: dict[str, Any] = {"device": "nvme" if nvme else tier}
    if nvme:
        offload |= {"nvme_path": nvme, "pipeline_read": True, "pipeline_write": True}
        kw["aio"] = {"block_size": 1}
    more: dict[str, Any] = {}
    if nvme_params:
        more["offload_param"] = {"device": "nvme", "nvme_path": nvme_params, "max_in_cpu": 0}
        kw["aio"] = {"block_size": 1}
    zero = zj.Zero(stage=stage, stage3_param_persistence_threshold=0, offload_optimizer=offload, **more)
    return zj.make_plan(
        PARAMS if params is None else params, tx, mesh_of(mesh), zero, precision=precision, **kw
    )


def train(
    state: zj.TrainState, plan: Plan, first: int, last: int, tx: Any = TX, loss_fn: Any = loss, **kw: Any
) -> tuple[zj.TrainState, list[float]]:
    """Steps on the batches from ``first`` to ``last``; also returns the losses."""
    step = zj.make_train_step(loss_fn, tx, plan, **kw)
    losses = []
    for batch in BATCHES[first:last]:
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return state, losses


def save_first(folder: pathlib.Path, stage: int = 3) -> Plan:
    """Saves the first state of the run of child.py; returns its plan."""
    plan = plan_of(stage)
    with zj.Checkpointer(folder) as checkpoints:
        state = zj.init_state(PARAMS, TX, plan, rng=7)
        checkpoints.save(state, plan, {"seen": [], "next": 0}, wait=True)
    return plan


def flat(state: zj.TrainState, plan: Plan) -> dict[str, np.ndarray]:
    """Everything in a state by name, whole, in the user's shapes: what any checkpoint of it has to hold."""
    found = {}
    for spec, value in stored_leaves(state, plan):
        whole = np.zeros(spec.shape, spec.dtype)
        for piece in pieces(array_spec(spec.name, value, spec.shape), value, copy=False):
            whole[piece.index] = piece.fetch()
        found[spec.name] = whole
    return found


def assert_same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    """Bit for bit."""
    assert a.keys() == b.keys()
    wrong = [
        k
        for k in a
        if a[k].dtype != b[k].dtype or a[k].shape != b[k].shape or a[k].tobytes() != b[k].tobytes()
    ]
    assert not wrong, {k: (a[k], b[k]) for k in wrong}


def assert_in_place(state: zj.TrainState, plan: Plan, tx: Any = TX) -> None:
    """Every leaf has exactly the plan's sharding, dtype and shape."""
    wanted = zj.abstract_state(tx, plan)
    assert jax.tree.structure(state) == jax.tree.structure(wanted)
    for (path, have), want in zip(
        jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(wanted), strict=True
    ):
        where = jax.tree_util.keystr(path)
        assert have.sharding == want.sharding, (where, have.sharding, want.sharding)
        assert (have.dtype, have.shape) == (want.dtype, want.shape), where
        assert have.committed, where
