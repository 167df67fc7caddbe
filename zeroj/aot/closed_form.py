"""Bytes, traffic and time of every ZeRO choice from the sizes of a model alone: no tracing, no compiler.

The state follows the table of stages (Rajbhandari et al. 2020, "ZeRO", section 5, with Adam's K = 12 split
into master 4 and moments 8), the traffic the same paper's section 7, ZeRO++ Wang et al. 2023, section 3. P
is the number of parameters, N the number of GPUs, k the GPUs of a node.
"""

from __future__ import annotations

import dataclasses
import math

from zeroj.aot.choices import Batch, Choice, Machine
from zeroj.aot.sizes import Sizes
from zeroj.aot.timeline import collective_seconds

BF16, FP32 = 2, 4
MASTER, MOMENTS = FP32, 2 * FP32
NVME_BUFFERS = 4
"""Leaves of optimizer state that pass through host memory at a time when it lies on disk."""


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What a choice needs: bytes by part per GPU, bytes per node of host and NVMe, traffic, step time.

    ``intra`` and ``inter`` are bytes that one GPU sends in a step to GPUs of its node, and across nodes.
    """

    choice: Choice
    parts: dict[str, int]
    host: int
    nvme: int
    intra: float
    inter: float
    compute_seconds: float
    communication_seconds: float
    update_seconds: float
    seconds: float
    over: dict[str, int]

    @property
    def device(self) -> int:
        """Bytes per GPU."""
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        """Whether nothing is over what there is."""
        return not self.over


def estimate(choice: Choice, sizes: Sizes, batch: Batch, machine: Machine) -> Estimate:
    """Returns what one choice needs for a model, a batch and a machine.

    Example::

      machine = Machine(find("h100"), 1, 8, host_memory=1e12, nvme=0)
      estimate(Choice(2), from_numbers(13e9, 40, 5120), Batch(), machine).device
    """
    parts, host, nvme = _memory(choice, sizes, batch, machine)
    forward, backward, update = _collectives(choice, sizes, batch, machine)
    intra, inter = _sent(forward + backward + update, machine)
    links = [_seconds(c, machine) for c in (forward, backward, update)]
    compute = _compute_seconds(sizes, batch, machine)
    # Layers overlap their neighbours' collectives; the first one's gather and the last one's scatter are
    # exposed.
    fetch, read, store = _transfers(choice, sizes, batch, machine)
    hidden = max(compute / 3, links[0], fetch) + max(compute * 2 / 3, links[1], read, store)
    exposed = (links[0] + links[1]) / sizes.layers
    own = max(update_seconds(choice, sizes, batch, machine)) + links[2]
    over = {
        "GPU": sum(parts.values()) - usable_memory(machine),
        "host": host - int(0.9 * machine.host_memory),
        "NVMe": nvme - int(0.9 * machine.nvme),
    }
    return Estimate(
        choice,
        parts,
        host,
        nvme,
        intra,
        inter,
        compute,
        sum(links),
        own,
        hidden + exposed + own,
        {place: by for place, by in over.items() if by > 0},
    )


def usable_memory(machine: Machine) -> int:
    """Bytes of a GPU that a program may take: the rest goes to CUDA and to fragments."""
    return int(0.92 * machine.gpu.memory_bytes)


def _memory(choice: Choice, sizes: Sizes, batch: Batch, machine: Machine) -> tuple[dict[str, int], int, int]:
    """Bytes by part on a GPU, and bytes per node on host and NVMe."""
    n, k, p = machine.num_gpus, machine.gpus_per_node, sizes.params
    shards = 1 if choice.stage == 0 else n
    # At stage 3 the params are the fp32 master, unless that is offloaded: then the GPU computes with a copy at 16 bits.
    own_master = choice.stage == 3 and choice.optimizer == "none"
    parts = {
        "params": 0 if own_master else _share(BF16 * p, n if choice.stage == 3 else 1),
        "master": _share(MASTER * p, shards),
        "moments": _share(MOMENTS * p, shards),
        "secondary": _share(p, k) if choice.zeropp else 0,  # kept as the int8 that was gathered
        **_temporaries(choice, sizes, batch, n),
    }
    places = {"none": 0, "cpu": 0, "nvme": 0}
    for part, place, share in (
        ("moments", choice.optimizer, choice.ratio),
        ("master", choice.optimizer, choice.ratio),
        ("params", choice.params, 1.0),
        ("secondary", "none" if choice.params == "none" else "cpu", 1.0),
    ):
        away = math.ceil(share * parts[part]) if place != "none" else 0
        places[place] += away
        parts[part] -= away
    places["cpu"] += _waiting(choice, sizes, batch, n)
    # What is not resident streams through the GPU, and what is on disk through the host, a few leaves at a
    # time.
    streamed = places["cpu"] + places["nvme"] > 0
    parts["streamed"] = 2 * _share((MASTER + MOMENTS) * sizes.gathered, n) if streamed else 0
    buffers = NVME_BUFFERS * _share((MASTER + MOMENTS) * sizes.gathered, n) if places["nvme"] else 0
    return parts, (places["cpu"] + buffers) * k, places["nvme"] * k


def _temporaries(choice: Choice, sizes: Sizes, batch: Batch, n: int) -> dict[str, int]:
    """Bytes of gradients, activations and whole params at the moment of a step that holds most.

    Three moments: the loss, when all kept activations and the logits live; the end of the backward pass, when
    the gradients and one layer's activations do; the update. What lives at another moment counts 0.
    """
    p, half = sizes.params, BF16 * sizes.params
    accumulates = batch.accumulation > 1
    away = _waiting(choice, sizes, batch, n)
    accumulator = _share(FP32 * p, n if choice.stage >= 2 else 1) - away if accumulates else 0
    # One micro-batch's gradient is reduced where it is made, at every stage; it stays at 16 bits until the update.
    grads = accumulator if accumulates else _share(half, n if choice.stage > 0 else 1) - away
    kept = sizes.kept(batch.tokens, batch.remat)
    scores = 0 if batch.fused_attention else sizes.scores(batch.micro, batch.sequence)
    embedding = BF16 * sizes.embedding if choice.stage == 3 else 0
    # Stage 3 holds a layer and the next one. A gradient is whole until it is reduced.
    gathered = 2 * BF16 * sizes.gathered if choice.stage == 3 else 0
    unreduced = BF16 * sizes.gathered if choice.stage > 0 else 0
    # Below stage 3 new params are gathered into the old ones' place, one stack at a time: of the largest stack of
    # matrices, a third of the layers', the new shard and the gathered whole are there beside it.
    stack = BF16 * sizes.layer * sizes.layers // 3 if choice.stage in (1, 2) else 0
    updates = _share(stack, n) if stack else _share(half, n) if choice.stage else 0
    at_loss = {
        "activations": kept + sizes.logits(batch.tokens) + 4 * batch.tokens * sizes.hidden,
        "grads": accumulator,
        "gathered": 2 * embedding,
    }
    at_backward = {
        "activations": kept + sizes.block_work(batch.tokens) + scores,
        "grads": grads,
        "gathered": gathered,
        "full grads": unreduced,
        "updates": _share(stack, n),
    }
    at_update = {"grads": grads, "updates": updates, "new params": stack}
    most = max((at_loss, at_backward, at_update), key=lambda moment: sum(moment.values()))
    names = ("grads", "gathered", "full grads", "updates", "new params", "activations")
    return {name: most.get(name, 0) for name in names}


def _waiting(choice: Choice, sizes: Sizes, batch: Batch, n: int) -> int:
    """Bytes of gradients, or of their sums over micro-batches, that wait beside offloaded params and state."""
    if choice.params == "none":
        return 0
    return math.ceil(choice.ratio * _share((FP32 if batch.accumulation > 1 else BF16) * sizes.params, n))


def _share(total: int, parts: int) -> int:
    return math.ceil(total / parts)


@dataclasses.dataclass(frozen=True)
class _Collective:
    op: str
    payload: float
    size: int
    nodes: int


def _collectives(
    choice: Choice, sizes: Sizes, batch: Batch, machine: Machine
) -> tuple[list[_Collective], list[_Collective], list[_Collective]]:
    """Collectives of a step's forwards, backwards and update: payloads of the whole model."""
    n, m, k = machine.num_gpus, machine.nodes, machine.gpus_per_node
    whole, times = float(BF16 * sizes.params), batch.accumulation
    gather = _Collective("all-gather", whole, n, m)
    scatter = _Collective("reduce-scatter", whole, n, m)
    if choice.zeropp:
        # int8 gather across nodes, once a step, and inside the node in every pass; all-to-all of int8 inside the
        # node, then of int4 across nodes.
        across = _Collective("all-gather", whole / 2 / k, m, m)
        local = _Collective("all-gather", whole / 2, k, 1)
        swaps = [_Collective("all-to-all", whole / 2, k, 1), _Collective("all-to-all", whole / 4 / k, m, m)]
        return [across, *[local] * times], [local, *swaps] * times, []
    if choice.stage == 3:
        return [gather] * times, [gather, scatter] * times, []
    if choice.stage == 2:
        return [], [scatter] * times, [gather]
    if choice.stage == 1:
        return [], [scatter], [gather]
    return [], [_Collective("all-reduce", whole, n, m)], []


