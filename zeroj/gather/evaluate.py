"""The loss alone over sharded params, with the same gather on use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from zeroj.gather import inputs
from zeroj.gather import loss as losses
from zeroj.gather.means import over_devices
from zeroj.plan.plan import Plan


def evaluate(
    loss_fn: Callable[..., Any], plan: Plan, params: Any, batch: Any, rng: jax.Array, *, has_aux: bool = False
) -> tuple[jax.Array, Any]:
    """(loss, aux) of the global batch; aux is reduced as for the gradient.

    Args:
        loss_fn: the user's loss.
        plan: where the params live.
        params: stored params.
        batch: leaves of shape (global batch, ...).
        rng: a key, folded per device.
        has_aux: whether the loss must return (loss, aux).
    """
    leaves = inputs.check_params(plan, params)
    inputs.check_batch(plan, batch)

    def local(leaves: list[jax.Array], batch: Any, rng: jax.Array) -> tuple[jax.Array, Any]:
        (key,) = inputs.microbatch_keys(plan, rng, 1)
        program, out_shape = losses.loss_program(
            loss_fn,
            plan.treedef.unflatten([inputs.whole_struct(plan, leaf) for leaf in plan.leaves]),
            jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch),
            jax.ShapeDtypeStruct((), key.dtype),
            has_aux=has_aux,
        )
        walker = inputs.interpreter(plan)
        args = [*inputs.lazy_leaves(plan, leaves), *jax.tree.leaves(batch), key]
        outs = walker.force(walker.run(program, args, [None] * len(program.jaxpr.outvars)))
        head = jax.tree.unflatten(jax.tree.structure(out_shape), outs)
        loss, _, aux = over_devices(head, plan.zero_axes, plan.degree)
        return loss + walker.gathers.token(), aux

    return jax.shard_map(
        local,
        mesh=plan.mesh,
        in_specs=(
            [plan.param_placement(leaf).zero_spec for leaf in plan.leaves],
            inputs.batch_specs(plan, batch),
            PartitionSpec(),
        ),
        out_specs=PartitionSpec(),
        axis_names=set(plan.zero_axes),
        check_vma=False,
    )(leaves, batch, rng)
