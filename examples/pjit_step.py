"""A training loop of your own with zeroj's plan: accumulation, clipping and checkpoints written by hand.

    python examples/pjit_step.py --stage 2 --out out/pjit_step

All is plain JAX, optax and Orbax but for the plan, ``zj.value_and_grad`` and ``zj.wrap_optimizer``. The
script trains, saves, restores onto the same plan, and shows that both states go on alike.
"""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Callable
from typing import Any

import gpt
import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
import text
from devices import request_devices

import zeroj as zj

MICRO_BATCHES, CLIP_NORM = 2, 1.0

State = tuple[Any, Any]  # params and optimizer state, where the plan puts them


def make_step(loss_fn: Callable[..., Any], tx: Any, plan: Any) -> Callable[[State, Any], tuple[State, Any]]:
    """A jitted step: accumulate gradients over micro-batches, clip by the global norm, update."""
    loss_and_grads = zj.value_and_grad(loss_fn, plan)

    def step(state: State, batch: Any) -> tuple[State, Any]:
        params, opt_state = state

        def add(total: Any, micro: Any) -> tuple[Any, Any]:
            loss, grads = loss_and_grads(params, micro)
            total = jax.tree.map(jnp.add, total, grads)
            return jax.lax.with_sharding_constraint(total, plan.grads), loss

        micros = jax.tree.map(lambda x: x.reshape(MICRO_BATCHES, -1, *x.shape[1:]), batch)
        _, shapes = jax.eval_shape(loss_and_grads, params, jax.tree.map(lambda x: x[0], micros))
        zeros = jax.tree.map(lambda grad: jnp.zeros(grad.shape, grad.dtype), shapes)
        zeros = jax.lax.with_sharding_constraint(zeros, plan.grads)
        total, losses = jax.lax.scan(add, zeros, micros)
        norm = optax.tree.norm(total) / MICRO_BATCHES
        factor = jnp.minimum(1.0, CLIP_NORM / norm) / MICRO_BATCHES
        updates, opt_state = tx.update(jax.tree.map(lambda g: g * factor, total), opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), (losses.mean(), norm)

    return jax.jit(step, donate_argnums=0)


def save(folder: pathlib.Path, state: State) -> None:
    """Write the state with Orbax: each process writes its own shards."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder.absolute(), state, force=True)


def restore(folder: pathlib.Path, plan: Any) -> State:
    """Read a state back to where ``plan`` puts it."""
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(folder.absolute(), (plan.params_struct(), plan.opt_state_struct()))


def main() -> None:
    """Train, save, restore, compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stage", type=int, default=2, choices=range(4))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out/pjit_step"))
    args = parser.parse_args()
    request_devices(8)
    definition, init_fn = gpt.build(gpt.GPTConfig(layers=2, width=64, context=64))
    tx = optax.adamw(3e-3)
    plan = zj.make_plan(jax.eval_shape(init_fn), tx, zj.make_mesh(), zj.Zero(stage=args.stage))
    tx = zj.wrap_optimizer(tx, plan)
    step = make_step(gpt.make_loss_fn(definition), tx, plan)

    born = zj.init_state(init_fn, tx, plan)  # sharded from the start, so that nothing is ever whole
    state = born.params, born.opt_state
    batches = text.Batches(text.load().train, 32, 64)
    for number in range(args.steps):
        state, (loss, norm) = step(state, next(batches))
        if number % 5 == 0:
            print(f"step {number:>3}  loss {loss:.4f}  grad norm {norm:.3f}")

    save(args.out / "state", state)
    restored, batch = restore(args.out / "state", plan), next(batches)
    _, (loss, _) = step(state, batch)
    _, (loss_again, _) = step(restored, batch)
    print(f"next loss {loss:.6f}, from the checkpoint {loss_again:.6f}")
    if loss != loss_again:
        raise SystemExit("FAILED: the restored state goes on differently")


if __name__ == "__main__":
    main()
