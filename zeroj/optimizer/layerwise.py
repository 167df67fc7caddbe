"""Updates made in the backward pass: a stack of layers is updated in the loop that makes its gradients.

Where nothing waits for all gradients (no clipping, no check that they are finite), a layer's state can come to the
device while its gradient is made, and go back while the next layer's is: so the copies hide behind the backward pass,
and no gradient of a whole stack ever lives. For updates that are elementwise and mix no leaves; the others stay where
they were, after the backward pass (see :mod:`zeroj.optimizer.stream`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from zeroj import _compat
from zeroj.collectives import memory
from zeroj.gather.sinks import Made, Taking
from zeroj.optimizer.flow import Const, Flow, Op, run_op, value_of
from zeroj.optimizer.norms import squares_of
from zeroj.optimizer.partition import SMALL
from zeroj.optimizer.pieces import ELEMENTWISE, leaf_bytes, piece_bytes
from zeroj.optimizer.stream import DEFAULT_BUFFERS
from zeroj.optimizer.update import as_dtype, unflatten
from zeroj.optimizer.zero import ZeroOptimizer
from zeroj.plan.plan import ParamLeaf, Plan

#: The owner of inputs that are not known where gradients arise.
LATER = -1


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
    update = _LayerUpdate(tx.user_tx, plan)
    found = update.leaves()
    if not found:
        return None
    inner = plan.state_treedef.flatten_up_to(opt_state.inner)
    masters = plan.treedef.flatten_up_to(opt_state.master) if plan.has_master else []
    by_path = {leaf.path: masters[i] for i, leaf in enumerate(plan.leaves)} if masters else {}
    values = {
        leaf.path: (
            *([by_path[leaf.path]] if masters else []),
            *(v for v, s in zip(inner, plan.state_leaves, strict=True) if s.owner == leaf.path),
        )
        for leaf in found
    }
    also = [v for v, s in zip(inner, plan.state_leaves, strict=True) if not s.owner]

    def make(
        path: str,
        stored: tuple[jax.Array, ...],
        param: jax.Array,
        also: Sequence[jax.Array],
        applied: jax.Array | None,
    ) -> LayerSink:
        return LayerSink(stored, param, update, path, tuple(also), applied)

    return Taking(values, {leaf.path: leaf.placement.zero_spec for leaf in found}, also, make)


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
        return tuple(memory.put_layer(*pair, self.at) for pair in zip(self.stacks, self.last, strict=True))


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
        also: the state that belongs to no leaf.
        applied: bool scalar; where it is False everything stays as it is. None: the update is always made.
        within: of a layer: the loop around it.
        ahead: of a layer: the next one's param, if it is in host memory; on the device.
        unread: of a layer: whether ``value`` and ``ahead`` are still to be read.
    """

    value: tuple[jax.Array, ...]
    param: jax.Array
    update: _LayerUpdate
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


