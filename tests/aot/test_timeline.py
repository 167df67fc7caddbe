"""The model of time: single transfers by formula, schedules by hand, and trends that must hold."""

from __future__ import annotations

import dataclasses

import jax
import pytest
from jax.sharding import PartitionSpec as P

from tests.aot.programs import ALL, TARGET, scanned_loss, sharded, struct
from zeroj.aot import Target, hlo
from zeroj.aot.hardware import Gpu, Rate, find
from zeroj.aot.timeline import Timeline, collective_seconds, simulate
from zeroj.aot.traffic import Cluster

ROUND = Rate(1e9, 1.0, "a round number")
GPU: Gpu = dataclasses.replace(
    find("h100"),
    flops_bf16=Rate(1e12, 1.0, "a round number"),
    hbm=ROUND,
    nvlink=ROUND,
    network=Rate(1e8, 1.0, "a round number"),
    pcie=ROUND,
    nvlink_latency=0.0,
    network_latency=0.0,
    launch_latency=0.0,
)
"""1 GB/s of memory, NVLink and PCIe, 0.1 GB/s of network: an array of 1 MB moves in a millisecond."""

MB = 250_000
"""Elements of one MB of fp32."""


def run(*lines: str) -> Timeline:
    text = f"HloModule m\n\n%body (p: f32[{MB}]) -> f32[{MB}] {{\n  %p = f32[{MB}]{{0}} parameter(0)\n"
    text += f"  %bs = (f32[{MB}]{{0}}, f32[{MB}]{{0}}) all-reduce-start(%p), {GROUP}, to_apply=%add\n"
    text += f"  ROOT %bd = f32[{MB}]{{0}} all-reduce-done(%bs)\n}}\n\n"
    text += f"ENTRY %e (x: f32[{MB}]) -> f32[{MB}] {{\n  %x = f32[{MB}]{{0}} parameter(0)\n"
    text += "\n".join("  " + line for line in lines) + "\n}\n"
    return simulate(hlo.parse(text), Cluster(2, 2), GPU)


GROUP = "channel_id=1, replica_groups={{0,1}}, use_global_device_ids=true"
START = f"%s = (f32[{MB}]{{0}}, f32[{MB}]{{0}}) all-reduce-start(%x), {GROUP}, to_apply=%add"
DONE = f"%d = f32[{MB}]{{0}} all-reduce-done(%s)"
KERNEL = f"%k = f32[{MB}]{{0}} negate(%x)"
"""Reads one MB and writes one: two milliseconds. The all-reduce of two devices takes one."""


def test_a_collective_behind_enough_compute_is_hidden() -> None:
    line = run(START, KERNEL, DONE, f"ROOT %r = (f32[{MB}]{{0}}) tuple(%d)")
    assert line.seconds == pytest.approx(2e-3)
    assert line.communication_seconds == pytest.approx(1e-3)
    assert line.exposed_seconds == 0 and line.hidden_fraction == 1
    assert line.waits == []


def test_a_collective_that_nothing_hides_is_exposed() -> None:
    line = run(KERNEL, START, f"ROOT {DONE}")
    assert line.seconds == pytest.approx(3e-3)
    assert line.hidden_fraction == 0
    assert [(w.name, w.stream) for w in line.waits] == [("d", "nvlink")]
    synchronous = run(KERNEL, f"ROOT %r = f32[{MB}]{{0}} all-reduce(%x), {GROUP}, to_apply=%add")
    assert synchronous.seconds == pytest.approx(3e-3) and synchronous.hidden_fraction == 0


def test_collectives_of_one_stream_queue_up() -> None:
    second, done = START.replace("%s ", "%s2 "), DONE.replace("%d ", "%d2 ").replace("%s", "%s2")
    line = run(START, second, DONE, f"ROOT {done}")
    assert line.seconds == pytest.approx(2e-3)
    assert line.exposed_seconds == pytest.approx(2e-3)


def test_a_loop_costs_its_body_times_its_count() -> None:
    loop = f"ROOT %w = f32[{MB}]{{0}} while(%x), condition=%c, body=%body, "
    loop += 'backend_config={"known_trip_count":{"n":"5"}}'
    line = run(loop)
    assert line.seconds == pytest.approx(5e-3)
    assert line.communication_seconds == pytest.approx(5e-3)
    assert [w.seconds for w in line.waits] == [pytest.approx(5e-3)]


def test_host_transfers_have_streams_of_their_own() -> None:
    start = f"%c = (f32[{MB}]{{0:S(5)}}, f32[{MB}]{{0}}, u32[]) copy-start(%x)"
    done = f"%cd = f32[{MB}]{{0:S(5)}} copy-done(%c)"
    line = run(START, start, KERNEL, DONE, f"ROOT {done}")
    assert line.seconds == pytest.approx(2e-3)
    assert line.copy_seconds == pytest.approx(1e-3) and line.copy_exposed_seconds == 0


@pytest.mark.parametrize(
    ("op", "size", "nodes", "expected"),
    [
        ("all-gather", 8, 1, 7 / 8 * 1e-3),
        ("reduce-scatter", 8, 1, 7 / 8 * 1e-3),
        ("all-reduce", 8, 1, 2 * 7 / 8 * 1e-3),
        ("all-gather", 8, 2, 7 / 8 * 10e-3 / 4),
        ("all-gather", 2, 2, 1 / 2 * 10e-3),
        ("all-to-all", 8, 2, 4 / 8 * 10e-3),
        ("collective-permute", 8, 2, 10e-3),
        ("all-gather", 1, 1, 0.0),
    ],
)
def test_time_of_one_collective_of_a_megabyte(op: str, size: int, nodes: int, expected: float) -> None:
    assert collective_seconds(op, 1e6, size, nodes, GPU) == pytest.approx(expected)


def step_on(gigabits: float, nodes: int = 2) -> Timeline:
    gpus = TARGET.num_devices // nodes
    target = Target(find("h100").with_network(gigabits, gpus), nodes, gpus)
    step = sharded(jax.grad(scanned_loss), (P(None, ALL), P(ALL)), P(None, ALL))
    return target.compile(step, struct((6, 1024, 1024), P(None, ALL)), struct((8192, 1024), P(ALL))).timeline


def test_a_slower_network_never_helps() -> None:
    fast, slow, slowest = step_on(400), step_on(40), step_on(4)
    assert fast.seconds < slow.seconds < slowest.seconds
    assert fast.communication_seconds < slow.communication_seconds < slowest.communication_seconds
    assert fast.flops == slow.flops == 4 * 2 * 6 * 1024 * 1024 * 1024


def test_inside_one_node_the_network_does_not_matter() -> None:
    assert step_on(400, nodes=1) == step_on(4, nodes=1)
