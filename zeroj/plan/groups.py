"""Groups of devices within the mesh: those that hold a second shard together (hpZ), or all of the state (MiCS)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from jax.sharding import AbstractMesh, Mesh

from zeroj.config.zero import Zero
from zeroj.errors import PlanError

#: The axis of the nodes of one group, where a group of MiCS spans nodes and gathers over them first.
SPAN = "span"


def group_mesh(mesh: Mesh, axes: tuple[str, ...], zero: Zero) -> tuple[Mesh, tuple[str, ...]]:
    """The mesh whose innermost ZeRO axis is the group that ``zero`` asks for, and its ZeRO axes.

    Args:
        mesh: the mesh.
        axes: the ZeRO axes, outermost first.
        zero: the section. Where it asks for no group, or for one of the innermost axis's size, the mesh is
            returned as it is. Otherwise the devices stay in their order, and the last two ZeRO axes are cut anew:
            into two, or into three where a group is gathered node by node (MiCS, hierarchical).

    Raises:
        ConfigError: the group does not fit the devices.
        PlanError: the ZeRO axes do not stand side by side, so that they cannot be cut anew.
    """
    size = max(zero.zero_hpz_partition_size, zero.mics_shard_size)
    if size <= 1 and zero.mics_shard_size < 1:
        return mesh, axes
    inner = axes[-1]
    world = math.prod(mesh.shape[axis] for axis in axes)
    zero.check_devices(world, mesh.shape[inner])
    if size == mesh.shape[inner]:
        return mesh, axes
    outer = axes[-2] if len(axes) > 1 else ""
    names = list(mesh.axis_names)
    where = names.index(inner)
    total = mesh.shape[inner] * (mesh.shape[outer] if outer else 1)
    if not outer or names[where - 1] != outer or total % size:
        raise PlanError(
            f"Groups of {size} devices cannot be cut out of the mesh {dict(mesh.shape)}: it needs two ZeRO axes "
            f"side by side whose product {size} divides. Build it with zj.make_mesh(node={world // size}, "
            f"local={size}, ...)."
        )
    if not zero.mics_hierarchical_params_gather or size < mesh.shape[inner]:
        return _cut(mesh, {**dict(mesh.shape), outer: total // size, inner: size}), axes
    sizes: dict[str, int] = {}
    for name, count in mesh.shape.items():
        sizes[name] = total // size if name == outer else count
        if name == outer:
            sizes[SPAN] = size // mesh.shape[inner]
    return _cut(mesh, sizes), (*axes[:-1], SPAN, inner)


def _cut(mesh: Mesh, sizes: dict[str, int]) -> Mesh:
    """The same devices in the same order, along other axes."""
    kinds = (mesh.axis_types[0],) * len(sizes)
    if isinstance(mesh, AbstractMesh):
        return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds)
    return Mesh(mesh.devices.reshape(tuple(sizes.values())), tuple(sizes), axis_types=kinds)


def sharding_axes(mesh: Mesh, axes: Sequence[str], zero: Zero) -> dict[str, int]:
    """The axes that split a leaf, in the order in which they cut it, with their sizes.

    Under hpZ the node's own axis comes first: what the devices of a node hold together then is contiguous in
    every one of them, and the second half of a gather is a plain all-gather. Under MiCS it is the only one, or stands
    with that of the group's nodes.
    """
    if zero.mics_shard_size > 0:
        axes = [axes[-1], SPAN] if SPAN in axes else axes[-1:]
    elif zero.zero_hpz_partition_size > 1:
        axes = [axes[-1], *axes[:-1]]
    return {axis: mesh.shape[axis] for axis in axes}
