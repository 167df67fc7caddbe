"""The sections about running: checkpoints, monitors, profilers, rematerialisation, compilation."""

from __future__ import annotations

from typing import Literal

from zeroj.config.rows import Bool, Float, Int, Names, Section, Text, honoured, not_needed, refused

_WRITER = "Orbax writes every device's shards in parallel and in the background"
_MODULES = "XLA counts the compiled program, which has no modules"
_NO_PASS = "the whole step is one XLA program, and XLA has its own passes"
_REMAT = "use jax.checkpoint in the model, with the policy that fits it"


class ParallelWrite(Section):
    """DeepSpeed's writing by pipeline stage."""

    pipeline_stage: Bool = not_needed(False, _WRITER)


class Writer(Section):
    """DeepSpeed's own checkpoint writer."""

    type: Literal["fast", "python", "mock"] | None = not_needed(None, _WRITER)
    decoupled: Bool = not_needed(False, _WRITER)
    io_buffer_size: Int = not_needed(64 * 2**20, _WRITER, gt=0)
    io_buffer_double: Bool = not_needed(True, _WRITER)
    show_statistics: Bool = not_needed(False, _WRITER)
    data_parallel: Literal["replica", "socket", "machine"] | None = not_needed(None, _WRITER)
    io_multiplier: Int = not_needed(1, _WRITER, gt=0)


class CheckpointSection(Section):
    """How checkpoints are written and read."""

    tag_validation: Literal["Ignore", "Warn", "Fail", "IGNORE", "WARN", "FAIL", "ignore", "warn", "fail"] = (
        honoured("Warn", "What to do when processes save under different tags.")
    )
    load_universal: Bool = not_needed(False, "every zeroj checkpoint restores onto any plan and mesh")
    use_node_local_storage: Bool = refused(
        False, "a checkpoint is one folder that all processes see", "save to a shared file system"
    )
    parallel_write: ParallelWrite | None = not_needed(None, _WRITER)
    checkpoint_serialization: Bool = not_needed(True, _WRITER)
    writer: Writer | None = not_needed(None, _WRITER)


class TensorBoard(Section):
    """Scalars for TensorBoard, from process 0."""

    enabled: Bool = honoured(False, "Write TensorBoard events. Needs tensorboardX.")
    output_path: Text = honoured("", "Folder. Empty: the working directory.")
    job_name: Text = honoured("DeepSpeedJobName", "Folder below it.")


class CSVMonitor(Section):
    """Scalars as CSV files, from process 0."""

    enabled: Bool = honoured(False, "Write one CSV file for each scalar.")
    output_path: Text = honoured("", "Folder. Empty: the working directory.")
    job_name: Text = honoured("DeepSpeedJobName", "Folder below it.")


class Wandb(Section):
    """Scalars for Weights & Biases, from process 0."""

    enabled: Bool = honoured(False, "Log to Weights & Biases. Needs wandb.")
    group: Text | None = honoured(None, "Group of runs.")
    team: Text | None = honoured(None, "Team (entity).")
    project: Text = honoured("deepspeed", "Project.")


class FlopsProfiler(Section):
    """Floating-point operations of the step, from the compiled program."""

    enabled: Bool = honoured(False, "Report the FLOPs of the compiled step.")
    profile_step: Int = honoured(1, "Step whose time they are divided by.", ge=1)
    output_file: Text | None = honoured(None, "File to write to. Left out: the log.")
    module_depth: Int = not_needed(-1, _MODULES, ge=-1)
    top_modules: Int = not_needed(1, _MODULES, ge=1)
    detailed: Bool = not_needed(True, _MODULES)
    recompute_fwd_factor: Float = not_needed(
        0.0, "recomputation is in the compiled program, and so counted", ge=0
    )


class CommsLogger(Section):
    """Collectives of the step, from the compiled program's inventory."""

    enabled: Bool = honoured(False, "Report every collective of the compiled step: bytes, group, times.")
    verbose: Bool = not_needed(
        False, "the inventory is static and complete; nothing happens at run time to print"
    )
    prof_all: Bool = honoured(True, "Report all of them; false: those in prof_ops.")
    prof_ops: Names = honoured((), "Names of the collectives to report.")
    debug: Bool = not_needed(False, "the inventory names the source of each collective anyway")


class ActivationCheckpointing(Section):
    """Rematerialisation belongs to the model, by jax.checkpoint; where what it keeps waits is said here."""

    partition_activations: Bool = refused(
        False,
        "it splits activations over tensor-parallel ranks",
        "shard them with jax.lax.with_sharding_constraint",
    )
    cpu_checkpointing: Bool = honoured(
        False, "What jax.checkpoint regions keep for the backward pass, their inputs, waits in host memory."
    )
    contiguous_memory_optimization: Bool = not_needed(
        False, "XLA's buffer assignment leaves nothing to defragment"
    )
    number_checkpoints: Int | None = not_needed(None, "it sizes a buffer that XLA sizes itself", gt=0)
    synchronize_checkpoint_boundary: Bool = not_needed(
        False, "there is one program, with nothing to synchronise"
    )
    profile: Bool = not_needed(False, "jax.profiler shows recomputed operations under their own names")


class Compile(Section):
    """DeepCompile."""

    deepcompile: Bool = not_needed(False, _NO_PASS)
    free_activation: Bool = not_needed(False, "XLA frees every buffer after its last use")
    free_activation_threshold: Int = not_needed(10 * 2**20, "XLA frees every buffer after its last use", ge=0)
    offload_activation: Bool = refused(
        False, "which activations may go to the host is for the model to say", _REMAT
    )
    offload_activation_pin_memory: Bool = not_needed(True, "host buffers are pinned")
    offload_opt_states: Bool = refused(
        False, "zeroj has one way to say it", 'set zero_optimization.offload_optimizer.device to "cpu"'
    )
    offload_parameters: Bool = refused(
        False, "zeroj has one way to say it", 'set zero_optimization.offload_param.device to "cpu"'
    )
    double_buffer: Bool = not_needed(True, _NO_PASS)
    symmetric_memory: Bool = not_needed(False, _NO_PASS)
    sync_before_reduce: Bool = not_needed(False, _NO_PASS)
    sync_after_reduce: Bool = not_needed(False, _NO_PASS)
    sync_before_allgather: Bool = not_needed(False, _NO_PASS)
    sync_after_allgather: Bool = not_needed(False, _NO_PASS)
    keep_int_input_tensors: Bool = not_needed(True, _NO_PASS)
    keep_all_input_tensors: Bool = not_needed(False, _NO_PASS)
    debug_log: Bool = not_needed(False, "use jax.log_compiles, or XLA_FLAGS=--xla_dump_to")
    passes: Names = not_needed((), _NO_PASS)
