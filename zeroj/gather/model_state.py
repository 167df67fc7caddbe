"""What a model carries from step to step beside its params: running statistics, counters, random streams.

The rule, where every device runs on its own slice of the batch: all start a step from the same state, each
carries it through its own micro-batches, and at the end of the step floats are averaged over devices, integers
and booleans are the largest of any device (counters agree anyway), and a random key, of which each device sees
its own fold, moves on by one fold. Over the global batch the state is what the loss returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zeroj.errors import PlanError
from zeroj.plan import tree
from zeroj.plan.mesh import traced_on
from zeroj.plan.plan import Plan


def everywhere(plan: Plan, state: Any) -> Any:
    """The first state, on every device of every process.

    Args:
        plan: the plan.
        state: a tree of arrays and random keys, the same in every process, or a function of nothing that makes it.
    """
    if callable(state):
        return jax.jit(traced_on(plan.mesh, state), out_shardings=plan.replicated)()
    leaves, treedef = jax.tree.flatten(state)
    kinds = [jax.random.key_impl(x) if _is_key(jnp.asarray(x)) else None for x in leaves]
    words = [
        np.asarray(x if k is None else jax.random.key_data(x)) for x, k in zip(leaves, kinds, strict=True)
    ]

    def make(words: list[jax.Array]) -> Any:
        pairs = zip(words, kinds, strict=True)
        return jax.tree.unflatten(
            treedef, [x if kind is None else jax.random.wrap_key_data(x, impl=kind) for x, kind in pairs]
        )

    return jax.jit(traced_on(plan.mesh, make), out_shardings=plan.replicated)(words) if leaves else state


def enter(state: Any, axes: Sequence[str]) -> Any:
    """The state as this device's program sees it.

    Args:
        state: the carried state.
        axes: the ZeRO axes inside ``shard_map``; none over the global batch.
    """
    split = _split(axes)
    if not split:
        return state
    index = jax.lax.axis_index(split)
    return jax.tree.map(lambda x: jax.random.fold_in(x, index) if _is_key(x) else x, state)


def leave(carried: Any, found: Any, axes: Sequence[str], degree: int) -> Any:
    """The state to carry on, the same on every device.

    Args:
        carried: the state before the step.
        found: what this device's last micro-batch returned.
        axes: the ZeRO axes; none over the global batch.
        degree: the number of devices along them.
    """
    split = _split(axes)

    def one(before: Any, after: Any) -> Any:
        if _is_key(before):
            return jax.random.fold_in(before, 0)
        if jnp.issubdtype(before.dtype, jnp.inexact):
            return jax.lax.psum(after / degree, split)
        return jax.lax.pmax(after.astype(jnp.int32), split).astype(before.dtype)

    return jax.tree.map(one, carried, found) if split else found


def fit(carried: Any, found: Any) -> Any:
    """What the loss returned, in the dtypes of what it was given.

    Raises:
        PlanError: another tree or other shapes; lists every leaf that differs.
    """
    before, structure = tree.flatten(carried)
    after, returned = tree.flatten(found)
    faults = [f"missing: {path}" for path in before.keys() - after.keys()]
    faults += [f"new: {path}" for path in after.keys() - before.keys()]
    faults += [
        f"{path}: shape {after[path].shape}, given {before[path].shape}"
        for path in before.keys() & after.keys()
        if after[path].shape != before[path].shape
        or _is_key(after[path].value) != _is_key(before[path].value)
    ]
    if not faults and structure != returned:
        faults = [f"the tree {returned}, given {structure}"]
    if faults:
        raise PlanError(
            "loss_fn must return the model_state that it was given, with new values; it differs:\n  - "
            + "\n  - ".join(sorted(faults))
        )
    return jax.tree.map(lambda a, b: b if _is_key(a) else jnp.asarray(b, a.dtype), carried, found)


def _split(axes: Sequence[str]) -> tuple[str, ...]:
    return tuple(axis for axis in axes if jax.lax.axis_size(axis) > 1)


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
