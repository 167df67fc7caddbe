"""Random programs: loss and gradient under a random plan equal those of plain JAX."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import HealthCheck, Phase, given, reject, seed, settings
from hypothesis import strategies as st

import zeroj as zj
from tests.gather import programs

pytestmark = [pytest.mark.filterwarnings("ignore:The scan at"), pytest.mark.usefixtures("compile_fast")]
MESHES = [{"local": 8}, {"node": 2, "local": 4}, {"local": 3}, {"local": 4, "model": 2}]
PLANS = st.fixed_dictionaries(
    {
        "stage": st.sampled_from([3, 3, 2, 1]),
        "stage3_param_persistence_threshold": st.sampled_from([0, 0, 30]),
    },
    optional={
        "stage3_prefetch_bucket_size": st.sampled_from([0, 150, 10**6]),
        "stage3_max_live_parameters": st.sampled_from([0, 300, 10**9]),
        "stage3_max_reuse_distance": st.sampled_from([0, 200, 10**9]),
        "reshard_after_forward": st.just(False),
        "offload_param": st.just({"device": "cpu"}),
        "zero_hpz_partition_size": st.just(4),
    },
)
EXAMPLES = {
    "steps": programs.PROGRAMS,
    "zero": PLANS,
    "mesh": st.sampled_from(MESHES),
    "view": st.sampled_from(["device", "device", "global"]),
    "width": st.sampled_from([3, 4, 8]),
    "frozen": st.sampled_from(["", "", "table", "w", "b"]),
    "scanned": st.booleans(),
}


def check(steps: Any, zero: Any, mesh: Any, view: str, width: int, frozen: str, scanned: bool) -> None:
    r = np.random.default_rng(0)
    params = {"steps": programs.init(steps, r, width), "shared": programs.shared_params(r, width)}
    loss_fn = programs.loss_of(steps)
    left_out = {"reshard_after_forward", "offload_param"} if zero["stage"] < 3 else set()
    if zero["stage"] < 3 or view == "global" or "node" not in mesh:
        left_out |= {"zero_hpz_partition_size"}
    zero = {key: value for key, value in zero.items() if key not in left_out}
    made = zj.make_mesh(devices=jax.devices()[: int(np.prod(list(mesh.values())))], **mesh)
    degree = mesh.get("node", 1) * mesh["local"]
    batch = jnp.asarray(r.normal(size=(2 * degree, width)), jnp.float32)

    def trains(path: str, leaf: Any) -> bool:
        return jnp.issubdtype(leaf.dtype, jnp.floating) and not (frozen and path.endswith(frozen))

    plan = zj.make_plan(
        params,
        optax.sgd(0.1),
        made,
        zj.Zero(**zero),
        trainable=trains,
        scanned=zj.find_scanned(loss_fn, params, batch) if scanned else (),
    )
    try:
        want_loss, want = oracle(loss_fn, params, batch, degree if view == "device" else 1)
    except NotImplementedError:  # plain JAX cannot differentiate it: forward mode through a custom_vjp
        reject()
    if not all(np.isfinite(np.asarray(x, np.float32)).all() for x in (want_loss, *want) if x is not None):
        reject()  # a program without a gradient: the deviation of a single example has none
    step = jax.jit(zj.value_and_grad(loss_fn, plan, loss_over=view))
    loss, grads = step(zj.shard_params(plan, params), batch)

    half = any(name in str(steps) for name in ("cast", "casts"))
    bound = 3e-2 if half else 2e-5
    np.testing.assert_allclose(float(loss), float(want_loss), rtol=bound, atol=bound)
    got = [None if g is None else g for g in jax.tree.leaves(grads, is_leaf=lambda g: g is None)]
    size = max(float(optax.tree_utils.tree_norm([e for e in want if e is not None])), 1e-2)
    for leaf, g, exact in zip(plan.leaves, got, want, strict=True):
        assert (g is None) == (not leaf.trainable), leaf.path
        if g is not None:
            whole = np.asarray(g, np.float32)[tuple(slice(0, n) for n in leaf.shape)]
            distance = np.linalg.norm(whole - np.asarray(exact, np.float32))
            assert distance <= bound * (np.linalg.norm(exact) + 0.05 * size), (leaf.path, distance)


def oracle(loss_fn: Any, params: Any, batch: jax.Array, parts: int) -> tuple[jax.Array, list[Any]]:
    """Loss and gradients of plain JAX on one device: the mean of the loss over equal parts of the batch."""
    leaves, treedef = jax.tree.flatten(params)
    live = [i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.floating)]

    def mean(values: list[jax.Array]) -> jax.Array:
        merged = list(leaves)
        for i, value in zip(live, values, strict=True):
            merged[i] = value
        split = batch.reshape(parts, -1, *batch.shape[1:])
        return jax.lax.map(lambda x: loss_fn(jax.tree.unflatten(treedef, merged), x), split).mean()

    loss, grads = jax.jit(jax.value_and_grad(mean))([leaves[i] for i in live])
    by_index = dict(zip(live, grads, strict=True))
    return loss, [by_index.get(i) for i in range(len(leaves))]


def run_examples(number: int, start: int, phases: tuple[Phase, ...] = (Phase.generate, Phase.shrink)) -> None:
    options = settings(
        max_examples=number,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=phases,
        print_blob=False,
    )
    seed(start)(options(given(**EXAMPLES)(check)))()


@pytest.mark.slow
def test_random_programs_equal_plain_jax() -> None:
    run_examples(12, 0)


@pytest.mark.full
@pytest.mark.parametrize("start", range(1, 21))
def test_many_random_programs_equal_plain_jax(start: int) -> None:
    run_examples(25, start)
