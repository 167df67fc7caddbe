"""The few gradient transformations that optax has not, and the dtype that all of them compute in."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax


def scale_by_plain_adam(
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
) -> optax.GradientTransformation:
    """Adam without bias correction: `m / (sqrt(v + eps_root) + eps)`.

    Args:
        b1: decay of the first moment.
        b2: decay of the second moment.
        eps: added to the root.
        eps_root: added under it.

    Returns:
        A transformation with the state of `optax.scale_by_adam`.
    """
    adam = optax.scale_by_adam(b1, b2, eps, eps_root)

    def update(updates: optax.Updates, state: Any, params: Any = None) -> tuple[optax.Updates, Any]:
        _, state = adam.update(updates, state, params)
        scaled = jax.tree.map(lambda m, v: m / (jnp.sqrt(v + eps_root) + eps), state.mu, state.nu)
        return scaled, state

    return optax.GradientTransformation(adam.init, update)


def clip_trust_ratio(low: float, high: float) -> optax.GradientTransformation:
    """LAMB's layer-wise step: scale each leaf's update by `clip(|param| / |update|, low, high)`.

    Where either norm is zero, the update is left as it is. Source: You et al., arXiv 1904.00962, section 3,
    with the bounds of DeepSpeed's Lamb.

    Args:
        low: smallest ratio.
        high: largest ratio.

    Returns:
        A stateless transformation that needs params.
    """

    def scale(update: jax.Array, param: jax.Array) -> jax.Array:
        norm, size = jnp.linalg.norm(param.ravel()), jnp.linalg.norm(update.ravel())
        defined = (norm > 0) & (size > 0)
        return update * jnp.where(defined, jnp.clip(norm / jnp.where(defined, size, 1.0), low, high), 1.0)

    return optax.stateless(lambda updates, params: jax.tree.map(scale, updates, params))


def in_float32(tx: optax.GradientTransformation, state_dtype: Any = None) -> optax.GradientTransformation:
    """Let `tx` compute in fp32, whatever the dtype of params and gradients.

    optax keeps moments in the dtype of the params, and in bfloat16 an update of less than 1/256 is lost.

    Args:
        tx: any transformation.
        state_dtype: dtype in which state with dims is kept between updates; left out, fp32.

    Returns:
        A transformation whose updates are fp32; `optax.apply_updates` adds them in fp32 and casts the sum.
    """

    def init(params: optax.Params) -> Any:
        return _cast_state(tx.init(_to(params, jnp.float32)), state_dtype)

    def update(updates: optax.Updates, state: Any, params: Any = None) -> tuple[optax.Updates, Any]:
        up = _cast_state(state, jnp.float32) if state_dtype is not None else state
        low = None if params is None else _to(params, jnp.float32)
        updates, new = tx.update(_to(updates, jnp.float32), up, low)
        return updates, _cast_state(new, state_dtype)

    return optax.GradientTransformation(init, update)


def _to(tree: Any, dtype: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


def _cast_state(state: Any, dtype: Any) -> Any:
    """Cast the state's floating-point arrays; scalars (counts, hyperparameters) keep their dtype."""
    if dtype is None:
        return state
    return jax.tree.map(
        lambda x: x.astype(dtype) if x.ndim and jnp.issubdtype(x.dtype, jnp.floating) else x, state
    )
