"""What offload promises, read from XLA:GPU's own program for 8 H100s: bytes, crossings, directions.

benchmarks/offload.py holds the large cases; these are the same claims at a size that compiles in seconds.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import sys
from collections import defaultdict
from typing import Any

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "benchmarks"))

import clusters
import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

import zeroj as zj
from zeroj.optimizer.stream import DEFAULT_BUFFERS

pytestmark = pytest.mark.slow

CPU = {"device": "cpu"}
SMALL = clusters.Shape(layers=6, width=512, vocab=0, sequence=128)
#: Elements of a device's shard in a piece: the four stacks are cut into 2 or 3 pieces each.
GROUP = 4 * 512 * 512 * 2 // 8


@functools.cache
def compiled(
    *offloaded: str, stage: int = 3, accumulation: int = 1, scan: bool = True, **more: Any
) -> clusters.Compiled:
    sections: dict[str, Any] = {name: CPU for name in offloaded}
    shape = dataclasses.replace(SMALL, scan=scan)
    return clusters.compile_zeroj(
        shape, stage, nodes=1, accumulation=accumulation, sub_group_size=GROUP, **sections, **more
    )


def crossings(case: clusters.Compiled) -> dict[str, int]:
    found: dict[str, int] = defaultdict(int)
    for copy in case.report.copies:
        found[copy.direction] += copy.nbytes * copy.times
    return found


def on_host(case: clusters.Compiled, *parts: str) -> int:
    """Bytes of these parts in host memory, per device."""
    return sum(case.plan.memory().host.get(part, 0) for part in parts) // 8


def hidden(case: clusters.Compiled) -> float:
    line = case.report.timeline
    return 1 - line.copy_exposed_seconds / line.copy_seconds


@pytest.mark.parametrize("params", [(), ("offload_param",)], ids=["state", "params"])
def test_without_clipping_stacks_are_updated_in_the_backward_loop(params: tuple[str, ...]) -> None:
    """A stack crosses once and one layer more; no gradient of a whole stack is left, and the copies hide."""
    case = compiled("offload_optimizer", *params, clipped=False, profile="overlap")
    state, held = on_host(case, "master", "opt_state"), on_host(case, "params")
    again = (state + held) // SMALL.layers
    assert crossings(case) == {"h2d": state + 2 * held + again, "d2h": state + held + again}
    assert all(copy.asynchronous for copy in case.report.copies)
    clipped = compiled("offload_optimizer", *params, profile="overlap")
    assert hidden(case) > hidden(clipped)
    in_flight = DEFAULT_BUFFERS * GROUP * (12 + 2 * bool(params))
    assert case.report.device.temporary <= clipped.report.device.temporary + in_flight


@pytest.mark.parametrize("params", [(), ("offload_param",)], ids=["state", "params"])
def test_a_rotated_step_hides_the_copies_of_a_clipped_one(params: tuple[str, ...]) -> None:
    """In the forward loop a stack crosses once and one layer more; its params are made there, and not fetched."""
    case = compiled("offload_optimizer", *params, rotate=True, profile="overlap")
    state, held, waiting = (
        on_host(case, *parts) for parts in (("master", "opt_state"), ("params",), ("grads",))
    )
    read, written = state + waiting, state + held
    assert crossings(case) == {
        "h2d": read + held + (read + held) // SMALL.layers,  # held: for the backward pass
        "d2h": written + written // SMALL.layers + waiting,
    }
    assert all(copy.asynchronous for copy in case.report.copies)
    clipped = compiled("offload_optimizer", *params, profile="overlap")
    assert hidden(case) > hidden(clipped)
    layers = 2 * (read + written) // SMALL.layers  # what comes and what goes, of two layers
    pending = 0 if params else 2 * SMALL.count // 8  # the gradients of the step before, until they are used
    allowed = clipped.report.device.temporary + layers + pending
    assert case.report.device.temporary <= allowed


@pytest.mark.parametrize("stage", [1, 3])
def test_with_the_optimizer_offloaded_the_device_holds_the_params(stage: int) -> None:
    case = compiled("offload_optimizer", stage=stage)
    memory = case.plan.memory()
    assert case.report.device.arguments == memory.resident + case.batch_bytes + 32
    whole = 2 * SMALL.count  # bytes of bf16
    norms = 2 * SMALL.layers * SMALL.width
    assert memory.resident <= (whole / 8 if stage == 3 else whole) + 14 * norms + 64
    assert case.report.host.arguments == on_host(case, "master", "opt_state")


def test_with_params_offloaded_too_the_device_holds_small_leaves_alone() -> None:
    case = compiled("offload_optimizer", "offload_param")
    norms = 2 * SMALL.layers * SMALL.width
    assert case.plan.memory().resident <= 14 * norms + 64
    assert case.report.device.arguments == case.plan.memory().resident + case.batch_bytes + 32


@pytest.mark.parametrize("offloaded", [("offload_optimizer",), ("offload_optimizer", "offload_param")])
def test_every_leaf_crosses_once_each_way_and_params_once_for_each_gather(offloaded: tuple[str, ...]) -> None:
    case = compiled(*offloaded)
    moved = crossings(case)
    state, params = on_host(case, "master", "opt_state"), on_host(case, "params")
    waiting = on_host(case, "grads")
    # params for the forward and for the backward pass; gradients for the update: their norm is known when they leave
    assert moved["h2d"] == state + 2 * params + waiting
    assert moved["d2h"] == state + params + waiting


@pytest.mark.parametrize("offloaded", [("offload_optimizer",), ("offload_optimizer", "offload_param")])
def test_host_memory_is_updated_in_place_by_asynchronous_copies(offloaded: tuple[str, ...]) -> None:
    case = compiled(*offloaded)
    report = case.report
    assert report.host.temporary == on_host(case, "grads")  # what waits for the update, and no copy
    assert report.host.aliased == report.host.outputs == report.host.arguments
    assert all(copy.asynchronous for copy in report.copies)
    assert {copy.direction for copy in report.copies} == {"h2d", "d2h"}


def test_the_update_needs_no_more_than_the_pieces_in_flight() -> None:
    """Temporaries are at most 2 % above the step without offload, plus three pieces of master and moments."""
    with_offload, without = compiled("offload_optimizer").report.device, compiled().report.device
    assert with_offload.temporary <= 1.02 * without.temporary + 3 * 12 * GROUP


BOTH = ("offload_optimizer", "offload_param")


@pytest.mark.parametrize("scan", [True, pytest.param(False, marks=pytest.mark.full)])
def test_sums_over_micro_batches_are_in_host_memory_and_not_on_the_device(
    scan: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """A layer's sum comes in and goes out in each of four micro-batches; what is carried is changed in place."""
    case, parts = compiled(*BOTH, accumulation=4, scan=scan), 4
    report, moved = case.report, crossings(case)
    state, params, sums = (
        on_host(case, "master", "opt_state"),
        on_host(case, "params"),
        on_host(case, "accumulator"),
    )
    assert sums == 4 * (SMALL.count - 2 * SMALL.layers * SMALL.width) // 8
    assert report.host.temporary <= 1.01 * sums
    assert moved["h2d"] <= state + parts * (2 * params + sums) + 2 * sums  # the norm and the update
    assert moved["d2h"] <= state + params + (parts + 1) * sums  # once as zeros
    assert all(copy.asynchronous for copy in report.copies)
    assert HOST_COMPUTE not in report.hlo and WARNING not in capfd.readouterr().err
    once, without = compiled(*BOTH, scan=scan).report, compiled(accumulation=4, scan=scan).report
    # beside one micro-batch: its slices of the sums, of one layer and of the next
    layer = sums // SMALL.layers
    assert report.device.temporary <= once.device.temporary + 2 * layer
    assert report.device.temporary <= without.device.temporary - 0.9 * sums


