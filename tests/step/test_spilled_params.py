"""Params in files: read while the step runs, and bit for bit the training of the same plan in host memory."""

from __future__ import annotations

import math
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zeroj as zj
from tests import oracle
from zeroj.plan.rules import NVME
from zeroj.spill.tier import is_spilled

pytestmark = pytest.mark.slow

#: From jax 0.11 on, XLA:CPU multiplies matrices of some gradients in another order; see test_spilled.py.
NEARLY = 1e-4 if jax.__version_info__ >= (0, 11) else 0.0
LAYERS, WIDTH = 3, 32
SCANNED, UNROLLED = True, False


def params_of(scanned: bool) -> Any:
    rng = np.random.default_rng(0)
    stack = rng.normal(size=(LAYERS, WIDTH, 3 * WIDTH), scale=0.1).astype(np.float32)
    back = rng.normal(size=(LAYERS, 3 * WIDTH, WIDTH), scale=0.1).astype(np.float32)
    layers = (
        {"up": stack, "down": back}
        if scanned
        else [{"up": u, "down": d} for u, d in zip(stack, back, strict=True)]
    )
    embed = rng.normal(size=(40, WIDTH)).astype(np.float32)  # 40 is no multiple of 8 x 8
    return {"embed": embed, "layers": layers, "scale": np.ones(WIDTH, np.float32)}


def loss(params: Any, batch: Any) -> jax.Array:
    x = params["embed"][batch["tokens"]] * params["scale"]

    def layer(x: Any, w: Any) -> Any:
        return x + jnp.tanh(x @ w["up"]) @ w["down"], None

    if isinstance(params["layers"], dict):
        x, _ = jax.lax.scan(jax.checkpoint(layer), x, params["layers"])
    else:
        for w in params["layers"]:
            x, _ = layer(x, w)
    return jnp.mean(jnp.square((x @ params["embed"].T).astype(jnp.float32))) * batch["weight"].mean()


def batches(count: int) -> list[Any]:
    rng = np.random.default_rng(1)
    return [
        {"tokens": rng.integers(0, 40, (16, 4)), "weight": rng.uniform(0.5, 1.5, 16).astype(np.float32)}
        for _ in range(count)
    ]


def plan_on(
    params: str,
    state: str,
    path: pathlib.Path,
    tx: Any,
    *,
    scanned: bool = SCANNED,
    precision: str = "fp32",
    **more: Any,
) -> Any:
    """A plan with params and optimizer state on "none", "cpu" or "nvme"."""
    paths = {"nvme_path": str(path)}
    zero: dict[str, Any] = {"stage": 3, "stage3_param_persistence_threshold": 100}
    if params != "none":
        extra = more.pop("offload_param", {})
        zero["offload_param"] = {
            "device": params,
            **(paths | {"max_in_cpu": 0} | extra if params == "nvme" else {}),
        }
    if state != "none":
        pipelined = {"pipeline_read": True, "pipeline_write": True}
        zero["offload_optimizer"] = {"device": state, **(paths | pipelined if state == "nvme" else {})}
    tree = params_of(scanned)
    stacks = ["layers"] if scanned else None
    return zj.make_plan(
        tree, tx, oracle.mesh_of(8), zero | more, precision=precision, scanned=stacks, aio={"block_size": 1}
    )


def run(
    plan: Any, tx: Any, steps: int = 4, scanned: bool = SCANNED, **options: Any
) -> tuple[list[float], Any, Any]:
    # clipping that is never active: without it stacks in host memory are updated in the backward pass, within 1e-6
    step = zj.make_train_step(loss, tx, plan, **{"clip_norm": 1e6, **options})
    state, losses = zj.init_state(params_of(scanned), tx, plan), []
    for batch in batches(steps):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses, state, step


