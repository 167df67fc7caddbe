"""What a compiled program moves: its collectives and its transfers between device and host."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Iterator

from zeroj.aot import costs, groups, loops
from zeroj.aot.hlo import Computation, Instruction, Module
from zeroj.aot.shapes import HloError, leaves

_WIRE = {
    "all-gather": 1.0,
    "reduce-scatter": 1.0,
    "all-to-all": 1.0,
    "ragged-all-to-all": 1.0,
    "all-reduce": 2.0,
    "collective-permute": None,
    "collective-broadcast": None,
    "send": None,
}
"""Factor f of the wire formula f (n-1)/n x payload; None: the payload itself crosses the wire once."""

_NOT_COUNTED = {"recv", "partition-id", "replica-id", "collective-permute-done", "recv-done", "send-done"}
_SUSPECT = re.compile(r"all-|reduce-scatter|collective|^send|^recv|ragged")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of the program, and how often it runs in a step.

    Bytes are per device and per run. ``payload`` is the size of the whole: the output of an all-gather, the
    input of the others. ``wire`` is what one device sends (and receives): (n-1)/n x payload for all-gather,
    reduce-scatter and all-to-all, 2 (n-1)/n x payload for all-reduce (the ring bounds: Patarasu and Yuan
    2009, "Bandwidth optimal all-reduce algorithms"), the payload for a permute.
    """

    op: str
    dtype: str
    payload: int
    wire: float
    group_size: int
    nodes: int
    times: int
    asynchronous: bool
    between: int
    name: str
    source: str

    @property
    def reach(self) -> str:
        """ "intra": all groups stay inside a node; "inter": some group crosses nodes."""
        return "inter" if self.nodes > 1 else "intra"

    @property
    def across_nodes(self) -> float:
        """Bytes that one device sends to other nodes in a step, on average over the devices of a node.

        A ring over m nodes with k devices each enters every node once: 1/k of what its devices send. An
        all-to-all sends to the (n-k)/n of its group that are elsewhere.
        """
        if self.nodes == 1:
            return 0.0
        inside = max(1, self.group_size // self.nodes)
        if self.op.endswith("all-to-all"):
            return self.times * self.payload * (self.group_size - inside) / self.group_size
        return self.times * self.wire / inside

    @property
    def wire_per_step(self) -> float:
        """Bytes that one device sends in a step."""
        return self.wire * self.times


@dataclasses.dataclass(frozen=True)
class HostCopy:
    """One transfer between device and host, "h2d" or "d2h"; ``nbytes`` is per device and run."""

    direction: str
    nbytes: int
    times: int
    asynchronous: bool
    name: str
    source: str


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Number of devices of a program and how many of them share a node; devices are numbered node by node."""

    num_devices: int
    gpus_per_node: int


@functools.lru_cache(maxsize=4096)
def _groups(text: str, cluster: Cluster) -> tuple[int, int]:
    rows = groups.parse_groups(text, cluster.num_devices)
    return rows.shape[1], groups.nodes_spanned(rows, cluster.gpus_per_node)


@functools.lru_cache(maxsize=4096)
def _pairs(text: str, cluster: Cluster) -> tuple[int, int]:
    pairs = [(int(a), int(b)) for a, b in re.findall(r"\{(\d+),\s*(\d+)\}", text)]
    crossing = any(a // cluster.gpus_per_node != b // cluster.gpus_per_node for a, b in pairs)
    return cluster.num_devices, 2 if crossing else 1


def base_op(instruction: Instruction) -> str:
    """The opcode without ``-start``."""
    return instruction.op.removesuffix("-start")


def carried(
    module: Module, computation: Computation, instruction: Instruction
) -> Iterator[tuple[Computation, Instruction]]:
    """Yields the collectives that an instruction runs: itself, or those inside an async-start or a fusion."""
    if base_op(instruction) in _WIRE:
        yield computation, instruction
        return
    if instruction.op.endswith(("-done", "-update")) or instruction.op in _NOT_COUNTED:
        return
    if _SUSPECT.search(instruction.op):
        raise HloError(f"collective not understood: {instruction.line[:400]}")
    if base_op(instruction) in ("async", "fusion"):
        for name in instruction.called:
            inner = module.computations[name]
            for each in inner.instructions.values():
                yield from carried(module, inner, each)


def describe(
    module: Module, computation: Computation, instruction: Instruction, cluster: Cluster
) -> tuple[str, str, int, float, int, int]:
    """Returns op, dtype, payload bytes, wire bytes, group size and nodes spanned of one collective."""
    op = base_op(instruction)
    shapes = computation.operand_shapes(instruction)
    arrays = [a for shape in shapes for a in leaves(shape)]
    arrays = arrays[:1] if op == "ragged-all-to-all" else [a for a in arrays if a.dtype != "token"]
    size, nodes = _reach(instruction, op, cluster)
    payload = sum(a.nbytes for a in arrays) * (size if op == "all-gather" else 1)
    factor = _WIRE[op]
    wire = float(payload) if factor is None else factor * payload * (size - 1) / size
    dtype = "+".join(sorted({a.dtype for a in arrays}))
    return op, dtype, payload, wire, size, nodes


def _reach(instruction: Instruction, op: str, cluster: Cluster) -> tuple[int, int]:
    if op in ("collective-permute", "send"):
        pairs = instruction.attribute(r'source_target_pairs="?(\{\{.*?\}\}|\{\})')
        if pairs is None:
            raise HloError(f"no source_target_pairs in: {instruction.line[:400]}")
        return _pairs(pairs, cluster)
    text = groups.group_text(instruction.attributes)
    if text is None:
        raise HloError(f"no replica_groups in: {instruction.line[:400]}")
    has_channel = "channel_id=" in instruction.attributes
    global_ids = "use_global_device_ids=true" in instruction.attributes
    if op in ("all-gather", "all-reduce", "reduce-scatter") and not global_ids:
        # Without global ids the numbers are replicas, of which zeroj's programs have one: with a channel the
        # group is every device, without one each device alone.
        return _groups("{}", cluster) if has_channel else (1, 1)
    return _groups(text, cluster)


def done_of(computation: Computation, start: Instruction) -> Instruction | None:
    """The -done instruction that waits for a -start, through any -update between."""
    for user in computation.users[start.name]:
        if user.op.endswith("-done"):
            return user
        if user.op.endswith("-update"):
            return done_of(computation, user)
    return None


def compute_between(computation: Computation, start: Instruction) -> int:
    """Number of instructions that compute between a -start and its -done."""
    done = done_of(computation, start)
    if done is None:
        return 0
    first, last = computation.positions[start.name] + 1, computation.positions[done.name]
    inside = itertools.islice(computation.instructions.values(), first, last)
    idle = costs.FREE - {"while", "call", "conditional"}
    return sum(i.op not in idle and not i.op.endswith(("-start", "-done")) for i in inside)


def _count(module: Module, computation: Computation, loop: Instruction) -> int:
    count = loops.trip_count(module, computation, loop)
    return 1 if count is None else count


def _length(module: Module, computation: Computation) -> int:
    """Instructions of a computation and of those that it calls."""
    inner = (module.computations[n] for i in computation.instructions.values() for n in i.called)
    return len(computation.instructions) + sum(_length(module, c) for c in inner)


def walk(
    module: Module, computation: Computation | None = None, times: int = 1
) -> Iterator[tuple[Computation, Instruction, int]]:
    """Yields every instruction of the schedule with the number of times that a step runs it.

    Loops multiply by their trip count (1 where it depends on data), calls are entered, and of a conditional
    the branch with the most instructions is.
    """
    computation = computation or module.entry
    for instruction in computation.instructions.values():
        yield computation, instruction, times
        if instruction.op == "while":
            body = instruction.attribute(r"body=%?([\w.\-]+)") or ""
            yield from walk(
                module, module.computations[body], times * _count(module, computation, instruction)
            )
        elif instruction.op in ("call", "conditional"):
            branches = [module.computations[name] for name in instruction.called]
            if instruction.op == "conditional":
                branches = [max(branches, key=lambda c: _length(module, c))]
            for branch in branches:
                yield from walk(module, branch, times)


def collectives(module: Module, cluster: Cluster) -> list[Collective]:
    """Lists every collective of a step, in the order of the schedule."""
    rows = []
    for computation, instruction, times in walk(module):
        for inner_computation, inner in carried(module, computation, instruction):
            asynchronous = instruction.op.endswith("-start")
            between = compute_between(computation, instruction) if asynchronous else 0
            what = describe(module, inner_computation, inner, cluster)
            source = module.source(inner)
            rows.append(Collective(*what, times, asynchronous, between, instruction.name, source))
    return rows


def host_copies(module: Module) -> list[HostCopy]:
    """Lists every transfer between device and host of a step, in the order of the schedule."""
    rows = []
    for computation, instruction, times in walk(module):
        moved = costs.traffic(module, computation, instruction)
        asynchronous = instruction.op.endswith("-start")
        for direction, count in (("h2d", moved.host_read), ("d2h", moved.host_written)):
            if count:
                source = module.source(instruction)
                rows.append(HostCopy(direction, count, times, asynchronous, instruction.name, source))
    return rows
