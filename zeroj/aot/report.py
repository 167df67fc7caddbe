"""What a compile for a cluster tells: bytes, collectives, transfers, time, flags; printed as plain tables."""

from __future__ import annotations

import collections
import dataclasses
import functools
from typing import Any

from zeroj.aot import traffic
from zeroj.aot.compile import Compiled
from zeroj.aot.hardware import Gpu
from zeroj.aot.hlo import Module, parse
from zeroj.aot.text import milliseconds, size, table, yes
from zeroj.aot.timeline import Timeline, simulate
from zeroj.aot.traffic import Cluster, Collective, HostCopy


@dataclasses.dataclass(frozen=True)
class Bytes:
    """Bytes of a program in one memory, per device, as XLA assigned its buffers.

    ``total`` is arguments + outputs - aliased + temporary: donated arguments that became outputs count once.
    """

    arguments: int
    outputs: int
    aliased: int
    temporary: int

    @property
    def total(self) -> int:
        """Bytes needed at the same time."""
        return self.arguments + self.outputs - self.aliased + self.temporary


@dataclasses.dataclass(frozen=True)
class Report:
    """A step compiled for a cluster. ``print(report)`` shows the tables.

    ``device`` and ``host`` are bytes per GPU; ``flags`` are the compiler flags used, ``dropped`` those that
    this version of the compiler does not know; ``hlo`` is the text of the compiled program;
    ``compile_seconds`` is what tracing, lowering and compiling took here.
    """

    device: Bytes
    host: Bytes
    flags: dict[str, Any]
    dropped: dict[str, str]
    hlo: str = dataclasses.field(repr=False)
    cluster: Cluster
    gpu: Gpu = dataclasses.field(repr=False)
    compile_seconds: float

    @staticmethod
    def of(compiled: Compiled, cluster: Cluster, gpu: Gpu) -> Report:
        """Makes the report of a compiled step."""
        m = compiled.memory
        device = Bytes(
            m.argument_size_in_bytes, m.output_size_in_bytes, m.alias_size_in_bytes, m.temp_size_in_bytes
        )
        host = Bytes(
            m.host_argument_size_in_bytes,
            m.host_output_size_in_bytes,
            m.host_alias_size_in_bytes,
            m.host_temp_size_in_bytes,
        )
        return Report(
            device, host, compiled.flags, compiled.dropped, compiled.hlo, cluster, gpu, compiled.seconds
        )

    @functools.cached_property
    def module(self) -> Module:
        """The program, read."""
        return parse(self.hlo)

    @functools.cached_property
    def collectives(self) -> list[Collective]:
        """Every collective of the program with bytes, group, reach and times per step."""
        return traffic.collectives(self.module, self.cluster)

    @functools.cached_property
    def copies(self) -> list[HostCopy]:
        """Every transfer between device and host."""
        return traffic.host_copies(self.module)

    @functools.cached_property
    def timeline(self) -> Timeline:
        """The predicted run of the step: a model, not a measurement."""
        return simulate(self.module, self.cluster, self.gpu)

    @property
    def step_seconds(self) -> float:
        """Predicted seconds of a step."""
        return self.timeline.seconds

    @property
    def hidden_fraction(self) -> float:
        """Predicted part of the communication that runs beside compute."""
        return self.timeline.hidden_fraction

    @property
    def fits(self) -> bool:
        """Whether the device bytes are within the GPU's memory."""
        return self.device.total <= self.gpu.memory_bytes

    def tokens_per_second(self, tokens: int) -> float:
        """Predicted tokens per second of the cluster, for a global batch of a number of tokens."""
        return tokens / self.step_seconds

    def model_flop_utilisation(self, model_flops: float) -> float:
        """Predicted part of the cluster's dense bf16 peak that the model's own operations make up.

        Args:
          model_flops: operations that the model needs for one global batch, without recomputation: 6 x params
            x tokens for a transformer whose attention is small beside its matrices (Kaplan et al. 2020, 2.1).
        """
        return model_flops / (self.step_seconds * self.cluster.num_devices * self.gpu.flops_bf16.value)

    def wire_bytes(self, op: str | None = None, reach: str | None = None) -> float:
        """Returns the bytes that one device sends in a step.

        Args:
          op: only this op ("all-gather", ...); left out: all.
          reach: only "intra" or "inter"; left out: both.
        """
        rows = [c for c in self.collectives if op in (None, c.op) and reach in (None, c.reach)]
        return sum(c.wire_per_step for c in rows)

    def as_data(self) -> dict[str, Any]:
        """Returns the report, without the program's text, as data that JSON can hold."""
        return {
            "device": {**dataclasses.asdict(self.device), "total": self.device.total, "fits": self.fits},
            "host": {**dataclasses.asdict(self.host), "total": self.host.total},
            "collectives": [{**dataclasses.asdict(c), "reach": c.reach} for c in self.collectives],
            "copies": [dataclasses.asdict(c) for c in self.copies],
            "timeline": {**dataclasses.asdict(self.timeline), "hidden_fraction": self.hidden_fraction},
            "flags": self.flags,
            "dropped": self.dropped,
            "cluster": dataclasses.asdict(self.cluster),
            "gpu": self.gpu.description,
            "compile_seconds": self.compile_seconds,
        }

    def __str__(self) -> str:
        c = self.cluster
        parts = [
            f"{c.num_devices} x {self.gpu.description}, {c.gpus_per_node} a node;"
            f" compiled in {self.compile_seconds:.1f} s",
            self._memory_table(),
            self._collective_table(),
            self._copy_table(),
            self._time_table(),
            "flags: " + ", ".join(f"{k}={v}" for k, v in self.flags.items()),
        ]
        if self.dropped:
            parts.append("flags dropped: " + ", ".join(f"{k} ({why})" for k, why in self.dropped.items()))
        return "\n\n".join(p for p in parts if p)

    def _memory_table(self) -> str:
        rows = [
            [name, *map(size, (b.arguments, b.outputs, b.aliased, b.temporary, b.total))]
            for name, b in (("device", self.device), ("host", self.host))
        ]
        heads = ["bytes per GPU", "arguments", "outputs", "aliased", "temporary", "total"]
        have = size(self.gpu.memory_bytes)
        verdict = f"fits the GPU's {have}" if self.fits else f"DOES NOT FIT the GPU's {have}"
        return f"{table(heads, rows)}\n{verdict}"

    def _collective_table(self) -> str:
        groups: dict[tuple[Any, ...], list[float]] = collections.defaultdict(lambda: [0, 0, 0.0])
        for c in self.collectives:
            entry = groups[c.op, c.dtype, c.payload, c.group_size, c.reach, c.asynchronous]
            entry[0] += 1
            entry[1] += c.times
            entry[2] += c.wire_per_step
        rows = [
            [op, dtype, size(payload), str(n), reach, yes(async_), str(sites), str(times), size(wire)]
            for (op, dtype, payload, n, reach, async_), (sites, times, wire) in groups.items()
        ]
        if not rows:
            return "no collectives"
        heads = [
            "collective",
            "dtype",
            "payload",
            "group",
            "reach",
            "async",
            "sites",
            "times",
            "bytes a step",
        ]
        return table(heads, rows)

    def _copy_table(self) -> str:
        if not self.copies:
            return ""
        sums: dict[tuple[str, bool], list[int]] = collections.defaultdict(lambda: [0, 0])
        for copy in self.copies:
            entry = sums[copy.direction, copy.asynchronous]
            entry[0] += copy.times
            entry[1] += copy.times * copy.nbytes
        rows = [[way, yes(async_), str(times), size(moved)] for (way, async_), (times, moved) in sums.items()]
        return table(["host transfer", "async", "times", "bytes a step"], rows)

    def _time_table(self) -> str:
        t = self.timeline
        rows = [
            ["step", milliseconds(t.seconds), ""],
            ["kernels", milliseconds(t.compute_seconds), ""],
            ["collectives", milliseconds(t.communication_seconds), milliseconds(t.exposed_seconds)],
            ["host transfers", milliseconds(t.copy_seconds), milliseconds(t.copy_exposed_seconds)],
        ]
        lines = [table(["predicted by a model, not measured", "in all", "exposed"], rows)]
        lines.append(f"{self.hidden_fraction:.0%} of the communication hidden; longest waits:")
        lines += [f"  {milliseconds(w.seconds)} {w.stream} {w.name} ({w.source})" for w in t.waits[:5]]
        return "\n".join([*lines, *(f"note: {note}" for note in t.notes)])
