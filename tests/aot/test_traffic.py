"""Collectives and host transfers of compiled programs, against counts made by hand."""

from __future__ import annotations

import collections
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.aot.programs import ALL, DEVICE, HOST, MESH, TARGET, scanned_loss, sharded, struct
from zeroj.aot import hlo, traffic
from zeroj.aot.shapes import HloError
from zeroj.aot.traffic import Cluster, Collective

X = struct((1024, 64), P(ALL))
"""A shard of 128 x 64 fp32 values a device: 32,768 bytes."""


def rows(step: Any, *args: Any) -> list[tuple[str, str, int, int, str, int]]:
    report = TARGET.compile(step, *args)
    return [(c.op, c.dtype, c.payload, c.group_size, c.reach, c.times) for c in report.collectives]


@pytest.mark.parametrize(
    ("fun", "out", "expected"),
    [
        (lambda x: jax.lax.psum(x, "local"), P(ALL), ("all-reduce", "f32", 32768, 4, "intra", 1)),
        (lambda x: jax.lax.psum(x, "node"), P(ALL), ("all-reduce", "f32", 32768, 2, "inter", 1)),
        (lambda x: jax.lax.psum(x, ALL), P(), ("all-reduce", "f32", 32768, 8, "inter", 1)),
        (lambda x: jax.lax.all_gather(x, ALL, tiled=True), P(), ("all-gather", "f32", 262144, 8, "inter", 1)),
        (
            lambda x: jax.lax.all_gather(x, ("local", "node"), tiled=True),
            P(),
            ("all-gather", "f32", 262144, 8, "inter", 1),
        ),
        (
            lambda x: jax.lax.all_gather(x, "local", tiled=True),
            P("node"),
            ("all-gather", "f32", 131072, 4, "intra", 1),
        ),
        (
            lambda x: jax.lax.psum_scatter(x, "local", tiled=True),
            P(ALL),
            ("reduce-scatter", "f32", 32768, 4, "intra", 1),
        ),
        (
            lambda x: jax.lax.all_to_all(x.astype(jnp.int8), "local", 0, 0, tiled=True),
            P(ALL),
            ("all-to-all", "s8", 8192, 4, "intra", 1),
        ),
        (
            lambda x: jax.lax.all_to_all(x.astype(jnp.bfloat16), "node", 0, 1, tiled=True),
            P(ALL),
            ("all-to-all", "bf16", 16384, 2, "inter", 1),
        ),
        (
            lambda x: jax.lax.ppermute(x, "local", [(i, (i + 1) % 4) for i in range(4)]),
            P(ALL),
            ("collective-permute", "f32", 32768, 8, "intra", 1),
        ),
        (
            lambda x: jax.lax.ppermute(x, "node", [(0, 1), (1, 0)]),
            P(ALL),
            ("collective-permute", "f32", 32768, 8, "inter", 1),
        ),
    ],
)
def test_one_collective(fun: Any, out: P, expected: tuple[Any, ...]) -> None:
    assert rows(sharded(fun, P(ALL), out), X) == [expected]


def test_the_wire_formulas() -> None:
    def wire(op: str, payload: int, size: int) -> float:
        line = {
            "all-gather": f"%c = f32[{payload // 4}]{{0}} all-gather(%x), channel_id=1, replica_groups="
            f"[1,{size}]<=[{size}], dimensions={{0}}, use_global_device_ids=true",
            "all-reduce": f"%c = f32[{payload // 4}]{{0}} all-reduce(%x), channel_id=1, replica_groups="
            f"[1,{size}]<=[{size}], use_global_device_ids=true, to_apply=%add",
        }[op]
        shard = payload // 4 // (size if op == "all-gather" else 1)
        text = f"HloModule m\n\nENTRY %e (x: f32[{shard}]) -> f32[] {{\n"
        text += f"  %x = f32[{shard}]{{0}} parameter(0)\n  ROOT {line}\n}}\n"
        (row,) = traffic.collectives(hlo.parse(text), Cluster(size, 8))
        assert row.payload == payload
        return row.wire

    assert wire("all-gather", 4096, 8) == 4096 * 7 / 8
    assert wire("all-reduce", 4096, 8) == 2 * 4096 * 7 / 8
    assert wire("all-gather", 4096, 1) == 0


