"""The safetensors format: headers, memory maps, and the index of a model in several files.

Format: https://huggingface.co/docs/safetensors (8 bytes length, JSON header, data).
"""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from zeroj.errors import CheckpointError

#: dtype -> its name in a safetensors header.
CODES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "complex64": "C64", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

Part = tuple[tuple[slice, ...], np.ndarray]


@dataclass(frozen=True)
class Tensor:
    """One tensor to be exported: its name in the file, shape, dtype, and its parts as they are needed."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    parts: Callable[[], Iterator[Part]]

    @property
    def nbytes(self) -> int:
        """Its size in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_header(file: pathlib.Path) -> dict[str, np.ndarray]:
    """The tensors of one file as memory maps, by name.

    Raises:
        CheckpointError: it is no safetensors file, or cut short.
    """
    dtypes = {code: jnp.dtype(name) for name, code in CODES.items()}
    try:
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(size))
        header.pop("__metadata__", None)
        start = 8 + size
        return {
            name: memory_map(file, dtypes[t["dtype"]], start + t["data_offsets"][0], tuple(t["shape"]), "r")
            for name, t in header.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} is no whole safetensors file: {error}") from error


def lay_out(file: pathlib.Path, group: list[Tensor], tied: dict[str, str]) -> None:
    """Writes the header of a file, and makes room for the data of all its tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **{f"tied:{a}": b for a, b in tied.items()}}}
    offset = 0
    for t in group:
        end = offset + t.nbytes
        header[t.name] = {"dtype": CODES[t.dtype.name], "shape": list(t.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + offset)


def data_start(file: pathlib.Path) -> int:
    """Where the data of a file begins."""
    with file.open("rb") as stream:
        return 8 + int.from_bytes(stream.read(8), "little")


def memory_map(
    file: pathlib.Path, dtype: np.dtype, offset: int, shape: tuple[int, ...], mode: Any
) -> np.ndarray:
    """A part of a file as an array; whole pages stay out of memory until they are used."""
    if not math.prod(shape):
        return np.zeros(shape, dtype)
    return np.memmap(file, dtype, mode=mode, offset=offset, shape=shape)


def write_index(
    folder: pathlib.Path, files: Sequence[pathlib.Path], groups: Sequence[Sequence[Tensor]]
) -> None:
    """Says which tensor is in which file."""
    where = {t.name: file.name for file, group in zip(files, groups, strict=True) for t in group}
    total = sum(t.nbytes for group in groups for t in group)
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2)
    (folder / INDEX).write_text(text)


def tensor_files(path: pathlib.Path) -> list[pathlib.Path]:
    """The safetensors files of a folder: those of its index, else the whole one, else all.

    Raises:
        CheckpointError: there is none.
    """
    if path.is_file():
        return [path]
    if (path / INDEX).is_file():
        where = json.loads((path / INDEX).read_text())["weight_map"]
        return [path / name for name in sorted(set(where.values()))]
    if (path / WHOLE).is_file():
        return [path / WHOLE]
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{path} holds no .safetensors file.")
    return files
