"""The loss alone over sharded params, with the same gather on use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from zeroj.gather import inputs
from zeroj.gather import loss as losses
from zeroj.gather import model_state as carried
from zeroj.gather.means import over_devices
from zeroj.gather.views import View
from zeroj.plan.plan import Plan


def evaluate(
    loss_fn: Callable[..., Any],
    plan: Plan,
    params: Any,
    batch: Any,
    rng: jax.Array,
    model_state: Any = (),
    *,
    view: View,
    has_aux: bool = False,
) -> tuple[jax.Array, Any]:
    """(loss, aux) of the global batch; aux is reduced as for the gradient.

    Args:
        loss_fn: the user's loss.
        plan: where the params live.
        params: stored params.
        batch: leaves of shape (global batch, ...).
        rng: a key, folded per device where the view is one device's.
        model_state: what the model carries from step to step; what the loss makes of it is dropped.
        view: what the loss sees of the batch.
        has_aux: whether the loss must return (loss, aux).
    """
    leaves = inputs.check_params(plan, params)
    inputs.check_batch(plan, batch)

    def program(
        leaves: list[jax.Array], batch: Any, rng: jax.Array, state: Any, *rest: Any
    ) -> tuple[Any, list[jax.Array], Any]:
        del rest  # no gradients: no errors of theirs, and nothing that takes them
        (key,) = view.keys(rng, 1)
        state = carried.enter(state, view.axes)
        traced, out_shape = losses.loss_program(
            loss_fn,
            plan.treedef.unflatten([inputs.whole_struct(plan, leaf) for leaf in plan.leaves]),
            losses.struct_of(batch),
            losses.struct_of(key),
            losses.struct_of(state),
            has_aux=has_aux,
        )
        walker = inputs.interpreter(plan, view)
        args = [*inputs.lazy_leaves(plan, leaves), *jax.tree.leaves(batch), key, *jax.tree.leaves(state)]
        outs = walker.force(walker.run(traced, args, [None] * len(traced.jaxpr.outvars)))
        head = jax.tree.unflatten(jax.tree.structure(out_shape), outs)
        loss, _, aux = over_devices(head, view.axes, view.degree)
        return (loss + walker.gathers.token(), aux), [], ()

    (loss, aux), _, _ = view.run(program, (leaves, batch, rng, model_state), [])
    return loss, aux
