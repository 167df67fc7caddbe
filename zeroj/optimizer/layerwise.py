"""Updates made in the backward pass: a stack of layers is updated in the loop that makes its gradients.

Where nothing waits for all gradients (no clipping, no check that they are finite), a layer's state can come to the
device while its gradient is made, and go back while the next layer's is: so the copies hide behind the backward pass,
and no gradient of a whole stack ever lives. For updates that are elementwise and mix no leaves; the others stay where
they were, after the backward pass (see :mod:`zeroj.optimizer.stream`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from zeroj.collectives import memory
from zeroj.gather.host_gradients import squares_of
from zeroj.gather.sinks import Hold, Made, Taking
from zeroj.optimizer.layer_update import LayerUpdate, stored_of
from zeroj.optimizer.zero import ZeroOptimizer
from zeroj.plan.plan import Plan


def applies(plan: Plan) -> bool:
    """Whether a plan keeps optimizer state in host memory, and params and gradients alike in shards."""
    return plan.streams and not plan.spills and plan.stage.params and not plan.replica_axes


def taking(tx: ZeroOptimizer, opt_state: Any) -> Taking | None:
    """The leaves that can be updated in the backward pass; None: there are none.

    Args:
        tx: the wrapped transformation, of a plan at stage 3 that keeps optimizer state in host memory.
        opt_state: its state, traced.
    """
    plan = tx.plan
    update = LayerUpdate(tx.user_tx, plan)
    found = update.leaves()
    if not found:
        return None
    inner = plan.state_treedef.flatten_up_to(opt_state.inner)
    values = stored_of(plan, opt_state, [leaf.path for leaf in found])

    def make(
        path: str,
        stored: tuple[jax.Array, ...],
        param: jax.Array,
        also: Sequence[jax.Array],
        applied: jax.Array | None,
    ) -> LayerSink:
        return LayerSink(stored, param, update, path, tuple(also), applied)

    return Taking(
        values, {leaf.path: leaf.placement.zero_spec for leaf in found}, update.counters(inner), make
    )


class Carried(NamedTuple):
    """What a loop carries of a leaf.

    The results of a layer leave the device at the beginning of the next layer's iteration, and what that one updates
    comes when its first gradient is there: so each way has about half of the iteration to hide behind. In the first
    iteration nothing waits yet: what is written is the first layer as it was.

    Attributes:
        stacks: the sum of squares of each layer's gradient; the arrays of :class:`LayerSink`; the param, if it is in
            host memory.
        last: the results of the layer before, on the device.
        at: whose they are.
        step: how far it is from a layer to the next one that the loop works on.
        ahead: this layer's param, if it is in host memory; on the device.
    """

    stacks: tuple[jax.Array, ...]
    last: tuple[jax.Array, ...]
    at: jax.Array
    step: jax.Array
    ahead: jax.Array | None

    def written(self) -> tuple[jax.Array, ...]:
        """The stacks with the results that wait in their place."""
        return memory.put_layers(self.stacks, self.last, self.at)


class Within(NamedTuple):
    """The loop around a layer: its stacks, the layer's index and the next one's, and the step between them."""

    stacks: tuple[jax.Array, ...]
    at: jax.Array
    onward: jax.Array
    step: jax.Array


@dataclass(frozen=True)
class LayerSink:
    """What updates one leaf, or a layer of it, with a gradient as it arises.

    Attributes:
        value: the master, if it has one of its own, and the state; of a layer, on the device.
        param: the stored param; of a layer, on the device.
        update: how.
        path: the leaf.
        also: the counters of the transformation's state, see :meth:`LayerUpdate.counters`.
        applied: bool scalar; where it is False everything stays as it is. None: the update is always made.
        within: of a layer: the loop around it.
        ahead: of a layer: the next one's param, if it is in host memory; on the device.
        unread: of a layer: whether ``value`` and ``ahead`` are still to be read.
    """

    value: tuple[jax.Array, ...]
    param: jax.Array
    update: LayerUpdate
    path: str
    also: tuple[jax.Array, ...]
    applied: jax.Array | None
    within: Within | None = None
    ahead: jax.Array | None = None
    unread: bool = False

    @property
    def shard(self) -> jax.Array | None:
        """The param, if it is in host memory: changed in place there, while on the device the loop makes a new stack.

        XLA would bring a new stack in host memory to the device and back, to where the old one was.
        """
        return self.param if self.update.by_path[self.path].param_memory else None

    def start(self, first: int, step: int) -> Carried:
        """What a loop carries at first."""
        sink = self.after(self.param) if self.unread else self
        at, layers = jnp.int32(first), sink.param.shape[0]
        stacks = (
            jnp.zeros((layers,), jnp.float32),
            *sink.value,
            *([] if sink.shard is None else [sink.shard]),
        )
        last = tuple(memory.layer_of(x, at) for x in stacks)
        return Carried(stacks, last, at, jnp.int32(step), None if sink.shard is None else last[-1])

    def layer(self, stack: Carried, index: jax.Array) -> LayerSink:
        """That of one layer, of which nothing is read yet but its param."""
        index = index.astype(jnp.int32)
        stacks, param = stack.written(), stack.ahead
        if param is None:
            param = jax.lax.dynamic_index_in_dim(self.param, index, keepdims=False)
        onward = jnp.clip(index + stack.step, 0, stacks[0].shape[0] - 1)
        within = Within(stacks, index, onward, stack.step)
        return replace(self, value=(), param=param, within=within, unread=True)

    def after(self, value: jax.Array) -> LayerSink:
        """The same with the layer's state, and the next layer's param, which come when ``value`` is made."""
        if self.within is None:
            return self
        stacks, *indices, _ = self.within
        index, onward = jax.lax.optimization_barrier((*indices, value))[:2]
        held = stacks[1:] if self.shard is None else stacks[1:-1]
        state = tuple(memory.layer_of(x, index) for x in held)
        ahead = None if self.shard is None else memory.layer_of(stacks[-1], onward)
        return replace(self, value=state, ahead=ahead, unread=False)

    def due(self, hold: Hold) -> LayerSink:
        """The same with the layer's state passed through ``hold``.

        What waits for the gradient then waits for the state too: XLA would begin to read as late as it thinks will
        do, all layers' reads in a queue.
        """
        if self.within is None or self.unread:
            return self
        return replace(self, value=tuple(hold(self.value)))

    def plus(self, addend: jax.Array) -> Made:
        """Updates with the gradient of a layer; with that of a whole stack, layer by layer."""
        if self.within is None:
            return self._in_a_loop(addend)
        if self.unread:
            return self.after(addend).plus(addend)
        precision, dtype = self.update.plan.precision, self.update.by_path[self.path].dtype
        grad = addend.astype(precision.gradient(dtype)).astype(precision.seen(dtype))
        param, stored = self.update(self.path, grad, self.value, self.param, self.also, self.applied)
        return Made(param, squares_of(grad), stored)

    def put(self, made: Made) -> Carried:
        """The leaf's state with the results of the layer before in it; those of this one wait."""
        assert self.within is not None
        sink = self.after(made.squares) if self.unread else self
        last = (made.squares, *made.stored, *([] if self.shard is None else [made.param]))
        return Carried(self.within.stacks, last, self.within.at, self.within.step, sink.ahead)

    def given(self, made: Made) -> jax.Array | None:
        """The layer's new param, unless the loop carries it."""
        return made.param if self.shard is None else None

    def whole(self, carried: Carried, given: jax.Array | None) -> Made:
        """The leaf, updated."""
        squares, *stored = carried.written()
        param = stored.pop() if given is None else given
        return Made(param, jnp.sum(squares), tuple(stored))

    def _in_a_loop(self, grads: jax.Array) -> Made:
        """For a gradient that did not arise in a loop: one of its own, so that the device holds a layer at a time."""

        def body(stack: Carried, layer: tuple[jax.Array, jax.Array]) -> tuple[Carried, jax.Array | None]:
            index, grad = layer
            sink = self.layer(stack, index).after(grad)
            made = sink.plus(grad)
            return sink.put(made), self.given(made)

        return self.whole(*jax.lax.scan(body, self.start(0, 1), (jnp.arange(grads.shape[0]), grads)))