#: XLA's mark on what it computes in host memory, and the warning that goes with it.
HOST_COMPUTE, WARNING = '_xla_compute_type="host"', "device compute in host memory space"
TARGET = zj.aot.Target("h100", nodes=1, gpus_per_node=8)


def test_a_naive_program_on_host_arrays_is_seen_to_compute_there(capfd: pytest.CaptureFixture[str]) -> None:
    place = NamedSharding(TARGET.mesh(), PartitionSpec("local"), memory_kind="pinned_host")
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=place)
    report = TARGET.compile(jax.jit(lambda a, b: a * b + a, out_shardings=place), x, x)
    assert HOST_COMPUTE in report.hlo
    assert WARNING in capfd.readouterr().err


@pytest.mark.parametrize(
    ("stage", "offloaded"),
    [
        pytest.param(1, ["offload_optimizer"], marks=pytest.mark.full),
        pytest.param(2, ["offload_optimizer"], marks=pytest.mark.full),
        (3, ["offload_optimizer", "offload_param"]),
    ],
)
def test_nothing_is_computed_in_host_memory(
    stage: int, offloaded: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    """With counters, masks, an average of the params, clipping, a loss scale, an embedding's scatter, activations."""
    shape = clusters.Shape(layers=2, width=128, vocab=512, sequence=32, micro=2)

    def mask(params: Any) -> Any:
        return jax.tree.map(lambda p: p.ndim > 1, params)

    tx = optax.chain(optax.ema(0.9), optax.clip_by_global_norm(1.0), optax.adamw(1e-3, mask=mask))
    mesh, zero = TARGET.mesh(), zj.Zero(stage=stage, sub_group_size=8192, **dict.fromkeys(offloaded, CPU))
    plan = zj.make_plan(shape.params, tx, mesh, zero, precision="fp16", scanned=["blocks"])
    step = zj.make_train_step(
        clusters.make_loss(shape),
        tx,
        plan,
        clip_norm=1.0,
        accumulation_steps=2,
        offload_activations=stage == 3,
    )
    report = TARGET.compile(step, zj.abstract_state(tx, plan), shape.batch(mesh, plan.zero_axes))
    assert {copy.direction for copy in report.copies} == {"h2d", "d2h"}
    assert HOST_COMPUTE not in report.hlo
    assert WARNING not in capfd.readouterr().err


@functools.cache
def with_activations(away: bool) -> zj.aot.Report:
    shape = clusters.Shape(layers=4, width=128, vocab=0, sequence=128, micro=8)
    tx = optax.sgd(0.1)
    mesh = TARGET.mesh()
    plan = zj.make_plan(shape.params, tx, mesh, zj.Zero(stage=3), precision="bf16", scanned=["blocks"])
    step = zj.make_train_step(clusters.make_loss(shape), tx, plan, offload_activations=away)
    return TARGET.compile(step, zj.abstract_state(tx, plan), shape.batch(mesh, plan.zero_axes))


def test_inputs_of_layers_wait_in_host_memory() -> None:
    """They are what the program has there; each goes once and comes back once, and the device has the room."""
    inputs = 4 * 8 * 128 * 128 * 2
    plain, away = with_activations(False), with_activations(True)
    moved: dict[str, int] = defaultdict(int)
    for copy in away.copies:
        moved[copy.direction] += copy.nbytes * copy.times
        assert copy.asynchronous
    assert moved == {"d2h": inputs, "h2d": inputs}
    assert (plain.host.temporary, away.host.temporary) == (0, inputs)
    assert away.device.temporary <= plain.device.temporary - 0.9 * inputs
