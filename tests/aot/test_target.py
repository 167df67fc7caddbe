"""Describing a cluster and compiling for it: sizes, memory, flags, and every mistake's message."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.aot.programs import ALL, MESH, TARGET, sharded, struct
from zeroj import _compat
from zeroj.aot import Target
from zeroj.aot.hardware import find, table
from zeroj.errors import PlanError, ZerojError


def test_the_default_mesh_is_the_shape_of_the_cluster() -> None:
    assert dict(MESH.shape) == {"node": 2, "local": 4}
    assert set(MESH.axis_types) == {AxisType.Auto}
    assert dict(TARGET.mesh(data=4, model=2).shape) == {"data": 4, "model": 2}
    with pytest.raises(PlanError, match="data=4 x model=4 has 16 devices, the cluster 8"):
        TARGET.mesh(data=4, model=4)


def test_memory_is_arguments_outputs_aliases_and_temporaries() -> None:
    step = sharded(lambda w, g: w - 0.1 * g, (P(ALL), P(ALL)), P(ALL), donate_argnums=0)
    report = TARGET.compile(step, struct((1024, 64), P(ALL)), struct((1024, 64), P(ALL)))
    shard = 128 * 64 * 4
    device = report.device
    assert (device.arguments, device.outputs, device.aliased, device.temporary) == (
        2 * shard,
        shard,
        shard,
        0,
    )
    assert device.total == 2 * shard
    assert report.fits and "fits the GPU's 84.94 GB" in str(report)
    assert report.host.total == 0
    assert report.collectives == [] and report.hidden_fraction == 1.0


@pytest.mark.parametrize("gpu", sorted(table()))
def test_every_gpu_of_the_table_compiles(gpu: str) -> None:
    target = Target(gpu, nodes=2, gpus_per_node=4)
    step = sharded(lambda x: jax.lax.psum(x @ x.T, ALL), P(ALL), P())
    report = target.compile(step, struct((512, 64), P(ALL), "bfloat16"))
    assert [c.op for c in report.collectives] == ["all-reduce"]
    assert 0 < report.step_seconds < 1e-3
    assert find(gpu).description in str(report)


def test_every_rate_has_a_source_and_an_efficiency() -> None:
    for gpu in table().values():
        for rate in (gpu.flops_bf16, gpu.hbm, gpu.nvlink, gpu.network, gpu.pcie):
            assert rate.source and 0 < rate.efficiency <= 1 and rate.usable < rate.value


def test_a_cluster_of_4096_gpus_and_a_gpu_of_one_s_own() -> None:
    gpu = dataclasses.replace(find("h100"), description="H100 with 96 GB", memory_bytes=96 * 10**9)
    target = Target(gpu, nodes=512, gpus_per_node=8)
    sharding = NamedSharding(target.mesh(), P(("node", "local")))
    x = jax.ShapeDtypeStruct((4096, 64), jnp.float32, sharding=sharding)
    report = target.compile(jax.jit(jnp.sum), x)
    assert report.device.arguments == 64 * 4
    assert [(c.op, c.group_size, c.nodes) for c in report.collectives] == [("all-reduce", 4096, 512)]


def test_a_step_that_does_not_fit_says_so() -> None:
    small = Target(dataclasses.replace(find("h100"), memory_bytes=10**9), 2, 4)
    report = small.compile(jax.jit(jnp.sin), struct((2 * 10**9,), P(ALL)))
    assert not report.fits and "DOES NOT FIT the GPU's 1.00 GB" in str(report)


def test_one_gpu() -> None:
    report = Target("h100", nodes=1, gpus_per_node=1).compile(jax.jit(jnp.sin), jnp.ones(8))
    assert report.collectives == [] and report.device.arguments == 32


def test_profiles_and_flags_are_part_of_the_report() -> None:
    step = sharded(lambda x: jax.lax.psum(x, ALL), P(ALL), P())
    x = struct((1024, 64), P(ALL))
    default = TARGET.compile(step, x)
    assert default.flags == {"xla_gpu_autotune_level": 0} and default.dropped == {}
    overlap = TARGET.compile(step, x, profile="overlap", compiler_options={"xla_no_such_flag": 1})
    assert overlap.flags["xla_gpu_enable_latency_hiding_scheduler"] is True
    assert "xla_no_such_flag" in overlap.dropped
    assert set(overlap.flags).isdisjoint(overlap.dropped)
    assert "xla_no_such_flag (unknown to the compiler of jax" in str(overlap)


def test_the_jit_s_own_compiler_options_are_used() -> None:
    flag = "xla_gpu_all_reduce_combine_threshold_bytes"
    step = sharded(lambda x: jax.lax.psum(x, ALL), P(ALL), P(), compiler_options={flag: 5})
    assert TARGET.compile(step, struct((1024, 64), P(ALL))).flags[flag] == 5


def test_the_report_prints_what_it_holds() -> None:
    def step(x: jax.Array) -> jax.Array:
        return jax.lax.all_gather(x, ALL, tiled=True)

    text = str(TARGET.compile(sharded(step, P(ALL), P()), struct((1024, 64), P(ALL))))
    for part in ("bytes per GPU", "all-gather", "inter", "not measured", "xla_gpu_autotune_level=0"):
        assert part in text


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Target("h1000"), "no GPU named 'h1000'.*h100"),
        (lambda: Target("h100", nodes=0), "nodes=0"),
        (lambda: Target("h100", nodes=1, gpus_per_node=-1), "gpus_per_node=-1"),
        (lambda: TARGET.compile(lambda x: x, struct((8,))), "not a jitted function"),
        (lambda: TARGET.compile(jax.jit(lambda x: x @ x), struct((8, 4))), "failed to trace.*dot_general"),
        (lambda: TARGET.compile(jax.jit(jnp.sin), struct((8,)), profile="fast"), "no profile 'fast'"),
    ],
)
def test_mistakes(make: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        make()


def test_a_step_for_another_number_of_devices() -> None:
    sharding = NamedSharding(Target("h100", 1, 4).mesh(), P("local"))
    x = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding)
    with pytest.raises(PlanError, match="4 devices, the cluster has 8"):
        TARGET.compile(jax.jit(jnp.sum), x)


def test_callbacks_cannot_be_compiled() -> None:
    def step(x: jax.Array) -> jax.Array:
        return jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    with pytest.raises(ZerojError, match="calls back into Python"):
        TARGET.compile(jax.jit(step), struct((8,)))
    with pytest.raises(ZerojError, match="calls back into Python"):
        Target("h100", 1, 1).compile(jax.jit(step), jnp.ones(8))


def test_a_program_that_the_compiler_refuses() -> None:
    flag = {"xla_gpu_all_gather_combine_threshold_bytes": "many"}
    with pytest.raises(ZerojError, match="could not compile the step for Target.*many"):
        TARGET.compile(jax.jit(jnp.sin), struct((8,)), compiler_options=flag)


def test_without_the_compiler_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_compat, "gpu_compiler_installed", lambda: False)
    with pytest.raises(ZerojError, match=r"zeroj\[aot\]"):
        TARGET.compile(jax.jit(jnp.sin), struct((8,)))


def test_a_step_on_a_mesh_of_cpu_devices_compiles_too(eight_devices: list[jax.Device]) -> None:
    mesh = jax.make_mesh((2, 4), ("node", "local"), axis_types=(AxisType.Auto,) * 2, devices=eight_devices)
    sharding = NamedSharding(mesh, P(ALL))
    host = sharding.with_memory_kind("pinned_host")
    step = jax.jit(lambda x, m: (x.sum(), jax.device_put(m, jax.memory.Space.Device) + x))
    x, m = jax.device_put(jnp.ones((8, 64)), sharding), jax.device_put(jnp.ones((8, 64)), host)
    report = TARGET.compile(step, x, m)
    assert [c.op for c in report.collectives] == ["all-reduce"]
    assert report.host.arguments == 64 * 4 and report.device.arguments == 64 * 4
    with pytest.raises(PlanError, match="8 devices, the cluster has 16"):
        Target("h100", 2, 8).compile(step, x, m)
