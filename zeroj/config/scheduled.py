"""A configured schedule on an optimizer of the user's own, whose state holds its learning rate."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from zeroj.errors import ConfigError


class ScheduledState(NamedTuple):
    """``updates``: int32 scalar, updates made so far; ``inner``: the optimizer's own state."""

    updates: jax.Array
    inner: Any


def scheduled(
    tx: optax.GradientTransformation, schedule: optax.Schedule, state: Any
) -> optax.GradientTransformationExtraArgs:
    """Gives every ``learning_rate`` in an optimizer's state the value of a schedule before each update.

    Args:
        tx: an optimizer made with ``optax.inject_hyperparams``, or with several of them, one for each group.
        schedule: update number -> learning rate. A skipped step is no update.
        state: the optimizer's state, or ShapeDtypeStructs of it.

    Returns:
        The optimizer; its state is a :class:`ScheduledState`.

    Raises:
        ConfigError: the state holds no ``learning_rate``.

    Example:
        >>> tx = optax.inject_hyperparams(optax.adamw)(learning_rate=0.0)
        >>> tx = scheduled(tx, config.make_schedule(), jax.eval_shape(tx.init, params))
    """
    rates = [rate for _, rate in optax.tree_utils.tree_get_all_with_path(state, "learning_rate")]
    if not rates:
        raise ConfigError(
            "The config has a section 'scheduler', and the state of the optimizer given as tx= holds no "
            "'learning_rate' that it could set. Make the optimizer with optax.inject_hyperparams, as in "
            "optax.inject_hyperparams(optax.adamw)(learning_rate=0.0); or with "
            "zj.Config.load(...).make_schedule() as its learning rate, and leave the section out."
        )
    inner = optax.with_extra_args_support(tx)

    def init(params: Any) -> ScheduledState:
        return ScheduledState(jnp.zeros((), jnp.int32), inner.init(params))

    def update(
        grads: Any, state: ScheduledState, params: Any = None, **extra: Any
    ) -> tuple[Any, ScheduledState]:
        rate = jnp.asarray(schedule(state.updates), rates[0].dtype)
        set_to = optax.tree_utils.tree_set(state.inner, learning_rate=rate)
        updates, after = inner.update(grads, set_to, params, **extra)
        return updates, ScheduledState(state.updates + 1, after)

    return optax.GradientTransformationExtraArgs(init, update)
