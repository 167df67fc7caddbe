"""Every honoured key of ds_config.json has an effect, and a test sees it."""

from __future__ import annotations

import functools
import importlib
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zeroj as zj
from tests import oracle
from tests.config import keys
from zeroj.config.old import put

pytestmark = pytest.mark.usefixtures("compile_fast")
HONOURED = [key for key in keys.all_keys() if key.row.status == "honoured" and not key.is_section]
FP16 = {"fp16.enabled": True}
SHARDED = {"zero_optimization.stage": 3, "zero_optimization.stage3_param_persistence_threshold": 0}
QUANTISED = {**SHARDED, "zero_optimization.zero_quantized_gradients": True}
BF16 = {"bf16.enabled": True, "zero_optimization.stage": 2}
HOST = {**SHARDED, "zero_optimization.offload_optimizer.device": "cpu"}
PIECES = {**HOST, "zero_optimization.sub_group_size": 64}

#: key -> what stands beside it, and two of its values: the compiled step, its state or its plan are not the same.
STEP: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "gradient_clipping": ({}, 1.0, 0.5),
    "communication_data_type": (BF16, "bf16", "fp32"),
    "gradient_allreduce_op": ({}, "mean", "sum"),
    "zero_optimization.stage": ({}, 1, 3),
    "zero_optimization.stage3_param_persistence_threshold": ({"zero_optimization.stage": 3}, 0, 1000),
    "zero_optimization.stage3_model_persistence_threshold": (
        {"zero_optimization.stage": 3, "zero_optimization.stage3_param_persistence_threshold": 1000},
        10,
        1000,
    ),
    "zero_optimization.stage3_prefetch_bucket_size": (SHARDED, 0, 1000),
    "zero_optimization.stage3_max_live_parameters": (SHARDED, 70, 1000),
    "zero_optimization.stage3_max_reuse_distance": (SHARDED, 0, 1000),
    "fp16.enabled": ({}, False, True),
    "fp16.auto_cast": (FP16, False, True),
    "fp16.loss_scale": (FP16, 128, 256),
    "fp16.initial_scale_power": (FP16, 5, 6),
    "fp16.loss_scale_window": (FP16, 5, 6),
    "fp16.hysteresis": (FP16, 1, 2),
    "fp16.consecutive_hysteresis": (FP16, False, True),
    "fp16.min_loss_scale": (FP16, 1, 2),
    "fp16.fp16_master_weights_and_grads": ({**FP16, "zero_optimization.stage": 2}, False, True),
    "bf16.enabled": ({}, False, True),
    "bf16.check_grad_overflow": (BF16, False, True),
    "bf16.bf16_master_weights_and_grads": (BF16, False, True),
    "bf16.bf16_optimizer_states": (BF16, False, True),
    "data_types.grad_accum_dtype": ({**BF16, "gradient_accumulation_steps": 2}, "fp32", "bf16"),
    "optimizer.type": ({}, "AdamW", "Lion"),
    "zero_optimization.reshard_after_forward": (SHARDED, True, False),
    "zero_optimization.overlap_comm": ({"zero_optimization.stage": 2}, False, True),
    "zero_optimization.offload_optimizer.device": (SHARDED, "none", "cpu"),
    "zero_optimization.offload_optimizer.ratio": (HOST, 1.0, 0.5),
    "zero_optimization.offload_optimizer.buffer_count": (PIECES, 2, 5),
    "zero_optimization.sub_group_size": (HOST, 64, 1_000_000),
    "zero_optimization.offload_param.device": (SHARDED, "none", "cpu"),
    "zero_optimization.zero_hpz_partition_size": (SHARDED, 1, 4),
    "zero_optimization.zero_quantized_weights": (SHARDED, False, True),
    "zero_optimization.zero_quantized_gradients": (SHARDED, False, True),
    "zero_optimization.zero_quantized_gradients_bits": (QUANTISED, 4, 8),
    "zero_optimization.zeropp_loco_param.err_beta": (QUANTISED, 0.8, 0.5),
    "zero_optimization.zeropp_loco_param.reset_T": (QUANTISED, 1024, 7),
    "zero_optimization.mics_shard_size": (SHARDED, -1, 4),
    "zero_optimization.mics_hierarchical_params_gather": (
        {**SHARDED, "zero_optimization.mics_shard_size": 8},
        False,
        True,
    ),
}
#: Those that need large leaves, or several nodes, to do anything.
LARGE = ("zero_hpz", "zeropp", "zero_quantized", "mics", "offload", "sub_group")

