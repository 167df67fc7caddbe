"""The compiled step, and what can be read off it: seconds to make, FLOPs, collectives."""

from __future__ import annotations

import dataclasses
import functools
import time
from typing import Any

from zeroj.aot import costs, traffic
from zeroj.aot.hlo import Module, parse


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled step.

    Attributes:
        hlo: XLA's text of it, for one device.
        xla_flops: XLA's own count for one device, elementwise operations included, a loop's body once.
        seconds: what tracing, lowering and compiling took, or loading it from JAX's cache.
        devices: how many devices run it.
        devices_per_node: how many of them share a node.
    """

    hlo: str
    xla_flops: float
    seconds: float
    devices: int
    devices_per_node: int

    @functools.cached_property
    def module(self) -> Module:
        """The text, read."""
        return parse(self.hlo)

    @functools.cached_property
    def matrix_flops(self) -> float:
        """Operations of matrix products and convolutions of one device in one step, loops multiplied out."""
        return float(
            sum(
                times * sum(costs.flops(self.module, computation, instruction).values())
                for computation, instruction, times in traffic.walk(self.module)
            )
        )

    @functools.cached_property
    def collectives(self) -> list[traffic.Collective]:
        """Every collective of one step, in the order of the schedule."""
        return traffic.collectives(self.module, traffic.Cluster(self.devices, self.devices_per_node))


def compile_program(step: Any, *args: Any, devices: int, devices_per_node: int) -> Program:
    """Compiles a jitted function for its arguments; calling it with them later compiles nothing again.

    Args:
        step: what ``jax.jit`` or :func:`zeroj.make_train_step` returned.
        *args: its arguments, or ShapeDtypeStructs of them.
        devices: how many devices run it.
        devices_per_node: how many of them share a node.
    """
    begin = time.perf_counter()
    compiled = step.lower(*args).compile()
    seconds = time.perf_counter() - begin
    costs_found = compiled.cost_analysis() or {}
    first = costs_found[0] if isinstance(costs_found, list) else costs_found
    return Program(
        compiled.as_text() or "", float(first.get("flops", 0.0)), seconds, devices, devices_per_node
    )
