"""Device meshes: which axes there are, and which of them ZeRO shards over."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from zeroj.errors import PlanError

#: The axes that ZeRO shards over unless a plan names others: across hosts, and within a host.
DEFAULT_ZERO_AXES = ("node", "local")


def make_mesh(*, devices: Sequence[jax.Device] | None = None, **axes: int) -> Mesh:
    """Builds a mesh whose ``local`` axis never leaves a host.

    Args:
        devices: the devices to use; left out, all devices of all processes.
        **axes: axis name -> size, in order, outermost first. Left out, ``node`` (the number of processes)
            and ``local`` (the devices of one process). One size may be -1: what is left over.
            ``node`` and ``local`` are the axes that ZeRO shards over; further axes, such as ``model``,
            belong to the user's model.

    Returns:
        A ``jax.sharding.Mesh`` with automatic axes.

    Raises:
        PlanError: the sizes do not multiply to the number of devices, or ``local`` would span hosts.

    Example:
        >>> mesh = zj.make_mesh(node=2, local=4)   # two simulated nodes on 8 CPU devices
    """
    found = list(jax.devices() if devices is None else devices)
    # jax.devices() need not come in the order of hosts: an axis inside a host must really be inside it
    found.sort(key=lambda d: (d.process_index, d.id))
    hosts = len({d.process_index for d in found})
    if not axes:
        axes = {"node": hosts, "local": -1}
    sizes = _infer(axes, len(found))
    grid = np.array(found, dtype=object).reshape(tuple(sizes.values()))
    _check_local(grid, tuple(sizes))
    return Mesh(grid, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def zero_axes_of(mesh: Mesh, zero_axes: Sequence[str] | None) -> tuple[str, ...]:
    """The axes of ``mesh`` to shard over, in the mesh's order.

    Raises:
        PlanError: none of the default axes is in the mesh, or a named axis is not.
    """
    have = tuple(mesh.axis_names)
    wanted = DEFAULT_ZERO_AXES if zero_axes is None else tuple(zero_axes)
    missing = [a for a in wanted if a not in have]
    if zero_axes is not None and (missing or not wanted):
        raise PlanError(f"zero_axes {wanted} are not all axes of the mesh, which has {dict(mesh.shape)}.")
    if len(missing) == len(wanted):
        raise PlanError(
            f"The mesh has axes {dict(mesh.shape)}, none of which is a ZeRO axis "
            f"({', '.join(DEFAULT_ZERO_AXES)}). Name the axes that split the batch, as in "
            f"make_plan(..., zero_axes=({have[0]!r},)), or build the mesh with zj.make_mesh()."
        )
    return tuple(a for a in have if a in wanted)


def traced_on(mesh: Mesh, fun: Callable[..., Any]) -> Callable[..., Any]:
    """``fun``, traced as if ``mesh`` were the context's mesh, whatever ``jax.set_mesh`` the caller is inside.

    A plan's mesh has automatic axes. Inside ``jax.set_mesh`` of a mesh with explicit ones, JAX would refuse its
    arrays in every operation. Where no mesh is set, nothing is changed.

    Args:
        mesh: the plan's mesh.
        fun: a function that is only called under a trace, such as one given to ``jax.jit``.
    """

    @functools.wraps(fun)
    def run(*args: Any, **kwargs: Any) -> Any:
        if jax.sharding.get_abstract_mesh().empty:
            return fun(*args, **kwargs)
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return fun(*args, **kwargs)

    return run


def _infer(axes: dict[str, int], count: int) -> dict[str, int]:
    """Fills in a size of -1 and checks the product."""
    unknown = [a for a, n in axes.items() if n == -1]
    bad = {a: n for a, n in axes.items() if n < 1 and n != -1}
    known = int(np.prod([n for n in axes.values() if n != -1], dtype=np.int64))
    if bad or len(unknown) > 1 or (unknown and count % max(known, 1)):
        raise PlanError(
            f"Mesh sizes {axes} do not describe {count} devices: each must be at least 1, at most one "
            f"may be -1, and the others must divide {count}."
        )
    sizes = {a: (count // known if n == -1 else n) for a, n in axes.items()}
    total = int(np.prod(list(sizes.values()), dtype=np.int64))
    if total != count:
        raise PlanError(
            f"Mesh sizes {sizes} multiply to {total}, but there are {count} devices. "
            f"Change a size, give -1 for one axis, or pass devices=jax.devices()[:{total}]."
        )
    return sizes


def _check_local(grid: np.ndarray, names: tuple[str, ...]) -> None:
    """The ``local`` axis must stay inside one process, or 'intra-node' traffic crosses the network."""
    if "local" not in names:
        return
    rows = np.moveaxis(grid, names.index("local"), -1).reshape(-1, grid.shape[names.index("local")])
    crossing = [row for row in rows if len({d.process_index for d in row}) > 1]
    if crossing:
        raise PlanError(
            f"The axis 'local' has size {rows.shape[1]} and would span processes "
            f"{sorted({d.process_index for d in crossing[0]})}. Give 'local' at most the devices of one "
            "process, and put the rest into 'node'."
        )
