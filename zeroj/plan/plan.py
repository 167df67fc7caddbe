"""The plan: where every array of a training run lives, as data."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zeroj.config.offload import Aio
from zeroj.config.spill import SpillSettings, spill_settings
from zeroj.config.zero import Zero
from zeroj.errors import PlanError
from zeroj.plan import offload, tree
from zeroj.plan.cuts import Cut, file_cuts
from zeroj.plan.groups import group_mesh, sharding_axes
from zeroj.plan.leaves import STAGES as STAGES
from zeroj.plan.leaves import ParamLeaf as ParamLeaf
from zeroj.plan.leaves import Stage as Stage
from zeroj.plan.leaves import StateLeaf as StateLeaf
from zeroj.plan.mesh import zero_axes_of
from zeroj.plan.precision import Precision, make_precision
from zeroj.plan.rules import NVME, Placement, place
from zeroj.plan.thresholds import threshold_of, thresholds_within
from zeroj.plan.wire import wire_of

#: What ``Zero.needs()`` may name that plans can do.
SUPPORTED = frozenset(
    {
        *("offload_optimizer:cpu", "offload_optimizer:ratio", "offload_param:cpu"),
        *("offload_optimizer:nvme", "offload_param:nvme", "nvme"),
        *(
            "zero++:hpZ",
            "zero++:qwZ",
            "zero++:qgZ",
            "zero++:loco",
            "zero++:nontrainable",
            "mics",
            "mics:hierarchical",
        ),
    }
)


@dataclass(frozen=True)
class Plan:
    """Where every array lives: the mesh, the stage, the dtypes and one placement per leaf.

    Build it with :func:`make_plan`. ``print(plan)`` shows it as a table, ``plan.memory()`` its bytes. ``plan.tx`` is
    the optimizer that it was made for; plans are compared without it. ``plan.zero`` is the section as laid out.
    """

    mesh: Mesh
    zero: Zero
    zero_axes: tuple[str, ...]
    precision: Precision
    threshold: int
    leaves: tuple[ParamLeaf, ...]
    treedef: Any
    state_leaves: tuple[StateLeaf, ...]
    state_treedef: Any
    concrete_init: bool = False
    spill: SpillSettings | None = None
    spill_params: SpillSettings | None = None
    tx: optax.GradientTransformation | None = field(default=None, compare=False, repr=False)

    @property
    def stage(self) -> Stage:
        """The row of the stage table."""
        return STAGES[self.zero.stage]

    @cached_property
    def degree(self) -> int:
        """N: how many devices share the state, and among how many the batch is split."""
        return math.prod(self.mesh.shape[a] for a in self.zero_axes)

    @property
    def replica_axes(self) -> tuple[str, ...]:
        """The ZeRO axes that split the batch and no leaf: along them groups hold the same state (MiCS)."""
        split = sharding_axes(self.mesh, self.zero_axes, self.zero)
        return tuple(axis for axis in self.zero_axes if axis not in split)

    @property
    def has_master(self) -> bool:
        """Whether the optimizer's state holds an fp32 master.

        At stage 3 the params themselves are it, unless the optimizer's state lives in host memory or in files:
        then the master does too, and the device holds shards of the params in the compute dtype.
        """
        return self.precision.has_master and (not self.stage.params or offload.state_off_device(self.zero))

    @cached_property
    def streams(self) -> bool:
        """Whether anything that an update changes lives in host memory, and so is streamed through the device."""
        return any({leaf.state_memory, leaf.param_memory} - {"", NVME} for leaf in self.leaves)

    @cached_property
    def spills(self) -> bool:
        """Whether any of the optimizer's state, or of the params, lies in files."""
        masters = self.has_master and any(leaf.state_memory == NVME for leaf in self.leaves)
        state = any(leaf.placement.memory == NVME for leaf in self.state_leaves)
        return masters or state or self.spills_params

    @cached_property
    def spills_params(self) -> bool:
        """Whether any of the params lies in files."""
        return any(leaf.param_memory == NVME for leaf in self.leaves)

    @cached_property
    def file_cuts(self) -> dict[str, Cut | None]:
        """Path of a leaf -> how its files are cut; see :func:`zeroj.plan.cuts.file_cuts`."""
        return file_cuts(self)

    # -- placements, in the order of ``leaves`` ----------------------------------------------------

    def param_placement(self, leaf: ParamLeaf) -> Placement:
        """Where the stored param lives."""
        return leaf.placement.at(leaf.param_memory) if self.stage.params else leaf.placement.whole()

    def stored_placement(self, leaf: ParamLeaf) -> Placement:
        """Where the array that is stored for a param lives: the param's, or that of its bytes."""
        if not leaf.packed:
            return self.param_placement(leaf)
        return leaf.stored(math.prod(self.mesh.shape[axis] for axis in leaf.placement.axes))

    def stored_dtype(self, leaf: ParamLeaf) -> np.dtype:
        """The dtype of the array that is stored for a param."""
        return np.dtype(np.int8) if leaf.packed else self.param_dtype(leaf)

    def grad_placement(self, leaf: ParamLeaf) -> Placement:
        """Where the reduced gradient lives."""
        return leaf.placement if self.stage.grads else leaf.placement.whole()

    def gradient_memory(self, leaf: ParamLeaf) -> str:
        """Where a step's gradient waits for the update: on the host if neither its param nor state is on the device."""
        return offload.PINNED if leaf.param_memory and leaf.state_memory else ""

    def accumulator_memory(self, leaf: ParamLeaf) -> str:
        """Where the sum of its gradients over micro-batches is: where one of them would wait.

        Under MiCS it is summed over groups of devices after the last micro-batch, and stays on the device until then.
        """
        return "" if self.replica_axes else self.gradient_memory(leaf)

    def master_placement(self, leaf: ParamLeaf) -> Placement:
        """Where what the optimizer updates lives: the fp32 master, or the param that is its own master."""
        placement = self.state_placement(leaf)
        return placement if self.has_master else placement.at(leaf.param_memory)

    def state_placement(self, leaf: ParamLeaf) -> Placement:
        """Where all that mirrors the param in the optimizer's state lives."""
        return (leaf.placement if self.stage.opt_state else leaf.placement.whole()).at(leaf.state_memory)

    def param_dtype(self, leaf: ParamLeaf) -> np.dtype:
        """The dtype of the stored param: the master's where it is its own master, else the compute dtype."""
        keep_master = leaf.trainable and not self.has_master
        return self.precision.master(leaf.dtype) if keep_master else self.precision.compute(leaf.dtype)

    def master_dtype(self, leaf: ParamLeaf) -> np.dtype:
        """The dtype of what the optimizer updates. Frozen leaves have no master: they are stored as computed."""
        kept = self.precision.master if leaf.trainable else self.precision.compute
        return kept(leaf.dtype)

    # -- pytrees ------------------------------------------------------------------------------------

    def sharding(self, placement: Placement) -> NamedSharding:
        """The NamedSharding of one placement, memory kind included; of what lies in files, once it is read."""
        kind = None if placement.memory == NVME else placement.memory or None
        return NamedSharding(self.mesh, placement.spec, memory_kind=kind)

    @property
    def replicated(self) -> NamedSharding:
        """The sharding of what every device holds whole: counters, scales, keys."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def params(self) -> Any:
        """The params' tree of NamedSharding."""
        return self._tree(lambda leaf: self.sharding(self.stored_placement(leaf)))

    @property
    def grads(self) -> Any:
        """The gradients' tree of NamedSharding. Frozen leaves have None."""
        return self._tree(lambda leaf: self.sharding(self.grad_placement(leaf)) if leaf.trainable else None)

    @property
    def opt_state(self) -> Any:
        """The tree of NamedSharding of the wrapped optimizer's state."""
        return jax.tree.map(lambda s: s.sharding, self.opt_state_struct())

    def params_struct(self) -> Any:
        """The stored params as ShapeDtypeStructs with shardings."""
        return self._tree(lambda leaf: self._struct(self.stored_placement(leaf), self.stored_dtype(leaf)))

    def user_struct(self) -> Any:
        """The params as the user gave them: ShapeDtypeStructs in the user's shapes and dtypes."""
        return self._tree(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))

    def opt_state_struct(self) -> tree.ZeroOptState:
        """The wrapped optimizer's state as ShapeDtypeStructs with shardings."""
        inner = [self._struct(leaf.placement, leaf.dtype) for leaf in self.state_leaves]
        master: Any = ()
        if self.has_master:
            master = tree.trainable_only(self, self._tree(self._master_struct))
        return tree.ZeroOptState(master, jax.tree.unflatten(self.state_treedef, inner))

    def _master_struct(self, leaf: ParamLeaf) -> jax.ShapeDtypeStruct:
        return self._struct(self.master_placement(leaf), self.master_dtype(leaf))

    def _struct(self, placement: Placement, dtype: np.dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(placement.padded, dtype, sharding=self.sharding(placement))

    def _tree(self, make: Callable[[ParamLeaf], Any]) -> Any:
        return jax.tree.unflatten(self.treedef, [make(leaf) for leaf in self.leaves])

    # -- for people -----------------------------------------------------------------------------------

    def memory(self) -> Any:
        """Bytes per device, per host and on disk, by part: a :class:`zeroj.MemoryReport`."""
        from zeroj.plan.memory import memory_report  # what stands right of the plan reads it, not the reverse

        return memory_report(self)

    def __str__(self) -> str:
        from zeroj.plan.memory import plan_table

        return plan_table(self)


def make_plan(
    params: Any,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    zero: Zero | Mapping[str, Any] | None = None,
    *,
    precision: str | Precision = "fp32",
    trainable: Any = None,
    zero_axes: tuple[str, ...] | None = None,
    scanned: Any = None,
    aio: Aio | Mapping[str, Any] | None = None,
) -> Plan:
    """Decides where every array of a training run lives. Allocates nothing of the model.

    Args:
        params: the user's tree of arrays or ``jax.ShapeDtypeStruct`` (dict, linen, ``nnx.State``, any pytree).
            Leaves that already are sharded on axes of ``mesh`` other than the ZeRO axes keep that (tensor
            parallelism).
        tx: the optax optimizer, not wrapped.
        mesh: the device mesh.
        zero: the "zero_optimization" section as :class:`zeroj.Zero` or a dict; left out, stage 0.
        precision: "fp32", "bf16", "fp16" or a :class:`Precision`.
        trainable: a tree of booleans like ``params`` or a predicate of (path, leaf); left out, every floating
            leaf is trainable. Integer and boolean leaves never are.
        zero_axes: the axes to shard over; left out, those of "node" and "local" that the mesh has.
        scanned: a predicate of a leaf's path, or a collection of path prefixes: leaves whose dim 0 is a stack
            that a ``lax.scan`` runs over; that dim is then never sharded. Left out, a first dim of at most 128
            is sharded only if no other will do.
        aio: the section "aio", for state in files: with it the direct engine is used, else the Orbax one.

    Returns:
        The plan.

    Raises:
        PlanError: what was given does not fit together; every fault is listed.

    Example:
        >>> plan = zj.make_plan(params, optax.adamw(1e-3), zj.make_mesh(), zj.Zero(stage=3))
    """
    zero = (zero if isinstance(zero, Zero) else Zero(**dict(zero or {}))).laid_out()
    policy = precision if isinstance(precision, Precision) else make_precision(precision)
    check_tx(tx)
    lacking = [need for need in zero.needs() if need not in SUPPORTED]
    if lacking:
        raise PlanError(
            "This zero_optimization asks for what zeroj does not do yet: " + ", ".join(lacking) + "."
        )
    mesh, axes = group_mesh(tree.auto_mesh(mesh), zero_axes_of(mesh, zero_axes), zero)
    flat, treedef = tree.flatten(params)
    trains = tree.trainable_flags(params, flat, trainable)
    is_stack = tree.path_predicate(scanned)
    sizes = sharding_axes(mesh, axes, zero)
    numels = [leaf.size for leaf in flat.values()]
    threshold = threshold_of(zero, numels, math.prod(sizes.values()))
    thresholds = thresholds_within(zero, numels, threshold)
    leaves = []
    for (path, leaf), flag, own_threshold in zip(flat.items(), trains, thresholds, strict=True):
        placement = place(
            leaf.shape,
            sizes,
            threshold=own_threshold,
            scanned=(0,) if is_stack(path) else (),
            model=tree.model_axes(leaf.sharding, axes, len(leaf.shape)),
        )
        wire = wire_of(
            zero,
            leaf.shape[is_stack(path) :],
            [axis for axis in axes if axis in placement.axes and jnp.issubdtype(leaf.dtype, jnp.floating)],
            math.prod(mesh.shape[axis] for axis in placement.axes),
            flag,
            bool(placement.model),
        )
        kind, placement = np.dtype(leaf.dtype), replace(placement, wire=wire)
        leaves.append(ParamLeaf(path, leaf.keys, kind, placement, flag, stack=is_stack(path)))
    disk = aio if aio is None or isinstance(aio, Aio) else Aio(**aio)
    plan = Plan(mesh, zero, axes, policy, threshold, tuple(leaves), treedef, (), None)
    plan = replace(
        plan,
        spill=spill_settings(zero.offload_optimizer, disk),
        spill_params=spill_settings(zero.offload_param, disk),
    )
    return _with_state(plan, tx)


def _with_state(plan: Plan, tx: optax.GradientTransformation) -> Plan:
    """Adds the layout of the optimizer's state, found from paths and shapes."""
    masters = plan._tree(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, plan.precision.master(leaf.dtype)))
    shapes, concrete = tree.abstract_init(tx, tree.trainable_only(plan, masters))
    flat, treedef = tree.flatten(shapes)
    by_keys = {leaf.keys: leaf for leaf in plan.leaves if leaf.trainable}
    sizes = sharding_axes(plan.mesh, plan.zero_axes, plan.zero)
    state_leaves = []
    for path, entry in flat.items():
        param = tree.mirrored(entry.keys, by_keys)
        owner = "" if param is None else param.path
        if param is not None and param.shape == entry.shape:
            placement, of = plan.state_placement(param), param.path
        else:
            placement, of = place(entry.shape, sizes, threshold=plan.threshold), ""
            placement = placement if plan.stage.opt_state else placement.whole()
        state_leaves.append(StateLeaf(path, np.dtype(entry.dtype), placement, of, owner))
    whole = replace(
        plan, state_leaves=tuple(state_leaves), state_treedef=treedef, concrete_init=concrete, tx=tx
    )
    return offload.offloaded(whole)


def check_tx(tx: Any) -> None:
    """Raises a PlanError where ``tx`` is no optax transformation."""
    if not (callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))):
        raise PlanError(
            f"tx must be an optax.GradientTransformation (with init and update), not {type(tx).__name__}. "
            "A schedule or an nnx.Optimizer is not one: pass the optax object that it was made from."
        )
