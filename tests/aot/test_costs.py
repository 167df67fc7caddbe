"""Bytes and operations of single instructions, against counts made by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from tests.aot.programs import ALL, TARGET, sharded, struct
from zeroj.aot import costs, hlo
from zeroj.aot.costs import Traffic

BODY = """HloModule m

%update (p0: f32[8,16], p1: f32[16], p2: s32[]) -> f32[8,16] {{
  %p0 = f32[8,16]{{1,0}} parameter(0)
  %p1 = f32[16]{{0}} parameter(1)
  %p2 = s32[] parameter(2)
  %zero = s32[] constant(0)
  %row = f32[1,16]{{1,0}} bitcast(%p1)
  ROOT %u = f32[8,16]{{1,0}} dynamic-update-slice(%p0, %row, %p2, %zero)
}}

%pick (p0: f32[8,16], p1: s32[]) -> bf16[1,16] {{
  %p0 = f32[8,16]{{1,0}} parameter(0)
  %p1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %s = f32[1,16]{{1,0}} dynamic-slice(%p0, %p1, %zero), dynamic_slice_sizes={{1,16}}
  ROOT %c = bf16[1,16]{{1,0}} convert(%s)
}}

ENTRY %e (x: f32[8,16], h: f32[8,16], v: f32[16], i: s32[]) -> f32[] {{
  %x = f32[8,16]{{1,0}} parameter(0)
  %h = f32[8,16]{{1,0:S(5)}} parameter(1)
  %v = f32[16]{{0}} parameter(2)
  %i = s32[] parameter(3)
  ROOT %r = {line}
}}
"""


def traffic_of(line: str) -> Traffic:
    module = hlo.parse(BODY.format(line=line))
    return costs.traffic(module, module.entry, module.entry.root)


def test_plain_instructions_read_operands_and_write_results() -> None:
    assert traffic_of("f32[8,16]{1,0} add(%x, %x)") == Traffic(3 * 512, 0, 0)
    assert traffic_of("f32[] bitcast(%x)") == Traffic(0, 0, 0)
    assert traffic_of('f32[8,16]{1,0} custom-call(), custom_call_target="AllocateBuffer"') == Traffic(0, 0, 0)


def test_slices_and_updates_in_place_move_the_slice() -> None:
    assert traffic_of("f32[1,16]{1,0} dynamic-slice(%x, %i, %i)") == Traffic(64 + 64 + 8, 0, 0)
    update = "f32[8,16]{1,0} fusion(%x, %v, %i), kind=kLoop, calls=%update"
    assert traffic_of(update) == Traffic(64 + 64 + 4, 0, 0)
    pick = "bf16[1,16]{1,0} fusion(%x, %i), kind=kLoop, calls=%pick"
    assert traffic_of(pick) == Traffic(64 + 32 + 4, 0, 0)


def test_host_memory_is_counted_apart() -> None:
    start = "(f32[8,16]{1,0}, f32[8,16]{1,0:S(5)}, u32[]) copy-start(%h)"
    assert traffic_of(start) == Traffic(512, 512, 0)
    assert traffic_of("f32[8,16]{1,0:S(5)} copy(%x)") == Traffic(512, 0, 512)
    pick = "((f32[8,16]{1,0:S(5)}, s32[]), bf16[1,16]{1,0}, u32[]) fusion-start(%h, %i), calls=%pick"
    assert traffic_of(pick) == Traffic(32 + 4, 64, 0)
    update = "f32[8,16]{1,0:S(5)} fusion(%h, %v, %i), kind=kLoop, calls=%update"
    assert traffic_of(update) == Traffic(64 + 4, 0, 64)


def flops(step: object, *args: object) -> float:
    return TARGET.compile(step, *args).timeline.flops


def test_operations_of_matrix_products() -> None:
    step = sharded(lambda x, w: jnp.tanh(x @ w), (P(ALL), P()), P(ALL))
    assert flops(step, struct((1024, 256), P(ALL)), struct((256, 512))) == 2 * 128 * 256 * 512

    def looped(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=7)[0]

    step = sharded(looped, (P(ALL), P()), P(ALL))
    assert flops(step, struct((1024, 256), P(ALL)), struct((256, 256))) == 7 * 2 * 128 * 256 * 256


def test_operations_of_convolutions() -> None:
    def conv(x: jax.Array, k: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def grads(x: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.grad(lambda x, k: jnp.sum(conv(x, k) ** 2), argnums=(0, 1))(x, k)

    args = struct((8, 32, 32, 16), P(ALL), "bfloat16"), struct((3, 3, 16, 32), P(), "bfloat16")
    once = 2 * (32 * 32 * 32) * (3 * 3 * 16)
    assert flops(sharded(conv, (P(ALL), P()), P(ALL)), *args) == once
    assert flops(sharded(grads, (P(ALL), P()), (P(ALL), P())), *args) == 3 * once
