"""The update of optimizer state that lies in files: part by part, each read, updated on the device, written.

The whole update is taken apart into what mixes leaves and a part for each leaf (see
:mod:`zeroj.optimizer.partition`). Each part is a compiled program of its own; parts of one shape share one. Reads
run ahead and writes run behind, as the settings say, with a bounded number of bytes of host memory.
"""

from __future__ import annotations

import math
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import optax

from zeroj import _compat
from zeroj.optimizer.flow import Op, run_op, value_of
from zeroj.optimizer.partition import SplitUpdate, split_update
from zeroj.optimizer.spill_pass import Pass
from zeroj.optimizer.update import Arrays, as_params, updated
from zeroj.plan.mesh import traced_on
from zeroj.plan.plan import Plan
from zeroj.plan.rules import NVME, Placement
from zeroj.spill.buffers import Arenas, round_up
from zeroj.spill.tier import is_spilled

#: Threads that bring updated parts from the device to the files.
WRITERS = 2


@dataclass(frozen=True)
class Part:
    """What is updated by one program.

    Attributes:
        inputs: the update's inputs that it takes: masters, then gradients, then state, of its leaves.
        outputs: the update's outputs that it gives: masters, then state.
    """

    groups: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class Layout:
    """The inputs of an update by number: masters, gradients, state, the loss; and where each lives."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.numbers = [i for i, leaf in enumerate(plan.leaves) if leaf.trainable]
        self.live = [plan.leaves[i] for i in self.numbers]
        self.count, self.inner_at = len(self.live), 2 * len(self.live)
        self.end = self.inner_at + len(plan.state_leaves)
        names = {leaf.path: j for j, leaf in enumerate(self.live)}
        own = list(range(self.count))
        self.inner_owners = [names.get(s.owner) for s in plan.state_leaves]
        self.owners: list[int | None] = [*own, *own, *self.inner_owners, None]
        self.out_owners: list[int | None] = [*own, *self.inner_owners]

    def struct(self, index: int) -> jax.ShapeDtypeStruct:
        """An input on the device."""
        plan = self.plan
        if index >= self.end:
            return jax.ShapeDtypeStruct((), jax.numpy.float32, sharding=plan.replicated)
        if index >= self.inner_at:
            state = plan.state_leaves[index - self.inner_at]
            return self._struct(state.placement, state.dtype)
        leaf = self.live[index % self.count]
        if index >= self.count:
            return self._struct(plan.grad_placement(leaf), plan.precision.seen(leaf.dtype))
        if plan.has_master:
            return self._struct(plan.master_placement(leaf), plan.master_dtype(leaf))
        return self._struct(plan.param_placement(leaf), plan.param_dtype(leaf))

    def out_shardings(self, output: int) -> list[Any]:
        """Of what a part gives for one output: a master comes with the param that is made from it."""
        plan = self.plan
        if output >= self.count:
            return [self.struct(output + self.count).sharding]
        leaf = self.live[output]
        master = [self.struct(output).sharding] if plan.has_master else []
        return [plan.sharding(plan.param_placement(leaf).at("")), *master]

    def _struct(self, placement: Placement, dtype: Any) -> jax.ShapeDtypeStruct:
        sharding = self.plan.sharding(placement.at(""))
        return jax.ShapeDtypeStruct(placement.padded, dtype, sharding=sharding)


class SpilledUpdate:
    """The update of a plan with spilled state, taken apart and compiled at the first use.

    Attributes:
        buffer_bytes: host memory that streaming takes at most on this process, in bytes: ``buffer_count`` times
            the largest part.
    """

    def __init__(self, tx: optax.GradientTransformationExtraArgs, plan: Plan, donate: bool = True) -> None:
        assert plan.spill is not None
        self.plan, self.donate, self.settings = plan, donate, plan.spill
        self.layout = Layout(plan)
        self.split = self._take_apart(tx)
        spilled = self._spilled_inputs()
        groups = range(len(self.split.groups))
        in_files = [g for g in groups if spilled & set(self.split.inputs[g])]
        rest = tuple(g for g in groups if g not in in_files)
        self.resident = self._part(rest)
        self.parts = [self._part((g,)) for g in in_files]
        largest = max((self._host_bytes(p, spilled) for p in self.parts), default=0)
        self.buffer_bytes = self.settings.buffer_count * largest
        self.arenas = Arenas(self.buffer_bytes)
        self.writers = ThreadPoolExecutor(WRITERS, thread_name_prefix="zeroj-spill-writer")
        self._programs: dict[str, Any] = {}
        self._compiled: dict[Part, Any] = {}
        self._shared_program: Any = None
        self._shared_order: list[int] = []

    def begin(self, arrays: Arrays) -> Pass:
        """Begins to read, if reads may run ahead; the gradients need not be there yet."""
        return Pass(self, arrays)

    def shared(self, values: list[Any]) -> tuple[list[Any], dict[int, Any]]:
        """What the parts need of each other, in the order of ``_shared_order``; and the outputs of no leaf."""
        needed = [*self.split.shared_inputs]
        free = [i for i, owner in enumerate(self.layout.owners) if owner is None]
        at = {i: n for n, i in enumerate([*needed, *free])}
        if self._shared_program is None:

            def run(given: list[Any]) -> Any:
                return self.split.shared(lambda i: given[at[i]])

            structs = [self.layout.struct(i) for i in at]
            known, _ = jax.eval_shape(traced_on(self.plan.mesh, run), structs)
            self._shared_order = list(known)
            shardings = (
                dict.fromkeys(known, self.plan.replicated),
                {i: self.layout.out_shardings(i)[0] for i in self.split.shared_outputs},
            )
            self._shared_program = jax.jit(traced_on(self.plan.mesh, run), out_shardings=shardings)
        given = [_read(values[i]) for i in at]
        known, outs = self._shared_program(given)
        return [known[v] for v in self._shared_order], outs

    def program(self, part: Part, shared: list[Any]) -> Any:
        """The compiled program of a part: (donated inputs, others, free inputs, shared) -> outputs in order."""
        if part not in self._compiled:
            donated, kept, free = self.inputs_of(part)
            order = [*donated, *kept, *free]
            flow = self.split.flow
            ops = flow.closure(flow.values(part.outputs), dict.fromkeys(self._shared_order))
            kept_alive = self._used_elsewhere(part, ops)

            def run(donated: list[Any], kept: list[Any], free: list[Any], shared: list[Any]) -> Any:
                given = dict(zip(order, [*donated, *kept, *free], strict=True))
                known = dict(zip(self._shared_order, shared, strict=True))
                for op in ops:
                    known.update(run_op(op, known, given.__getitem__))
                made = {n: value_of(flow.outs[n], known, given.__getitem__) for n in part.outputs}
                results = [v for n, value in made.items() for v in self._outputs(n, value)]
                return results, [known[v] for v in kept_alive]

            structs = [[self.layout.struct(i) for i in some] for some in (donated, kept, free)]
            structs.append(
                [jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=self.plan.replicated) for v in shared]
            )
            shardings = [s for output in part.outputs for s in self.layout.out_shardings(output)]
            jitted = jax.jit(
                traced_on(self.plan.mesh, run),
                donate_argnums=(0,),
                out_shardings=(shardings, self.plan.replicated),
            )
            lowered = jitted.lower(*structs)
            text = lowered.as_text()
            if text not in self._programs:
                self._programs[text] = lowered.compile()
            self._compiled[part] = self._programs[text]
        return self._compiled[part]

    def inputs_of(self, part: Part) -> tuple[list[int], list[int], list[int]]:
        """A part's inputs: those whose memory it may reuse, other ones, and those of no leaf."""
        is_grad = lambda i: self.layout.count <= i < self.layout.inner_at  # noqa: E731
        spilled = self._spilled_inputs()
        donated = [i for i in part.inputs if not is_grad(i) and (self.donate or i in spilled)]
        kept = [i for i in part.inputs if i not in donated]
        return donated, kept, [i for i, owner in enumerate(self.layout.owners) if owner is None]

    def _used_elsewhere(self, part: Part, ops: list[Op]) -> list[int]:
        """Numbers that this part uses once and the whole update more often.

        XLA divides by a number that is used once by multiplying with its reciprocal, and so rounds otherwise than
        in a program of all leaves. Such numbers become results of the part, which is a second use.
        """
        flow, same = self.split.flow, self._same

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

    def _outputs(self, output: int, value: Any) -> list[Any]:
        if output >= self.layout.count:
            return [value]
        params = as_params(self.plan, [self.layout.live[output]], [value])
        return [*params, *([value] if self.plan.has_master else [])]

    def _part(self, groups: tuple[int, ...]) -> Part:
        inputs = sorted({i for g in groups for i in self.split.inputs[g]})
        outputs = sorted({i for g in groups for i in self.split.outputs[g]})
        return Part(groups, tuple(inputs), tuple(outputs))

    def _spilled_inputs(self) -> set[int]:
        layout, plan = self.layout, self.plan
        masters = {
            j
            for j, leaf in enumerate(layout.live)
            if plan.has_master and plan.master_placement(leaf).memory == NVME
        }
        return masters | {
            layout.inner_at + s for s, leaf in enumerate(plan.state_leaves) if leaf.placement.memory == NVME
        }

    def _host_bytes(self, part: Part, spilled: set[int]) -> int:
        total = 0
        for i in spilled & set(part.inputs):
            struct = self.layout.struct(i)
            shard = struct.sharding.shard_shape(struct.shape)
            each = round_up(jax.numpy.dtype(struct.dtype).itemsize * math.prod(shard))
            indices = struct.sharding.addressable_devices_indices_map(struct.shape).values()
            total += each * len({str(index) for index in indices})
        return total

    def _take_apart(self, tx: optax.GradientTransformationExtraArgs) -> SplitUpdate:
        plan, layout = self.plan, self.layout

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


def _read(value: Any) -> Any:
    return value.to_devices() if is_spilled(value) else value
