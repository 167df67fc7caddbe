"""Which devices a collective joins: every form in which XLA prints replica groups, and their reach."""

from __future__ import annotations

import re

import numpy as np

from zeroj.aot.shapes import HloError

_IOTA = re.compile(r"\[([\d,]*)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_TRANSPOSED = re.compile(r"\[([\d,]+)\]T\(([\d,]+)\)")
_MESH = re.compile(r"mesh\[([^\]]*)\](?:,\s*device_ids=\((.*?)\))?\s*\{([^}]*)\}")
_AXIS = re.compile(r"'?([^'=,:]+)'?=(\d+)")
_AXIS_REF = re.compile(r"'?([^',:]+)'?(?::\((\d+)\)(\d+))?")


def parse_groups(text: str, num_devices: int) -> np.ndarray:
    """Reads replica groups into an array of device ids, one row a group.

    Args:
      text: what follows ``replica_groups=``. Read are lists ``{{0,1},{2,3}}``, iota ``[2,4]<=[8]``, iota
        with a transpose ``[4,2]<=[2,4]T(1,0)``, mesh axes ``mesh['node'=2,'local'=4] {'local'}``, with
        sub-axes ``'local':(1)2`` and device ids (a list or ``[8,8]T(1,0)``) too, and ``{}``, one group of all.
      num_devices: devices of the program.

    Returns:
      int array of shape (number of groups, group size).

    Raises:
      HloError: for any other form, and for groups of unequal size.
    """
    text = text.strip()
    if text == "{}":
        return np.arange(num_devices).reshape(1, -1)
    if text.startswith("{{"):
        rows = [[int(i) for i in row.split(",") if i.strip()] for row in re.findall(r"\{([\d,\s]*)\}", text)]
        if len({len(row) for row in rows}) != 1:
            raise HloError(f"replica groups of unequal size: {text[:200]}")
        return np.array(rows)
    if match := _IOTA.fullmatch(text):
        return _iota(*match.groups())
    if match := _MESH.fullmatch(text):
        return _mesh(match.group(1), match.group(2), match.group(3), text)
    raise HloError(f"replica groups not understood: {text[:200]}")


def _ints(text: str) -> list[int]:
    return [int(i) for i in text.split(",") if i.strip()]


def _iota(dims: str, reshape: str, transpose: str | None) -> np.ndarray:
    ids = np.arange(np.prod(_ints(reshape))).reshape(_ints(reshape))
    ids = ids.transpose(_ints(transpose)) if transpose else ids
    return ids.reshape(_ints(dims)) if dims else ids.reshape(-1)


def _mesh(axes: str, ids: str | None, grouped: str, text: str) -> np.ndarray:
    """Groups over axes of a mesh: the grouped axes (or sub-axes) become the row, the others the rows."""
    sizes = {name.strip(): int(size) for name, size in _AXIS.findall(axes)}
    devices = _mesh_devices(ids, list(sizes.values()))
    refs: dict[str, list[tuple[int, int]]] = {}
    order: list[tuple[str, int]] = []
    for name, pre, size in _AXIS_REF.findall(grouped):
        name = name.strip()
        if name not in sizes:
            raise HloError(f"replica groups name an axis that the mesh lacks: {text[:200]}")
        ref = (int(pre), int(size)) if pre else (1, sizes[name])
        refs.setdefault(name, []).append(ref)
        order.append((name, ref[0]))
    shape: list[int] = []
    position: dict[tuple[str, int], int] = {}
    for name, full in sizes.items():
        done = 1
        for pre, size in sorted(refs.get(name, [])):
            if pre != done:
                shape.append(pre // done)
            position[name, pre] = len(shape)
            shape.append(size)
            done = pre * size
        if done != full or not refs.get(name):
            shape.append(full // done)
    inner = [position[key] for key in order]
    outer = [i for i in range(len(shape)) if i not in inner]
    group = int(np.prod([shape[i] for i in inner]))
    return devices.reshape(shape).transpose(outer + inner).reshape(-1, group)


def _mesh_devices(ids: str | None, sizes: list[int]) -> np.ndarray:
    if not ids:
        return np.arange(np.prod(sizes))
    if "<=" in ids:
        dims, rest = ids.split("<=")
        match = _IOTA.fullmatch(f"{dims or '[]'}<={rest}")
        if not match:
            raise HloError(f"device ids of a mesh not understood: {ids[:200]}")
        return _iota(*match.groups()).reshape(-1)
    if match := _TRANSPOSED.fullmatch(ids):
        return _iota("", *match.groups()).reshape(-1)
    return np.array(_ints(ids))


def group_text(attributes: str) -> str | None:
    """Cuts the text of ``replica_groups=`` out of an instruction's attributes, or returns None."""
    start = attributes.find("replica_groups=")
    if start < 0:
        return None
    rest = attributes[start + len("replica_groups=") :]
    if rest.startswith("mesh"):
        return rest[: rest.index("}") + 1]
    depth = 0
    for i, char in enumerate(rest):
        depth += (char in "{[(") - (char in "}])")
        if char == "," and depth == 0:
            return rest[:i]
    return rest


def nodes_spanned(groups: np.ndarray, gpus_per_node: int) -> int:
    """Returns how many nodes the widest group touches: 1 means that the collective stays inside nodes.

    Devices are numbered node by node, as CUDA and JAX number them.
    """
    return max(len(np.unique(row)) for row in groups // gpus_per_node)
