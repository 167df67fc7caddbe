"""The section "zero_optimization", which is also `zj.Zero`, its form in Python."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import pydantic

from zeroj.config.faults import faults_of, raise_faults
from zeroj.config.needs import ZERO_NEEDS, needs_of
from zeroj.config.offload import OffloadOptimizer, OffloadParam
from zeroj.config.rows import Bool, Float, Int, Names, Off, Section, honoured, not_needed, refused
from zeroj.config.rules import device_faults, zero_faults

_COMBINED = "XLA combines collectives itself; their size is a compiler flag, not a property of the step"
_SCHEDULED = "XLA's latency-hiding scheduler places every gather and every reduction"


class Loco(Section):
    """Error feedback of the quantised gradients (LoCo, arXiv 2407.04480)."""

    err_beta: Float = honoured(0.8, "Share of the old error kept in the running error.", ge=0, le=1)
    reset_T: Int = honoured(1024, "Steps after which the error is set to zero.", gt=0)


class LeafModule(Section):
    """Modules that DeepSpeed gathers as one unit."""

    classes: Names = not_needed(
        (), "gathering happens where a parameter is used; there are no modules to mark"
    )
    names: Names = not_needed((), "gathering happens where a parameter is used; there are no modules to mark")
    name_suffixes: Names = not_needed((), "gathering happens where a parameter is used; there are no modules")


class ZeroSection(Section):
    """The keys of "zero_optimization", as DeepSpeed names them, and zeroj's own `reshard_after_forward`."""

    aliases: ClassVar[Mapping[str, str]] = {
        "prefetch_bucket_size": "stage3_prefetch_bucket_size",
        "param_persistence_threshold": "stage3_param_persistence_threshold",
        "model_persistence_threshold": "stage3_model_persistence_threshold",
        "max_live_parameters": "stage3_max_live_parameters",
        "max_reuse_distance": "stage3_max_reuse_distance",
        "gather_16bit_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
        "module_granularity_threshold": "stage3_module_granularity_threshold",
        "use_all_reduce_for_fetch_params": "stage3_use_all_reduce_for_fetch_params",
        "allgather_sequential": "stage3_allgather_sequential",
        "partition_stream_chunk_size": "stage3_partition_stream_chunk_size",
    }

    stage: Literal[0, 1, 2, 3] = honoured(
        0,
        "What is sharded: 0 nothing, 1 optimizer state, 2 also gradients, 3 also params.",
        auto="zero_stage",
    )
    offload_optimizer: OffloadOptimizer | None = honoured(
        None, "Keeps optimizer state in host memory or on NVMe. Stages 1 to 3."
    )
    offload_param: OffloadParam | None = honoured(None, "Keeps params in host memory or on NVMe. Stage 3.")
    sub_group_size: Int = honoured(
        10**9, "Elements of a device's shard that are streamed at a time when state is offloaded.", gt=0
    )
    stage3_param_persistence_threshold: Int | None = honoured(
        None,
        "Leaves of at most this many elements stay whole. Left out: zeroj keeps the smallest leaves whole, "
        "so long as together they are at most 2 % of total / N.",
        auto="persistence",
        ge=0,
    )
    stage3_model_persistence_threshold: Int | None = honoured(
        None, "Elements that may stay whole altogether. Left out: no further limit.", ge=0
    )
    reshard_after_forward: Bool = honoured(
        True,
        "zeroj's own. true: a gathered param is freed after the forward pass and gathered again for the "
        "backward pass (3Ψ on the wire). false: it is kept (2Ψ, and the params whole at the peak). Stage 3.",
    )
    zero_hpz_partition_size: Int = honoured(
        1, "hpZ: devices of a group that holds a second, 16-bit shard of the params. Stage 3.", gt=0
    )
    zero_quantized_weights: Bool = honoured(False, "qwZ: params are gathered as int8. Stage 3.")
    zero_quantized_nontrainable_weights: Bool = honoured(False, "Frozen params are stored as int8. Stage 3.")
    zero_quantized_gradients: Bool = honoured(
        False,
        "qgZ: gradients are reduced in two hops, as int8 in a node and int4 across, and come out as the true "
        "mean. Stage 3.",
    )
    zero_quantized_gradients_bits: Literal[4, 8] = honoured(
        4, "zeroj's own. Bits of a gradient across nodes under qgZ; within a node it takes 8. Stage 3."
    )
    zeropp_loco_param: Loco | None = honoured(None, "Error feedback for quantised gradients.")
    mics_shard_size: Int = honoured(
        -1, "MiCS: devices of a group that shards the state; groups are replicas. -1: off. Stage 3.", ge=-1
    )
    mics_hierarchical_params_gather: Bool = honoured(False, "MiCS: gather over nodes first, then within one.")

    overlap_comm: Bool | None = honoured(
        None,
        "Stage 2, true: params are shards between steps; a step gathers each where it is first used and keeps it to "
        "its end, so that the gather hides behind the forward pass. Otherwise stage 2 gathers the new params at the "
        f"end of the step, where nothing hides it, and they are whole between steps. At other stages {_SCHEDULED}, "
        "whatever this says.",
    )
    contiguous_gradients: Bool = not_needed(True, "XLA's buffer assignment leaves nothing to defragment")
    reduce_scatter: Bool = refused(
        True,
        "gradients of stages 1 to 3 are shards, and an all-reduce would move twice their bytes",
        "use stage 0 for an all-reduce",
    )
    reduce_bucket_size: Int = not_needed(5 * 10**8, _COMBINED, auto="reduce_bucket", gt=0)
    allgather_bucket_size: Int = not_needed(5 * 10**8, _COMBINED, gt=0)
    allgather_partitions: Bool = not_needed(True, "params are always gathered by all-gather")
    use_multi_rank_bucket_allreduce: Bool = not_needed(True, "each leaf has its own reduce-scatter")
    round_robin_gradients: Bool = not_needed(False, "every device copies its own shard of every leaf")
    load_from_fp32_weights: Bool = refused(
        True,
        "a zeroj checkpoint holds the fp32 master, and nothing else to start from",
        "to start from 16-bit weights, load them and make a new state with zj.init_state",
    )
    elastic_checkpoint: Bool = not_needed(False, "every zeroj checkpoint restores onto any plan and mesh")
    ignore_unused_parameters: Bool = refused(
        True,
        "JAX gives an unused parameter a gradient of zeros, and nothing marks it as unused",
        "look for leaves whose gradient is all zeros",
    )
    legacy_stage1: Bool = refused(
        False, "the old stage 1 is gone from DeepSpeed as well", "leave the key out"
    )

    stage3_prefetch_bucket_size: Int = honoured(
        5 * 10**7,
        "Elements that are gathered together, one such bucket ahead of their use. Left out: about a layer of "
        "width 4096, and at most a sixteenth of the model.",
        auto="prefetch",
        ge=0,
    )
    stage3_max_live_parameters: Int = honoured(
        10**9,
        "A region under jax.checkpoint has its params gathered at once if twice their elements are at most "
        "this; otherwise bucket by bucket.",
        ge=0,
    )
    stage3_max_reuse_distance: Int = honoured(
        10**9,
        "Outside jax.checkpoint a gathered param is used again, rather than gathered again, while at most this "
        "many elements were gathered since. Left out: 0, gathered again for the backward pass.",
        ge=0,
    )
    stage3_gather_16bit_weights_on_model_save: Bool = not_needed(
        False, "zj.export_safetensors gathers leaf by leaf, whatever the stage", auto="save_16bit"
    )
    stage3_module_granularity_threshold: Int = not_needed(0, "there are no modules to group", ge=0)
    stage3_use_all_reduce_for_fetch_params: Bool = not_needed(
        False, "shards are padded to equal size instead"
    )
    stage3_allgather_sequential: Bool = not_needed(False, _SCHEDULED)
    stage3_partition_stream_chunk_size: Int = not_needed(0, "params are born in their shards", ge=0)
    memory_efficient_linear: Bool = not_needed(
        True, "the backward pass keeps shards of the params, never the gathered ones, for every layer"
    )
    pipeline_loading_checkpoint: Bool = not_needed(False, "each process reads its own shards only")
    override_module_apply: Bool = not_needed(True, "there is no module hook to override")
    log_trace_cache_warnings: Bool = not_needed(
        False, "the program is traced once; there is no trace to invalidate"
    )
    enable_sanity_checks: Bool = not_needed(
        False, "arrays are immutable: a gathered param cannot be edited in place"
    )
    leaf_module: LeafModule | None = not_needed(None, "gathering happens where a parameter is used")
    save_muon_momentum_buffer_in_memory: Bool = refused(
        False, "optimizer state lives where the plan puts it, for Muon as for any other", "leave the key out"
    )
    zenflow: Off = refused(
        None,
        "its updates are stale by design, so that the trajectory is no longer that of the optimizer",
        'use offload_optimizer with "device": "cpu", which is exact',
        keys=(
            "topk_ratio",
            "select_strategy",
            "select_interval",
            "update_interval",
            "overlap_step",
            "offload",
            "auto_ratio",
            "full_warm_up_rounds",
            "pt_reserved_cores_perc",
        ),
    )


