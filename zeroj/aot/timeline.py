"""A model of how a compiled step runs: roofline for compute, links for collectives, PCIe for host transfers.

It simulates the schedule that the compiler chose, on one GPU: a compute stream that takes the instructions in
order, a stream of collectives inside the node, one of collectives across nodes, one copy stream each way, and
one of kernels that the compiler made asynchronous. A
``-start`` begins when the compute stream reaches it and its stream is free; a ``-done`` makes the compute
stream wait. What it does not know: contention of kernels for memory bandwidth, stragglers, the
shape-dependence of matrix kernels, the congestion of the network. Numbers of the hardware, with their
efficiency, are ``hardware.json``; the roofline is Williams, Waterman and Patterson 2009, the cost of
collectives alpha-beta with the ring bounds (Thakur, Rabenseifner and Gropp 2005).
"""

from __future__ import annotations

import collections
import dataclasses

from zeroj.aot import costs, loops, traffic
from zeroj.aot.hardware import Gpu
from zeroj.aot.hlo import Computation, Instruction, Module
from zeroj.aot.traffic import Cluster

_RATE_OF = {"bf16": 1.0, "f16": 1.0, "f32": 0.5, "s8": 2.0, "u8": 2.0, "f64": 1 / 16}
"""Matrix rate relative to bf16 (f32 runs as tf32, JAX's default on GPU); eight-bit floats 2."""

LINKS = ("nvlink", "network")
COPIES = ("h2d", "d2h")
KERNELS = "kernels"


@dataclasses.dataclass(frozen=True)
class Wait:
    """Time that the compute stream waits for a transfer: seconds a step, over all its runs."""

    seconds: float
    stream: str
    name: str
    source: str


@dataclasses.dataclass
class Block:
    """What running a computation takes: seconds in all, busy seconds and exposed seconds by stream, waits."""

    seconds: float = 0.0
    compute: float = 0.0
    flops: float = 0.0
    busy: dict[str, float] = dataclasses.field(default_factory=lambda: collections.defaultdict(float))
    exposed: dict[str, float] = dataclasses.field(default_factory=lambda: collections.defaultdict(float))
    waits: list[Wait] = dataclasses.field(default_factory=list)

    def add(self, other: Block, times: int) -> None:
        """Adds another block's contents, run a number of times, without its seconds."""
        self.compute += other.compute * times
        self.flops += other.flops * times
        for mine, theirs in ((self.busy, other.busy), (self.exposed, other.exposed)):
            for stream, seconds in theirs.items():
                mine[stream] += seconds * times
        self.waits.extend(dataclasses.replace(w, seconds=w.seconds * times) for w in other.waits)


@dataclasses.dataclass(frozen=True)
class Timeline:
    """The predicted step, per GPU. All numbers are of a model (see the module), none is measured.

    ``seconds`` is the step; ``compute_seconds`` the kernels; ``communication_seconds`` the collectives, were
    nothing hidden, and ``exposed_seconds`` the part of them that the kernels wait for; ``copy_seconds`` and
    ``copy_exposed_seconds`` the same for host transfers; ``flops`` the operations of matrix products,
    recomputed ones included; ``waits`` all waits, the longest first; ``notes`` what the model could not see.
    """

    seconds: float
    compute_seconds: float
    communication_seconds: float
    exposed_seconds: float
    copy_seconds: float
    copy_exposed_seconds: float
    flops: float
    waits: list[Wait]
    notes: list[str]

    @property
    def hidden_fraction(self) -> float:
        """Part of the communication time that runs beside compute: 1 where there is none or all is hidden."""
        total = self.communication_seconds
        return 1.0 - self.exposed_seconds / total if total else 1.0


def simulate(module: Module, cluster: Cluster, gpu: Gpu) -> Timeline:
    """Predicts the run of a compiled step.

    Args:
      module: the program, read.
      cluster: number of GPUs, and of GPUs a node.
      gpu: rates of the hardware.
    """
    run = _Simulator(module, cluster, gpu)
    block = run.computation(module.entry)
    return Timeline(
        block.seconds,
        block.compute,
        sum(block.busy[s] for s in LINKS),
        sum(block.exposed[s] for s in LINKS),
        sum(block.busy[s] for s in COPIES),
        sum(block.exposed[s] for s in COPIES),
        block.flops,
        sorted(block.waits, key=lambda w: -w.seconds),
        sorted(run.notes),
    )


