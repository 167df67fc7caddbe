"""DeepSpeed's own estimate of model-state memory, to compare with: ``zeroj plan --deepspeed-estimate``.

The formulas are those of ``estimate_zero2_model_states_mem_needs`` and
``estimate_zero3_model_states_mem_needs`` in DeepSpeed's ``runtime/zero``. They count the model's states for
Adam in mixed precision and nothing else: no activations, no stage 1, no NVMe, no secondary shards. What
zeroj really needs is :mod:`zeroj.aot.closed_form`.
"""

from __future__ import annotations

import dataclasses

from zeroj.errors import PlanError

BUFFER_FACTOR = 1.5
"""DeepSpeed's ``additional_buffer_factor``."""

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Estimate:
    """One row of DeepSpeed's table: bytes per host ("CPU") and per GPU, and for which options."""

    host: float
    gpu: float
    options: str

    def __str__(self) -> str:
        return f"{self.host / GIB:8.2f}GB | {self.gpu / GIB:6.2f}GB | {self.options}"


def zero2(params: int, gpus_per_node: int = 1, nodes: int = 1) -> list[Estimate]:
    """Returns DeepSpeed's estimates for ZeRO-2, with and without optimizer offload.

    Args:
      params: number of parameters, shared ones counted once.
      gpus_per_node: GPUs a node.
      nodes: nodes.
    """
    total = _gpus(gpus_per_node, nodes)
    return [
        Estimate(params * max(4 * total, 16) * BUFFER_FACTOR, 2 * params, "offload_optimizer=cpu"),
        Estimate(
            params * 4 * gpus_per_node * BUFFER_FACTOR,
            2 * params + int(18 * params / total),
            "offload_optimizer=none",
        ),
    ]


def zero3(params: int, largest_layer: int, gpus_per_node: int = 1, nodes: int = 1) -> list[Estimate]:
    """Returns DeepSpeed's estimates for ZeRO-3: every offload, with and without ``zero.Init``.

    Args:
      params: number of parameters, shared ones counted once.
      largest_layer: parameters of the module that holds the most of its own.
      gpus_per_node: GPUs a node.
      nodes: nodes.
    """
    total = _gpus(gpus_per_node, nodes)
    n, share = gpus_per_node, 1 / nodes
    layer = 4 * largest_layer
    cases = [
        ("offload_param=cpu , offload_optimizer=cpu ", layer, 18 * share * params, max(4 * n, 18 * share)),
        (
            "offload_param=none, offload_optimizer=cpu ",
            layer + int(2 * params / total),
            16 * share * params,
            max(4 * n, 16 * share),
        ),
        ("offload_param=none, offload_optimizer=none", layer + int(18 * params / total), layer * n, 4 * n),
    ]
    rows = []
    for options, gpu, with_init, factor_without in cases:
        rows.append(Estimate(with_init * BUFFER_FACTOR, gpu, f"{options}, zero_init=1"))
        rows.append(Estimate(factor_without * params * BUFFER_FACTOR, gpu, f"{options}, zero_init=0"))
    return rows


def _gpus(gpus_per_node: int, nodes: int) -> int:
    if gpus_per_node < 1 or nodes < 1:
        raise PlanError(f"a cluster has at least one GPU: gpus_per_node={gpus_per_node}, nodes={nodes}")
    return gpus_per_node * nodes
