"""Bytes of state per device, host and disk, in closed form from a plan; and the plan as a table."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from jax.sharding import Mesh

from zeroj.plan.feedback import error_bytes
from zeroj.plan.groups import SPAN
from zeroj.plan.rules import NVME, Placement
from zeroj.plan.wire import BLOCK

if TYPE_CHECKING:
    from zeroj.plan.plan import ParamLeaf, Plan

#: How many leaves ``print(plan)`` lists: the largest ones; ``plan_table(plan, limit=None)`` lists all.
TABLE_ROWS = 40


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of a training run's state. Activations and temporaries are not in it: compile the step for those.

    Attributes:
        device: part -> bytes on each device: "params", "master", "opt_state", "grads", "accumulator", and under
            hpZ "secondary": what a step keeps of its gathers, and drops at its end; under LoCo "errors". The last
            two are in ``host`` where the params, or the optimizer's state, are off the device.
        host: part -> bytes in each host's memory: of "grads" and "accumulator" a step has one, see
            :attr:`host_total`; "spill_buffers" at most, while state in files is updated, and
            "param_buffers", while a step reads params from files.
        nvme: part -> bytes on each host's disk.
        whole: part -> bytes the same part would take unsharded on one device.
    """

    device: Mapping[str, int]
    host: Mapping[str, int] = field(default_factory=dict)
    nvme: Mapping[str, int] = field(default_factory=dict)
    whole: Mapping[str, int] = field(default_factory=dict)

    @property
    def device_total(self) -> int:
        """All bytes of state on one device."""
        return sum(self.device.values())

    @property
    def host_total(self) -> int:
        """Bytes in each host's memory at most: gradients of one micro-batch, or the sums of several."""
        waiting = [self.host.get(part, 0) for part in ("grads", "accumulator")]
        return sum(self.host.values()) - min(waiting)

    @property
    def resident(self) -> int:
        """Bytes on one device between steps: params, master, optimizer state, LoCo's errors; no gradients."""
        return sum(self.device.get(part, 0) for part in ("params", "master", "opt_state", "errors"))

    def __str__(self) -> str:
        rows = [f"{'part':<12} {'bytes/device':>16} {'unsharded':>16}"]
        for part, count in self.device.items():
            rows.append(f"{part:<12} {show_bytes(count):>16} {show_bytes(self.whole.get(part, 0)):>16}")
        rows.append(
            f"{'total':<12} {show_bytes(self.device_total):>16} {show_bytes(sum(self.whole.values())):>16}"
        )
        for where, parts in (("host", self.host), ("nvme", self.nvme)):
            rows += [f"{part:<12} {show_bytes(count):>16} on each {where}" for part, count in parts.items()]
        return "\n".join(rows)


def memory_report(plan: Plan) -> MemoryReport:
    """The exact bytes of state under ``plan``, from shapes alone."""
    live = [leaf for leaf in plan.leaves if leaf.trainable]
    accumulates = plan.stage.accumulator
    policy = plan.precision
    parts: dict[str, list[tuple[Placement, np.dtype]]] = {
        "params": [(plan.stored_placement(leaf), plan.stored_dtype(leaf)) for leaf in plan.leaves],
        "master": [(plan.master_placement(leaf), policy.master(leaf.dtype)) for leaf in live]
        if plan.has_master
        else [],
        "opt_state": [(leaf.placement, leaf.dtype) for leaf in plan.state_leaves],
        "grads": [_gradient(plan, leaf) for leaf in live],
        "accumulator": [
            (
                (leaf.placement if accumulates else leaf.placement.whole()).at(plan.accumulator_memory(leaf)),
                policy.accumulator(leaf.dtype),
            )
            for leaf in live
        ],
    }
    shards = {
        part: sum(shard_bytes(plan, p, d) for p, d in rows if not p.memory) for part, rows in parts.items()
    }
    many = devices_per_host(plan.mesh)
    held = {
        part: sum(shard_bytes(plan, p, d) for p, d in rows if p.memory not in ("", NVME)) * many
        for part, rows in parts.items()
    }
    files = {
        part: sum(file_bytes(plan, p, d) for p, d in rows if p.memory == NVME) for part, rows in parts.items()
    }
    if plan.spills:
        from zeroj.plan import cuts  # which counts with the functions below

        held_paths = cuts.held_params(plan)
        stays = [x for x in plan.leaves if x.path in held_paths]
        kept = sum(file_bytes(plan, plan.param_placement(x), plan.param_dtype(x)) for x in stays)
        files["params"] -= kept
        held["params"] += kept
        buffers = (plan.spill or plan.spill_params).buffer_count  # type: ignore[union-attr]
        held["spill_buffers"] = buffers * cuts.update_buffer(plan)
        held["param_buffers"] = sum(cuts.param_window(plan))
    errors, errors_away = error_bytes(plan)
    shards |= {"errors": errors} if errors else {}
    held["errors"] = errors_away * many
    host = {part: count for part, count in held.items() if count}
    nvme = {part: count for part, count in files.items() if count}
    whole = {part: sum(math.prod(p.shape) * d.itemsize for p, d in rows) for part, rows in parts.items()}
    if any(leaf.placement.wire.kept for leaf in plan.leaves):
        near = [(leaf.placement.wire.near_memory, secondary_bytes(plan, leaf)) for leaf in plan.leaves]
        shards["secondary"] = sum(size for away, size in near if not away)
        host |= {"secondary": size * many} if (size := sum(size for away, size in near if away)) else {}
    return MemoryReport(device=shards, host=host, nvme=nvme, whole=whole)