#: type -> its params, and another value for each: the rate or what the optimizer makes of it is not the same.
RATES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "WarmupLR": (
        {"warmup_min_lr": 0.01, "warmup_max_lr": 0.1, "warmup_num_steps": 10, "warmup_type": "linear"},
        {"warmup_min_lr": 0.02, "warmup_max_lr": 0.2, "warmup_num_steps": 20, "warmup_type": "log"},
    ),
    "WarmupDecayLR": (
        {"warmup_min_lr": 0.01, "warmup_max_lr": 0.1, "warmup_num_steps": 10, "warmup_type": "linear",
         "total_num_steps": 25},
        {"warmup_min_lr": 0.02, "warmup_max_lr": 0.2, "warmup_num_steps": 20, "warmup_type": "log",
         "total_num_steps": 29},
    ),
    "WarmupCosineLR": (
        {"warmup_min_ratio": 0.1, "cos_min_ratio": 0.2, "warmup_num_steps": 10, "warmup_type": "linear",
         "total_num_steps": 25},
        {"warmup_min_ratio": 0.2, "cos_min_ratio": 0.3, "warmup_num_steps": 20, "warmup_type": "log",
         "total_num_steps": 29},
    ),
    "LRRangeTest": (
        {"lr_range_test_min_lr": 0.1, "lr_range_test_step_size": 7, "lr_range_test_step_rate": 1.0,
         "lr_range_test_staircase": False},
        {"lr_range_test_min_lr": 0.2, "lr_range_test_step_size": 8, "lr_range_test_step_rate": 2.0,
         "lr_range_test_staircase": True},
    ),
    "OneCycle": (
        {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "decay_lr_rate": 0.5, "cycle_first_step_size": 8,
         "cycle_second_step_size": 9, "cycle_first_stair_count": 0, "cycle_second_stair_count": 0,
         "decay_step_size": 3, "cycle_momentum": True, "cycle_min_mom": 0.7, "cycle_max_mom": 0.9,
         "decay_mom_rate": 0.1},
        {"cycle_min_lr": 0.02, "cycle_max_lr": 0.2, "decay_lr_rate": 0.6, "cycle_first_step_size": 7,
         "cycle_second_step_size": 7, "cycle_first_stair_count": 3, "cycle_second_stair_count": 3,
         "decay_step_size": 2, "cycle_momentum": False, "cycle_min_mom": 0.6, "cycle_max_mom": 0.8,
         "decay_mom_rate": 0.2},
    ),
}  # fmt: skip

#: key -> the test that sees its effect, where it is one on a console, a file or other processes.
ELSEWHERE = {
    "zero_optimization.offload_optimizer.pin_memory": "tests.test_effects.test_pageable_memory_is_refused",
    "zero_optimization.offload_param.pin_memory": "tests.test_effects.test_pageable_memory_is_refused",
    "zero_optimization.offload_optimizer.nvme_path": "tests.step.test_spilled_faults.test_two_states_on_one_path",
    "zero_optimization.offload_optimizer.verify": "tests.config.test_spill.test_each_key_reaches_the_plan",
    "zero_optimization.offload_optimizer.pipeline_read": "tests.config.test_spill.test_each_key_reaches_the_plan",
    "zero_optimization.offload_optimizer.pipeline_write": "tests.config.test_spill.test_each_key_reaches_the_plan",
    "zero_optimization.offload_param.nvme_path": "tests.config.test_spill.test_keys_of_params_reach_the_plan",
    "zero_optimization.offload_param.max_in_cpu": "tests.step.test_spilled_params.test_what_is_kept_in_host_memory",
    "zero_optimization.offload_param.buffer_count": "tests.config.test_spill.test_keys_of_params_reach_the_plan",
    "zero_optimization.offload_param.buffer_size": "tests.config.test_spill.test_keys_of_params_reach_the_plan",
    "activation_checkpointing.cpu_checkpointing": "tests.gather.test_residuals.test_the_key_moves_activations",
    "aio": "tests.config.test_spill.test_each_key_reaches_the_plan",
    "zero_optimization.zero_quantized_nontrainable_weights": (
        "tests.gather.test_frozen.test_what_is_stored_and_gathered_is_int8"
    ),
    "train_batch_size": "tests.config.test_batch.test_inference",
    "train_micro_batch_size_per_gpu": "tests.config.test_batch.test_inference",
    "gradient_accumulation_steps": "tests.config.test_batch.test_inference",
    "data_types.param_dtype": "tests.config.test_rules.test_each_is_refused_with_its_key_and_reason",
    "scheduler.type": "tests.config.test_schedules.test_warm_ups",
    "checkpoint.tag_validation": "tests.multihost.test_two_processes.test_two_processes_train_as_one",
    "steps_per_print": "tests.monitor.test_run.test_steps_per_print",
    "wall_clock_breakdown": "tests.monitor.test_run.test_wall_clock_breakdown_names_all_four_parts",
    "memory_breakdown": "tests.monitor.test_run.test_memory_breakdown_counts_live_arrays",
    "dump_state": "tests.monitor.test_run.test_dump_state_prints_every_value_in_force_and_the_plan",
    "tensorboard": "tests.monitor.test_run.test_tensorboard_gets_the_same_scalars",
    "csv_monitor": "tests.monitor.test_run.test_csv_holds_every_step_against_examples_seen",
    "wandb": "tests.monitor.test_run.test_wandb_gets_the_same_scalars",
    "flops_profiler": "tests.monitor.test_run.test_flops_are_those_of_the_program",
    "comms_logger": "tests.monitor.test_run.test_comms_logger_lists_the_collectives_of_the_step",
    "optimizer.params": "tests.config.test_optimizers.test_every_honoured_param_changes_the_trajectory",
}


