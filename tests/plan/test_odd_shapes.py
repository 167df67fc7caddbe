"""Dims that the devices do not divide, inits that must not depend on the devices, and names of memory kinds."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zeroj as zj
from tests import oracle

pytestmark = pytest.mark.usefixtures("compile_fast")
SHAPES = ((5,), (13,), (1,), (7, 3), (9, 8), (16, 3), (1000, 1001))
TX = optax.adamw(1e-2)


@functools.cache
def odd_model() -> oracle.Model:
    rng = np.random.default_rng(2)
    return oracle.pull_model({f"p{i}": oracle.normal(rng, *shape) for i, shape in enumerate(SHAPES)})


@functools.cache
def odd_oracle() -> oracle.Run:
    return oracle.oracle(odd_model(), TX)


@pytest.mark.parametrize(
    ("stage", "devices"), [(0, 8), (1, 8), (2, 8), (3, 8), (1, 3), (3, 3), (3, 5), (1, 6), (3, 6)]
)
def test_odd_dims_train_as_plain_optax_does(stage: int, devices: int) -> None:
    m = odd_model()
    zero = zj.Zero(stage=stage, stage3_param_persistence_threshold=0)
    plan = zj.make_plan(m.params, TX, oracle.mesh_of(devices), zero)
    oracle.assert_equals_oracle(oracle.train(m, TX, plan), odd_oracle(), [])


def test_the_dim_that_divides_is_the_one_that_is_sharded_and_the_rest_is_accounted_for() -> None:
    mesh = zj.make_mesh(local=8)
    params = {f"p{i}": jax.ShapeDtypeStruct(shape, jnp.float32) for i, shape in enumerate(SHAPES)}
    params["vocabulary"] = jax.ShapeDtypeStruct((50257, 1600), jnp.float32)
    plan = zj.make_plan(params, TX, mesh, zj.Zero(stage=3, stage3_param_persistence_threshold=0))
    placements = {leaf.path: leaf.placement for leaf in plan.leaves}
    assert placements["p4"].dims == ((1, ("local",)),) and placements["p5"].dims == ((0, ("local",)),)
    assert placements["p6"].dims == ((0, ("local",)),) and placements["p6"].padded == (1000, 1001)
    assert placements["vocabulary"].dims == ((1, ("local",)),)
    assert placements["vocabulary"].padded == (50257, 1600)
    assert placements["p1"].padded == (16,) and "padded" in placements["p1"].note
    for path in ("p0", "p2"):
        assert not placements[path].sharded and "fewer elements" in placements[path].note
    text = str(plan)
    assert "fewer elements than the 8 devices" in text and "2 leaves (6 elements) stay whole" in text


def test_the_plan_warns_where_whole_leaves_cost_much() -> None:
    params = {"w": jax.ShapeDtypeStruct((4096, 8), jnp.float32)}
    zero = zj.Zero(stage=3, stage3_param_persistence_threshold=100_000)
    assert "WARNING: lower stage3_param_persistence_threshold" in str(
        zj.make_plan(params, TX, zj.make_mesh(), zero)
    )


def test_the_first_params_do_not_depend_on_stage_or_devices() -> None:
    """The same key gives the same arrays, bit for bit, wherever they are born."""

    def init() -> Any:
        keys = jax.random.split(jax.random.key(3), 3)
        return {
            "normal": jax.random.normal(keys[0], (496, 31)),
            "uniform": jax.random.uniform(keys[1], (13,)),
            "cut": jax.nn.initializers.lecun_normal()(keys[2], (50, 24)),
        }

    wanted = jax.device_get(jax.jit(init)())
    struct = jax.eval_shape(init)
    for stage, devices in ((0, 1), (0, 8), (3, 1), (3, 2), (3, 4), (3, 8)):
        zero = zj.Zero(stage=stage, stage3_param_persistence_threshold=0)
        plan = zj.make_plan(struct, optax.sgd(0.1), oracle.mesh_of(devices), zero)
        found = zj.full_params(zj.init_state(init, optax.sgd(0.1), plan), plan)
        for name, array in wanted.items():
            np.testing.assert_array_equal(found[name], array, err_msg=f"{name}, {stage=}, {devices=}")


def test_default_memory_kinds_are_the_backends_own_and_never_named() -> None:
    """The name of the default kind differs by backend and version, so no code may compare with or build one."""
    params = {"w": jax.ShapeDtypeStruct((64, 8), jnp.float32)}
    plan = zj.make_plan(params, TX, zj.make_mesh(), zj.Zero(stage=3))
    default = jax.devices()[0].default_memory().kind
    state = zj.init_state(lambda: {"w": jnp.ones((64, 8))}, TX, plan)
    for sharding in jax.tree.leaves((plan.params, plan.grads, plan.opt_state)):
        assert sharding.memory_kind in (None, default)
    for leaf in jax.tree.leaves(state):
        assert leaf.sharding.memory_kind in (None, default)
    named = re.compile(r"""memory_kind\s*(=|==|!=)\s*["']device["']""")
    sources = Path(zj.__file__).parent.rglob("*.py")
    assert [path.name for path in sources if named.search(path.read_text())] == []
