"""Hugging Face's arguments that zeroj does not have: which mean nothing here, and which are refused, and why."""

from __future__ import annotations

from typing import Any

#: Accepted with any value: they say how PyTorch does what JAX does by itself, or what only scripts read.
NO_EFFECT = frozenset(
    "overwrite_output_dir logging_dir save_safetensors dataloader_pin_memory dataloader_num_workers "
    "dataloader_persistent_workers dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order "
    "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend "
    "local_rank log_level log_level_replica log_on_each_node use_cpu no_cuda tf32 skip_memory_metrics use_cache "
    "average_tokens_across_devices torch_empty_cache_steps eval_accumulation_steps eval_do_concat_batches "
    "half_precision_backend bf16_full_eval fp16_full_eval length_column_name _n_gpu logging_nan_inf_filter "
    "save_on_each_node gradient_checkpointing_kwargs activation_checkpointing_kwargs accelerator_config "
    "restore_callback_states_from_checkpoint include_tokens_per_second full_determinism".split()
)

_HUB = "nothing is uploaded; push the folder that save_model wrote yourself"
_TORCH = "it is PyTorch's"

#: Refused where they are not at their default, with the reason.
REFUSED: dict[str, str] = {
    "push_to_hub": _HUB,
    "hub_model_id": _HUB,
    "hub_token": _HUB,
    "hub_private_repo": _HUB,
    "hub_always_push": _HUB,
    "hub_strategy": _HUB,
    "hub_revision": _HUB,
    "fsdp": 'ZeRO is asked for by deepspeed={"zero_optimization": {"stage": 3}}',
    "fsdp_config": 'ZeRO is asked for by deepspeed={"zero_optimization": {"stage": 3}}',
    "parallelism_config": "pass the Trainer a mesh of zj.make_mesh(...)",
    "optim": "AdamW is the default; pass another by the ds_config's optimizer, or optimizers=(optax..., None)",
    "optim_args": "configure the ds_config's optimizer, or pass optimizers=(optax..., None)",
    "optim_target_modules": "pass optimizers=(optax.partition(...), None)",
    "torch_compile": _TORCH + "; every step is compiled by XLA",
    "torch_compile_backend": _TORCH + "; every step is compiled by XLA",
    "torch_compile_mode": _TORCH + "; every step is compiled by XLA",
    "use_liger_kernel": _TORCH + "; XLA fuses",
    "liger_kernel_config": _TORCH + "; XLA fuses",
    "neftune_noise_alpha": "add the noise in the model's embedding, by its rng",
    "auto_find_batch_size": "zeroj plan tells the batch that fits before the run",
    "group_by_length": "batches are padded to a few lengths only; sort the dataset for more",
    "save_only_model": "a checkpoint without optimizer state could not be resumed; call save_model",
    "enable_jit_checkpoint": "use zj.Preemption",
    "batch_eval_metrics": "compute_metrics gets all predictions at once",
    "eval_use_gather_object": "predictions are arrays",
    "include_for_metrics": "compute_metrics gets predictions and label_ids",
    "include_inputs_for_metrics": "compute_metrics gets predictions and label_ids",
    "debug": "use jax_debug_nans",
    "trackio_space_id": "report_to takes tensorboard, wandb and csv",
    "trackio_bucket_id": "report_to takes tensorboard, wandb and csv",
    "trackio_static_space_id": "report_to takes tensorboard, wandb and csv",
    "project": "set WANDB_PROJECT, or the ds_config's section wandb",
    "activation_checkpointing": "use gradient_checkpointing",
    "fp16_opt_level": _TORCH,
    "mp_parameters": _TORCH,
}

#: The defaults of theirs: an object that leaves these alone has asked for nothing.
THEIR_DEFAULTS: dict[str, tuple[Any, ...]] = {
    **{name: (None, False, "", [], {}) for name in REFUSED},
    "optim": (None, "adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw"),
    "hub_strategy": (None, "every_save"),
    "project": (None, "huggingface"),
    "fp16_opt_level": (None, "O1"),
    "fsdp": (None, "", [], False),
    "torch_compile_backend": (None, "inductor"),
    "fsdp_config": (
        None,
        {"min_num_params": 0, "xla": False, "xla_fsdp_v2": False, "xla_fsdp_grad_ckpt": False},
    ),
}
