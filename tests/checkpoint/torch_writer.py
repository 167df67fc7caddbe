"""Writes ``.pt`` files by hand, from the documented layout of torch.save, without PyTorch."""

from __future__ import annotations

import collections
import io
import pathlib
import pickle
import sys
import types
import zipfile
from typing import Any
from unittest import mock

import numpy as np

_KINDS = {"float32": "FloatStorage", "int64": "LongStorage", "float16": "HalfStorage", "bool": "BoolStorage"}


class _Storage:
    def __init__(self, key: str, array: np.ndarray) -> None:
        self.key, self.array = key, array


def _modules() -> dict[str, Any]:
    """Modules that only give names to what the pickle refers to."""
    torch, utils = types.ModuleType("torch"), types.ModuleType("torch._utils")
    for name in _KINDS.values():
        setattr(torch, name, type(name, (), {"__module__": "torch"}))

    def _rebuild_tensor_v2(*_: Any) -> None:
        raise AssertionError("only its name is used")

    _rebuild_tensor_v2.__module__ = "torch._utils"
    _rebuild_tensor_v2.__qualname__ = "_rebuild_tensor_v2"
    utils._rebuild_tensor_v2 = _rebuild_tensor_v2  # type: ignore[attr-defined]
    return {"torch": torch, "torch._utils": utils}


class _Pickler(pickle.Pickler):
    def __init__(self, stream: Any, modules: dict[str, Any]) -> None:
        super().__init__(stream, protocol=2)
        self.modules, self.storages = modules, list[np.ndarray]()

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, np.ndarray):
            return NotImplemented
        base = value.base if isinstance(value.base, np.ndarray) else value
        if not any(base is known for known in self.storages):
            self.storages.append(base)
        key = next(i for i, known in enumerate(self.storages) if known is base)
        offset = (
            value.__array_interface__["data"][0] - base.__array_interface__["data"][0]
        ) // value.itemsize
        stride = tuple(s // value.itemsize for s in value.strides)
        rebuild = self.modules["torch._utils"]._rebuild_tensor_v2
        return rebuild, (
            _Storage(str(key), base),
            offset,
            value.shape,
            stride,
            False,
            collections.OrderedDict(),
        )

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, _Storage):
            return None
        kind = getattr(self.modules["torch"], _KINDS[value.array.dtype.name])
        return "storage", kind, value.key, "cpu", value.array.size


def write_torch_file(file: pathlib.Path, content: Any) -> None:
    """Like torch.save; arrays become tensors, and views of one base share its storage."""
    modules = _modules()
    stream = io.BytesIO()
    with mock.patch.dict(sys.modules, modules):
        pickler = _Pickler(stream, modules)
        pickler.dump(content)
    file.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", stream.getvalue())
        archive.writestr("archive/byteorder", "little")
        for key, storage in enumerate(pickler.storages):
            archive.writestr(f"archive/data/{key}", np.ascontiguousarray(storage).tobytes())
        archive.writestr("archive/version", "3\n")