def collective_seconds(op: str, payload: float, size: int, nodes: int, gpu: Gpu) -> float:
    """Returns the time of one collective.

    Args:
      op: "all-gather", "reduce-scatter", "all-reduce", "all-to-all", or another (a permute).
      payload: bytes of the whole (see :class:`zeroj.aot.traffic.Collective`).
      size: devices of a group.
      nodes: nodes that a group spans.
      gpu: rates of the hardware.

    A ring over m nodes with k GPUs each uses the k network adapters of a node side by side: its time is the
    larger of wire bytes / nvlink and wire bytes / (k x network). An all-to-all sends (n-k)/n of the payload
    of every GPU through its own adapter.
    """
    if size == 1:
        return 0.0
    if nodes == 1:
        latency = gpu.nvlink_latency
        inside, across = (size - 1) / size * payload, 0.0
    else:
        latency = gpu.network_latency
        k = max(1, size // nodes)
        inside, across = (size - 1) / size * payload, (size - 1) / size * payload / k
        if "all-to-all" in op:
            inside, across = (k - 1) / size * payload, (size - k) / size * payload
        elif op in ("collective-permute", "send", "collective-broadcast"):
            inside, across = 0.0, payload
        elif k == 1:
            inside = 0.0
    factor = 2.0 if op == "all-reduce" else 1.0
    return latency + factor * max(inside / gpu.nvlink.usable, across / gpu.network.usable)


class _Simulator:
    """Simulates computations one by one; a loop's body once, times its trip count."""

    def __init__(self, module: Module, cluster: Cluster, gpu: Gpu):
        self.module, self.cluster, self.gpu = module, cluster, gpu
        self.notes: set[str] = set()
        self._blocks: dict[str, Block] = {}

    def computation(self, computation: Computation) -> Block:
        """Simulates a computation that begins with idle streams."""
        if computation.name not in self._blocks:
            streams = _Streams(Block(), dict.fromkeys((*LINKS, *COPIES, KERNELS), 0.0))
            for instruction in computation.instructions.values():
                self._run(computation, instruction, streams)
            for name in list(streams.pending):
                streams.wait(name, name, "end of the computation")
            self._blocks[computation.name] = streams.block
        return self._blocks[computation.name]

    def _run(self, computation: Computation, instruction: Instruction, streams: _Streams) -> None:
        op = instruction.op
        if op in ("while", "call", "conditional"):
            self._nested(computation, instruction, streams)
        elif op.endswith(("-done", "-update")):
            for name in instruction.operands:
                if op.endswith("-update"):
                    streams.rename(name, instruction.name)
                else:
                    streams.wait(name, instruction.name, self.module.source(instruction))
        elif op not in costs.FREE:
            self._one(computation, instruction, streams)

    def _one(self, computation: Computation, instruction: Instruction, streams: _Streams) -> None:
        """A collective, a host transfer or a kernel."""
        source = self.module.source(instruction)
        carried = list(traffic.carried(self.module, computation, instruction))
        moved = costs.traffic(self.module, computation, instruction)
        if carried:
            for inner_computation, inner in carried:
                what = traffic.describe(self.module, inner_computation, inner, self.cluster)
                seconds = collective_seconds(what[0], what[2], what[4], what[5], self.gpu)
                streams.start(instruction.name, "network" if what[5] > 1 else "nvlink", seconds)
        elif moved.host_read or moved.host_written:
            for stream, count in (("h2d", moved.host_read), ("d2h", moved.host_written)):
                if count:
                    streams.start(instruction.name, stream, count / self.gpu.pcie.usable)
        else:
            seconds, flops = self._kernel(computation, instruction, moved.device)
            streams.compute(instruction, seconds, flops)
            return
        if not instruction.op.endswith("-start"):
            streams.wait(instruction.name, instruction.name, source)

    def _kernel(self, computation: Computation, instruction: Instruction, moved: int) -> tuple[float, float]:
        """Seconds (operations or bytes, whichever take longer, and the launch) and operations of a kernel."""
        unseen = costs.unseen(instruction)
        if unseen:
            self.notes.add(f"operations of {unseen} are not counted, only its bytes")
        counted = costs.flops(self.module, computation, instruction)
        rate = self.gpu.flops_bf16.usable
        work = sum(
            n / (rate * _RATE_OF.get(t, 2.0 if t.startswith("f8") else 0.5)) for t, n in counted.items()
        )
        seconds = max(work, moved / self.gpu.hbm.usable) + self.gpu.launch_latency
        return seconds, float(sum(counted.values()))

    def _nested(self, computation: Computation, instruction: Instruction, streams: _Streams) -> None:
        if instruction.op == "while":
            body = instruction.attribute(r"body=%?([\w.\-]+)") or ""
            times = loops.trip_count(self.module, computation, instruction)
            if times is None:
                where = self.module.source(instruction)
                self.notes.add(f"a loop's count depends on data, its body is counted once: {where}")
            streams.nested(self.computation(self.module.computations[body]), 1 if times is None else times)
            return
        blocks = [self.computation(self.module.computations[name]) for name in instruction.called]
        if instruction.op == "conditional":
            blocks = [max(blocks, key=lambda b: b.seconds)]
        for block in blocks:
            streams.nested(block, 1)


class _Streams:
    """The clock of one computation: the compute stream's time, the other streams, what is in flight."""

    def __init__(self, block: Block, free: dict[str, float]):
        self.block, self.free = block, free
        self.pending: dict[str, list[tuple[str, float]]] = {}

    def compute(self, instruction: Instruction, seconds: float, flops: float) -> None:
        self.block.compute += seconds
        self.block.flops += flops
        if instruction.op.endswith("-start"):
            self.start(instruction.name, KERNELS, seconds)
        else:
            self.block.seconds += seconds

    def start(self, name: str, stream: str, seconds: float) -> None:
        end = max(self.block.seconds, self.free[stream]) + seconds
        self.free[stream] = end
        self.block.busy[stream] += seconds
        self.pending.setdefault(name, []).append((stream, end))

    def rename(self, name: str, new: str) -> None:
        if name in self.pending:
            self.pending[new] = self.pending.pop(name)

    def wait(self, start: str, name: str, source: str) -> None:
        for stream, end in self.pending.pop(start, []):
            self._expose(end - self.block.seconds, stream, name, source)

    def _expose(self, seconds: float, stream: str, name: str, source: str) -> None:
        if seconds > 0:
            self.block.seconds += seconds
            self.block.exposed[stream] += seconds
            if stream != KERNELS:
                self.block.waits.append(Wait(seconds, stream, name, source))

    def nested(self, inner: Block, times: int) -> None:
        """Runs a loop or a call, which first waits for what is in flight on the streams that it uses."""
        for stream, busy in inner.busy.items():
            if busy:
                lag = self.free[stream] - self.block.seconds
                self._expose(lag, stream, "before a loop", "in flight before a loop")
        self.block.seconds += inner.seconds * times
        self.block.add(inner, times)
        for stream, busy in inner.busy.items():
            if busy:
                self.free[stream] = self.block.seconds