def _gradient(plan: Plan, leaf: ParamLeaf) -> tuple[Placement, np.dtype]:
    """A gradient at the end of the backward pass: in host memory it waits in the dtype in which it arose."""
    placement, kind = plan.grad_placement(leaf), plan.gradient_memory(leaf)
    if kind:
        return placement.at(kind), plan.precision.compute(leaf.dtype)
    return placement, plan.precision.gradient(leaf.dtype)


def devices_per_host(mesh: Any) -> int:
    """Devices of the mesh that share a host: of a mesh without devices, those along all axes but "node"."""
    if isinstance(mesh, Mesh):
        return max(Counter(device.process_index for device in mesh.devices.flat).values())
    return math.prod(size for axis, size in mesh.shape.items() if axis != "node")


def file_bytes(plan: Plan, placement: Placement, dtype: np.dtype) -> int:
    """Bytes of one leaf in files of one host, at most: its devices' distinct shards."""
    shard = shard_bytes(plan, placement, dtype)
    shards = math.prod(placement.padded) * np.dtype(dtype).itemsize // max(shard, 1)
    return shard * min(shards, devices_per_host(plan.mesh))


def shard_bytes(plan: Plan, placement: Placement, dtype: np.dtype) -> int:
    """Bytes of one leaf on one device."""
    parts = math.prod(plan.mesh.shape[axis] for axis in placement.axes)
    for axes in placement.model:
        parts *= math.prod(plan.mesh.shape[axis] for axis in axes or ())
    return math.prod(placement.padded) * np.dtype(dtype).itemsize // parts


def secondary_bytes(plan: Plan, leaf: ParamLeaf) -> int:
    """Bytes per device of what a step keeps of a leaf's gather: hpZ's shard, or the whole leaf."""
    wire, dtype = leaf.placement.wire, plan.precision.compute(leaf.dtype)
    if not wire.kept:
        return 0
    nodes = math.prod(plan.mesh.shape[axis] for axis in wire.kept)
    if wire.weights is None:
        return nodes * shard_bytes(plan, leaf.placement, dtype)
    return nodes * wire.weights.packed_bytes(shard_bytes(plan, leaf.placement, np.dtype(np.int8)))