class Zero(ZeroSection):
    """What to shard and where to keep it: "zero_optimization" in Python, with DeepSpeed's field names.

    Args:
        stage: 0 to 3; left out, 0.
        offload_optimizer: a dict or `OffloadOptimizer`; left out, optimizer state stays on the device.
        offload_param: a dict or `OffloadParam`; left out, params stay on the device.
        reshard_after_forward: zeroj's own; see docs/ds_config.md, as for all other fields.

    Raises:
        ConfigError: for unknown names, wrong values and impossible combinations, all in one message.

    Example:
        >>> Zero(stage=3, offload_optimizer={"device": "cpu"}).offload_optimizer.device
        'cpu'
    """

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except pydantic.ValidationError as error:
            raise_faults("zj.Zero", faults_of(error, ZeroSection, fields))
        raise_faults("zj.Zero", zero_faults(self))

    def needs(self) -> tuple[str, ...]:
        """Names of the features that it asks for, so that an engine can refuse one that it lacks."""
        return needs_of(ZERO_NEEDS, self)

    def laid_out(self) -> Zero:
        """The section that decides where arrays live, and when params are gathered.

        Stage 2 with ``overlap_comm`` is laid out as stage 3 whose gathered params are kept: the same bytes on the wire.

        Example:
            >>> Zero(stage=2, overlap_comm=True).laid_out().stage
            3
        """
        if self.stage != 2 or not self.overlap_comm:
            return self
        return self.model_copy(update={"stage": 3, "reshard_after_forward": False})

    def check_devices(self, world: int, local: int) -> None:
        """Check what can only be checked once the mesh is known.

        Args:
            world: the ZeRO degree: all devices that share the state.
            local: how many of them are in one node.

        Raises:
            ConfigError: a group of hpZ or MiCS does not fit the devices.

        Example:
            >>> Zero(stage=3, zero_hpz_partition_size=4).check_devices(world=8, local=4)
        """
        raise_faults("zj.Zero", device_faults(self, world, local))
