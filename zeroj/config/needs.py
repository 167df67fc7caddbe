"""The features that a config asks for, by name, so that an engine can refuse by name what it has not got."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def _device(zero: Any, section: str) -> str:
    part = getattr(zero, section)
    return "none" if part is None else str(part.device)


ZERO_NEEDS: dict[str, Callable[[Any], bool]] = {
    "offload_optimizer:cpu": lambda z: _device(z, "offload_optimizer") == "cpu",
    "offload_optimizer:nvme": lambda z: _device(z, "offload_optimizer") == "nvme",
    "offload_optimizer:ratio": lambda z: (
        _device(z, "offload_optimizer") != "none" and z.offload_optimizer.ratio < 1
    ),
    "offload_param:cpu": lambda z: _device(z, "offload_param") == "cpu",
    "offload_param:nvme": lambda z: _device(z, "offload_param") == "nvme",
    "nvme": lambda z: "nvme" in (_device(z, "offload_optimizer"), _device(z, "offload_param")),
    "zero++:hpZ": lambda z: z.zero_hpz_partition_size > 1,
    "zero++:qwZ": lambda z: z.zero_quantized_weights,
    "zero++:qgZ": lambda z: z.zero_quantized_gradients,
    "zero++:nontrainable": lambda z: z.zero_quantized_nontrainable_weights,
    "zero++:loco": lambda z: z.zeropp_loco_param is not None,
    "mics": lambda z: z.mics_shard_size > 0,
    "mics:hierarchical": lambda z: z.mics_hierarchical_params_gather,
}


def needs_of(table: Mapping[str, Callable[[Any], bool]], section: Any) -> tuple[str, ...]:
    """The names in `table` that hold for a checked section."""
    return tuple(name for name, asked in table.items() if asked(section))
