"""PyTorch's ``.pt`` files, read without PyTorch, and without running anything that a file says.

A file of ``torch.save`` is an uncompressed zip: a pickle of the structure, and one member for the bytes of each
storage. The pickle is read by an unpickler that knows tensors, plain containers and nothing else. Tensors come as
memory maps: only the slices that are used are read.
"""

from __future__ import annotations

import collections
import pathlib
import pickle
import zipfile
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from zeroj.errors import CheckpointError

_STORAGES = {
    "FloatStorage": "float32", "DoubleStorage": "float64", "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16", "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16",
    "CharStorage": "int8", "ByteStorage": "uint8", "BoolStorage": "bool",
}  # fmt: skip


def read_torch_file(file: str | pathlib.Path) -> Any:
    """Reads a file of ``torch.save``: tensors (as numpy memory maps) in dicts, lists and tuples, and scalars.

    Args:
        file: the file, in the zip format that PyTorch writes since 1.6.

    Raises:
        CheckpointError: it is no such file, is damaged, or holds objects of other classes, which are not made.
    """
    file = pathlib.Path(file)
    try:
        with zipfile.ZipFile(file) as archive:
            members = {name.split("/", 1)[-1]: info for name, info in archive.NameToInfo.items()}
            if "byteorder" in members and archive.read(members["byteorder"]).strip() != b"little":
                raise CheckpointError(
                    f"{file} was written on a big-endian machine, which zeroj does not read."
                )
            with archive.open(members["data.pkl"]) as stream:
                return _TensorUnpickler(stream, file, members).load()
    except CheckpointError:
        raise
    except (OSError, KeyError, ValueError, TypeError, IndexError, EOFError, AttributeError) as error:
        raise CheckpointError(f"{file} is no whole .pt file: {error}") from error
    except (zipfile.BadZipFile, pickle.UnpicklingError) as error:
        raise CheckpointError(
            f"{file} is no .pt file that zeroj reads: {error}. Files from before PyTorch 1.6 have to be loaded "
            "and saved again with a newer PyTorch."
        ) from error


class _TensorUnpickler(pickle.Unpickler):
    """Makes tensors and ordered dicts; refuses every other class."""

    def __init__(self, stream: Any, file: pathlib.Path, members: dict[str, zipfile.ZipInfo]) -> None:
        super().__init__(stream)
        self._file, self._members = file, members

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _STORAGES:
            return jnp.dtype(_STORAGES[name])
        known = {
            ("torch._utils", "_rebuild_tensor_v2"): _tensor,
            ("torch._utils", "_rebuild_parameter"): _parameter,
            ("collections", "OrderedDict"): collections.OrderedDict,
            ("torch", "Size"): tuple,
        }
        if (module, name) in known:
            return known[module, name]
        raise CheckpointError(
            f"{self._file} holds an object of {module}.{name}. Only tensors and plain containers are read, so "
            "that no code from a file is ever run."
        )

    def persistent_load(self, pid: Any) -> np.ndarray:
        kind, dtype, key, _, count = pid
        if kind != "storage":
            raise ValueError(f"unknown reference {kind!r}")
        info = self._members[f"data/{key}"]
        if info.compress_type != zipfile.ZIP_STORED or info.file_size < count * dtype.itemsize:
            raise ValueError(f"storage {key} is compressed or too short")
        if not count:
            return np.zeros(0, dtype)
        return np.memmap(self._file, dtype, mode="r", offset=_data_offset(self._file, info), shape=(count,))


def _data_offset(file: pathlib.Path, info: zipfile.ZipInfo) -> int:
    """Where the bytes of a stored member begin: after its local header, whose name and extra field vary."""
    with file.open("rb") as stream:
        stream.seek(info.header_offset)
        header = stream.read(30)
    name, extra = int.from_bytes(header[26:28], "little"), int.from_bytes(header[28:30], "little")
    return info.header_offset + 30 + name + extra


def _tensor(
    storage: np.ndarray, offset: int, size: Sequence[int], stride: Sequence[int], *_: Any
) -> np.ndarray:
    """A view of a storage; never outside of it, whatever the file says."""
    last = offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    if 0 in size:
        return np.zeros(tuple(size), storage.dtype)
    if offset < 0 or min(stride, default=0) < 0 or last >= storage.size:
        raise ValueError("a tensor reaches beyond its storage")
    strides = tuple(s * storage.itemsize for s in stride)
    return np.lib.stride_tricks.as_strided(storage[offset:], tuple(size), strides, writeable=False)


def _parameter(data: np.ndarray, *_: Any) -> np.ndarray:
    return data