def _seconds(collectives: list[_Collective], machine: Machine) -> float:
    return sum(collective_seconds(c.op, c.payload, c.size, c.nodes, machine.gpu) for c in collectives)


def _sent(collectives: list[_Collective], machine: Machine) -> tuple[float, float]:
    """Bytes that one GPU sends inside its node and across nodes, by the rings of collective_seconds."""
    intra = inter = 0.0
    for c in collectives:
        factor = 2.0 if c.op == "all-reduce" else 1.0
        inside = max(1, c.size // c.nodes)
        wire = factor * c.payload * (c.size - 1) / c.size
        if c.nodes == 1:
            intra += wire
        elif c.op == "all-to-all":
            inter += c.payload * (c.size - inside) / c.size
            intra += c.payload * (inside - 1) / c.size
        else:
            inter += wire / inside
            intra += wire * (inside - 1) / inside
    return intra, inter


def _compute_seconds(sizes: Sizes, batch: Batch, machine: Machine) -> float:
    work = sizes.flops(batch.tokens, batch.sequence) * batch.accumulation
    return work * (4 / 3 if batch.remat else 1) / machine.gpu.flops_bf16.usable


def _transfers(choice: Choice, sizes: Sizes, batch: Batch, machine: Machine) -> tuple[float, float, float]:
    """Seconds of transfers beside compute: params in for the forwards, for the backwards, gradients out.

    Gradients wait beside the params; of several micro-batches their fp32 sums come in as well. Under hpZ a node's
    share of the params goes out in the forward pass, as int8, and comes in for the backward passes in their place.
    """
    if choice.params == "none":
        return 0.0, 0.0, 0.0
    link = machine.gpu.pcie.usable
    rate = min(link, machine.nvme_rate / machine.gpus_per_node) if choice.params == "nvme" else link
    share = sizes.params / machine.num_gpus * batch.accumulation
    sums = choice.ratio * FP32 if batch.accumulation > 1 else 0.0
    fetch = again = BF16 * share / rate
    if choice.zeropp:
        near = sizes.params / machine.gpus_per_node / link
        fetch, again = max(fetch, near), near * batch.accumulation
    return fetch, again + sums * share / link, (sums or choice.ratio * BF16) * share / link


def update_seconds(choice: Choice, sizes: Sizes, batch: Batch, machine: Machine) -> tuple[float, float]:
    """Seconds of the update's kernels, and of its transfers: PCIe both ways at once, or the node's disks."""
    share = sizes.params / (1 if choice.stage == 0 else machine.num_gpus)
    kernels = 2 * share * (MASTER + MOMENTS + FP32) / machine.gpu.hbm.usable
    read = choice.ratio * (MASTER + MOMENTS) * share if choice.optimizer != "none" else 0.0
    if choice.params != "none":  # the norm reads the gradients, then the update does
        read += 2 * choice.ratio * (FP32 if batch.accumulation > 1 else BF16) * share
    on_disk = (MASTER + MOMENTS) * share * (choice.optimizer == "nvme")
    on_disk += BF16 * share * (choice.params == "nvme")
    disks = 2 * on_disk * machine.gpus_per_node / machine.nvme_rate
    return kernels, max(read / machine.gpu.pcie.usable, disks)
