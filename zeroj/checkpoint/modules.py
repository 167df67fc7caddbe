"""Flax nnx modules from safetensors, with nothing read before a device needs it."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from zeroj.checkpoint.on_read import CastOnRead
from zeroj.checkpoint.safetensors import Names, load_safetensors
from zeroj.plan import tree


def load_module(
    path: str | pathlib.Path,
    make: Callable[[], nnx.Module],
    *,
    names: Names | None = None,
    dtype: Any = None,
    fresh: Callable[[str], bool] | None = None,
) -> Any:
    """An nnx module whose params are tensors on disk.

    Nothing is made on a device and nothing is read: give the module to a :class:`zeroj.Trainer`, or its state
    to :func:`zeroj.init_state`, and each device gets its own slices alone.

    Args:
        path: a safetensors file, or a folder of them, with or without an index.
        make: a function of nothing that makes the module; it is traced for its shapes.
        names: path -> name in the file, or for a stack of layers the names of all of them; left out, "/" becomes ".".
        dtype: dtype of floating params; left out, the files'.
        fresh: whether the leaf of a path is not in the files, such as an adapter's: it is made by ``make``.

    Returns:
        The module.

    Raises:
        CheckpointError: tensors are missing or have other shapes; lists all of them.

    Example:
        >>> model = zj.load_module("folder", lambda: Llama(config, nnx.Rngs(0)), names=Llama.tensor_name)
    """
    module = nnx.eval_shape(make)
    flat, treedef = tree.flatten(nnx.state(module, nnx.Param))
    made = [name for name in flat if fresh is not None and fresh(name)]
    stored = {name: entry.value for name, entry in flat.items() if name not in made}
    found = load_safetensors(path, stored, names=names)
    values = {name: _cast(value, dtype) for name, value in found.items()}
    values |= dict(zip(made, _made(make, made), strict=True))
    nnx.update(module, treedef.unflatten([values[name] for name in flat]))
    return module


def _cast(value: Any, dtype: Any) -> Any:
    if dtype is None or value.dtype == jnp.dtype(dtype) or not jnp.issubdtype(value.dtype, jnp.floating):
        return value
    return CastOnRead(value, jnp.dtype(dtype))


def _made(make: Callable[[], nnx.Module], wanted: list[str]) -> list[Any]:
    """Some leaves of a new module; the others are never computed."""

    def some() -> list[Any]:
        flat, _ = tree.flatten(nnx.state(make(), nnx.Param))
        return [flat[name].value for name in wanted]

    return [np.asarray(value) for value in jax.jit(some)()] if wanted else []
