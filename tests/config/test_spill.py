"""What "offload_optimizer" and "aio" say of files reaches the plan, key by key."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import optax
import pytest

import zeroj as zj
from zeroj.config.spill import SpillSettings

CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "verify": ({"verify": False}, {}, "verify"),
    "pipeline_read": ({"pipeline_read": True}, {}, "pipeline_read"),
    "pipeline_write": ({"pipeline_write": True}, {}, "pipeline_write"),
    "buffer_count": ({"buffer_count": 7}, {}, "buffer_count"),
    "block_size": ({}, {"block_size": 1 << 16}, "block_size"),
    "queue_depth": ({}, {"queue_depth": 3}, "queue_depth"),
    "intra_op_parallelism": ({}, {"intra_op_parallelism": 5}, "threads"),
}


def settings(section: dict[str, Any], aio: dict[str, Any] | None) -> SpillSettings:
    zero = zj.Zero(stage=3, offload_optimizer={"device": "nvme", "nvme_path": "/tmp", **section})
    params = {"w": np.zeros((64, 64), np.float32)}
    plan = zj.make_plan(params, optax.adam(0.1), zj.make_mesh(), zero, aio=aio)
    assert plan.spill is not None
    return plan.spill


@pytest.mark.parametrize("name", CASES)
def test_each_key_reaches_the_plan(name: str) -> None:
    section, aio, field = CASES[name]
    usual, found = settings({}, {}), settings(section, aio)
    differing = {
        f.name for f in dataclasses.fields(usual) if getattr(usual, f.name) != getattr(found, f.name)
    }
    # a shard smaller than one request stays in memory, so the block size decides that too
    assert differing == ({field, "smallest"} if name == "block_size" else {field})


def test_an_aio_section_chooses_the_direct_engine() -> None:
    assert settings({}, {}).direct and not settings({}, None).direct


def test_keys_of_params_reach_the_plan() -> None:
    """Buffers for params are stated, in pages: their number and size change that."""

    def plan(**section: Any) -> Any:
        where = {"device": "nvme", "nvme_path": "/tmp", "max_in_cpu": 0}
        zero = zj.Zero(stage=3, offload_param=where | section)
        params = {f"w{i}": np.zeros((64, 64), np.float32) for i in range(9)}
        return zj.make_plan(
            params,
            optax.sgd(0.1),
            zj.make_mesh(local=1, devices=jax.devices()[:1]),
            zero,
            aio={"block_size": 1},
        )

    page, whole = 4096, 64 * 64 * 4
    assert plan().spill_params.path == "/tmp" and plan().memory().nvme == {"params": 9 * whole}
    buffers = lambda **section: plan(**section).memory().host["param_buffers"]  # noqa: E731
    assert buffers() == (5 + 1) * whole
    assert buffers(buffer_count=2) == (2 + 1) * whole
    assert buffers(buffer_count=2, buffer_size=2 * page // 4) == 2 * 2 * page + whole
    assert plan(max_in_cpu=64 * 64 * 4).memory().host["params"] == 4 * whole