def plan_table(plan: Plan, limit: int | None = TABLE_ROWS) -> str:
    """The plan as text: for each leaf shape, dtype, where it lives, bytes per device, and why it is whole."""
    stage, memory = plan.stage, memory_report(plan)
    where = lambda sharded: "sharded" if sharded else "whole"  # noqa: E731
    axes = ", ".join(f"{axis}={plan.mesh.shape[axis]}" for axis in plan.mesh.axis_names)
    head = [
        f"ZeRO stage {plan.zero.stage} on mesh ({axes}), N = {plan.degree} over {'/'.join(plan.zero_axes)}, "
        f"{plan.precision.name}",
        f"params {where(stage.params)}, gradients {where(stage.grads)}, optimizer state "
        f"{where(stage.opt_state)}; leaves of at most {plan.threshold} elements stay whole",
        *_wire_lines(plan),
    ]
    order = sorted(plan.leaves, key=lambda leaf: -math.prod(leaf.shape))
    shown = order if limit is None else order[:limit]
    rows = [("leaf", "shape", "dtype", "shard", "bytes/device", "note")]
    for leaf in shown:
        size = shard_bytes(plan, plan.stored_placement(leaf), plan.stored_dtype(leaf))
        spec = str(leaf.placement.spec).removeprefix("PartitionSpec") if leaf.placement.sharded else "whole"
        frozen = "frozen, stored as int8" if leaf.packed else "frozen"
        notes = (leaf.placement.note, leaf.placement.wire.note, "" if leaf.trainable else frozen)
        note = "; ".join(filter(None, notes))
        rows.append((leaf.path, str(leaf.shape), str(leaf.dtype), spec, show_bytes(size), note))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    lines = ["  ".join([*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[-1]]) for row in rows]
    rest = order[len(shown) :]
    if rest:
        size = sum(shard_bytes(plan, plan.stored_placement(x), plan.stored_dtype(x)) for x in rest)
        lines.append(f"... and {len(rest)} smaller leaves, {show_bytes(size)} per device")
    return "\n".join([*head, "", *lines, "", str(memory), *_whole_note(plan)])


def _wire_lines(plan: Plan) -> list[str]:
    """What ZeRO++ and MiCS change of how leaves travel, and the rule for those that they leave alone."""
    zero, lines = plan.zero, []
    wires = [leaf.placement.wire for leaf in plan.leaves if leaf.placement.sharded]
    kept = next((wire.kept for wire in wires if wire.kept), ())
    if kept:
        near = "/".join(axis for axis in plan.zero_axes if axis not in kept)
        away = any(wire.near_memory for wire in wires)
        whole = "and kept whole to its end, as at stage 2 with overlap_comm"
        later = f"then over {near} alone" if near else whole
        lines.append(
            f"{'hpZ: ' if near else ''}gathered over {'/'.join(kept)} once a step, {later}"
            + (", from host memory" if away else "")
        )
    if zero.zero_quantized_weights or zero.zero_quantized_gradients:
        gathered = {str(wire.weights) for wire in wires if wire.weights}
        reduced = {", ".join(f"{fmt} over {axis}" for axis, fmt in wire.hops) for wire in wires if wire.hops}
        quantised = [wire for wire in wires if wire.weights or wire.hops]
        lines.append(
            f"quantised in blocks of {BLOCK}: gathers {'/'.join(sorted(gathered)) or 'none'}, gradients "
            f"{'; '.join(sorted(reduced)) or 'none'}; {len(quantised)} of {len(wires)} sharded leaves "
            f"(those with two dims and a shard of at least {BLOCK} elements)"
        )
    if plan.replica_axes:
        group = math.prod(plan.mesh.shape[a] for a in plan.zero_axes if a not in plan.replica_axes)
        lines.append(
            f"MiCS: groups of {group} devices hold the state; {plan.degree // group} groups are alike"
        )
    if zero.mics_hierarchical_params_gather:
        lines.append(
            f"MiCS: gathered over the {plan.mesh.shape[SPAN]} nodes of a group first, then within each"
            if SPAN in plan.zero_axes
            else "MiCS: every group is within one node, so mics_hierarchical_params_gather changes nothing"
        )
    return lines


def _whole_note(plan: Plan) -> list[str]:
    """What stayed whole at a sharded stage, and a warning when it costs."""
    degree = plan.degree // math.prod(plan.mesh.shape[axis] for axis in plan.replica_axes)
    if not plan.stage.opt_state or degree == 1:
        return []
    whole = [leaf for leaf in plan.leaves if not leaf.placement.sharded]
    count = sum(math.prod(leaf.shape) for leaf in whole)
    total = sum(math.prod(leaf.shape) for leaf in plan.leaves)
    if not count:
        return []
    share = count * degree / max(total, 1)
    text = f"{len(whole)} leaves ({count} elements) stay whole: {share:.1%} of total / N"
    return [
        text
        + (". WARNING: lower stage3_param_persistence_threshold" if share > 0.05 and count > 1024 else "")
    ]


def show_bytes(count: float) -> str:
    """Bytes as people read them, in powers of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    return f"{count:.2f} TiB"
