"""Compile the example GPT's ZeRO-3 step, at 6.7 B params, for a cluster that is not here.

    pip install -e '.[aot]'
    JAX_PLATFORMS=cpu python examples/plan_cluster.py
    JAX_PLATFORMS=cpu zeroj plan plan_cluster:build --gpu h100 --nodes 8   (from the folder examples/)

Nothing of the model is allocated. Bytes and collectives are those of XLA:GPU's compiled program; only the time is
a model's.
"""

from __future__ import annotations

from typing import Any

import gpt
import jax
import jax.numpy as jnp
import optax

import zeroj as zj

SHAPE = gpt.GPTConfig(vocab_size=50304, context=2048, layers=32, heads=32, width=4096, remat=True)


def build(target: zj.aot.Target) -> tuple[Any, ...]:
    """The jitted step, its state and its batch as shapes: one sequence for each GPU of ``target``."""
    definition, init_fn = gpt.build(SHAPE)
    tx = optax.adamw(1e-4)
    plan = zj.make_plan(
        jax.eval_shape(init_fn), tx, target.mesh(), zj.Zero(stage=3), precision="bf16", scanned=["blocks"]
    )
    step = zj.make_train_step(gpt.make_loss_fn(definition), tx, plan, clip_norm=1.0)
    batch = {"tokens": jax.ShapeDtypeStruct((target.num_devices, SHAPE.context + 1), jnp.int32)}
    return step, zj.abstract_state(tx, plan), batch


if __name__ == "__main__":
    cluster = zj.aot.Target("h100", nodes=8, gpus_per_node=8)
    print(cluster.compile(*build(cluster)))
