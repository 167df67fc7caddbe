"""Frozen params stored as int8: the step is that of the dequantised weights, to the bit."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zeroj as zj
from tests.gather.test_zeropp import ALL, HPZ, WIDTH, batches, first_params, loss_fn
from zeroj.plan.wire import Format

pytestmark = pytest.mark.usefixtures("compile_fast")
TX = optax.adamw(1e-2)
INT8 = {"zero_quantized_nontrainable_weights": True}


def adapted(stacked: bool = True) -> dict[str, Any]:
    """A frozen model, of layers in a loop or not, and two small matrices that train."""
    rng = np.random.default_rng(8)
    pair = {
        k: (rng.normal(size=s) * 0.1).astype(np.float32)
        for k, s in {"a": (WIDTH, 8), "b": (8, WIDTH)}.items()
    }
    return {"base": first_params(stacked), "adapter": pair}


def adapted_loss(params: Any, batch: Any) -> jax.Array:
    base = params["base"]
    low = params["adapter"]["a"] @ params["adapter"]["b"]
    return loss_fn({**base, "frozen": base["frozen"] + low}, batch)


def indexed_loss(params: Any, batch: Any) -> jax.Array:
    """The same with the layers taken out of their stack by index, in a loop."""
    base = params["base"]
    blocks = base["blocks"]

    def layer(i: Any, x: jax.Array) -> jax.Array:
        return x + jnp.tanh(x @ blocks["up"][i] + blocks["bias"][i]) @ blocks["down"][i]

    low = params["adapter"]["a"] @ params["adapter"]["b"]
    x = base["tokens"][batch["x"]] @ (base["frozen"] + low)
    x = jax.lax.fori_loop(0, blocks["up"].shape[0], layer, x)
    logits = (x @ base["tokens"].T).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def plan_of(params: Any, precision: str = "bf16", mesh: Any = None, **zero: Any) -> zj.Plan:
    return zj.make_plan(
        params,
        TX,
        mesh or zj.make_mesh(node=2, local=4),
        zj.Zero(stage=3, stage3_param_persistence_threshold=0, **zero),
        precision=precision,
        scanned=["base/blocks"] if isinstance(params["base"]["blocks"], dict) else None,
        trainable=lambda path, _: path.startswith("adapter"),
    )


def trained(params: Any, plan: zj.Plan, steps: int = 2, loss: Any = adapted_loss, state: Any = None) -> Any:
    step = zj.make_train_step(loss, TX, plan, accumulation_steps=2)
    state = zj.init_state(params, TX, plan) if state is None else state
    losses = []
    for batch in batches(steps):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses, state


def same(found: Any, wanted: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(found), jax.device_get(wanted))


@pytest.mark.parametrize(
    ("precision", "stacked", "loss", "zero"),
    [
        ("bf16", True, adapted_loss, {}),
        ("fp32", False, adapted_loss, {}),
        ("fp32", True, indexed_loss, {}),
        ("bf16", True, adapted_loss, HPZ),
    ],
    ids=["scan", "unrolled", "indexed", "hpZ"],
)
def test_the_step_is_that_of_the_dequantised_weights(
    precision: str, stacked: bool, loss: Any, zero: Any
) -> None:
    params = adapted(stacked)
    plan = plan_of(params, precision, **INT8, **zero)
    losses, state = trained(params, plan, loss=loss)
    dequantised = zj.full_params(zj.init_state(params, TX, plan), plan)
    assert any(
        np.abs(a - b).max() > 0 for a, b in zip(*map(jax.tree.leaves, (dequantised, params)), strict=True)
    )
    plain = plan_of(params, precision, **zero)
    wanted_losses, wanted = trained(dequantised, plain, loss=loss)
    assert losses == wanted_losses
    grads = [
        jax.jit(zj.value_and_grad(loss, p))(zj.shard_params(p, dequantised), batches(1)[0])
        for p in (plan, plain)
    ]
    same(*grads)
    found, expected = zj.full_params(state, plan), zj.full_params(wanted, plain)
    same(found["base"], expected["base"])
    for name, value in found[
        "adapter"
    ].items():  # XLA may round AdamW's last bit otherwise in another program
        np.testing.assert_allclose(value, expected["adapter"][name], rtol=3e-6, atol=1e-8)


def test_what_is_stored_and_gathered_is_int8() -> None:
    params = adapted()
    plan = plan_of(params, **INT8)
    state = zj.init_state(params, TX, plan)
    frozen = [leaf for leaf in plan.leaves if leaf.packed]
    assert {leaf.path.split("/")[-1] for leaf in frozen} == {"up", "down", "tokens", "frozen"}
    for leaf, stored in zip(plan.leaves, jax.tree.leaves(state.params), strict=True):
        assert (stored.dtype == jnp.int8) == leaf.packed, leaf.path
    held = sum(s.data.nbytes for x in jax.tree.leaves(state.params) for s in x.addressable_shards[:1])
    assert plan.memory().device["params"] == held
    fmt = Format(8)
    up = next(leaf for leaf in frozen if leaf.path.endswith("up"))
    layers, padded = up.placement.padded[0], math.prod(up.placement.padded[1:])
    assert plan.stored_placement(up).padded == (layers, 8 * fmt.packed_bytes(padded // 8))
    assert "frozen, stored as int8" in str(plan)
    step = zj.make_train_step(adapted_loss, TX, plan)
    program = str(step.trace(state, batches(1)[0]).jaxpr)
    gathered = [line for line in program.splitlines() if "all_gather[" in line]
    assert sum("i8[" in line.split("=")[0] for line in gathered) >= 4


def test_all_of_zero_plus_plus_with_it(tmp_path: Any) -> None:
    """Trains, saves user-shaped weights, and goes on to the bit on the same mesh; and restores onto another."""
    params = adapted()
    plan = plan_of(params, **INT8, **ALL)
    losses, state = trained(params, plan, 3)
    assert losses[-1] < losses[0] + 0.2
    with zj.Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(state, plan, wait=True)
        again, _ = checkpoints.restore(plan)
        same(again.params, state.params)
        plain = plan_of(params)
        wide, _ = checkpoints.restore(plain)
        same(zj.full_params(wide, plain), zj.full_params(state, plan))
        other = plan_of(params, mesh=zj.make_mesh(node=4, local=2), **INT8)
        elsewhere, _ = checkpoints.restore(other)
        trained(params, other, 1, state=elsewhere)
    zj.export_safetensors(state, tmp_path / "model.safetensors", plan=plan)


def test_single_leaves_are_read_and_written_dequantised() -> None:
    params = adapted()
    plan = plan_of(params, "fp32", **INT8)
    state = zj.init_state(params, TX, plan)
    path = "base/blocks/up"
    before = zj.get_full(state, plan, path)
    same(before, zj.full_params(state, plan)["base"]["blocks"]["up"])
    ones = np.full_like(before, 0.25)
    state = zj.set_full(state, plan, path, ones)
    same(zj.get_full(state, plan, path), ones)
    assert zj.get_local(state, plan, path)[0].data.dtype == np.float32
    stored = zj.shard_params(plan, state.params)
    same(stored, state.params)


def test_it_is_refused_in_host_memory() -> None:
    with pytest.raises(zj.ConfigError, match="zero_quantized_nontrainable_weights: .*offload_param"):
        zj.Zero(stage=3, offload_param={"device": "cpu"}, **INT8)
