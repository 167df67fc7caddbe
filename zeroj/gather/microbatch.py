"""One micro-batch: the traced loss and gradient, walked with this device's shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from zeroj import _compat
from zeroj.collectives.quantized import Feedback
from zeroj.gather import host_sums
from zeroj.gather.host_gradients import HostGradient
from zeroj.gather.inputs import interpreter, lazy_leaves
from zeroj.gather.kept import Kept
from zeroj.gather.loss import LossOut
from zeroj.gather.reductions import Reduction, Reductions
from zeroj.gather.renewals import Renewed
from zeroj.gather.sinks import takers
from zeroj.gather.views import View
from zeroj.gather.where import Moves
from zeroj.plan.plan import Plan


@dataclass(frozen=True)
class MicroBatch:
    """What runs one micro-batch.

    Attributes:
        plan: where params and gradients live.
        view: what the loss sees of the batch.
        traced: the loss and its gradient.
        out_shape: what the loss returns, as shapes.
        reductions: how each gradient is summed over devices.
        wanted: per output of ``traced`` the reduction that is made here, or None.
        leaves: stored params, this device's shards.
        scale: fp32 scalar that the loss is multiplied by for the backward pass.
        count: gives the micro-batch's count from the program's inputs, or None.
        moves: what becomes of single leaves.
        taken: path -> this device's shards of the arrays that these work on.
        also: replicated arrays that they read.
        renewed: path -> what the first micro-batch renewed, which later ones use.
    """

    plan: Plan
    view: View
    traced: _compat.Program
    out_shape: Any
    reductions: Sequence[Reduction]
    wanted: Reductions
    leaves: list[jax.Array]
    scale: jax.Array
    count: Callable[[list[Any]], jax.Array] | None
    moves: Moves
    taken: dict[str, tuple[jax.Array, ...]]
    also: Any
    renewed: dict[str, Renewed] = field(default_factory=dict)

    def __call__(
        self, micro: Any, key: jax.Array, carry: Any, kept: Kept
    ) -> tuple[LossOut, list[Any], jax.Array]:
        """Runs it.

        Args:
            micro: its slice of the batch.
            key: its key.
            carry: (the model's state, LoCo's errors by path, whether those count, sums in host memory by path).
            kept: what is kept of gathers, to which it adds.

        Returns:
            What the loss returned, with the next ``carry`` as its model state; a gradient per trained leaf, None for
            those in the carry; a token.
        """
        state, errors, feeds, sums = carry
        pairs = zip(self.plan.leaves, self.leaves, strict=True)
        leaves = [self.renewed[leaf.path].param if leaf.path in self.renewed else x for leaf, x in pairs]
        beta = _beta(self.plan)
        walker = interpreter(self.plan, self.view)
        walker.gathers.kept = kept
        walker.errors = {path: Feedback(given, beta, self.scale, feeds) for path, given in errors.items()}
        inputs = [*jax.tree.leaves(micro), key, self.scale, *jax.tree.leaves(state)]
        values = [*lazy_leaves(self.plan, leaves), *inputs]
        weight = self.count(values) if self.count and (sums or self.moves.taking) else None
        walker.sinks = {path: host_sums.HostSum(value, weight) for path, value in sums.items()}
        precision = self.plan.precision
        dtypes = {
            x.path: precision.gradient(x.dtype) for x in self.plan.leaves if x.path in self.moves.leaving
        }
        walker.sinks |= {path: HostGradient(dtype) for path, dtype in dtypes.items()}
        if self.moves.renewing and not self.renewed:
            walker.renewals = self.moves.renewing.of(self.plan, self.taken, leaves, self.also)
        walker.sinks |= takers(self.plan, self.moves.taking, self.taken, leaves, self.also, weight)
        outs = walker.force(walker.run(self.traced, values, self.wanted))
        heads = len(jax.tree.leaves(self.out_shape))
        head = jax.tree.unflatten(jax.tree.structure(self.out_shape), outs[:heads])
        made = [g if r.into else r.away(g) for r, g in zip(self.reductions, outs[heads:], strict=True)]
        sums = {r.into: g for r, g in zip(self.reductions, made, strict=True) if r.into}
        left = {path: fed.left() for path, fed in walker.errors.items()}
        self.renewed.update(walker.renewals.rest())
        carry = head.model_state, left, jnp.ones_like(feeds) if left else feeds, sums
        return head._replace(model_state=carry), self._addends(made), walker.gathers.token()

    def _addends(self, made: Sequence[Any]) -> list[Any]:
        """The gradients in the accumulator's dtype; None for one that was taken where it arose."""
        live = [leaf for leaf in self.plan.leaves if leaf.trainable]
        return [
            None if r.into else widened(g, self.plan.precision.accumulator(x.dtype))
            for r, g, x in zip(self.reductions, made, live, strict=True)
        ]


def _beta(plan: Plan) -> float:
    """The share of an old error that stays in the running one."""
    loco = plan.zero.zeropp_loco_param
    return float(loco.err_beta) if loco else 0.0


def widened(grad: jax.Array, dtype: Any) -> jax.Array:
    """A gradient in ``dtype``; one in host memory as it is, to be cast where it is used."""
    return grad if _compat.is_on_host(grad) else grad.astype(dtype)
