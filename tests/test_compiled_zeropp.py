"""What ZeRO++ sends, read from XLA:GPU's own program for 8 nodes of 8 H100s."""

from __future__ import annotations

import functools
import pathlib
import sys
from typing import Any

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "benchmarks"))

import clusters

from zeroj.aot.traffic import Collective

pytestmark = pytest.mark.slow  # compiles of ten seconds and more
SHAPE = clusters.Shape(layers=8, width=512, vocab=0, sequence=128)
HPZ = {"zero_hpz_partition_size": 8}
QWZ, QGZ = {"zero_quantized_weights": True}, {"zero_quantized_gradients": True}
FORMS: dict[str, Any] = {"plain": {}, "hpZ": HPZ, "qwZ": QWZ, "all": HPZ | QWZ | QGZ}
FORMS["LoCo"] = FORMS["all"] | {"zeropp_loco_param": {}}
OPTIMIZER, PARAM = {"offload_optimizer": {"device": "cpu"}}, {"offload_param": {"device": "cpu"}}
FORMS["all, optimizer"], FORMS["LoCo, optimizer"] = FORMS["all"] | OPTIMIZER, FORMS["LoCo"] | OPTIMIZER
FORMS |= {f"{form}, params": FORMS[form] | OPTIMIZER | PARAM for form in ("plain", "hpZ", "all")}
WEIGHTS = 2 * 12 * SHAPE.width**2 * SHAPE.layers
"""Bytes of all matrices in bf16."""


@functools.cache
def compiled(form: str) -> clusters.Compiled:
    zero: dict[str, Any] = FORMS[form]
    # The norms' scales stay whole, so that what is gathered is the matrices alone.
    return clusters.compile_zeroj(SHAPE, 3, nodes=8, stage3_param_persistence_threshold=4096, **zero)


def large(form: str, op: str, reach: str | None = None) -> list[Collective]:
    """The collectives that carry matrices, not norms or scalars."""
    rows = [c for c in compiled(form).report.collectives if c.op == op and c.payload > 2**14]
    return [c for c in rows if reach in (None, c.reach)]


def payload(rows: list[Collective]) -> int:
    return sum(c.payload * c.times for c in rows)


def across(form: str) -> float:
    return sum(c.across_nodes for c in compiled(form).report.collectives)


def test_all_three_send_a_quarter_across_nodes() -> None:
    """Scales, padding and what stays whole included; the paper's 0.75 of 3."""
    assert across("plain") == pytest.approx(3 * WEIGHTS * 63 / 64 / 8, rel=0.01)
    assert across("all") <= 0.27 * across("plain")


def test_all_three_send_small_integers_only() -> None:
    rows = [c for c in compiled("all").report.collectives if c.payload > 2**14]
    assert {c.dtype for c in rows} == {"s8"}
    assert {(c.op, c.reach) for c in rows} == {
        (op, reach) for op in ("all-gather", "all-to-all") for reach in ("intra", "inter")
    }
    assert {(c.group_size, c.nodes) for c in rows} == {(8, 1), (8, 8)}


def test_the_gradient_crosses_the_network_as_four_bits() -> None:
    """Half a byte an element and an eighth of the leaf; int8 within the node."""
    scales = 1 + 4 / 256
    assert payload(large("all", "all-to-all", "intra")) == pytest.approx(WEIGHTS / 2 * scales, rel=0.01)
    scales = 1 + 4 / 128
    assert payload(large("all", "all-to-all", "inter")) == pytest.approx(WEIGHTS / 4 / 8 * scales, rel=0.01)


def test_hpz_gathers_across_nodes_once_and_within_the_node_twice() -> None:
    """The forward pass gathers the node's part, an eighth, from the other nodes; the backward pass nothing."""
    assert {(c.group_size, c.nodes) for c in large("hpZ", "all-gather")} == {(8, 8), (8, 1)}
    assert payload(large("hpZ", "all-gather", "inter")) == WEIGHTS // 8
    assert payload(large("hpZ", "all-gather", "intra")) == 2 * WEIGHTS
    backward = [c for c in large("hpZ", "all-gather", "inter") if "transpose" in c.source]
    assert not backward, backward


def test_qwz_halves_the_gathers() -> None:
    plain, quantised = payload(large("plain", "all-gather")), payload(large("qwZ", "all-gather"))
    assert plain == 2 * WEIGHTS
    assert quantised == pytest.approx(plain / 2 * (1 + 4 / 256), rel=1e-3)
    assert {c.dtype for c in large("qwZ", "all-gather")} == {"s8"}


def test_the_second_shard_takes_what_the_plan_says() -> None:
    """2 bytes a param over the devices of a node, seen in the temporaries."""
    extra = compiled("hpZ").report.device.temporary - compiled("plain").report.device.temporary
    planned = compiled("hpZ").plan.memory().device["secondary"]
    assert planned == pytest.approx(2 * SHAPE.count / 8, rel=0.01)
    assert extra == pytest.approx(planned, rel=0.02)


@pytest.mark.parametrize("form", ["hpZ", "all"])
def test_it_keeps_the_lookahead_of_plain_gathers(form: str) -> None:
    """Every gather is asynchronous, as at plain stage 3."""
    assert all(c.asynchronous for c in [*large("plain", "all-gather"), *large(form, "all-gather")])
    assert all(c.asynchronous for c in large(form, "all-to-all"))


