"""A plan with state in host memory: its bytes to the byte, its memory kinds, and what is refused before allocation."""

from __future__ import annotations

import types
from collections import defaultdict
from typing import Any

import jax
import numpy as np
import optax
import pytest

import zeroj as zj
from tests import oracle
from zeroj.plan import host_memory, offload

CPU = {"device": "cpu"}


def plan_of(stage: int = 3, precision: str = "bf16", tx: Any = None, **zero: Any) -> zj.Plan:
    params = {"stack": np.ones((4, 30, 64), np.float32), "wide": np.ones((64, 48), np.float32)}
    params |= {"bias": np.ones(3, np.float32), "scale": np.float32(1) * np.ones(())}
    mesh = oracle.mesh_of(8)
    zero = {"offload_optimizer": CPU, "stage3_param_persistence_threshold": 8, **zero}
    return zj.make_plan(
        params, tx or optax.adamw(1e-3), mesh, zj.Zero(stage=stage, **zero), precision=precision
    )


def held(tree: Any) -> dict[str, int]:
    """Memory kind -> bytes on the first device, as the arrays have them."""
    found: dict[str, int] = defaultdict(int)
    for leaf in jax.tree.leaves(tree):
        found[leaf.sharding.memory_kind] += leaf.addressable_shards[0].data.nbytes
    return found


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("params", [False, True])
def test_bytes_of_the_plan_are_those_of_the_arrays(stage: int, precision: str, params: bool) -> None:
    if params and stage < 3:
        with pytest.raises(zj.ConfigError, match="stage 3"):
            plan_of(stage, precision, offload_param=CPU)
        return
    tx = optax.adamw(1e-3)
    plan = plan_of(stage, precision, tx, **({"offload_param": CPU} if params else {}))
    state = zj.init_state(plan.treedef.unflatten([np.ones(x.shape, x.dtype) for x in plan.leaves]), tx, plan)
    arrays = held((state.params, state.opt_state))
    waiting = ("grads", "accumulator")
    kept = {part: count for part, count in plan.memory().host.items() if part not in waiting}
    assert arrays["pinned_host"] * 8 == sum(kept.values()) > 0
    assert sum(arrays.values()) - arrays["pinned_host"] == plan.memory().resident
    assert held([x for x in jax.tree.leaves(state) if x.ndim == 0]).keys() == {"device"}


def test_with_everything_offloaded_only_small_leaves_stay_on_the_device() -> None:
    resident = plan_of(offload_param=CPU).memory().resident
    assert resident < 200
    assert plan_of().memory().device["params"] == 2 * (4 * 30 * 64 + 64 * 48) // 8 + 2 * (3 + 1)
    assert plan_of().memory().device["master"] == 4 * (3 + 1)


def test_gradients_or_their_sums_wait_beside_offloaded_params() -> None:
    """2 bytes a param of one micro-batch, 4 of several: never both."""
    memory = plan_of(offload_param=CPU).memory()
    count = 4 * 30 * 64 + 64 * 48
    assert (memory.host["grads"], memory.host["accumulator"]) == (2 * count, 4 * count)
    assert memory.host_total == sum(memory.host.values()) - 2 * count
    assert plan_of().memory().device["accumulator"] == 4 * count // 8 + 4 * (3 + 1)


def test_a_ratio_is_kept_by_bytes() -> None:
    everything = sum(plan_of().memory().host.values())
    some = sum(plan_of(offload_optimizer={**CPU, "ratio": 0.35}).memory().host.values())
    assert 0 < some <= 0.35 * everything


def test_the_table_of_the_plan_says_what_is_on_the_host() -> None:
    assert "on each host" in str(plan_of())


def test_memory_that_the_devices_lack_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "PINNED", "far_away")
    with pytest.raises(zj.PlanError, match="far_away.*its kinds are.*'device', 'pinned_host'"):
        plan_of()


def test_memory_that_is_not_page_locked_is_refused() -> None:
    with pytest.raises(zj.PlanError, match="pin_memory.*cannot be honoured"):
        plan_of(offload_optimizer={**CPU, "pin_memory": False})


def test_a_host_too_small_is_refused_before_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of()
    host_memory.check_host_memory(plan)
    monkeypatch.setattr(host_memory, "host_memory", lambda: 1000)
    with pytest.raises(zj.PlanError, match=r"keeps .* in host memory .*this host has 1000 B.*ratio"):
        zj.init_state(lambda: None, optax.adamw(1e-3), plan)


def test_the_pinned_pool_of_cuda_is_named_with_the_variable_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of()
    monkeypatch.setenv(host_memory.PINNED_VARIABLE, "0.0001")
    gpu = types.SimpleNamespace(platform="gpu", process_index=0)
    mesh = types.SimpleNamespace(devices=np.array([gpu]))
    monkeypatch.setattr(host_memory, "Mesh", types.SimpleNamespace)
    like = types.SimpleNamespace(mesh=mesh, memory=plan.memory)
    with pytest.raises(
        zj.PlanError, match=r"limit of the host's pool, not of the GPU: set XLA_PJRT.*=1 .*too late"
    ):
        host_memory.check_host_memory(like)  # type: ignore[arg-type]
