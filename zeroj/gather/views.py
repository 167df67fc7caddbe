"""Two views that a loss may have of the batch: this device's slice of it, or the whole.

Under the device view the program runs inside ``shard_map``: gathers and reductions are collectives. Under the
global view it runs under plain ``jit``, as a user's own pjit step would: gathers and reductions are sharding
constraints, from which XLA's partitioner makes the collectives. What walks the program is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zeroj.collectives import fetch, plain
from zeroj.errors import PlanError
from zeroj.gather.inputs import batch_specs
from zeroj.gather.reductions import Reduction
from zeroj.plan.plan import ParamLeaf, Plan
from zeroj.plan.rules import Placement


class View(Protocol):
    """How a program sees params, batch and gradients.

    Attributes:
        axes: the mesh axes over which the program's own values are still to be summed.
        degree: the number of devices along them.
    """

    axes: tuple[str, ...]
    degree: int

    def near(self, array: jax.Array, placement: Placement) -> jax.Array:
        """What later gathers of a leaf may start from, from its stored shard."""

    def gather(self, near: jax.Array, placement: Placement, dtype: np.dtype) -> jax.Array:
        """The whole leaf, in the user's shape and ``dtype``, from what ``near`` gave."""

    def read(self, ticket: jax.Array, path: str, placement: Placement) -> jax.Array:
        """The stored shard of a leaf that lies in files, from its ticket."""

    def reduction(self, leaf: ParamLeaf, later: tuple[str, ...] = ()) -> Reduction:
        """How the gradient of a leaf is summed over devices; over the axes in ``later`` the caller sums it."""

    def split(self, batch: Any, accumulation: int) -> Any:
        """The batch as (accumulation, micro-batch, ...); scalars are repeated."""

    def keys(self, rng: jax.Array, accumulation: int) -> jax.Array:
        """(accumulation,) keys."""

    def run(
        self,
        program: Callable[..., Any],
        args: tuple[Any, ...],
        grads: list[Any],
        errors: Any = (),
        beside: Beside | None = None,
    ) -> Any:
        """Runs ``program(leaves, batch, *whole, errors, taken)``: returns (whole values, list of gradients, errors).

        Args:
            program: it; ``taken`` are the values of ``beside``, on one device.
            args: leaves, batch and what is whole.
            grads: the PartitionSpecs of the gradients over the ZeRO axes, or of what is made of them.
            errors: arrays of which each device has its own, along dim 0.
            beside: what it works on beside its params; left out, nothing.
        """


class Beside(Protocol):
    """What a program works on beside its params, by path of a leaf."""

    @property
    def values(self) -> Mapping[str, tuple[jax.Array, ...]]:
        """Global arrays."""

    @property
    def value_specs(self) -> dict[str, tuple[PartitionSpec, ...]]:
        """Their PartitionSpecs, over the ZeRO axes."""