@pytest.mark.full
def test_mics_sends_the_part_of_a_node_when_it_gathers_over_nodes_first() -> None:
    """Two groups of two nodes: each device fetches an eighth of the other node's half, not all of it."""
    mics = {"mics_shard_size": 16, "stage3_param_persistence_threshold": 4096}
    flat, first = (
        clusters.compile_zeroj(SHAPE, 3, nodes=4, mics_hierarchical_params_gather=flag, **mics)
        for flag in (False, True)
    )
    rows = [
        [c for c in form.report.collectives if c.op == "all-gather" and c.payload > 2**14]
        for form in (flat, first)
    ]
    assert {(c.group_size, c.nodes) for c in rows[0]} == {(16, 2)}
    assert {(c.group_size, c.nodes) for c in rows[1]} == {(2, 2), (8, 1)}
    assert payload([c for c in rows[1] if c.reach == "inter"]) == 2 * WEIGHTS // 8
    assert payload([c for c in rows[1] if c.reach == "intra"]) == payload(rows[0]) == 2 * WEIGHTS
    across = [sum(c.across_nodes for c in found) for found in rows]
    assert across[1] == pytest.approx(2 * WEIGHTS / 8 / 2, rel=1e-3) and across[1] < across[0], across


@pytest.mark.full
def test_loco_sends_no_more_and_keeps_its_errors_in_place() -> None:
    """The buffers are arguments, updated where they lie: no second copy, and every collective is asynchronous."""
    assert across("LoCo") == across("all")
    assert all(c.asynchronous for c in large("LoCo", "all-to-all"))
    planned = compiled("LoCo").plan.memory().device["errors"]
    assert planned == pytest.approx(WEIGHTS * (1 + 1 / 8), rel=1e-3)
    plain, fed = compiled("all").report.device, compiled("LoCo").report.device
    assert fed.arguments - plain.arguments == pytest.approx(planned, rel=1e-3)
    assert fed.temporary - plain.temporary < planned / SHAPE.layers


def host_copies(form: str) -> dict[str, int]:
    found = dict.fromkeys(("h2d", "d2h"), 0)
    for copy in compiled(form).report.copies:
        found[copy.direction] += copy.nbytes * copy.times
    return found


def test_loco_in_host_memory_takes_none_of_the_device() -> None:
    """Each buffer is read once and written once, layer by layer, in place: the host has no second copy either."""
    plain, fed = compiled("all, optimizer"), compiled("LoCo, optimizer")
    planned = fed.plan.memory().host["errors"] // 8
    assert planned == pytest.approx(WEIGHTS * (1 + 1 / 8), rel=1e-3)
    assert "errors" not in fed.plan.memory().device
    host = fed.report.host
    assert host.arguments - plain.report.host.arguments == pytest.approx(planned, rel=1e-3)
    assert host.aliased == host.arguments == host.outputs and host.temporary == plain.report.host.temporary
    assert fed.report.device.arguments - plain.report.device.arguments <= 64  # the flag beside them
    assert fed.report.device.temporary - plain.report.device.temporary < 2 * planned / SHAPE.layers
    moved, before = host_copies("LoCo, optimizer"), host_copies("all, optimizer")
    assert {d: moved[d] - before[d] for d in moved} == {"h2d": planned, "d2h": planned}
    assert all(copy.asynchronous for copy in fed.report.copies)


@pytest.mark.parametrize("form", ["hpZ", pytest.param("all", marks=pytest.mark.full)])
def test_with_params_in_host_memory_so_is_the_second_shard(form: str) -> None:
    """Written once and read once, layer by layer; of it the device has no more than the layers at hand. Under qwZ int8.

    The backward pass gathers within the node alone, from it: the params themselves cross the link once less.
    """
    plain, found = compiled("plain, params"), compiled(f"{form}, params")
    planned = found.plan.memory().host["secondary"] // 8
    assert planned == pytest.approx(
        2 * SHAPE.count / 8 / (1 if form == "hpZ" else 2 / (1 + 4 / 256)), rel=0.01
    )
    assert found.plan.memory().device["secondary"] <= planned / 100  # the norms' scales
    here, there = (case.report.device.temporary for case in (found, plain))
    assert here - there < 4 * planned / SHAPE.layers
    extra = found.report.host.temporary - plain.report.host.temporary
    waiting = plain.plan.memory().host["grads"] // 8  # gradients take the place of shards that are done with
    assert planned - waiting <= extra <= 1.02 * planned
    moved, before = (host_copies(f"{name}, params") for name in (form, "plain"))
    params = found.plan.memory().host["params"] // 8
    assert moved["d2h"] - before["d2h"] == pytest.approx(planned, rel=0.02)
    assert moved["h2d"] - before["h2d"] == pytest.approx(planned - params, rel=0.02)
    assert all(copy.asynchronous for copy in found.report.copies)
    assert '_xla_compute_type="host"' not in found.report.hlo
    gathers = large(f"{form}, params", "all-gather")
    assert {(c.group_size, c.nodes) for c in gathers} == {(8, 8), (8, 1)}
    assert not [c for c in gathers if c.reach == "inter" and "transpose" in c.source]
