"""Bringing a global batch onto the devices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from zeroj.errors import PlanError
from zeroj.gather.inputs import batch_specs, check_batch
from zeroj.plan.plan import Plan
from zeroj.plan.precision import Precision


def shard_batch(plan: Plan, batch: Any, size: int | None = None) -> Any:
    """Sends each device its slice of a global batch.

    Args:
        plan: the plan, whose ZeRO axes split the batch.
        batch: leaves (global batch, ...), numpy or jax arrays; the same on every process.
        size: what the global batch must be; left out, any size that the devices divide.

    Returns:
        The batch as global arrays, dim 0 over the ZeRO axes.

    Raises:
        PlanError: the sizes do not fit.
    """
    found = check_batch(plan, batch)
    if size is not None and found != size:
        raise PlanError(
            f"The batch has {found} examples, but train_batch_size is {size}: "
            "pass the whole global batch of one update, all micro-batches and devices together."
        )

    def place(x: Any, spec: Any) -> jax.Array:
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            return x
        sharding = NamedSharding(plan.mesh, spec)
        if jax.process_count() == 1:
            return jax.device_put(x, sharding)
        whole = np.asarray(x)
        return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])

    return jax.tree.map(place, batch, batch_specs(plan, batch))


def cast_floats(batch: Any, precision: Precision) -> Any:
    """The batch with its floating leaves in the compute dtype."""

    def cast(x: Any) -> Any:
        dtype = jnp.result_type(x)
        return x.astype(precision.compute(dtype)) if jnp.issubdtype(dtype, jnp.floating) else x

    return jax.tree.map(cast, batch)
