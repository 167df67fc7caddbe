"""Export to safetensors, and import from them, slice by slice.

The files are laid out first, then filled through memory maps: by every process its own shards, or chunk by
chunk from a checkpoint. So no process ever holds more than a part of one leaf.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zeroj.checkpoint.arrays import array_spec, pieces
from zeroj.checkpoint.catalog import Catalog
from zeroj.checkpoint.database import StoredArray
from zeroj.checkpoint.layout import param_name, stored_leaves
from zeroj.checkpoint.manifest import Manifest
from zeroj.checkpoint.on_read import StackOnRead
from zeroj.checkpoint.tensor_file import (
    CODES,
    INDEX,
    WHOLE,
    Part,
    Tensor,
    data_start,
    lay_out,
    memory_map,
    read_header,
    tensor_files,
    write_index,
)
from zeroj.checkpoint.together import arrive
from zeroj.errors import CheckpointError
from zeroj.plan import tree
from zeroj.plan.plan import Plan
from zeroj.step.state import TrainState

_SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
SHARD_BYTES = 5 * 10**9

#: path -> name in the file, or for a stack of layers the names of all of them.
Names = Callable[[str], "str | Sequence[str]"]


def export_safetensors(
    source: TrainState | str | pathlib.Path,
    path: str | pathlib.Path,
    dtype: Any = None,
    *,
    plan: Plan | None = None,
    step: int | None = None,
    tag: str | None = None,
    frozen: bool = True,
    only: Callable[[str], bool] | None = None,
    tied: Mapping[str, str] | None = None,
    names: Names | None = None,
    shard_bytes: int = SHARD_BYTES,
    model_state: bool = False,
) -> list[pathlib.Path]:
    """Writes the params as safetensors: one file, or several with an index, as Hugging Face names them.

    Of a state every process must call it, and ``path`` must be a folder that all of them see.

    Args:
        source: a state (then pass ``plan``), or the folder of a :class:`zeroj.Checkpointer`.
        path: the folder to write to; made if absent.
        dtype: "fp32", "bf16", "fp16" or a dtype for floating leaves; left out, the user's own.
        plan: the plan of the state.
        step: which checkpoint; left out, the latest.
        tag: the checkpoint's tag.
        frozen: whether to write leaves that do not train, too.
        only: a predicate of paths: which leaves to write; left out, all.
        tied: path -> path of the leaf that it equals; it is left out of the file.
        names: path -> name in the file, or names, of which each takes one slice of the leaf's first dim, such as
            those of stacked layers; left out, "/" becomes ".".
        shard_bytes: a file takes no further tensor beyond this size.
        model_state: whether to write what a state's model carries beside its params (running statistics), too,
            random keys aside.

    Returns:
        The files written.

    Raises:
        CheckpointError: there is no such checkpoint, it is damaged, or a dtype that safetensors lack.

    Example:
        >>> zj.export_safetensors(state, "exported", "bf16", plan=plan)
    """
    rename = names or (lambda leaf: leaf.replace("/", "."))

    def keep(leaf: str, trains: bool) -> bool:
        return (frozen or trains) and leaf not in (tied or {}) and (only is None or only(leaf))

    if isinstance(source, TrainState):
        if plan is None:
            raise CheckpointError(
                "A state alone does not know its layout: export_safetensors(..., plan=plan)."
            )
        tensors = _of_state(source, plan, dtype, keep, rename)
        tensors += _carried(source, rename) if model_state else []
    elif jax.process_index() == 0:
        tensors = _of_checkpoint(source, step, tag, dtype, keep, rename)
    else:
        return []
    together = isinstance(source, TrainState)
    metadata = {str(rename(a)): str(rename(b)) for a, b in (tied or {}).items()}
    return _write(pathlib.Path(path), tensors, shard_bytes, metadata, together)


def load_safetensors(
    path: str | pathlib.Path,
    like: Any,
    *,
    names: Names | None = None,
) -> Any:
    """Maps safetensors files into memory as a tree of params; nothing is read before it is used.

    Give the result to :func:`zeroj.init_state`: every device then gets its own slices alone.

    Args:
        path: a file, or a folder of them.
        like: a plan, or a tree of arrays or ShapeDtypeStructs: the structure and shapes that are wanted.
        names: path -> name in the file, or names of tensors to be stacked; left out, "/" becomes ".".

    Returns:
        The tree with numpy memory maps; of stacks with arrays that are read slice by slice.

    Raises:
        CheckpointError: tensors are missing or have other shapes; lists all of them.

    Example:
        >>> state = zj.init_state(zj.load_safetensors("llama", plan), tx, plan)
    """
    rename = names or (lambda leaf: leaf.replace("/", "."))
    flat, treedef = tree.flatten(like.user_struct() if isinstance(like, Plan) else like)
    found = {
        name: value for file in tensor_files(pathlib.Path(path)) for name, value in read_header(file).items()
    }
    faults: list[str] = []
    values = []
    for leaf, entry in flat.items():
        named = rename(leaf)
        stack = not isinstance(named, str)
        names_of, shape = (list(named), entry.shape[1:]) if stack else ([named], entry.shape)
        if stack and len(names_of) != entry.shape[0]:
            faults.append(f"{leaf}: {len(names_of)} names for a stack of shape {entry.shape}")
        faults += [f"{leaf}: no tensor {name!r}" for name in names_of if name not in found]
        parts = [found[name] for name in names_of if name in found]
        faults += [
            f"{leaf}: tensor {name!r} has shape {found[name].shape}, wanted {shape}"
            for name in names_of
            if name in found and found[name].shape != shape
        ]
        values.append(StackOnRead(tuple(parts)) if stack else next(iter(parts), None))
    if faults:
        raise CheckpointError(
            f"{path} does not fit the params:\n  - " + "\n  - ".join(faults) + "\nIt has: " + ", ".join(found)
        )
    return jax.tree.unflatten(treedef, values)


#: The parts of a leaf, or those of one slice of its first dim.
Parts = Callable[["int | None"], Iterator[Part]]


def _of_state(state: TrainState, plan: Plan, dtype: Any, keep: Any, rename: Any) -> list[Tensor]:
    stored = {s.spec.name: s.value for s in stored_leaves(state, plan)}
    tensors = []
    for leaf in plan.leaves:
        if not keep(leaf.path, leaf.trainable):
            continue
        value = stored[param_name(leaf)]
        found = pieces(array_spec(leaf.path, value, leaf.shape), value, copy=False)
        held: dict[int, np.ndarray] = {}  # what this process has of a stack, while its slices are written

        def parts(layer: int | None, found: Any = found, held: Any = held) -> Any:
            for number, piece in enumerate(found):
                if layer is None:
                    yield piece.index, piece.fetch()
                elif _covers(piece.index, layer):
                    if number not in held:
                        held[number] = piece.fetch()
                    yield piece.index, held[number]
                    if layer == piece.index[0].stop - 1:
                        del held[number]

        tensors += _named(rename(leaf.path), leaf.shape, _cast(leaf.dtype, dtype), parts)
    return tensors


def _named(names: str | Sequence[str], shape: tuple[int, ...], dtype: np.dtype, parts: Parts) -> list[Tensor]:
    """A leaf under its name, or its slices along the first dim under theirs."""
    if isinstance(names, str):
        return [Tensor(names, shape, dtype, partial(parts, None))]
    if len(names) != shape[0]:
        raise CheckpointError(f"{len(names)} names for a stack of shape {shape}: {', '.join(names)}")

    def slices(layer: int) -> Iterator[Part]:
        for index, data in parts(layer):
            yield index[1:], data[layer - index[0].start]

    return [Tensor(name, shape[1:], dtype, partial(slices, i)) for i, name in enumerate(names)]


def _covers(index: Sequence[slice], layer: int | None) -> bool:
    return layer is None or index[0].start <= layer < index[0].stop


def _carried(state: TrainState, rename: Any) -> list[Tensor]:
    """What the model carries, whole on every device, in its own dtypes; process 0 writes it."""
    tensors = []
    for path, entry in tree.flatten(state.model_state)[0].items():
        if jnp.issubdtype(entry.value.dtype, jax.dtypes.prng_key):
            continue

        def parts(value: Any = entry.value) -> Iterator[Part]:
            if jax.process_index() == 0:
                yield tuple(slice(0, n) for n in value.shape), np.asarray(value.addressable_data(0))

        tensors.append(Tensor(str(rename(path)), entry.shape, _cast(entry.value.dtype, None), parts))
    return tensors


def _of_checkpoint(
    source: Any, step: int | None, tag: str | None, dtype: Any, keep: Any, rename: Any
) -> list[Tensor]:
    catalog = Catalog(source)
    folder = catalog.folder(catalog.find(step, tag))
    tensors = []
    for name, leaf in Manifest.read(folder).leaves.items():
        part, _, path = name.partition("/")
        if part != "params" or not keep(path, leaf.trainable):
            continue

        def parts(layer: int | None, name: str = name) -> Iterator[Part]:
            stored = StoredArray(folder, name)
            for index in stored.chunks():
                if _covers(index, layer):
                    yield index, stored.read(index)

        tensors += _named(rename(path), tuple(leaf.shape), _cast(jnp.dtype(leaf.user_dtype), dtype), parts)
    return tensors


def _cast(own: np.dtype, wanted: Any) -> np.dtype:
    dtype = own if wanted is None or not jnp.issubdtype(own, jnp.floating) else _SHORT.get(wanted, wanted)
    if jnp.dtype(dtype).name not in CODES:
        raise CheckpointError(
            f"safetensors have no dtype {jnp.dtype(dtype).name}; pass dtype='fp32' or another."
        )
    return jnp.dtype(dtype)


def _write(
    folder: pathlib.Path, tensors: list[Tensor], limit: int, tied: dict[str, str], together: bool
) -> list[pathlib.Path]:
    """Lays out the files, fills them, and gives them their names only when they are whole."""
    groups = _grouped(tensors, limit)
    count = len(groups)
    files = [
        folder / (WHOLE if count == 1 else f"model-{i + 1:05d}-of-{count:05d}.safetensors")
        for i in range(count)
    ]
    unfinished = [file.with_suffix(".safetensors.part") for file in files]
    first = jax.process_index() == 0
    if first:
        folder.mkdir(parents=True, exist_ok=True)
        for file, group in zip(unfinished, groups, strict=True):
            lay_out(file, group, tied)
    _together(together, folder, "layout")
    for file, group in zip(unfinished, groups, strict=True):
        _fill(file, group)
    _together(together, folder, "filling")
    if first:
        for file, final in zip(unfinished, files, strict=True):
            os.replace(file, final)
        (folder / INDEX).unlink(missing_ok=True)
        if count > 1:
            write_index(folder, files, groups)
    _together(together, folder, "end")
    return files


def _together(several: bool, folder: pathlib.Path, what: str) -> None:
    if several:
        arrive(f"export to {folder} ({what})")


def _grouped(tensors: list[Tensor], limit: int) -> list[list[Tensor]]:
    groups: list[list[Tensor]] = [[]]
    for tensor in tensors:
        if groups[-1] and sum(t.nbytes for t in groups[-1]) + tensor.nbytes > limit:
            groups.append([])
        groups[-1].append(tensor)
    return groups


def _fill(file: pathlib.Path, group: list[Tensor]) -> None:
    offset = data_start(file)
    for tensor in group:
        for index, data in tensor.parts():
            if data.size:
                memory_map(file, tensor.dtype, offset, tensor.shape, "r+")[index] = data.astype(tensor.dtype)
        offset += tensor.nbytes
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
