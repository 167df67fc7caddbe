"""The update of optimizer state that lies in files: part by part, each read, updated on the device, written.

The whole update is taken apart into what mixes leaves and a part for each leaf (see
:mod:`zeroj.optimizer.partition`). Each part is a compiled program of its own; parts of one shape share one. A leaf
whose files are cut, and whose update is elementwise, is updated piece by piece, by one program. Reads run ahead and
writes run behind, as the settings say, with a bounded number of bytes of host memory.
"""

from __future__ import annotations

import math
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

import jax
import numpy as np
import optax

from zeroj import _compat
from zeroj.optimizer.flow import Flow, Op, run_op, value_of
from zeroj.optimizer.norms import Unfinished
from zeroj.optimizer.partition import SplitUpdate, split_update
from zeroj.optimizer.pieces import file_cuts, piece_plan, same_operations
from zeroj.optimizer.rooms import Rooms
from zeroj.optimizer.spill_layout import Inputs, Layout, Part
from zeroj.optimizer.spill_pass import Pass
from zeroj.optimizer.update import Arrays, as_params, updated
from zeroj.plan.cuts import Cut
from zeroj.plan.mesh import traced_on
from zeroj.plan.plan import Plan
from zeroj.plan.rules import NVME
from zeroj.spill.buffers import Arenas, round_up
from zeroj.spill.tier import is_spilled

#: Threads that bring updated parts from the device to the files.
WRITERS = 2