def owner(key: keys.Key, table: dict[str, Any]) -> str | None:
    """The entry of a table for a key, or for a section that it stands in."""
    names = [".".join(key.path[:n]) for n in range(len(key.path), 0, -1)]
    return next((name for name in names if name in table), None)


def test_every_honoured_key_is_seen_by_a_test() -> None:
    rates = {f"scheduler.params.{name}[{kind}]" for kind, (first, _) in RATES.items() for name in first}
    unseen = [
        str(key)
        for key in HONOURED
        if str(key) not in rates and not any(owner(key, table) for table in (STEP, ELSEWHERE))
    ]
    assert not unseen
    known = {str(key) for key in HONOURED} | {".".join(key.path[:n]) for key in HONOURED for n in (1, 2)}
    assert {*STEP, *ELSEWHERE} <= known  # nothing here is out of date
    for path in set(ELSEWHERE.values()):
        module, _, function = path.rpartition(".")
        assert callable(getattr(importlib.import_module(module), function)), path


@pytest.mark.parametrize("name", STEP)
def test_a_key_changes_the_step_its_state_or_its_plan(name: str) -> None:
    beside, first, second = STEP[name]
    assert step_of(name, first, **beside) != step_of(name, second, **beside)


@pytest.mark.parametrize("section", ["offload_optimizer", "offload_param"])
def test_pageable_memory_is_refused(section: str) -> None:
    zero = zj.Zero(stage=3, **{section: {"device": "cpu", "pin_memory": False}})
    with pytest.raises(zj.PlanError, match='"pin_memory": false cannot be honoured'):
        zj.make_plan({"w": np.ones((64, 64), np.float32)}, optax.sgd(0.1), zj.make_mesh(), zero)


def step_of(name: str, value: Any, **beside: Any) -> tuple[str, str, str]:
    data: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "steps_per_print": None,
    }
    for dotted, given in {**beside, name: value}.items():
        put(data, tuple(dotted.split(".")), given)
    return lowered(json.dumps(data), any(word in name for word in LARGE))


def twice(params: Any, batch: Any) -> jax.Array:
    """The same params in two rematerialised layers."""

    @jax.checkpoint
    def layer(x: jax.Array) -> jax.Array:
        return jnp.tanh(jnp.tanh(x @ params["w"]) @ params["v"].T @ params["v"])

    return jnp.mean(layer(layer(batch["x"])).astype(jnp.float32) ** 2)


@functools.cache
def lowered(text: str, large: bool) -> tuple[str, str, str]:
    """The step's program, its plan, and the first state of the scaler."""
    width = 64 if large else 8
    params = {"w": np.ones((width, width), np.float32), "v": np.ones((width // 2, width), np.float32)}
    engine = zj.initialize(twice, params, text, mesh=zj.make_mesh(node=2, local=4) if large else None)
    batch = engine._prepare({"x": np.ones((engine.batch_sizes.train, width), np.float32)}, None)
    program = engine._step.lower(engine.state, batch).as_text()
    return program, str(engine.plan) + str(engine.plan.memory()), str(jax.device_get(engine.state.scale))


def configured(kind: str, params: dict[str, Any]) -> zj.Config:
    optimizer = {"type": "AdamW", "params": {"lr": 0.1}}
    return zj.Config.load({"optimizer": optimizer, "scheduler": {"type": kind, "params": params}})


def rates(kind: str, params: dict[str, Any]) -> list[float]:
    schedule = configured(kind, params).make_schedule()
    assert schedule is not None
    return [float(rate) for rate in schedule(jnp.arange(30))]


def led_to(kind: str, params: dict[str, Any]) -> np.ndarray:
    """Where thirty updates lead."""
    tx = configured(kind, params).make_optimizer()
    assert tx is not None

    def update(carry: Any, grad: jax.Array) -> tuple[Any, None]:
        updates, state = tx.update(grad, carry[1], carry[0])
        return (optax.apply_updates(carry[0], updates), state), None

    grads = jnp.asarray(oracle.normal(np.random.default_rng(1), 30, 4))
    (end, _), _ = jax.lax.scan(update, (jnp.ones(4), tx.init(jnp.ones(4))), grads)
    return np.asarray(end)


@pytest.mark.parametrize("kind", RATES)
def test_a_key_changes_the_rate_or_where_it_leads(kind: str) -> None:
    first, second = RATES[kind]
    honoured = {key.name for key in HONOURED if key.kind == kind and key.path[0] == "scheduler"}
    assert set(first) == set(second) == honoured
    for name, value in second.items():
        see = led_to if "mom" in name else rates
        assert not np.allclose(see(kind, first), see(kind, first | {name: value}), rtol=1e-6, atol=0), name
