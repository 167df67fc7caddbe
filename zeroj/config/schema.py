"""The schema: every key of ds_config.json, in one tree of rows."""

from __future__ import annotations

from typing import Literal

from zeroj.config.offload import Aio
from zeroj.config.optimizer_rows import OptimizerSection
from zeroj.config.precision import BF16, FP16, DataTypes
from zeroj.config.rows import Bool, DType, Float, Int, Off, Section, Text, honoured, not_needed, refused
from zeroj.config.run_rows import (
    ActivationCheckpointing,
    CheckpointSection,
    CommsLogger,
    Compile,
    CSVMonitor,
    FlopsProfiler,
    TensorBoard,
    Wandb,
)
from zeroj.config.scheduler_rows import SchedulerSection
from zeroj.config.zero import ZeroSection

_AXIS = "add an axis to the mesh, as in zj.make_mesh(local=4, model=2), and shard the model over it yourself"
_MODEL = "do it in the model"
_DATA = "do it where the batches are made"


class DsConfig(Section):
    """ds_config.json."""

    train_batch_size: Int | None = honoured(
        None, "Examples of one update, over all devices.", auto="train_batch_size", gt=0
    )
    train_micro_batch_size_per_gpu: Int | None = honoured(
        None, "Examples of one device in one pass.", auto="micro_batch_size", gt=0
    )
    gradient_accumulation_steps: Int | None = honoured(
        None, "Micro-batches of one update.", auto="gradient_accumulation_steps", gt=0
    )
    gradient_clipping: Float = honoured(
        1.0, "Largest global L2 norm of the gradients. 0: no clipping.", auto="gradient_clipping", ge=0
    )
    communication_data_type: DType | None = honoured(
        None, "Dtype in which gradients are reduced. Left out: the compute dtype."
    )
    gradient_allreduce_op: Literal["mean", "sum"] = honoured(
        "mean", "sum: gradients are those of the sum over devices, N times the mean."
    )
    zero_optimization: ZeroSection = honoured(ZeroSection(), "What is sharded, and where it is kept.")
    fp16: FP16 = honoured(FP16(), "float16 compute with a loss scale.")
    bf16: BF16 = honoured(BF16(), "bfloat16 compute.")
    data_types: DataTypes = honoured(DataTypes(), "Which dtype is used for what.")
    optimizer: OptimizerSection | None = honoured(None, "The optimizer. Left out: the caller passes tx.")
    scheduler: SchedulerSection | None = honoured(None, "The learning rate schedule.")
    aio: Aio = honoured(Aio(), "How files are read and written.")
    checkpoint: CheckpointSection = honoured(CheckpointSection(), "How checkpoints are written and read.")
    steps_per_print: Int | None = honoured(
        None, "Print loss, learning rate and speed every so many updates.", gt=0
    )
    wall_clock_breakdown: Bool = honoured(False, "Report the time of compile, data, step and transfer.")
    memory_breakdown: Bool = honoured(False, "Report bytes in use on device and host.")
    dump_state: Bool = honoured(False, "Log the resolved config at the start.")
    tensorboard: TensorBoard = honoured(TensorBoard(), "Scalars for TensorBoard.")
    csv_monitor: CSVMonitor = honoured(CSVMonitor(), "Scalars as CSV files.")
    wandb: Wandb = honoured(Wandb(), "Scalars for Weights & Biases.")
    flops_profiler: FlopsProfiler = honoured(FlopsProfiler(), "FLOPs of the compiled step.")
    comms_logger: CommsLogger = honoured(CommsLogger(), "Collectives of the compiled step.")
    activation_checkpointing: ActivationCheckpointing = honoured(
        ActivationCheckpointing(), "Where what jax.checkpoint keeps waits for the backward pass."
    )
    compile: Compile = not_needed(Compile(), "XLA compiles the whole step")

    managed_gradient_accumulation: Bool = not_needed(
        True, "a step takes the whole global batch, or is yours to write"
    )
    prescale_gradients: Bool = refused(
        False,
        "the mean is formed once, after the sum",
        "leave the key out; gradients are the true mean either way",
    )
    gradient_predivide_factor: Float = refused(
        1.0, "it guards fp16 sums against overflow", 'set "communication_data_type" to "fp32"'
    )
    sparse_gradients: Bool = refused(
        False, "JAX's gradient of an embedding is dense", "shard the embedding; stage 2 or 3 does"
    )
    disable_allgather: Bool = refused(False, "params would differ between devices", "leave the key out")
    zero_allow_untested_optimizer: Bool = not_needed(False, "any optax transformation works")
    zero_force_ds_cpu_optimizer: Bool = not_needed(True, "offload works with any optax transformation")
    dataloader_drop_last: Bool = not_needed(
        False, "zeroj takes batches, and the Trainer has its own argument for it"
    )
    vocabulary_size: Int | None = not_needed(None, "zeroj pads what does not divide", gt=0)
    seq_parallel_communication_data_type: DType = not_needed("fp32", "there is no sequence parallelism")
    use_data_before_expert_parallelism: Bool = not_needed(False, "the mesh says which axis is which")
    log_level: Text | None = not_needed(None, "zeroj prints what the other keys ask for, and nothing else")
    timers: Off = refused(None, "there are no host timers inside a compiled step", "use wall_clock_breakdown")
    sequence_parallel_size: Int = refused(1, "zeroj shards state, not sequences", _AXIS)
    tensor_parallel: Off = refused(None, "zeroj shards state, not the model's computation", _AXIS)
    expert_parallel: Off = refused(None, "zeroj shards state, not the model's computation", _AXIS)
    pipeline: Off = refused(None, "zeroj shards state, not the model's computation", _AXIS)
    torch_autocast: Off = refused(
        None,
        "it chooses dtypes by torch module",
        "set bf16.enabled, and cast to fp32 in the model where it matters",
        keys=("dtype", "lower_precision_safe_modules"),
    )
    amp: Off = refused(
        None, "it is NVIDIA apex, for torch", "set bf16.enabled or fp16.enabled", keys=("opt_level",)
    )
    autotuning: Off = refused(
        None,
        "zeroj compiles the step for the cluster instead of running trials",
        'run "zeroj plan", which advises on stage, offload and batch',
        keys=(
            "fast",
            "metric",
            "tuner_type",
            "tuner_early_stop",
            "tuner_num_trials",
            "results_dir",
            "exps_dir",
        ),
    )
    elasticity: Off = refused(
        None,
        "a checkpoint restores onto any number of devices, and the batch sizes are worked out again",
        "restart with another mesh",
        keys=(
            "max_train_batch_size",
            "micro_batch_sizes",
            "min_gpus",
            "max_gpus",
            "ignore_non_elastic_batch_info",
        ),
    )
    hybrid_engine: Off = refused(
        None, "there is no separate inference engine", "use zj.full_params to generate"
    )
    comet: Off = refused(None, "there is no writer for it", "use wandb, tensorboard or csv_monitor")
    trackio: Off = refused(None, "there is no writer for it", "use wandb, tensorboard or csv_monitor")
    nebula: Off = refused(None, "checkpoints are written by Orbax", "leave the section out")
    datastates_ckpt: Off = refused(
        None, "checkpoints are written by Orbax, in the background", "leave the section out"
    )
    curriculum_learning: Off = refused(None, "zeroj does not make the batches", _DATA)
    data_efficiency: Off = refused(None, "zeroj does not make the batches", _DATA)
    compression_training: Off = refused(None, "it changes the model", _MODEL)
    quantize_training: Off = refused(None, "it changes the model", _MODEL)
    weight_quantization: Off = refused(None, "it is for inference", "leave the section out")
    sparse_attention: Off = refused(None, "it changes the model", _MODEL, keys=("mode",))
    progressive_layer_drop: Off = refused(None, "it changes the model", _MODEL, keys=("theta", "gamma"))
    eigenvalue: Off = refused(
        None, "it serves quantize_training, which is not supported", "leave the section out"
    )
    graph_harvesting: Bool = refused(False, "XLA uses CUDA graphs by itself", "leave the key out")
