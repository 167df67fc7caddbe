"""The update of one layer of a stack, taken out of a transformation that is elementwise and mixes no leaves.

The transformation is traced once, with one device's shards of layers in place of the stacks; of that program each
leaf's part is evaluated with what belongs to the leaf, and to no leaf. So it works inside a loop and ``shard_map``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from zeroj import _compat
from zeroj.optimizer.flow import Const, Flow, Op, run_op, value_of
from zeroj.optimizer.partition import SMALL
from zeroj.optimizer.pieces import ELEMENTWISE, leaf_bytes, piece_bytes
from zeroj.optimizer.stream import DEFAULT_BUFFERS
from zeroj.optimizer.update import as_dtype, flatten, unflatten
from zeroj.plan.leaves import StateLeaf
from zeroj.plan.plan import ParamLeaf, Plan

#: The owner of inputs that a layer cannot read: what is not known where gradients arise, arrays of no leaf.
LATER = -1


class LayerUpdate:
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
        param: jax.Array | None,
        also: Sequence[jax.Array],
        applied: jax.Array | None,
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """The new param and what is stored beside it, of a leaf's layer.

        Args:
            path: the leaf.
            grad: the layer's gradient, this device's shard, as the optimizer is to see it.
            stored: its master, if it has one of its own, and its state, on the device.
            param: its stored param, on the device. None, of one that has a master: it is the master's, rounded.
            also: the counters, see :meth:`counters`.
            applied: as in :class:`LayerSink`.
        """
        leaf, flow = self.by_path[path], self.flow(len(self.by_path[path].shape) - grad.ndim)
        state = list(stored[1:] if self.plan.has_master else stored)
        master = stored[0] if self.plan.has_master else param
        assert master is not None
        known = dict(zip(self._inputs(path), [master, grad, *state], strict=True))
        first = 2 * len(self.live)
        known |= dict(
            zip(self.counters(range(first, first + len(self.plan.state_leaves))), also, strict=True)
        )
        targets = [flow.outs[i] for i in self._outputs(path)]
        for op in flow.closure([t for t in targets if isinstance(t, int)], known):
            known.update(run_op(op, known, known.__getitem__))
        new = [value_of(t, known, known.__getitem__) for t in targets]
        if applied is not None:
            new = [jnp.where(applied, x, old) for x, old in zip(new, [master, *state], strict=True)]
        after = as_dtype(new[0], self.plan.param_dtype(leaf))
        if applied is not None and self.plan.has_master and param is not None:
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

    def counters(self, inner: Sequence[Any]) -> list[Any]:
        """Of the leaves of the transformation's state the scalars that belong to no leaf: what a layer may read."""
        return [v for v, s in zip(inner, self.plan.state_leaves, strict=True) if _is_counter(s)]

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
            flat = flatten(plan, optax.apply_updates(before, updates))
            kept = plan.state_treedef.flatten_up_to(after)
            return (
                [as_dtype(v, plan.master_dtype(x)) for v, x in zip(flat, self.live, strict=True)],
                [as_dtype(v, s.dtype) for v, s in zip(kept, plan.state_leaves, strict=True)],
            )

        program, _ = _compat.trace(update, [*masters, *grads, *inner, loss])
        owners = [None if _is_counter(s) else self.number.get(s.owner, LATER) for s in plan.state_leaves]
        return Flow(program, [*range(n), *range(n), *owners, LATER], SMALL)


def stored_of(plan: Plan, opt_state: Any, paths: Sequence[str]) -> dict[str, tuple[jax.Array, ...]]:
    """Path -> a leaf's master, if it has one of its own, and its optimizer state."""
    inner = plan.state_treedef.flatten_up_to(opt_state.inner)
    masters = plan.treedef.flatten_up_to(opt_state.master) if plan.has_master else []
    by_path = {leaf.path: masters[i] for i, leaf in enumerate(plan.leaves)} if masters else {}
    return {
        path: (
            *([by_path[path]] if masters else []),
            *(v for v, s in zip(inner, plan.state_leaves, strict=True) if s.owner == path),
        )
        for path in paths
    }


def _is_counter(state: StateLeaf) -> bool:
    return not state.owner and state.placement.shape == ()