class SpilledUpdate:
    """The update of a plan with spilled state, taken apart and compiled at the first use.

    Attributes:
        buffer_bytes: host memory that streaming takes at most on this process, in bytes: ``buffer_count`` times
            the largest part.

    Args:
        tx: the transformation.
        plan: where everything lives.
        donate: whether the memory of what is updated may be reused.
        accumulation: micro-batches of which the gradients are.
    """

    def __init__(
        self,
        tx: optax.GradientTransformationExtraArgs,
        plan: Plan,
        donate: bool = True,
        accumulation: int = 1,
    ) -> None:
        settings = plan.spill or plan.spill_params
        assert settings is not None
        self.plan, self.donate, self.settings, self.accumulation = plan, donate, settings, accumulation
        self.layout = self.pieces = Layout(plan)
        self.split = self.by_piece = self._take_apart(tx, self.layout)
        cuts = self._cuts(tx)
        groups = range(len(self.split.groups))
        away = [g for g in groups if self._off_device(g)]
        self.resident = self._part(tuple(g for g in groups if g not in away))
        self.parts = [self._part((g,), cuts.get(g)) for g in away]
        largest = max((self._host_bytes(p) for p in self.parts), default=0)
        self.buffer_bytes = self.settings.buffer_count * largest
        self.arenas = Arenas(self.buffer_bytes)
        self.rooms = Rooms() if plan.mesh.devices.flat[0].platform == "cpu" else None
        self.writers = ThreadPoolExecutor(WRITERS, thread_name_prefix="zeroj-spill-writer")
        self._programs: dict[str, Any] = {}
        self._compiled: dict[Part, Any] = {}
        self._shared_program: Any = None
        self._shared_order: list[int] = []

    def begin(self, arrays: Arrays) -> Pass:
        """Begins to read, if reads may run ahead; the gradients need not be there yet."""
        return Pass(self, arrays)

    def shared(self, values: list[Any], left: Unfinished) -> tuple[list[Any], dict[int, Any]]:
        """What the parts need of each other, in the order of ``_shared_order``; and the outputs of no leaf."""
        needed = [*self.split.shared_inputs]
        free = [i for i, owner in enumerate(self.layout.owners) if owner is None]
        at = {i: n for n, i in enumerate([*needed, *free])}
        if self._shared_program is None:

            def run(given: list[Any], left: Unfinished) -> Any:
                return self.split.shared(lambda i: self._on_device(i, given[at[i]], left))

            structs = [self.layout.gradient(i, self.accumulation) or self.layout.struct(i) for i in at]
            known, _ = jax.eval_shape(traced_on(self.plan.mesh, run), structs, left)
            self._shared_order = list(known)
            shardings = (
                dict.fromkeys(known, self.plan.replicated),
                {i: self.layout.out_shardings(i)[0] for i in self.split.shared_outputs},
            )
            self._shared_program = jax.jit(traced_on(self.plan.mesh, run), out_shardings=shardings)
        given = [self.to_devices(i, values[i]) for i in at]  # but gradients, which the program brings itself
        known, outs = self._shared_program(given, left)
        return [known[v] for v in self._shared_order], outs

    def to_devices(self, index: int, value: Any) -> Any:
        """An input, whole, on the devices."""
        if is_spilled(value):
            return value.to_devices()
        return (
            jax.device_put(value, self.layout.struct(index).sharding) if self.layout.memory(index) else value
        )

    def _on_device(self, index: int, value: Any, left: Unfinished) -> Any:
        """Of an input that a program was given, what the update sees: a gradient may be in host memory."""
        if self.layout.gradient(index, self.accumulation) is None:
            return value
        value = jax.device_put(value, jax.memory.Space.Device)
        if not self.layout.as_it_came(index, self.accumulation):
            return value
        return left.finish(value, self.layout.live[index - self.layout.count].dtype, self.plan.precision)

    def program(self, part: Part, shared: list[Any], left: Unfinished) -> Any:
        """The compiled program of a part: (*Inputs, shared, old, room, left, start) -> outputs in order.

        Of a part that is cut it makes one piece: ``start`` is where along the cut's dim that begins. What lies in
        files comes and goes as that piece, all else whole, and so do the params in ``old``, whose memory it reuses;
        as it does that of :meth:`room`.
        """
        if part not in self._compiled:
            self._compiled[part] = self._compile(part, shared, left)
        return self._compiled[part]

    def _compile(self, part: Part, shared: list[Any], left: Unfinished) -> Any:
        jitted, structs = self.jitted(part, shared, left)
        lowered = jitted.lower(*structs)
        text = lowered.as_text()
        if text not in self._programs:
            self._programs[text] = lowered.compile()
        return self._programs[text]

    def jitted(self, part: Part, shared: list[Any], left: Unfinished) -> tuple[Any, list[Any]]:
        """A part's program before it is compiled, and its arguments' shapes."""
        inputs, flow = self.inputs_of(part), self._flow(part)
        order = [*inputs.donated, *inputs.kept, *inputs.free]
        ops = flow.closure(flow.values(part.outputs), dict.fromkeys(self._shared_order))
        kept_alive, old = self._used_elsewhere(part, ops), self.updated_in_place(part)

        def run(donated: list[Any], kept: list[Any], free: list[Any], *rest: Any) -> Any:
            shared, params, _, left, start = rest
            given = dict(zip(order, [*donated, *kept, *free], strict=True))
            before = dict(zip(old, params, strict=True))
            get = lambda i: self._on_device(i, self._piece_of(part, i, given[i], start), left)  # noqa: E731
            known = dict(zip(self._shared_order, shared, strict=True))
            for op in ops:
                known.update(run_op(op, known, get))
            made = {n: value_of(flow.outs[n], known, get) for n in part.outputs}
            results = [
                v for n, value in made.items() for v in self._outputs(part, n, value, before, given, start)
            ]
            return results, ([known[v] for v in kept_alive], left)  # which is a second use, too

        structs: list[Any] = [[self._given(part, i) for i in some] for some in inputs]
        scalar = lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=self.plan.replicated)  # noqa: E731
        structs.append([scalar(v) for v in shared])
        structs.append([self.layout.param_struct(n) for n in old])
        structs.append([] if self.rooms is None else self.room(part))
        structs.append(jax.tree.map(scalar, left))
        structs.append(jax.ShapeDtypeStruct((), np.int32))
        away = self.rooms is None  # results for files leave the device in page-locked memory
        shardings = [s for output in part.outputs for s in self.layout.out_shardings(output, away)]
        jitted = jax.jit(
            traced_on(self.plan.mesh, run),
            donate_argnums=(0, 4, 5),
            keep_unused=True,  # as the room is
            out_shardings=(shardings, self.plan.replicated),
        )
        return jitted, structs

    def inputs_of(self, part: Part) -> Inputs:
        """A part's inputs."""
        layout = self.layout

        def fresh(index: int) -> bool:
            memory = layout.memory(index)  # of what lies in files, a result goes elsewhere than its input was
            return memory != NVME and (self.donate or bool(memory))

        is_grad = lambda i: layout.count <= i < layout.inner_at  # noqa: E731
        donated = [i for i in part.inputs if not is_grad(i) and fresh(i)]
        kept = [i for i in part.inputs if i not in donated]
        return Inputs(donated, kept, [i for i, owner in enumerate(self.layout.owners) if owner is None])

    def updated_in_place(self, part: Part) -> list[int]:
        """Of a part that is cut, the leaves whose stored params are not in files, nor their own masters."""
        if part.cut is None or not self.plan.has_master:
            return []
        return [n for n in part.outputs if n < self.layout.count and self.layout.param_memory(n) != NVME]

    def room(self, part: Part) -> list[jax.ShapeDtypeStruct]:
        """What of a part's results, or of those of one piece, goes into files."""
        layout, pieces, found = self.layout, self.pieces if part.cut else self.layout, []
        for n in part.outputs:
            index = n if n < layout.count else n + layout.count
            if n < layout.count and layout.param_memory(n) == NVME:
                found.append(pieces.param_struct(n))
            if layout.memory(index) == NVME and (n >= layout.count or self.plan.has_master):
                found.append(pieces.struct(index))
        return found

    def _given(self, part: Part, index: int) -> jax.ShapeDtypeStruct:
        """An input as the part's program takes it."""
        piece = part.cut is not None and self.layout.memory(index) == NVME
        away = self.layout.gradient(index, self.accumulation)
        if away is not None:
            return away
        return (self.pieces if piece else self.layout).struct(index)

    def _piece_of(self, part: Part, index: int, value: Any, start: Any) -> Any:
        """The piece of an input that is updated now."""
        cut = part.cut
        if cut is None or index not in part.inputs or self.layout.memory(index) == NVME:
            return value
        return jax.lax.dynamic_slice_in_dim(value, start, cut.size, cut.dim)

    def _flow(self, part: Part) -> Flow:
        return (self.split if part.cut is None else self.by_piece).flow

    def _used_elsewhere(self, part: Part, ops: list[Op]) -> list[int]:
        """Numbers that this part uses once and the whole update more often.

        XLA divides by a number that is used once by multiplying with its reciprocal, and so rounds otherwise than
        in a program of all leaves. Such numbers become results of the part, which is a second use.
        """
        flow, same = self._flow(part), self._same

        def uses(ops: list[Op], outs: list[Any]) -> Counter[int]:
            return Counter(
                same.get(v, v) for v in [*(v for op in ops for v in op.operands), *outs] if type(v) is int
            )

        here, whole = uses(ops, [flow.outs[n] for n in part.outputs]), uses(flow.ops, flow.outs)
        mine = {same.get(v, v): v for op in ops for v in (*op.operands, *op.outputs) if type(v) is int}
        return [mine[v] for v, n in here.items() if n == 1 and whole[v] > 1 and flow.shape(v) == ()]

    @cached_property
    def _same(self) -> dict[int, int]:
        """Numbers that are computed again for every leaf -> the first of them, as XLA finds them."""
        first: dict[Any, tuple[int, ...]] = {}
        same: dict[int, int] = {}
        for op in self.split.flow.ops:
            if all(self.split.flow.shape(v) == () for v in op.outputs):
                operands = tuple(same.get(v, v) if isinstance(v, int) else id(v.value) for v in op.operands)
                known = first.setdefault((op.name, operands), op.outputs)
                same.update(zip(op.outputs, known, strict=False))
        return same

    def _outputs(
        self, part: Part, output: int, value: Any, old: dict[int, Any], given: dict[int, Any], start: Any
    ) -> list[Any]:
        """What a part's program gives for one output; where it is a piece of what is not in files, the whole."""
        layout, cut = self.layout, part.cut

        def put(new: Any, before: Any, memory: str) -> Any:
            if cut is None or memory == NVME:
                return new
            return jax.lax.dynamic_update_slice_in_dim(before, new, start, cut.dim)

        if output >= layout.count:
            index = output + layout.count
            return [put(value, given.get(index), layout.memory(index))]
        pieces = self.pieces if cut else layout
        (param,) = as_params(pieces.plan, [pieces.live[output]], [value])
        before = old.get(output, given.get(output))
        param = put(param, before, layout.param_memory(output))
        return [
            param,
            *([put(value, given.get(output), layout.memory(output))] if self.plan.has_master else []),
        ]

    def _part(self, groups: tuple[int, ...], cut: Cut | None = None) -> Part:
        inputs = sorted({i for g in groups for i in self.split.inputs[g]})
        outputs = sorted({i for g in groups for i in self.split.outputs[g]})
        return Part(groups, tuple(inputs), tuple(outputs), cut)

    def _cuts(self, tx: optax.GradientTransformationExtraArgs) -> dict[int, Cut]:
        """Group -> cut, and the update of leaves that have the shape of one piece."""
        cuts = {g: cut for g, cut in file_cuts(self.plan, self.split).items() if self._off_device(g)}
        if not cuts:
            return {}
        pieces = Layout(piece_plan(self.plan, self.split, cuts))
        by_piece = self._take_apart(tx, pieces)
        if not same_operations(self.split.flow, by_piece.flow):
            return {}
        self.pieces, self.by_piece = pieces, by_piece
        return cuts

    def _off_device(self, group: int) -> bool:
        """Whether anything that a group's update changes does not live on the devices."""
        layout = self.layout
        params = [layout.param_memory(n) for n in self.split.outputs[group] if n < layout.count]
        return any([*map(layout.memory, self.split.inputs[group]), *params])

    def _host_bytes(self, part: Part) -> int:
        """What is read for a part, and params that are written beside their masters."""
        layout, total = self.layout, 0
        structs = [self._given(part, i) for i in part.inputs if layout.memory(i) == NVME]
        if self.plan.has_master:
            made = [n for n in part.outputs if n < layout.count and layout.param_memory(n) == NVME]
            structs += [(self.pieces if part.cut else layout).param_struct(n) for n in made]
        for struct in structs:
            shard = struct.sharding.shard_shape(struct.shape)
            each = round_up(jax.numpy.dtype(struct.dtype).itemsize * math.prod(shard))
            indices = struct.sharding.addressable_devices_indices_map(struct.shape).values()
            total += each * len({str(index) for index in indices})
        return total

    def _take_apart(self, tx: optax.GradientTransformationExtraArgs, layout: Layout) -> SplitUpdate:
        plan = layout.plan

        def update(values: list[Any]) -> Any:
            n = layout.count
            masters, grads, inner = values[:n], values[n : 2 * n], values[layout.inner_at : layout.end]
            loss = values[layout.end]
            rest = iter(grads)
            tree = plan.treedef.unflatten([next(rest) if x.trainable else None for x in plan.leaves])
            return updated(tx, plan, masters, grads, inner, None, {"value": loss, "grad": tree})

        structs = [
            jax.ShapeDtypeStruct(s.shape, s.dtype) for s in map(layout.struct, range(len(layout.owners)))
        ]
        program, _ = _compat.trace(traced_on(plan.mesh, update), structs)
        return split_update(program, layout.owners, layout.out_owners)
