"""The features that a config asks for, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zeroj.config.schema import DsConfig

NEEDS: dict[str, Callable[[DsConfig], Any]] = {
    "offload_optimizer:cpu": lambda f: _device(f, "offload_optimizer") == "cpu",
    "offload_optimizer:nvme": lambda f: _device(f, "offload_optimizer") == "nvme",
    "offload_optimizer:ratio": lambda f: (
        _device(f, "offload_optimizer") != "none" and f.zero_optimization.offload_optimizer.ratio < 1  # type: ignore[union-attr]
    ),
    "offload_param:cpu": lambda f: _device(f, "offload_param") == "cpu",
    "offload_param:nvme": lambda f: _device(f, "offload_param") == "nvme",
    "nvme": lambda f: "nvme" in (_device(f, "offload_optimizer"), _device(f, "offload_param")),
    "zero++:hpZ": lambda f: f.zero_optimization.zero_hpz_partition_size > 1,
    "zero++:qwZ": lambda f: f.zero_optimization.zero_quantized_weights,
    "zero++:qgZ": lambda f: f.zero_optimization.zero_quantized_gradients,
    "zero++:nontrainable": lambda f: f.zero_optimization.zero_quantized_nontrainable_weights,
    "zero++:loco": lambda f: f.zero_optimization.zeropp_loco_param is not None,
    "mics": lambda f: f.zero_optimization.mics_shard_size > 0,
    "mics:hierarchical": lambda f: f.zero_optimization.mics_hierarchical_params_gather,
    "reshard_after_forward:false": lambda f: not f.zero_optimization.reshard_after_forward,
    "fp16": lambda f: f.fp16.enabled,
    "fp16:auto_cast": lambda f: f.fp16.enabled and f.fp16.auto_cast,
    "low_precision_master": lambda f: (
        f.fp16.fp16_master_weights_and_grads or f.bf16.bf16_master_weights_and_grads
    ),
    "communication_data_type": lambda f: f.communication_data_type is not None,
    "grad_accum_dtype": lambda f: f.data_types.grad_accum_dtype not in (None, "fp32"),
    "gradient_allreduce_op:sum": lambda f: f.gradient_allreduce_op == "sum",
    "tensorboard": lambda f: f.tensorboard.enabled,
    "wandb": lambda f: f.wandb.enabled,
    "csv_monitor": lambda f: f.csv_monitor.enabled,
    "flops_profiler": lambda f: f.flops_profiler.enabled,
    "comms_logger": lambda f: f.comms_logger.enabled,
    "wall_clock_breakdown": lambda f: f.wall_clock_breakdown,
    "memory_breakdown": lambda f: f.memory_breakdown,
    "dump_state": lambda f: f.dump_state,
}


def _device(file: DsConfig, section: str) -> str:
    part = getattr(file.zero_optimization, section)
    return "none" if part is None else str(part.device)


def needs_of(file: DsConfig) -> tuple[str, ...]:
    """The names of `NEEDS` that hold for a checked file."""
    return tuple(name for name, asked in NEEDS.items() if asked(file))
