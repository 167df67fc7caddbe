"""What can be chosen: ZeRO stage, offload, ZeRO++; and for what: a batch, a machine."""

from __future__ import annotations

import dataclasses

from zeroj.aot.hardware import Gpu


@dataclasses.dataclass(frozen=True)
class Choice:
    """One way to run: ``stage`` 0 to 3, ``optimizer`` and ``params`` on "none", "cpu" or "nvme", ZeRO++.

    ``ratio`` is the share of the optimizer's state, by bytes, that is on "cpu": ``offload_optimizer.ratio``.
    """

    stage: int
    optimizer: str = "none"
    params: str = "none"
    zeropp: bool = False
    ratio: float = 1.0

    def __str__(self) -> str:
        parts = [f"stage {self.stage}"]
        share = f"{self.ratio:.0%} of the optimizer" if self.ratio < 1 else "optimizer"
        parts += [f"{share} on {self.optimizer}"] if self.optimizer != "none" else []
        parts += [f"params on {self.params}"] if self.params != "none" else []
        return " + ".join([*parts, *(["ZeRO++"] if self.zeropp else [])])

    @property
    def complexity(self) -> int:
        """Rank among choices of equal speed: the fewer parts, the better."""
        places = {"none": 0, "cpu": 1, "nvme": 2}
        return self.stage + 10 * places[self.optimizer] + 10 * places[self.params] + 5 * self.zeropp


@dataclasses.dataclass(frozen=True)
class Batch:
    """What one GPU does in a step: sequences a micro-batch, their length, micro-batches, recomputation.

    ``fused_attention``: whether attention runs in a kernel that never holds the score matrix, such as cuDNN's;
    ``jax.nn.dot_product_attention`` without an ``implementation`` does not.
    """

    micro: int = 1
    sequence: int = 2048
    accumulation: int = 1
    remat: bool = True
    fused_attention: bool = True

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch."""
        return self.micro * self.sequence


@dataclasses.dataclass(frozen=True)
class Machine:
    """The cluster as sizes: ``host_memory`` and ``nvme`` in bytes a node, ``nvme_rate`` in bytes/s a node."""

    gpu: Gpu
    nodes: int
    gpus_per_node: int
    host_memory: float
    nvme: float
    nvme_rate: float = 10e9

    @property
    def num_gpus(self) -> int:
        """GPUs of the cluster."""
        return self.nodes * self.gpus_per_node


def choices(machine: Machine) -> list[Choice]:
    """Lists the choices of a machine: ZeRO++ only across nodes, NVMe only where there is one."""
    disks = ("none", "cpu", "nvme") if machine.nvme else ("none", "cpu")
    found = [Choice(0), *(Choice(s, o) for s in (1, 2) for o in ("none", "cpu"))]
    for optimizer in disks:
        for params in disks:
            if disks.index(params) <= disks.index(optimizer):
                found.append(Choice(3, optimizer, params))
                if machine.nodes > 1:
                    found.append(Choice(3, optimizer, params, zeropp=True))
    return found
