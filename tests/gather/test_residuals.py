"""Activations that rematerialised regions keep, in host memory: the same gradients, and where they go."""

from __future__ import annotations

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
from zeroj.gather import residual_check, residuals

pytestmark = pytest.mark.usefixtures("compile_fast")

LAYERS, WIDTH, ROWS = 3, 32, 64
Loss = Callable[[Any, Any], jax.Array]


def params() -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(0), 3)
    return {
        "blocks": jax.random.normal(keys[0], (LAYERS, WIDTH, WIDTH)) / 6,
        "shift": jax.random.normal(keys[1], (LAYERS, WIDTH)) / 6,
        "head": jax.random.normal(keys[2], (WIDTH, 1)) / 6,
    }


def batch() -> dict[str, jax.Array]:
    return {"x": jax.random.normal(jax.random.key(3), (ROWS, WIDTH))}


def layer(x: jax.Array, w: jax.Array, b: jax.Array) -> jax.Array:
    return x + jnp.tanh(x @ w + b)


def end(x: jax.Array, p: Any) -> jax.Array:
    return jnp.mean((x @ p["head"]) ** 2)


def scanned(p: Any, batch: Any) -> jax.Array:
    def body(x: jax.Array, wb: Any) -> tuple[jax.Array, None]:
        return jax.checkpoint(layer)(x, *wb), None

    return end(jax.lax.scan(body, batch["x"], (p["blocks"], p["shift"]))[0], p)


def unrolled(p: Any, batch: Any) -> jax.Array:
    x = batch["x"]
    for i in range(LAYERS):
        x = jax.checkpoint(layer)(x, p["blocks"][i], p["shift"][i])
    return end(x, p)


def called(p: Any, batch: Any) -> jax.Array:
    return jax.jit(scanned)(p, batch)


def keeps_products(p: Any, batch: Any) -> jax.Array:
    """A policy of the user's own that saves more than inputs: that goes to the host with them."""
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable

    def body(x: jax.Array, wb: Any) -> tuple[jax.Array, None]:
        return jax.checkpoint(layer, policy=policy)(x, *wb), None

    return end(jax.lax.scan(body, batch["x"], (p["blocks"], p["shift"]))[0], p)


