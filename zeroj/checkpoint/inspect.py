"""What is in a checkpoint, for people, without devices; and whether all of it can be read."""

from __future__ import annotations

import math
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp

from zeroj.checkpoint.catalog import Catalog
from zeroj.checkpoint.database import StoredArray
from zeroj.checkpoint.manifest import Leaf, Manifest, read_extra
from zeroj.checkpoint.safetensors import SHARD_BYTES, export_safetensors
from zeroj.errors import CheckpointError


def inspect(
    directory: str | pathlib.Path, verify: bool = False, *, step: int | None = None, tag: str | None = None
) -> str:
    """Describes a folder of checkpoints, and one of them in full.

    Args:
        directory: the folder of a :class:`zeroj.Checkpointer`.
        verify: whether to read every chunk and check its checksum.
        step: which checkpoint to describe in full; left out, the latest.
        tag: its tag.

    Returns:
        A text of several lines.

    Raises:
        CheckpointError: there is no such checkpoint, or ``verify`` found damage; all of it is listed.

    Example:
        >>> print(zj.inspect_checkpoint("checkpoints", verify=True))
    """
    catalog = Catalog(directory)
    chosen = catalog.find(step, tag)
    folder = catalog.folder(chosen)
    lines = [f"{catalog.directory}: {len(catalog.manifests)} checkpoints", *_overview(catalog), ""]
    lines += _description(catalog.manifests[chosen], read_extra(folder))
    if verify:
        faults = list(damage(folder))
        if faults:
            raise CheckpointError(f"Checkpoint {chosen} is damaged:\n  - " + "\n  - ".join(faults))
        lines += ["", f"verified: every chunk of all {len(catalog.manifests[chosen].leaves)} arrays is whole"]
    return "\n".join(lines)


def damage(folder: str) -> Iterator[str]:
    """Reads a whole checkpoint, chunk by chunk, and yields what is missing or damaged.

    Args:
        folder: the folder of the arrays, as :meth:`zeroj.Checkpointer.folder` gives it.
    """
    try:
        read_extra(folder)
        manifest = Manifest.read(folder)
    except CheckpointError as error:
        yield str(error)
        return
    for name, leaf in manifest.leaves.items():
        yield from _leaf_damage(folder, name, leaf)


def convert(
    directory: str | pathlib.Path,
    out: str | pathlib.Path,
    *,
    step: int | None = None,
    tag: str | None = None,
    dtype: Any = None,
    frozen: bool = True,
    names: Callable[[str], str] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> list[pathlib.Path]:
    """Turns a checkpoint into safetensors, on any machine; the counterpart of DeepSpeed's zero_to_fp32.

    Args:
        directory: the folder of a :class:`zeroj.Checkpointer`.
        out: the folder to write to.
        step: which checkpoint; left out, the latest.
        tag: its tag.
        dtype: see :func:`zeroj.export_safetensors`; left out, the dtypes of the user's params.
        frozen: whether to write leaves that do not train, too.
        names: path -> name in the file; left out, "/" becomes ".".
        shard_bytes: a file takes no further tensor beyond this size.

    Returns:
        The files written.
    """
    return export_safetensors(
        directory, out, dtype, step=step, tag=tag, frozen=frozen, names=names, shard_bytes=shard_bytes
    )


def _overview(catalog: Catalog) -> list[str]:
    rows = []
    for step in sorted(catalog.manifests, key=lambda s: catalog.manifests[s].serial):
        m = catalog.manifests[step]
        size = sum(_nbytes(leaf) for leaf in m.leaves.values())
        saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(m.saved_at))
        metrics = " ".join(f"{k}={v:g}" for k, v in m.metrics.items())
        rows.append(f"  step {step:<10} {saved}  {_size(size):>10}  {' '.join(m.tags)} {metrics}".rstrip())
    return rows


def _description(m: Manifest, extra: dict[str, Any]) -> list[str]:
    params = [leaf for name, leaf in m.leaves.items() if name.split("/")[0] == "params"]
    versions = ", ".join(f"{name} {version}" for name, version in m.versions.items())
    lines = [
        f"step {m.step}" + "".join(f", tag {tag!r}" for tag in m.tags),
        f"  {sum(math.prod(leaf.shape) for leaf in params):,} params in {len(params)} leaves; {versions}",
        f"  saved at stage {m.stage} on N = {m.degree}, mesh {m.mesh}, {m.precision}; opens on any other",
        f"  extra: {', '.join(sorted(extra)) or 'none'}",
        "",
    ]
    width = max((len(name) for name in m.leaves), default=0)
    for name, leaf in m.leaves.items():
        note = "" if leaf.trainable else "  frozen"
        lines.append(
            f"  {name:<{width}}  {leaf.dtype:<9} {leaf.shape!s:<20} {_size(_nbytes(leaf)):>10}{note}"
        )
    return lines


def _leaf_damage(folder: str, name: str, leaf: Leaf) -> Iterator[str]:
    try:
        stored = StoredArray(folder, name)
    except CheckpointError as error:
        yield _first_line(error)
        return
    if (stored.shape, stored.dtype.name) != (leaf.shape, leaf.dtype):
        yield f"{name}: {stored.dtype.name} {stored.shape} stored, the manifest says {leaf.dtype} {leaf.shape}"
    for index in stored.chunks():
        try:
            stored.read(index)
        except CheckpointError as error:
            yield _first_line(error)


def _first_line(error: CheckpointError) -> str:
    return str(error).splitlines()[0]


def _nbytes(leaf: Leaf) -> int:
    return math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize


def _size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"
