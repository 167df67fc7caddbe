"""The update of optimizer state that lives in host memory: piece by piece through the device.

What mixes leaves comes first. Then one piece is read while another is updated and another is written back. A
barrier ties each read to the update a few pieces before, so that only so much is on the device at a time. All of
it is part of the one compiled step; the update itself runs on the device, and the host only holds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax

from zeroj import _compat
from zeroj.gather.sinks import Made
from zeroj.optimizer.partition import SplitUpdate, split_update
from zeroj.optimizer.pieces import Piece, cuts_of, in_order, piece_bytes, piece_plan, same_operations
from zeroj.optimizer.update import Arrays, as_params, updated
from zeroj.plan.plan import Plan

#: What is still to be done with (a gradient that waited in host memory, the dtype of its leaf).
Finish = Callable[[jax.Array, np.dtype], jax.Array]

#: Pieces on the device at a time unless buffer_count says otherwise: read, updated, written back.
DEFAULT_BUFFERS = 3


def streamed(
    tx: optax.GradientTransformationExtraArgs,
    plan: Plan,
    arrays: Arrays,
    grads: list[jax.Array],
    applied: jax.Array | None,
    extra: dict[str, Any],
    finish: Finish | None = None,
    made: Mapping[int, Made] | None = None,
    order: Sequence[int] = (),
) -> Arrays:
    """The update of a plan that keeps optimizer state in host memory; see :func:`zeroj.optimizer.update.updated`.

    ``made`` has the leaves that the backward pass updated, by number among the trainable ones; ``order`` all of these
    in the order in which their gradients are there, where that counts. Every array of host
    memory that the update needs is read once and written once, unless the transformation
    mixes leaves after it has used its state: what it mixes is then read before, too.
    """
    return _Stream(tx, plan, arrays, grads, applied, extra, finish, made or {}).run(order)


class _Stream:
    """One update while it is traced: arrays are replaced as their pieces are updated."""

    def __init__(
        self,
        tx: optax.GradientTransformationExtraArgs,
        plan: Plan,
        arrays: Arrays,
        grads: list[jax.Array],
        applied: jax.Array | None,
        extra: dict[str, Any],
        finish: Finish | None,
        made: Mapping[int, Made],
    ) -> None:
        self.plan = plan
        self.made = made
        self.finish = finish or (lambda grad, dtype: grad)
        self.away = [j not in made and _compat.is_on_host(grad) for j, grad in enumerate(grads)]
        self.live = [leaf for leaf in plan.leaves if leaf.trainable]
        self.params = list(arrays.params)
        self.numbers = [n for n, leaf in enumerate(plan.leaves) if leaf.trainable]
        flat, tree = jax.tree.flatten((applied, extra))
        treedef: Any = tree
        grad_index = {id(grad): len(self.live) + j for j, grad in enumerate(grads)}
        others = [value for value in flat if id(value) not in grad_index]
        #: The update's inputs: masters, gradients, state, and the rest; the first and third are replaced.
        self.values = [*arrays.masters, *grads, *arrays.inner, *others]
        self.count, self.inner_at = len(self.live), 2 * len(self.live)

        def update(plan: Plan, values: list[Any]) -> Any:
            n, end = self.count, self.inner_at + len(arrays.inner)
            rest = iter(values[end:])
            again = [values[grad_index[id(v)]] if id(v) in grad_index else next(rest) for v in flat]
            applied, extra = treedef.unflatten(again)
            return updated(tx, plan, values[:n], values[n : 2 * n], values[2 * n : end], applied, extra)

        owners = self._owners(len(others))
        #: The leaf of each output, or None.
        self.belongs = [*owners[: self.count], *owners[self.inner_at :]]
        self.split = _take_apart(update, plan, self._structs(plan), owners)
        self.cuts = cuts_of(plan, self.split, piece_bytes(plan))
        self.by_piece = self.split
        self.pieces_plan = piece_plan(plan, self.split, self.cuts)
        if self.cuts:
            self.by_piece = _take_apart(update, self.pieces_plan, self._structs(self.pieces_plan), owners)
            if not same_operations(self.split.flow, self.by_piece.flow):
                self.cuts, self.by_piece, self.pieces_plan = {}, self.split, plan

    def run(self, order: Sequence[int]) -> Arrays:
        """Updates everything; leaves in ``order``, as far as it is given."""
        shared, outs = self.split.shared(self._read())
        later = dict(outs)  # what several leaves read stays as it was until all have
        pending: deque[tuple[Piece, dict[int, Any]]] = deque()
        rank = {j: at for at, j in enumerate(order)}
        turns = [max((rank.get(j, 0) for j in members), default=0) for members in self.split.groups]
        for piece in in_order(turns, self.cuts, lambda g: not self._on_host(g)):
            if self.made.keys() & set(self.split.groups[piece.group]):
                continue
            if self._on_host(piece.group):
                self._make_room(piece, pending)
            made = self.by_piece.part(piece.group, self._read(piece), shared)
            own = {i: value for i, value in made.items() if self.belongs[i] is not None}
            later |= {i: value for i, value in made.items() if self.belongs[i] is None}
            pending.append((piece, own))
            if not self._on_host(piece.group):
                self._write(*pending.pop())
        while pending:
            self._write(*pending.popleft())
        for index, value in later.items():
            self._replace(index, value, None)
        self._take_made()
        self._settle()
        end = self.inner_at + len(self.plan.state_leaves)
        masters = self.values[: self.count] if self.plan.has_master else self.params
        return Arrays(self.params, masters, self.values[self.inner_at : end])

    def _take_made(self) -> None:
        """Puts what the backward pass updated in its place."""
        for j, made in self.made.items():
            stored, own = list(made.stored), self.belongs[self.count :]
            self.params[j] = made.param
            if self.plan.has_master:
                self.values[j] = stored.pop(0)
            places = [i for i, owner in enumerate(own) if owner == j]
            for i, value in zip(places, stored, strict=True):
                self.values[self.inner_at + i] = value

    def _settle(self) -> None:
        """Keeps params that were written in pieces where they live: XLA may choose another place for the whole."""
        for j, leaf in enumerate(self.live):
            if not leaf.param_memory:
                place = self.plan.sharding(self.plan.param_placement(leaf))
                self.params[j] = jax.lax.with_sharding_constraint(self.params[j], place)

    def _make_room(self, piece: Piece, pending: deque[tuple[Piece, dict[int, Any]]]) -> None:
        """Writes back what was updated, and holds the reads of ``piece`` until it was."""
        ahead = max(1, self._buffers() - 1)
        done: list[Piece] = []
        while len(pending) >= ahead or any(other.group == piece.group for other, _ in pending):
            self._write(*pending[0])
            done.append(pending.popleft()[0])
        if not done:
            return
        hosts = [i for i in self.split.inputs[piece.group] if self._memory(i)]
        own = () if self.plan.has_master else self.split.groups[piece.group]
        updated = sorted({k for other in done for k in self.split.groups[other.group]} - set(own))
        held, params = jax.lax.optimization_barrier(
            ([self._get(i) for i in hosts], [self.params[k] for k in updated])
        )
        for i, value in zip(hosts, held, strict=True):
            self._set(i, value)
        for k, value in zip(updated, params, strict=True):
            self.params[k] = value

    def _buffers(self) -> int:
        part = self.plan.zero.offload_optimizer
        given = part is not None and "buffer_count" in part.model_fields_set
        return part.buffer_count if part is not None and given else DEFAULT_BUFFERS

    # -- reading and writing -------------------------------------------------------------------------

    def _read(self, piece: Piece | None = None) -> Callable[[int], jax.Array]:
        """Reads inputs whole, or a piece of those that belong to its leaf; from the host to the device."""

        def read(index: int) -> jax.Array:
            value = self._get(index)
            if piece is not None and piece.cut and index in self.split.inputs[piece.group]:
                value = jax.lax.dynamic_slice_in_dim(value, piece.start, piece.cut.size, piece.cut.dim)
            if not self._memory(index):
                return value
            value = jax.device_put(value, jax.memory.Space.Device)
            if self.count <= index < self.inner_at:
                return self.finish(value, self.live[index - self.count].dtype)
            return value

        return read

    def _write(self, piece: Piece, made: dict[int, Any]) -> None:
        for index, value in made.items():
            self._replace(index, value, piece)

    def _replace(self, output: int, value: jax.Array, piece: Piece | None) -> None:
        """Puts one output in its place: a master also gives the stored param."""
        if output >= self.count:
            index = output + self.count  # gradients stand between masters and state
            self.values[index] = self._put(self.values[index], value, index, piece)
            return
        leaf = self.pieces_plan.leaves[self.numbers[output]]
        (param,) = as_params(self.pieces_plan, [leaf], [value])
        if leaf.param_memory:
            param = jax.device_put(param, jax.memory.Space.Host)
        self.params[output] = _put(self.params[output], param, piece)
        if self.plan.has_master:
            self.values[output] = self._put(self.values[output], value, output, piece)

    def _put(self, old: jax.Array, new: jax.Array, index: int, piece: Piece | None) -> jax.Array:
        if self._memory(index):
            new = jax.device_put(new, jax.memory.Space.Host)
        return _put(old, new, piece)

    def _get(self, index: int) -> jax.Array:
        """The current value of an input; a master that is the param itself is updated as that."""
        return self.params[index] if index < self.count and not self.plan.has_master else self.values[index]

    def _set(self, index: int, value: jax.Array) -> None:
        if index < self.count and not self.plan.has_master:
            self.params[index] = value
        else:
            self.values[index] = value

    # -- what is what --------------------------------------------------------------------------------

    def _on_host(self, group: int) -> bool:
        return any(self._memory(i) for i in self.split.inputs[group])

    def _memory(self, index: int) -> str:
        """The memory kind of an input, or empty."""
        if index < self.count:
            return self.plan.master_placement(self.live[index]).memory
        if index < self.inner_at:
            return self.live[index - self.count].state_memory if self.away[index - self.count] else ""
        place = index - self.inner_at
        if 0 <= place < len(self.plan.state_leaves):
            return self.plan.state_leaves[place].placement.memory
        return ""

    def _owners(self, others: int) -> list[int | None]:
        number = {leaf.path: j for j, leaf in enumerate(self.live)}
        own = list(range(self.count))
        return [*own, *own, *(number.get(s.owner) for s in self.plan.state_leaves), *[None] * others]

    def _structs(self, plan: Plan) -> list[jax.ShapeDtypeStruct]:
        """The inputs' shapes under ``plan``, on the device."""
        live = [leaf for leaf in plan.leaves if leaf.trainable]
        masters = [
            (plan.master_placement(x) if plan.has_master else plan.param_placement(x)).padded for x in live
        ]
        grads = [plan.grad_placement(x).padded for x in live]
        inner = [s.placement.padded for s in plan.state_leaves]
        shapes = [*masters, *grads, *inner]
        shapes += [v.shape for v in self.values[len(shapes) :]]
        dtypes = [v.dtype for v in self.values]
        for j, leaf in enumerate(live):
            if self.away[j]:  # what `finish` makes of it
                dtypes[self.count + j] = plan.precision.seen(leaf.dtype)
        return [jax.ShapeDtypeStruct(*pair) for pair in zip(shapes, dtypes, strict=True)]


def _put(old: jax.Array, new: jax.Array, piece: Piece | None) -> jax.Array:
    """A whole array replaced, or a piece of it in place."""
    if piece is None or piece.cut is None:
        return new
    return jax.lax.dynamic_update_slice_in_dim(old, new, piece.start, piece.cut.dim)


def _take_apart(
    update: Callable[[Plan, list[Any]], Any], plan: Plan, structs: list[Any], owners: list[int | None]
) -> SplitUpdate:
    program, _ = _compat.trace(lambda values: update(plan, values), structs)
    live = sum(leaf.trainable for leaf in plan.leaves)
    inner = owners[2 * live : 2 * live + len(plan.state_leaves)]
    return split_update(program, owners, [*owners[:live], *inner])