def test_loops_in_loops_multiply() -> None:
    def outer(carry: jax.Array, _: None) -> tuple[jax.Array, None]:
        inner = jax.lax.scan(lambda c, _: (jnp.tanh(jax.lax.psum(c, "local")), None), carry, None, length=5)[
            0
        ]
        gathered = jax.lax.all_gather(inner, "node", tiled=True)
        return jax.lax.psum_scatter(gathered, "node", tiled=True), None

    found = rows(sharded(lambda x: jax.lax.scan(outer, x, None, length=3)[0], P(ALL), P(ALL)), X)
    assert sorted(found) == [
        ("all-gather", "f32", 65536, 2, "inter", 3),
        ("all-reduce", "f32", 32768, 4, "intra", 15),
        ("reduce-scatter", "f32", 65536, 2, "inter", 3),
    ]


def test_a_loop_whose_count_depends_on_data_is_counted_once_and_named() -> None:
    def loop(x: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda c: jnp.sum(c) < 3.0, lambda c: jax.lax.psum(c, "local") * 0.1, x)

    report = TARGET.compile(sharded(loop, P(ALL), P(ALL)), X)
    assert [(c.op, c.times) for c in report.collectives] == [("all-reduce", 1)]
    assert any("depends on data" in note for note in report.timeline.notes)


def test_of_a_conditional_the_longest_branch_counts() -> None:
    def long(x: jax.Array) -> jax.Array:
        return jnp.tanh(jax.lax.psum(jnp.tanh(jax.lax.psum(x, "local")), "node"))

    def branch(x: jax.Array, p: jax.Array) -> jax.Array:
        return jax.lax.cond(p[0] > 0, lambda x: jax.lax.psum(x, ALL), long, x)

    found = rows(sharded(branch, (P(ALL), P()), P(ALL)), X, struct((1,)))
    assert [r[3] for r in found] == [4, 2]


def test_scanned_zero_3_has_its_gathers_and_scatters() -> None:
    step = sharded(jax.grad(scanned_loss), (P(None, ALL), P(ALL)), P(None, ALL))
    found = rows(step, struct((6, 256, 256), P(None, ALL)), struct((64, 256), P(ALL)))
    total: dict[str, int] = collections.Counter()
    for op, _, payload, _, _, times in found:
        total[op] += payload * times
    layer = 256 * 256 * 4
    assert total == {"all-gather": 2 * 6 * layer, "reduce-scatter": 6 * layer}


def test_the_partitioner_s_collectives_are_read_too() -> None:
    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return x @ w

    step = jax.jit(product, out_shardings=NamedSharding(MESH, P("node")))
    found = rows(step, struct((64, 512), P("node", "local")), struct((512, 256), P("local")))
    assert found == [("all-reduce", "f32", 32 * 256 * 4, 4, "intra", 1)]


def test_host_parameters_stream_in_and_gradients_out() -> None:
    def loss(stack: jax.Array, x: jax.Array) -> jax.Array:
        def body(h: jax.Array, shard: jax.Array) -> tuple[jax.Array, None]:
            whole = jax.lax.all_gather(jax.device_put(shard, DEVICE), ALL, tiled=True)
            return jnp.tanh(h @ whole), None

        return jnp.sum(jax.lax.scan(body, x, stack)[0])

    host = struct((8, 512, 512), P(None, ALL), kind="pinned_host")
    step = sharded(jax.grad(loss), (P(None, ALL), P(ALL)), P(None, ALL), out_shardings=host.sharding)
    report = TARGET.compile(step, host, struct((64, 512), P(ALL)))
    moved: dict[str, int] = collections.Counter()
    for copy in report.copies:
        moved[copy.direction] += copy.nbytes * copy.times
    stack = 512 * 512 * 4
    assert moved == {"h2d": stack, "d2h": stack}
    assert report.host.arguments == stack and report.host.outputs == stack
    assert report.device.arguments == 64 // 8 * 512 * 4


def test_host_state_is_copied_both_ways() -> None:
    def update(m: jax.Array, g: jax.Array) -> jax.Array:
        return jax.device_put(jax.device_put(m, DEVICE) * 0.9 + g, HOST)

    report = TARGET.compile(
        jax.jit(update), struct((512, 512), P(ALL), kind="pinned_host"), struct((512, 512), P(ALL))
    )
    assert sorted((c.direction, c.nbytes) for c in report.copies) == [("d2h", 131072), ("h2d", 131072)]
    assert report.host.total == 2 * 131072


OPS = {
    "psum": ("all-reduce", 1),
    "gather": ("all-gather", 1),
    "scatter": ("reduce-scatter", 1),
    "swap": ("all-to-all", 1),
}
AXES = {"node": (2, "inter"), "local": (4, "intra"), "both": (8, "inter")}