def in_groups(p: Any, batch: Any) -> jax.Array:
    """A loop in a loop, and an input that something else needs too."""
    x = batch["x"]

    def group(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        def body(x: jax.Array, wb: Any) -> tuple[jax.Array, None]:
            return jax.checkpoint(layer)(x, *wb), None

        return jax.lax.scan(body, x, (p["blocks"], p["shift"]))[0], None

    return end(jax.lax.scan(group, x, None, length=2)[0] * jnp.tanh(x), p)


LOSSES: tuple[Loss, ...] = (scanned, unrolled, called, keeps_products, in_groups)


def gradient(loss: Loss, loss_over: str, offload: bool, stage: int = 3) -> tuple[Any, Any]:
    """A jitted gradient and its arguments, on 8 devices."""
    zero = zj.Zero(stage=stage, stage3_param_persistence_threshold=4)
    scans = loss is not unrolled
    plan = zj.make_plan(
        params(),
        optax.sgd(0.1),
        oracle.mesh_of(8),
        zero,
        scanned=("blocks", "shift") if scans else None,
    )
    state = zj.init_state(params(), optax.sgd(0.1), plan)
    grad = zj.value_and_grad(loss, plan, loss_over=loss_over, offload_activations=offload)
    place = jax.sharding.NamedSharding(plan.mesh, jax.sharding.PartitionSpec(plan.zero_axes))
    return jax.jit(grad), (state.params, jax.device_put(batch(), place))


@pytest.fixture(autouse=True)
def every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small activations too."""
    monkeypatch.setattr(residuals, "SMALLEST", 8)


@pytest.mark.parametrize("loss_over", ["device", "global"])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda f: f.__name__)
def test_gradients_are_the_same(loss: Loss, loss_over: str) -> None:
    found, wanted = (
        f(*args) for f, args in (gradient(loss, loss_over, offload) for offload in (True, False))
    )
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-7)


def crossing(closed: Any) -> list[tuple[tuple[int, ...], str]]:
    """(shape, direction) of every copy between the memories, loops' bodies once."""
    found = []
    for eqn in closed.eqns:
        if eqn.primitive.name == "device_put":
            to_host = eqn.params["devices"][0] == jax.memory.Space.Host
            found += [(v.aval.shape, "d2h" if to_host else "h2d") for v in eqn.outvars]
        for value in eqn.params.values():
            for sub in value if isinstance(value, tuple) else (value,):
                inner = getattr(sub, "jaxpr", sub)
                found += crossing(inner) if hasattr(inner, "eqns") else []
    return found


@pytest.mark.parametrize(
    ("loss", "times"), [(scanned, 1), (unrolled, LAYERS), (keeps_products, 2), (in_groups, 1)]
)
def test_each_input_of_a_region_goes_to_the_host_once_and_comes_back_once(loss: Loss, times: int) -> None:
    f, args = gradient(loss, "device", True)
    copies = crossing(f.trace(*args).jaxpr.jaxpr)
    mine = (ROWS // 8, WIDTH)
    assert sorted(copies) == sorted([(mine, "d2h"), (mine, "h2d")] * times)


def test_the_key_moves_activations() -> None:
    wanted = {}
    for away in (False, True):
        config = {
            "train_batch_size": ROWS,
            "gradient_accumulation_steps": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
            "zero_optimization": {"stage": 2},
            "activation_checkpointing": {"cpu_checkpointing": away},
        }
        engine = zj.initialize(scanned, params(), config)
        placed = engine._prepare(batch(), None)
        copies = crossing(engine._step.trace(engine.state, placed).jaxpr.jaxpr)
        assert copies == [((ROWS // 16, WIDTH), way) for way in ("d2h", "h2d")] * away
        norms = [engine.train_batch(batch())["grad_norm"].item() for _ in range(3)]
        wanted[away] = [*norms, float(engine.compute_gradients(batch())[0])]
    np.testing.assert_allclose(wanted[True], wanted[False], rtol=1e-6)


def test_without_checkpointed_layers_it_is_refused() -> None:
    f, args = gradient(lambda p, b: end(layer(b["x"], p["blocks"][0], p["shift"][0]), p), "device", True)
    with pytest.raises(zj.PlanError, match=r"cpu_checkpointing.*jax\.checkpoint"):
        f.trace(*args)


def test_small_activations_stay_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residuals, "SMALLEST", ROWS * WIDTH)
    f, args = gradient(scanned, "device", True)
    with pytest.raises(zj.PlanError, match=f"at least {ROWS * WIDTH} elements"):
        f.trace(*args)


def test_the_start_up_check_passes_here_and_sees_a_fault() -> None:
    residual_check.compare(jax.devices()[0])

    def faulty(program: _compat.Program, *args: Any, **kwargs: Any) -> _compat.Program:
        good = residuals.offload_residuals(program, *args, **kwargs)
        structs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in good.jaxpr.invars]
        run = lambda *args: [1.001 * out for out in _compat.evaluate(good, *args)]  # noqa: E731
        return _compat.trace(run, *structs)[0]

    with pytest.raises(zj.PlanError, match=r"other gradients on .*four layers"):
        residual_check.compare(jax.devices()[0], faulty)


def test_versions_that_are_known_to_be_wrong_on_gpus_are_refused() -> None:
    residual_check.refuse_known((0, 11, 1))
    for version in ((0, 10, 2), (0, 11, 0)):
        with pytest.raises(zj.PlanError, match="wrong gradients on GPUs"):
            residual_check.refuse_known(version)
        with pytest.raises(zj.PlanError, match="hpZ with offload_param .* wrong gradients on GPUs"):
            residual_check.refuse_known(version, residual_check.NEAR)