class _LayerUpdate:
    """An update of shards of layers: traced as a whole, then evaluated for one leaf."""

    def __init__(self, tx: optax.GradientTransformationExtraArgs, plan: Plan) -> None:
        self.tx, self.plan = tx, plan
        self.live = [leaf for leaf in plan.leaves if leaf.trainable]
        self.by_path = {leaf.path: leaf for leaf in self.live}
        self.number = {leaf.path: j for j, leaf in enumerate(self.live)}
        self.stacks = {leaf.path for leaf in self.live if self._is_stack_away(leaf)}
        self.flow = functools.cache(self._flow)

    def leaves(self) -> list[ParamLeaf]:
        """The leaves that may be updated so, if all their layers together take no more than the pieces of a stream."""
        if not self.stacks:
            return []
        try:
            flow = self.flow(1)
        except (TypeError, ValueError):  # a transformation that knows the shapes of its leaves
            return []
        found = [
            self.by_path[path] for path in self.by_path if path in self.stacks and self._alone(flow, path)
        ]
        at_once = sum(leaf_bytes(self.plan, leaf) / leaf.shape[0] for leaf in found)
        return found if at_once <= DEFAULT_BUFFERS * piece_bytes(self.plan) else []

    def __call__(
        self,
        path: str,
        grad: jax.Array,
        stored: Sequence[jax.Array],
        param: jax.Array,
        also: Sequence[jax.Array],
        applied: jax.Array | None,
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """The new param and what is stored beside it, of a leaf's layer.

        Args:
            path: the leaf.
            grad: the layer's gradient, this device's shard, as the optimizer is to see it.
            stored: its master, if it has one of its own, and its state, on the device.
            param: its stored param, on the device.
            also: the state that belongs to no leaf.
            applied: as in :class:`LayerSink`.
        """
        leaf, flow = self.by_path[path], self.flow(len(self.by_path[path].shape) - grad.ndim)
        state = list(stored[1:] if self.plan.has_master else stored)
        master = stored[0] if self.plan.has_master else param
        known = dict(zip(self._inputs(path), [master, grad, *state], strict=True))
        known |= dict(zip(self._unowned(), also, strict=True))
        targets = [flow.outs[i] for i in self._outputs(path)]
        for op in flow.closure([t for t in targets if isinstance(t, int)], known):
            known.update(run_op(op, known, known.__getitem__))
        new = [value_of(t, known, known.__getitem__) for t in targets]
        if applied is not None:
            before = (master, *state)
            new = [
                x if old is None else jnp.where(applied, x, old) for x, old in zip(new, before, strict=True)
            ]
        after = as_dtype(new[0], self.plan.param_dtype(leaf))
        if applied is not None and self.plan.has_master:
            after = jnp.where(applied, after, param)
        return after, tuple(new if self.plan.has_master else new[1:])

    # -- what is what --------------------------------------------------------------------------------

    def _is_stack_away(self, leaf: ParamLeaf) -> bool:
        """Whether all its state lies in host memory, laid out as the leaf is, layer by layer and without padding."""
        state = [s for s in self.plan.state_leaves if s.owner == leaf.path]
        place = leaf.placement
        return (
            leaf.stack
            and bool(leaf.state_memory)
            and len(leaf.shape) > 1
            and leaf.shape[0] > 0
            and place.padded == place.shape
            and all(dim > 0 for dim, _ in place.dims)
            and all(
                s.of == leaf.path and s.placement.memory and s.placement.dims == place.dims for s in state
            )
        )

    def _inputs(self, path: str) -> list[int]:
        """Numbers of the inputs that belong to a leaf: its master, its gradient, its state."""
        j = self.number[path]
        return [j, len(self.live) + j, *(len(self.live) + i for i in self._outputs(path)[1:])]

    def _outputs(self, path: str) -> list[int]:
        """Numbers of the outputs that belong to a leaf: its master, its state."""
        first = len(self.live)
        state = [first + i for i, s in enumerate(self.plan.state_leaves) if s.owner == path]
        return [self.number[path], *state]

    def _unowned(self) -> list[int]:
        first = 2 * len(self.live)
        return [first + i for i, s in enumerate(self.plan.state_leaves) if not s.owner]

    def _alone(self, flow: Flow, path: str) -> bool:
        """Whether a leaf's results are elementwise in its own inputs, and nothing else is made of those."""
        number, own = self.number[path], self._outputs(path)
        targets = [flow.outs[i] for i in own]
        others = [out for i, out in enumerate(flow.outs) if i not in own]
        if any(isinstance(t, Const) or flow.made_from(t) != {number} for t in targets):
            return False
        if any(number in flow.made_from(out) for out in others if not isinstance(out, Const)):
            return False
        shape = self._local(self.by_path[path].placement.padded, path, 1)

        def simple(op: Op) -> bool:
            shapes = [flow.shape(v) for v in (*op.operands, *op.outputs)]
            elementwise = op.name in ELEMENTWISE and all(s in ((), shape) for s in shapes)
            return elementwise or all(s == () for s in shapes)

        return all(map(simple, flow.closure([t for t in targets if isinstance(t, int)], {})))

    def _local(self, shape: Sequence[int], path: str, depth: int) -> tuple[int, ...]:
        """The shape of one device's shard of a layer; ``depth`` loops have sliced it. Of other leaves, ``shape``."""
        if path not in self.stacks:
            return tuple(shape)
        local = list(shape)
        for dim, axes in self.by_path[path].placement.dims:
            local[dim] //= math.prod(self.plan.mesh.shape[axis] for axis in axes)
        return tuple(local[depth:])

    def _flow(self, depth: int) -> Flow:
        """The update of shards of layers, and of the other leaves in the user's shapes."""
        plan, n = self.plan, len(self.live)
        shapes = [self._local(leaf.shape, leaf.path, depth) for leaf in self.live]
        masters = [
            jax.ShapeDtypeStruct(s, plan.master_dtype(x)) for s, x in zip(shapes, self.live, strict=True)
        ]
        grads = [
            jax.ShapeDtypeStruct(s, plan.precision.seen(x.dtype))
            for s, x in zip(shapes, self.live, strict=True)
        ]
        inner = [
            jax.ShapeDtypeStruct(self._local(s.placement.shape, s.owner, depth), s.dtype)
            for s in plan.state_leaves
        ]
        loss = jax.ShapeDtypeStruct((), jnp.float32)

        def update(values: list[Any]) -> tuple[list[Any], list[Any]]:
            before, seen = unflatten(plan, values[:n]), unflatten(plan, values[n : 2 * n])
            state = plan.state_treedef.unflatten(values[2 * n : -1])
            updates, after = self.tx.update(seen, state, before, value=values[-1], grad=seen)
            new = plan.treedef.flatten_up_to(optax.apply_updates(before, updates))
            flat = [v for v, leaf in zip(new, plan.leaves, strict=True) if leaf.trainable]
            kept = plan.state_treedef.flatten_up_to(after)
            return (
                [as_dtype(v, plan.master_dtype(x)) for v, x in zip(flat, self.live, strict=True)],
                [as_dtype(v, s.dtype) for v, s in zip(kept, plan.state_leaves, strict=True)],
            )

        program, _ = _compat.trace(update, [*masters, *grads, *inner, loss])
        owners = [self.number.get(s.owner) for s in plan.state_leaves]
        return Flow(program, [*range(n), *range(n), *owners, LATER], SMALL)