class Files(Protocol):
    """What reads params from files while a program runs (see :class:`zeroj.spill.reader.ParamReader`).

    Attributes:
        dtypes: path of a leaf -> the dtype in which it is stored.
    """

    dtypes: dict[str, np.dtype]

    def read(self, ticket: Any, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """What a ticket stands for, on the host."""


def make_view(plan: Plan, loss_over: str, files: Files | None = None) -> View:
    """The view that ``loss_over`` names.

    Args:
        plan: the plan.
        loss_over: "device" or "global".
        files: what reads params from files.

    Raises:
        PlanError: it names none, or params lie in files and nothing reads them.
    """
    if loss_over not in ("device", "global"):
        raise PlanError(f"loss_over must be 'device' or 'global', not {loss_over!r}.")
    if plan.spills_params and files is None:
        raise PlanError(
            "The plan keeps params in files, which a function of your own cannot read: use zj.make_train_step and "
            'zj.make_eval_step, or "device": "cpu" in offload_param.'
        )
    if loss_over == "global" and any(_decides(leaf.placement) for leaf in plan.leaves):
        raise PlanError(
            "ZeRO++ (zero_hpz_partition_size, zero_quantized_weights, zero_quantized_gradients) decides what each "
            'device sends, and under loss_over="global" XLA\'s partitioner does. Use loss_over="device", with '
            "jax.lax.pmean over plan.zero_axes for values across devices, or leave ZeRO++ out."
        )
    return DeviceView(plan, files) if loss_over == "device" else GlobalView(plan, files)


def _decides(placement: Placement) -> bool:
    """Whether a leaf travels otherwise than as it is, in one launch."""
    wire = placement.wire
    return bool(wire.weights or wire.hops or (wire.first and not placement.kept_whole))


def _called(files: Files | None, ticket: jax.Array, path: str, shape: tuple[int, ...]) -> jax.Array:
    """Has one device's part of a param read by the host while the program runs."""
    assert files is not None
    dtype = files.dtypes[path]
    read = partial(files.read, shape=shape, dtype=dtype)
    return jax.pure_callback(read, jax.ShapeDtypeStruct(shape, dtype), ticket)


class DeviceView:
    """The loss sees this device's slice of the batch."""

    def __init__(self, plan: Plan, files: Files | None = None) -> None:
        self.plan, self.axes, self.degree, self.files = plan, plan.zero_axes, plan.degree, files

    def read(self, ticket: jax.Array, path: str, placement: Placement) -> jax.Array:
        """Calls the host for this device's shard."""
        return _called(self.files, ticket, path, tuple(fetch.shard_shape(placement)))

    def near(self, array: jax.Array, placement: Placement) -> jax.Array:
        """All-gathers over the axes whose result is kept."""
        return fetch.near(array, placement)

    def gather(self, near: jax.Array, placement: Placement, dtype: np.dtype) -> jax.Array:
        """All-gathers over the other axes."""
        return fetch.whole(near, placement, dtype)

    def reduction(self, leaf: ParamLeaf, later: tuple[str, ...] = ()) -> Reduction:
        """Reduce-scatters; a whole gradient in half precision is gathered again (see :class:`Reduction`)."""
        plan = self.plan
        again = plan.precision.half and not plan.stage.grads
        placement = leaf.placement if again else plan.grad_placement(leaf)
        now = tuple(axis for axis in plan.zero_axes if axis not in later)
        return Reduction(placement, _wire_dtype(plan, leaf), now, whole=again)

    def split(self, batch: Any, accumulation: int) -> Any:
        """Splits the slice of this device."""

        def one(x: jax.Array) -> jax.Array:
            if not x.ndim:
                return jnp.broadcast_to(x, (accumulation,))
            return x.reshape(accumulation, x.shape[0] // accumulation, *x.shape[1:])

        return jax.tree.map(one, batch)

    def keys(self, rng: jax.Array, accumulation: int) -> jax.Array:
        """Different on every device and for every micro-batch."""
        return jax.random.split(jax.random.fold_in(rng, jax.lax.axis_index(self.axes)), accumulation)

    def run(
        self,
        program: Callable[..., Any],
        args: tuple[Any, ...],
        grads: list[Any],
        errors: Any = (),
        beside: Beside | None = None,
    ) -> Any:
        """Runs inside ``shard_map`` over the ZeRO axes; the mesh's other axes stay automatic."""
        plan, whole = self.plan, PartitionSpec()
        own = PartitionSpec(plan.zero_axes)
        params = [plan.stored_placement(leaf).zero_spec for leaf in plan.leaves]
        taken, places = (dict(beside.values), beside.value_specs) if beside else ({}, {})
        return jax.shard_map(
            program,
            mesh=plan.mesh,
            in_specs=(params, batch_specs(plan, args[1]), *(whole for _ in args[2:]), own, places),
            out_specs=(whole, grads, own),
            axis_names=set(plan.zero_axes),
            check_vma=False,
        )(*args, errors, taken)


@dataclass(frozen=True)
class Constraint(Reduction):
    """A reduction that XLA's partitioner makes: the value is already the sum, and is told where to live."""

    mesh: Mesh | None = None

    def __call__(self, value: jax.Array) -> jax.Array:
        """Puts the sum where it belongs."""
        assert self.mesh is not None
        stored = plain.pad(value.astype(self.dtype), self.placement)
        sharding = NamedSharding(self.mesh, self.placement.spec)
        return jax.lax.with_sharding_constraint(stored, sharding).astype(value.dtype)

    def zero(self, dtype: Any) -> jax.Array:
        """Zeros where the sum belongs."""
        assert self.mesh is not None
        sharding = NamedSharding(self.mesh, self.placement.spec)
        return jax.lax.with_sharding_constraint(jnp.zeros(self.placement.padded, dtype), sharding)


class GlobalView:
    """The loss sees the whole batch, as under plain pjit."""

    def __init__(self, plan: Plan, files: Files | None = None) -> None:
        self.plan, self.degree, self.files = plan, 1, files
        self.axes: tuple[str, ...] = ()

    def read(self, ticket: jax.Array, path: str, placement: Placement) -> jax.Array:
        """Has every device call the host for its shard."""

        def one(ticket: jax.Array) -> jax.Array:
            return _called(self.files, ticket, path, tuple(fetch.shard_shape(placement)))

        spec = placement.zero_spec
        return jax.shard_map(
            one,
            mesh=self.plan.mesh,
            in_specs=(spec,),
            out_specs=spec,
            axis_names=set(self.plan.zero_axes),
            check_vma=False,
        )(ticket)

    def near(self, array: jax.Array, placement: Placement) -> jax.Array:
        """As it is: the partitioner gathers in one; the whole leaf, where that is kept."""
        return self._whole(array, placement) if placement.wire.keeps else array

    def gather(self, near: jax.Array, placement: Placement, dtype: np.dtype) -> jax.Array:
        """Constrains to whole, the user's own model axes excepted."""
        del dtype
        return plain.unpad(self._whole(near, placement), placement)

    def _whole(self, array: jax.Array, placement: Placement) -> jax.Array:
        whole = NamedSharding(self.plan.mesh, placement.whole().spec)
        return jax.lax.with_sharding_constraint(array, whole)

    def reduction(self, leaf: ParamLeaf, later: tuple[str, ...] = ()) -> Reduction:
        """Constrains to the shard."""
        assert not later
        plan = self.plan
        placement = plan.grad_placement(leaf)
        return Constraint(placement, _wire_dtype(plan, leaf), plan.zero_axes, mesh=plan.mesh)

    def split(self, batch: Any, accumulation: int) -> Any:
        """Splits so that each device's part of a micro-batch is a part of what it already holds."""
        plan = self.plan
        sharding = NamedSharding(plan.mesh, PartitionSpec(None, plan.zero_axes))

        def one(x: jax.Array) -> jax.Array:
            if not x.ndim:
                return jnp.broadcast_to(x, (accumulation,))
            parts = x.reshape(plan.degree, accumulation, -1, *x.shape[1:])
            micro = jnp.moveaxis(parts, 1, 0).reshape(accumulation, -1, *x.shape[1:])
            return jax.lax.with_sharding_constraint(micro, sharding)

        return jax.tree.map(one, batch)

    def keys(self, rng: jax.Array, accumulation: int) -> jax.Array:
        """Different for every micro-batch."""
        return jax.random.split(rng, accumulation)

    def run(
        self,
        program: Callable[..., Any],
        args: tuple[Any, ...],
        grads: list[Any],
        errors: Any = (),
        beside: Beside | None = None,
    ) -> Any:
        """Runs as it is."""
        del grads
        if beside is not None:  # stacks are renewed on one device, in shards
            raise PlanError(
                'A step with loss_over="global" does not make the update that is pending: state = step.settle(state), '
                "of the step that left it, does."
            )
        return program(*args, errors, {})


def _wire_dtype(plan: Plan, leaf: ParamLeaf) -> np.dtype:
    return np.dtype(plan.precision.communication or plan.precision.compute(leaf.dtype))