def assert_same(plan: Any, state: Any, other: Any, wanted: Any, rtol: float = 0) -> None:
    rtol = max(rtol, NEARLY)
    same = lambda a, b: np.testing.assert_allclose(  # noqa: E731
        np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=rtol, atol=rtol / 10
    )
    jax.tree.map(same, zj.full_params(state, plan), zj.full_params(wanted, other))
    inner, expected = jax.tree.leaves(state.opt_state.inner), jax.tree.leaves(wanted.opt_state.inner)
    for a, b in zip(inner, expected, strict=True):
        same(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("scanned", [SCANNED, UNROLLED])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_params_and_state_in_files_equal_the_host(
    tmp_path: pathlib.Path, precision: str, scanned: bool
) -> None:
    """Gradients wait in host memory in both, in the dtype in which they arose."""
    tx = optax.adamw(1e-2)
    files = plan_on("nvme", "nvme", tmp_path, tx, precision=precision, scanned=scanned)
    host = plan_on("cpu", "cpu", tmp_path, tx, precision=precision, scanned=scanned)
    losses, state, step = run(files, tx, scanned=scanned)
    expected, wanted, _ = run(host, tx, scanned=scanned)
    assert losses == pytest.approx(expected, rel=NEARLY, abs=0)
    assert_same(files, state, host, wanted)
    stored = dict(zip([x.path for x in files.leaves], files.treedef.flatten_up_to(state.params), strict=True))
    assert {p for p, v in stored.items() if is_spilled(v)} == stored.keys() - {"scale"}
    if scanned:
        assert len(stored["layers/up"].shards) == 8 * LAYERS, "one file a layer and device"
    reader = step.gradients.reader
    assert reader.ahead > 4 * reader.late, "the second step on, reads run ahead"
    evaluate = [zj.make_eval_step(loss, plan) for plan in (files, host)]
    found = [float(f(s, batches(1)[0])["loss"]) for f, s in zip(evaluate, (state, wanted), strict=True)]
    assert found[0] == pytest.approx(found[1], rel=NEARLY, abs=0)


@pytest.mark.parametrize("tiers", [("cpu", "nvme"), ("nvme", "cpu"), ("nvme", "none")])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_params_and_state_on_different_tiers(
    tmp_path: pathlib.Path, precision: str, tiers: tuple[str, str]
) -> None:
    """Nearly where state is on the device: there XLA makes one program of gradient and update."""
    tx = optax.adamw(1e-2)
    files = plan_on(*tiers, tmp_path, tx, precision=precision)
    beside = "none" if "none" in tiers else "cpu"
    host = plan_on(beside, beside, tmp_path, tx, precision=precision)
    losses, state, _ = run(files, tx, steps=3)
    expected, wanted, _ = run(host, tx, steps=3)
    rtol = 1e-4 if "none" in tiers else 0
    assert losses == pytest.approx(expected, rel=max(rtol, NEARLY), abs=0)
    assert_same(files, state, host, wanted, rtol)
    kinds = {getattr(x, "sharding", None) and x.sharding.memory_kind for x in jax.tree.leaves(state.params)}
    assert "pinned_host" in kinds or tiers[0] == "nvme"


def test_accumulation_the_global_view_and_quantised_gathers(tmp_path: pathlib.Path) -> None:
    tx = optax.adamw(1e-2)
    for options, more in (
        ({"accumulation_steps": 2}, {}),
        ({"loss_over": "global"}, {}),
        ({}, {"zero_quantized_weights": True}),
    ):
        files = plan_on("nvme", "nvme", tmp_path, tx, **more)
        host = plan_on("cpu", "cpu", tmp_path, tx, **more)
        losses, state, _ = run(files, tx, steps=2, **options)
        expected, wanted, _ = run(host, tx, steps=2, **options)
        assert losses == pytest.approx(expected, rel=max(1e-6, NEARLY))
        assert_same(files, state, host, wanted, rtol=3e-5)


def test_overflow_steps_change_nothing(tmp_path: pathlib.Path) -> None:
    tx = optax.adamw(1e-2)
    files = plan_on("nvme", "nvme", tmp_path, tx, precision="fp16")
    host = plan_on("cpu", "cpu", tmp_path, tx, precision="fp16")
    losses, state, _ = run(files, tx, steps=8)
    expected, wanted, _ = run(host, tx, steps=8)
    assert 0 < int(state.skipped) == int(wanted.skipped) < 8
    np.testing.assert_allclose(losses, expected, rtol=NEARLY)
    assert_same(files, state, host, wanted)


@pytest.mark.parametrize("optimizer", [optax.adafactor(1e-2), optax.lion(1e-3)], ids=["adafactor", "lion"])
def test_optimizers(tmp_path: pathlib.Path, optimizer: Any) -> None:
    files, host = (plan_on(t, t, tmp_path, optimizer) for t in ("nvme", "cpu"))
    losses, state, _ = run(files, optimizer, steps=3)
    expected, wanted, _ = run(host, optimizer, steps=3)
    assert losses == pytest.approx(expected, rel=NEARLY, abs=0)
    assert_same(files, state, host, wanted)


@pytest.mark.parametrize("zero", [{}, {"sub_group_size": 200}], ids=["whole", "cut"])
def test_muon(tmp_path: pathlib.Path, zero: dict[str, int]) -> None:
    """Its matrices are updated whole, whether their files are cut or not; ``scale`` and ``embed`` by its Adam."""
    optimizer = optax.contrib.muon(1e-2)
    files, host = (plan_on(t, t, tmp_path, optimizer, scanned=UNROLLED, **zero) for t in ("nvme", "cpu"))
    losses, state, step = run(files, optimizer, steps=3, scanned=UNROLLED)
    expected, wanted, _ = run(host, optimizer, steps=3, scanned=UNROLLED)
    assert losses == pytest.approx(expected, rel=NEARLY, abs=0)
    assert_same(files, state, host, wanted)
    momentum = [x for x in jax.tree.leaves(state.opt_state.inner) if x.shape == (WIDTH, 3 * WIDTH)]
    assert momentum and all(is_spilled(x) for x in momentum)
    assert all((x.cut is not None) == bool(zero) for x in momentum)
    assert all(part.cut is None for part in step.update.parts), "a matrix was updated in pieces"


@pytest.mark.parametrize("accumulation", [1, 2])
def test_gradients_wait_in_host_memory(tmp_path: pathlib.Path, accumulation: int) -> None:
    """Each leaf's whose param and state are away; and what waits there is counted there."""
    tx = optax.adamw(1e-2)
    plan = plan_on("nvme", "nvme", tmp_path, tx, precision="bf16")
    state = zj.init_state(params_of(SCANNED), tx, plan)
    step = zj.make_train_step(loss, tx, plan, accumulation_steps=accumulation, clip_norm=0.01)
    grads, _, metrics, left = step.gradients(state, batches(1)[0])
    found = {x.path: g for x, g in zip(plan.leaves, grads, strict=True)}
    on_host = {path for path, g in found.items() if g.sharding.memory_kind == "pinned_host"}
    assert on_host == found.keys() - {"scale"}
    wanted = jnp.bfloat16 if accumulation == 1 else jnp.float32
    assert {found[path].dtype for path in on_host} == {np.dtype(wanted)}
    if accumulation == 1:
        assert plan.memory().host["grads"] == sum(found[path].nbytes for path in on_host)
    assert float(left.factor) == float(metrics["clip_factor"]) < 1


def test_the_program_holds_tickets_and_one_layer(tmp_path: pathlib.Path) -> None:
    """No param of the files is an argument or a result of the step's program; gradients of their shape leave it."""
    tx = optax.adamw(1e-2)
    plan = plan_on("nvme", "nvme", tmp_path, tx, precision="bf16")
    state = zj.init_state(params_of(SCANNED), tx, plan)
    lowered = zj.make_train_step(loss, tx, plan).lower(zj.abstract_state(tx, plan), batches(1)[0])
    arguments = sum(math.prod(x.shape) for x in jax.tree.leaves(lowered.args_info) if x.dtype != np.int64)
    assert arguments < 1000 < plan.memory().whole["params"] / 2
    text = lowered.as_text()
    assert "xla_python" in text or "xla_ffi" in text
    gathered = [line for line in text.splitlines() if "all_gather" in line]
    assert any(f"-> tensor<{WIDTH}x{3 * WIDTH}xbf16>" in line for line in gathered)
    stack = f"-> tensor<{LAYERS}x{WIDTH}x{3 * WIDTH}xbf16>"
    assert not [line for line in gathered if stack in line], "a whole stack is gathered"
    del state


def test_memory_is_stated_and_kept(tmp_path: pathlib.Path) -> None:
    tx = optax.adamw(1e-2)
    plan = plan_on("nvme", "nvme", tmp_path, tx, precision="bf16")
    memory = plan.memory()
    _, state, step = run(plan, tx, steps=2)
    stored = [x for x in jax.tree.leaves(state.params) if is_spilled(x)]
    assert memory.nvme["params"] == sum(x.nbytes for x in stored)
    assert memory.host["param_buffers"] >= step.gradients.reader.window > 0
    assert (
        memory.host["spill_buffers"]
        <= step.update.buffer_bytes
        <= memory.host["spill_buffers"] + 4 * 8 * 4 * 4096
    )
    on_devices = sum(x.nbytes for x in jax.tree.leaves(state.params) if not is_spilled(x))
    assert memory.device["params"] == on_devices == WIDTH * 2


def test_what_is_kept_in_host_memory(tmp_path: pathlib.Path) -> None:
    """max_in_cpu: the first leaves that fit are in memory, the others in files, the numbers the same."""
    tx = optax.adamw(1e-2)
    size = LAYERS * WIDTH * 3 * WIDTH
    part = plan_on("nvme", "nvme", tmp_path, tx, offload_param={"max_in_cpu": size + 40 * WIDTH * 2})
    none = plan_on("nvme", "nvme", tmp_path, tx)
    losses, state, _ = run(part, tx, steps=3)
    expected, wanted, _ = run(none, tx, steps=3)
    assert losses == expected
    assert_same(part, state, none, wanted)
    assert part.memory().host["params"] + part.memory().nvme["params"] == none.memory().nvme["params"]
    assert part.memory().nvme["params"] == size * 4
    held = state.params["layers"]["down"]
    assert held.tier.store.held(held.shards[0].name) is not None


def test_a_damaged_file_stops_the_step_and_nothing_else(tmp_path: pathlib.Path) -> None:
    """The error names leaf and file; the state is still good once the file is."""
    tx = optax.adamw(1e-2)
    plan = plan_on("nvme", "nvme", tmp_path, tx)
    _, state, step = run(plan, tx, steps=2)
    array = state.params["layers"]["up"]
    file = pathlib.Path(array.tier.store.path(array.shards[3].name))
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    with pytest.raises(zj.SpillError, match="params/layers/up.*bytes"):
        step(state, batches(3)[2])
    file.write_bytes(content)
    state, metrics = step(state, batches(3)[2])
    assert np.isfinite(float(metrics["loss"]))


def test_a_function_of_ones_own_is_refused(tmp_path: pathlib.Path) -> None:
    plan = plan_on("nvme", "none", tmp_path, optax.sgd(0.1))
    assert any(leaf.param_memory == NVME for leaf in plan.leaves)
    with pytest.raises(zj.PlanError, match="params in files"):
        zj.value_and_grad(loss, plan)


def test_large_leaves_are_updated_in_pieces(tmp_path: pathlib.Path) -> None:
    """sub_group_size: the same numbers, with buffers of a piece's size, and files that a checkpoint reads."""
    tx = optax.adamw(1e-2)
    small = plan_on("none", "nvme", tmp_path, tx, precision="bf16", sub_group_size=200)
    large = plan_on("none", "nvme", tmp_path, tx, precision="bf16")
    assert max(cut.count for cut in small.file_cuts.values() if cut) > 4
    losses, state, step = run(small, tx)
    expected, wanted, other = run(large, tx)
    assert losses == expected
    assert_same(small, state, large, wanted)
    assert step.update.buffer_bytes < other.update.buffer_bytes
    with zj.Checkpointer(tmp_path / "saved") as checkpoints:
        checkpoints.save(state, small)
        moved, _ = checkpoints.restore(large)
        assert_same(large, moved, small, state)
        checkpoints.save(moved, large, step=9)
        back, _ = checkpoints.restore(small)
    assert_same(small, back, large, moved)
