"""zeroj in a step of your own: two lines change, marked (1) and (2)."""

import jax
import jax.numpy as jnp
import optax
from devices import request_devices

import zeroj as zj

request_devices(8)  # where there is no accelerator, simulate 8 devices


def init_fn():
    keys = jax.random.split(jax.random.key(0), 2)
    return {
        "up": 0.1 * jax.random.normal(keys[0], (64, 512)),
        "down": 0.1 * jax.random.normal(keys[1], (512, 1)),
    }


def loss_fn(params, batch):
    return jnp.mean((jnp.tanh(batch["x"] @ params["up"]) @ params["down"] - batch["y"]) ** 2)


@jax.jit
def step(params, opt_state, batch):
    loss, grads = zj.value_and_grad(loss_fn, plan)(params, batch)  # (1) was jax.value_and_grad(loss_fn)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


tx = optax.adamw(3e-3)
plan = zj.make_plan(jax.eval_shape(init_fn), tx, zj.make_mesh(), zj.Zero(stage=3))
tx = zj.wrap_optimizer(tx, plan)  # (2)

params = zj.shard_params(plan, init_fn())
opt_state = jax.jit(tx.init, out_shardings=plan.opt_state)(params)

x = jax.random.normal(jax.random.key(1), (256, 64))
batch = {"x": x, "y": jnp.sin(x.sum(axis=1, keepdims=True))}
losses = []
for _ in range(40):
    params, opt_state, loss = step(params, opt_state, batch)
    losses.append(float(loss))

print(plan)
print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
print(f"'up' is {params['up'].shape}, on one device {params['up'].addressable_shards[0].data.shape}")
