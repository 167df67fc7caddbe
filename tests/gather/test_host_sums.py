"""Sums of gradients over micro-batches in host memory: the same as on the device, whatever the loss looks like."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zeroj as zj
from tests import oracle
from zeroj import _compat
from zeroj.gather.gradients import gradients
from zeroj.gather.views import make_view

pytestmark = pytest.mark.usefixtures("compile_fast")

CPU = {"device": "cpu"}
BOTH = {"offload_optimizer": CPU, "offload_param": CPU}
STEPS, PARTS = 3, 4


def weighted(count: Callable[[Any, Any], jax.Array]) -> oracle.Model:
    """The scanned GPT; every example counts by the number of its tokens below 9, none in the first micro-batch."""
    m = oracle.model("scan")

    def loss(params: Any, batch: Any) -> zj.Mean:
        tokens = batch["tokens"]
        logits = oracle.gpt_logits(params, tokens[:, :-1], remat=False).astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        mask = (tokens[:, 1:] < 9) * batch["here"][:, None]
        return zj.Mean(jnp.sum(losses * mask), count(params, mask))

    here = (np.arange(oracle.BATCH) % (oracle.BATCH // 8) >= oracle.BATCH // 8 // PARTS).astype(np.float32)
    return oracle.Model(loss, m.params, [{**b, "here": here} for b in m.batches])


def nested() -> oracle.Model:
    """Two groups of three layers, a loop in a loop, and a matrix that is used twice outside them."""
    rng = np.random.default_rng(2)
    params = {"w": oracle.normal(rng, 2, 3, 8, 16, scale=0.3), "ends": oracle.normal(rng, 16, 8, scale=0.3)}

    def loss(p: Any, batch: Any) -> jax.Array:
        def group(x: jax.Array, ws: jax.Array) -> Any:
            return jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w) @ p["ends"], None), x, ws)

        x, _ = jax.lax.scan(group, batch["x"] @ p["ends"], p["w"])
        return jnp.mean((x @ p["ends"].T).astype(jnp.float32) ** 2)

    return oracle.Model(loss, params, [{"x": oracle.normal(rng, oracle.BATCH, 16)} for _ in range(STEPS)])


MODELS = {
    "scan": lambda: oracle.model("scan"),
    "unrolled": lambda: oracle.model("gpt"),
    "unrolled, recomputed": lambda: oracle.model("gpt-remat"),
    "nested": nested,
    "tokens": lambda: weighted(lambda params, mask: mask.sum()),
    "count of params": lambda: weighted(
        lambda params, mask: mask.sum() * (1 + 0 * jnp.sum(params["tokens"]))
    ),
}


COVER = [
    ("scan", "device", "bf16"),
    ("unrolled", "global", "fp32"),
    ("unrolled, recomputed", "device", "bf16"),
    ("nested", "device", "bf16"),
    ("tokens", "device", "bf16"),
    ("tokens", "global", "fp32"),
]
REST = [
    pytest.param(*row, marks=pytest.mark.full)
    for row in itertools.product(MODELS, ("device", "global"), ("fp32", "bf16"))
    if row not in COVER
]


def plan_of(m: oracle.Model, tx: Any, precision: str, sections: Any) -> zj.Plan:
    zero = zj.Zero(stage=3, stage3_param_persistence_threshold=4, sub_group_size=200, **sections)
    return zj.make_plan(m.params, tx, oracle.mesh_of(8), zero, precision=precision, scanned=("blocks", "w"))


def run(m: oracle.Model, loss_over: str, precision: str, sections: Any) -> tuple[Any, np.ndarray]:
    tx = optax.adamw(1e-2)
    plan = plan_of(m, tx, precision, sections)
    step = zj.make_train_step(m.loss, tx, plan, accumulation_steps=PARTS, clip_norm=0.02, loss_over=loss_over)
    state, norms = zj.init_state(m.params, tx, plan), []
    for batch in m.batches[:STEPS]:
        state, metrics = step(state, batch)
        norms.append(jax.device_get(metrics["grad_norm"]))
    return zj.full_params(state, plan), np.array(norms)


@pytest.mark.parametrize(("name", "loss_over", "precision"), [*COVER, *REST])
def test_sums_in_host_memory_are_those_of_the_device(name: str, loss_over: str, precision: str) -> None:
    m = MODELS[name]()
    (found, norms), (wanted, wanted_norms) = (run(m, loss_over, precision, s) for s in (BOTH, {}))
    assert oracle.distance(found, wanted) <= 1e-6
    np.testing.assert_allclose(norms, wanted_norms, rtol=1e-6)


def waiting(name: str, **sections: Any) -> list[bool]:
    """For each gradient of several micro-batches, whether it is in host memory."""
    m, tx = MODELS[name](), optax.adamw(1e-2)
    plan, found = plan_of(m, tx, "bf16", sections), []

    def run(params: Any, batch: Any) -> jax.Array:
        out = gradients(
            m.loss, plan, params, batch, view=make_view(plan, "device"), accumulation=PARTS, host=True
        )
        found.extend(map(_compat.is_on_host, out.grads))
        assert (out.divisor is not None) == any(found)
        return out.loss

    jax.jit(run).trace(plan.params_struct(), m.batches[0])
    return found


def test_sums_wait_where_params_and_state_do() -> None:
    assert all(waiting("tokens", **BOTH))
    assert not any(waiting("tokens", offload_optimizer=CPU))
    partly = waiting("tokens", offload_param=CPU, offload_optimizer={**CPU, "ratio": 0.4})
    assert any(partly) and not all(partly)


def test_sums_of_a_loss_whose_count_depends_on_the_params_stay_on_the_device() -> None:
    assert not any(waiting("count of params", **BOTH))
