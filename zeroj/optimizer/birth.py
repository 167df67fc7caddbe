"""The first state of a plan that keeps optimizer state in files, leaf by leaf, straight to its file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import optax

from zeroj import _compat
from zeroj.collectives import memory, plain
from zeroj.optimizer.partition import SplitUpdate, split_update
from zeroj.optimizer.update import as_params, store_state
from zeroj.optimizer.zero import first_state
from zeroj.plan import tree
from zeroj.plan.mesh import traced_on
from zeroj.plan.plan import Plan
from zeroj.plan.tree import ZeroOptState
from zeroj.spill.state import Spilled, spill_to_files


def born_in_files(
    tx: optax.GradientTransformation,
    plan: Plan,
    master_of: Callable[[int], Any],
    spilled: Spilled | None = None,
) -> tuple[Any, ZeroOptState]:
    """The first stored params and optimizer state.

    Args:
        tx: the user's transformation.
        plan: the plan.
        master_of: gives the master of a leaf of the plan, by index, on the devices; asked once for each, in
            order unless the transformation's init mixes leaves. A :class:`SpilledArray` that is already whole
            stays where it is.
        spilled: the files, where masters lie in them already; left out, they are made.

    Raises:
        SpillError: the files cannot be made or written.
    """
    spilled = spill_to_files(plan) if spilled is None else spilled
    return _Birth(tx, plan, master_of, spilled).run()


class _Birth:
    def __init__(self, tx: Any, plan: Plan, master_of: Callable[[int], Any], spilled: Spilled) -> None:
        self.tx, self.plan, self.master_of, self.spilled = tx, plan, master_of, spilled
        self.params: list[Any] = [None] * len(plan.leaves)
        self.masters: list[Any] = [None] * len(plan.leaves)
        self.inner: list[Any] = [None] * len(plan.state_leaves)

    def run(self) -> tuple[Any, ZeroOptState]:
        plan = self.plan
        if plan.concrete_init:
            self._all_at_once()
        else:
            self._leaf_by_leaf(self._take_apart())
        master = tree.trainable_only(plan, plan.treedef.unflatten(self.masters)) if plan.has_master else ()
        return plan.treedef.unflatten(self.params), ZeroOptState(
            master, plan.state_treedef.unflatten(self.inner)
        )

    def _take_apart(self) -> SplitUpdate:
        plan = self.plan

        def make(masters: list[Any]) -> Any:
            placements = [plan.master_placement(leaf).at("") for leaf in plan.leaves]
            views = [plain.unpad(m, p) for m, p in zip(masters, placements, strict=True)]
            state = self.tx.init(tree.trainable_only(plan, plan.treedef.unflatten(views)))
            return plan.state_treedef.flatten_up_to(store_state(plan, state))

        program, _ = _compat.trace(
            traced_on(plan.mesh, make), [self._struct(i) for i in range(len(plan.leaves))]
        )
        names = {leaf.path: i for i, leaf in enumerate(plan.leaves)}
        ends = [names.get(s.owner) for s in plan.state_leaves]
        return split_update(program, list(range(len(plan.leaves))), ends)

    def _leaf_by_leaf(self, split: SplitUpdate) -> None:
        shardings = [self.plan.sharding(s.placement.at("")) for s in self.plan.state_leaves]
        needed = {i: self._on_devices(self.master_of(i)) for i in split.shared_inputs}
        shared, outs = jax.jit(traced_on(self.plan.mesh, lambda given: split.shared(given.__getitem__)))(
            needed
        )
        for i, value in outs.items():
            self._keep_state(i, jax.device_put(value, shardings[i]))
        for group, leaves in enumerate(split.groups):
            masters = {i: needed.pop(i) if i in needed else self.master_of(i) for i in leaves}
            given = {i: self._on_devices(masters[i]) for i in split.inputs[group]}
            part = jax.jit(
                traced_on(
                    self.plan.mesh, lambda given, shared, g=group: split.part(g, given.__getitem__, shared)
                ),
                out_shardings={i: shardings[i] for i in split.outputs[group]},
            )
            for i, value in part(given, shared).items():
                self._keep_state(i, value)
            for i, value in masters.items():
                self._keep_master(i, value, given.get(i))

    def _all_at_once(self) -> None:
        masters = [self._on_devices(self.master_of(i)) for i in range(len(self.plan.leaves))]
        state = first_state(self.tx, self.plan, masters)
        for i, value in enumerate(self.plan.state_treedef.flatten_up_to(state.inner)):
            placement = self.plan.state_leaves[i].placement.at("")
            self._keep_state(i, jax.device_put(value, self.plan.sharding(placement)))
        for i, value in enumerate(masters):
            self._keep_master(i, value, None)

    def _keep_state(self, index: int, value: jax.Array) -> None:
        placement = self.plan.state_leaves[index].placement
        self.inner[index] = value
        if index in self.spilled.inner:
            self.spilled.inner[index].write(value)
            self.inner[index] = self.spilled.inner[index]
        elif placement.memory:
            self.inner[index] = jax.device_put(value, self.plan.sharding(placement))

    def _keep_master(self, index: int, value: Any, on_devices: Any) -> None:
        """Puts a master in its place, and makes the stored param from it."""
        plan, leaf = self.plan, self.plan.leaves[index]
        array = self._on_devices(value) if on_devices is None else on_devices
        make = traced_on(plan.mesh, lambda x: as_params(plan, [leaf], [x]))
        (param,) = jax.jit(make, out_shardings=[plan.sharding(plan.stored_placement(leaf))])(array)
        self.params[index], self.masters[index] = param, value
        if index in self.spilled.params:
            self.params[index] = self.spilled.params[index]
            if value is not self.params[index]:
                self.params[index].write(param)
        if index in self.spilled.masters:
            if value is not self.spilled.masters[index]:
                self.spilled.masters[index].write(array)
            self.masters[index] = self.spilled.masters[index]

    def _on_devices(self, value: Any) -> jax.Array:
        if not isinstance(value, jax.Array):
            return value.to_devices()
        return memory.here(value)

    def _struct(self, index: int) -> jax.ShapeDtypeStruct:
        leaf = self.plan.leaves[index]
        return jax.ShapeDtypeStruct(self.plan.master_placement(leaf).padded, self.plan.master_dtype(leaf))