def apply(op: str, axis: str, x: jax.Array) -> jax.Array:
    """A collective and a nonlinear step, which keep the shape, so that nothing merges."""
    name: Any = ALL if axis == "both" else axis
    n = AXES[axis][0]
    if op == "psum":
        return jnp.tanh(jax.lax.psum(x, name))
    if op == "gather":
        return jnp.tanh(jax.lax.all_gather(x, name, tiled=True))[: x.shape[0]] + x
    if op == "scatter":
        return jnp.tile(jnp.tanh(jax.lax.psum_scatter(x, name, tiled=True)), (n, 1))
    return jnp.tanh(jax.lax.all_to_all(x, name, 0, 0, tiled=True))


@hypothesis.settings(max_examples=12, deadline=None, derandomize=True)
@hypothesis.given(
    st.lists(
        st.tuples(st.sampled_from(sorted(OPS)), st.sampled_from(sorted(AXES)), st.sampled_from([1, 3])),
        min_size=1,
        max_size=3,
    )
)
def test_random_programs(parts: list[tuple[str, str, int]]) -> None:
    """Chains of collectives, some in loops: every one is found, with its group, reach and count."""

    def program(x: jax.Array) -> jax.Array:
        for op, axis, loops in parts:
            if loops == 1:
                x = apply(op, axis, x)
            else:
                x = jax.lax.scan(lambda c, _, o=op, a=axis: (apply(o, a, c), None), x, None, length=loops)[0]
        return x

    found: dict[Any, int] = collections.Counter()
    for op, _, payload, size, reach, times in rows(sharded(program, P(ALL), P(ALL)), X):
        found[op, payload, size, reach] += times
    expected: dict[Any, int] = collections.Counter()
    for op, axis, loops in parts:
        size, reach = AXES[axis]
        expected[OPS[op][0], 32768 * (size if op == "gather" else 1), size, reach] += loops
    assert found == expected


ENTRY = """HloModule m

%wrapped (p: f32[64]) -> f32[8] {{
  %p = f32[64]{{0}} parameter(0)
  ROOT %rs = f32[8]{{0}} reduce-scatter(%p), channel_id=1, replica_groups={{{{0,1,2,3,4,5,6,7}}}}, \
use_global_device_ids=true, dimensions={{0}}, to_apply=%add
}}

ENTRY %e (x: f32[64]) -> f32[8] {{
  %x = f32[64]{{0}} parameter(0)
{body}
}}
"""


def read(body: str) -> list[Collective]:
    return traffic.collectives(hlo.parse(ENTRY.format(body=body)), Cluster(8, 4))


def test_async_wrapped_and_fused_collectives() -> None:
    wrapped = "  %s = ((f32[64]{0}), f32[8]{0}) async-start(%x), calls=%wrapped\n"
    wrapped += "  %n = f32[64]{0} negate(%x)\n  ROOT %d = f32[8]{0} async-done(%s)"
    (row,) = read(wrapped)
    assert (row.op, row.payload, row.group_size, row.asynchronous, row.between) == (
        "reduce-scatter",
        256,
        8,
        True,
        1,
    )
    (row,) = read("  ROOT %f = f32[8]{0} fusion(%x), kind=kCustom, calls=%wrapped")
    assert (row.op, row.payload, row.asynchronous) == ("reduce-scatter", 256, False)


def test_tuples_and_mixed_dtypes() -> None:
    body = "  %h = bf16[16]{0} parameter(1)\n  ROOT %r = (f32[64]{0}, bf16[16]{0}) all-reduce(%x, %h), "
    body += "channel_id=1, replica_groups={}, use_global_device_ids=true, to_apply=%add"
    (row,) = read(body)
    assert (row.dtype, row.payload, row.group_size) == ("bf16+f32", 256 + 32, 8)


def test_groups_without_global_ids_count_replicas() -> None:
    (row,) = read("  ROOT %r = f32[64]{0} all-reduce(%x), replica_groups={{0}}, to_apply=%add")
    assert (row.group_size, row.wire) == (1, 0.0)
    (row,) = read("  ROOT %r = f32[64]{0} all-reduce(%x), channel_id=1, replica_groups={{0}}, to_apply=%add")
    assert row.group_size == 8


@pytest.mark.parametrize(
    "line",
    [
        "ROOT %r = f32[64]{0} all-frobnicate(%x), replica_groups={}",
        "ROOT %r = f32[64]{0} all-reduce(%x), channel_id=1, use_global_device_ids=true, to_apply=%add",
        "ROOT %r = f32[64]{0} collective-permute(%x), channel_id=1",
    ],
)
def test_a_collective_that_is_not_understood_is_an_error_that_shows_it(line: str) -> None:
    with pytest.raises(HloError) as error:
        read("  " + line)
    assert line in str(error.value)
