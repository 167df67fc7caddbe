"""A step turned round: the update of its stacks of layers is made in the forward pass of the next step.

What a step's gradients are clipped by, and whether they are finite, is known when the last of them is made; after that
nothing is computed behind which the copies of optimizer state could hide. In the next step's forward pass there is:
each layer's state comes while the layer before it is worked on, and goes back while the next one is. The arithmetic is
that of the step, and so are its losses; between two steps the state is one update behind, see
:class:`zeroj.step.rotated.RotatedStep`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from zeroj.collectives import memory
from zeroj.gather.renewals import Renewed, Renewing
from zeroj.gather.sinks import Hold
from zeroj.optimizer.layer_update import LayerUpdate, stored_of
from zeroj.optimizer.norms import Unfinished
from zeroj.optimizer.zero import ZeroOptimizer


class Pending(NamedTuple):
    """An update that is still to be made. A pytree.

    Attributes:
        grads: path of a leaf -> its gradient as it came.
        left: what is left to do to it.
        counters: the scalars of the transformation's state before the update.
        applied: bool scalar; where it is False nothing is updated. None: everything is.
    """

    grads: dict[str, jax.Array]
    left: Unfinished
    counters: list[jax.Array]
    applied: jax.Array | None


def renewing(tx: ZeroOptimizer, opt_state: Any, pending: Pending) -> Renewing:
    """What the next step is to renew.

    Args:
        tx: the wrapped transformation.
        opt_state: its state, traced.
        pending: the update.
    """
    plan, update = tx.plan, LayerUpdate(tx.user_tx, tx.plan)
    paths = list(pending.grads)
    stored = stored_of(plan, opt_state, paths)

    def make(path: str, values: tuple[jax.Array, ...], param: jax.Array, also: Any) -> StackRenewal:
        left, counters, applied = also
        return StackRenewal(values[0], values[1:], param, update, path, left, tuple(counters), applied)

    return Renewing(
        {path: (pending.grads[path], *stored[path]) for path in paths},
        {path: update.by_path[path].placement.zero_spec for path in paths},
        (pending.left, pending.counters, pending.applied),
        make,
        {path: len(stored[path]) for path in paths},
    )


class Carried(NamedTuple):
    """What a loop over layers carries of a stack.

    Attributes:
        stacks: what is stored beside the param, and the param; changed in place, each in its memory.
        last: the results of the layer before, on the device: they leave it while this layer is worked on.
        at: whose they are.
        step: how far it is from a layer to the next one that the loop works on.
        ahead: this layer's gradient, and its slices of what is updated; on the device.
    """

    stacks: tuple[jax.Array, ...]
    last: tuple[jax.Array, ...]
    at: jax.Array
    step: jax.Array
    ahead: tuple[jax.Array, ...]

    def written(self) -> tuple[jax.Array, ...]:
        """The stacks with the results that wait in their place."""
        return memory.put_layers(self.stacks, self.last, self.at)


class Working(NamedTuple):
    """The same within an iteration.

    Attributes:
        before: what was carried into it; its ``ahead`` is that of the next layer, or empty: not read yet. Its ``last``
            is empty once it is written.
        made: this layer's results.
        number: its index.
    """

    before: Carried
    made: tuple[jax.Array, ...]
    number: jax.Array


@dataclass(frozen=True)
class StackRenewal:
    """Renews one stack of layers on one device.

    Attributes:
        grads: this device's shard of its gradient.
        stored: those of its master, if it has one of its own, and its state.
        param: that of its stored param.
        update: how.
        path: the leaf.
        left: what is left to do to the gradient.
        counters: see :meth:`LayerUpdate.counters`.
        applied: as in :class:`Pending`.
    """

    grads: jax.Array
    stored: tuple[jax.Array, ...]
    param: jax.Array
    update: LayerUpdate
    path: str
    left: Unfinished
    counters: tuple[jax.Array, ...]
    applied: jax.Array | None

    def start(self, first: int, step: int) -> Carried:
        """What a loop carries at first: in its first iteration it writes the first layer as it was."""
        at, stacks = jnp.int32(first), (*self.stored, self.param)
        last = tuple(memory.layer_of(x, at) for x in stacks)
        return Carried(stacks, last, at, jnp.int32(step), self._read(stacks, at))

    def layer(self, carried: Carried, index: jax.Array) -> tuple[jax.Array, Working]:
        """One layer's new param; nothing of the next layer is read yet."""
        index = index.astype(jnp.int32)
        grad, *values = carried.ahead
        stored, param = (values, None) if self.update.plan.has_master else (values[:-1], values[-1])
        new, made = self.update(self.path, self._seen(grad), stored, param, self.counters, self.applied)
        return new, Working(carried._replace(ahead=()), (*made, new), index)

    def due(self, working: Working, hold: Hold) -> Working:
        """The same with the next layer's slices, passed through ``hold``; what is to be written waits for them.

        Reads and writes meet on the way to the same stack: XLA makes one wait for the other.
        """
        before = self._ahead(working)
        held = hold((*before.ahead, *before.last))
        n = len(before.ahead)
        return working._replace(before=before._replace(ahead=tuple(held[:n]), last=tuple(held[n:])))

    def write_first(self, working: Working, hold: Hold) -> Working:
        """The same with the results of the layer before in their place, by the time for which ``hold`` stands."""
        before = working.before
        stacks = tuple(hold(before.written()))
        return working._replace(before=before._replace(stacks=stacks, last=()))

    def put(self, working: Working) -> Carried:
        """What the loop carries on: the results of the layer before are written, those of this one wait."""
        before = self._ahead(working)
        stacks = before.written() if before.last else before.stacks
        return before._replace(stacks=stacks, last=working.made, at=working.number)

    def _ahead(self, working: Working) -> Carried:
        """What is carried, with the next layer's slices."""
        before = working.before
        if before.ahead:
            return before
        onward = jnp.clip(working.number + before.step, 0, self.grads.shape[0] - 1)
        return before._replace(ahead=self._read(before.stacks, onward))

    def whole(self, carried: Carried) -> Renewed:
        """The stack after its last layer."""
        *stored, param = carried.written()
        return Renewed(param, tuple(stored))

    def at_once(self) -> Renewed:
        """In a loop of its own, so that the device holds two layers at a time."""

        def body(carried: Carried, index: jax.Array) -> tuple[Carried, None]:
            return self.put(self.layer(carried, index)[1]), None

        return self.whole(jax.lax.scan(body, self.start(0, 1), jnp.arange(self.grads.shape[0]))[0])

    def _read(self, stacks: tuple[jax.Array, ...], index: jax.Array) -> tuple[jax.Array, ...]:
        """A layer's gradient, and its slices of what is updated, on the device."""
        updated = stacks[:-1] if self.update.plan.has_master else stacks
        return tuple(memory.layer_of(x, index) for x in (self.grads, *updated))

    def _seen(self, grad: jax.Array) -> jax.Array:
        """A layer's gradient as the optimizer is to see it."""
        return self.left.finish(grad, self.update.by_path[self.path].dtype, self.update.plan.precision)
