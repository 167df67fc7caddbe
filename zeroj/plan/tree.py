"""Paths, masks and shapes of the user's trees."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding

from zeroj.errors import PlanError

if TYPE_CHECKING:
    from zeroj.plan.plan import ParamLeaf, Plan


class ZeroOptState(NamedTuple):
    """State of a wrapped optimizer.

    Attributes:
        master: the fp32 master of the trainable params, sharded; ``()`` where the params are it themselves.
        inner: the state of the user's own transformation, in stored (padded) shapes.
    """

    master: Any
    inner: Any


@dataclass(frozen=True)
class Entry:
    """One leaf of a flattened tree."""

    keys: tuple[Any, ...]
    shape: tuple[int, ...]
    dtype: Any
    sharding: Any
    value: Any

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def path_str(keys: Sequence[Any]) -> str:
    """A path as text: "blocks/0/kernel"."""
    return jax.tree_util.keystr(tuple(keys), simple=True, separator="/")


def flatten(tree: Any) -> tuple[dict[str, Entry], Any]:
    """Flattens a tree of arrays or ShapeDtypeStructs to path -> entry.

    Raises:
        PlanError: leaves that are no arrays, listed with their types.
    """
    with_path, treedef = jax.tree_util.tree_flatten_with_path(tree)
    bad = [f"{path_str(k) or '(root)'}: {type(v).__name__}" for k, v in with_path if not _is_array(v)]
    if bad:
        raise PlanError("These leaves are neither arrays nor ShapeDtypeStructs: " + "; ".join(bad) + ".")
    entries = {
        path_str(keys): Entry(
            tuple(keys), tuple(np.shape(v)), jnp.result_type(v), getattr(v, "sharding", None), v
        )
        for keys, v in with_path
    }
    assert len(entries) == len(with_path), "two leaves with one path"
    return entries, treedef


def _is_array(value: Any) -> bool:
    return (hasattr(value, "shape") and hasattr(value, "dtype")) or isinstance(value, (bool, int, float))


def trainable_flags(params: Any, flat: Mapping[str, Entry], trainable: Any) -> list[bool]:
    """For each leaf whether it trains: floating, and selected by the user's mask or predicate."""
    if trainable is None:
        chosen = [True] * len(flat)
    elif callable(trainable):
        chosen = [bool(trainable(path, entry.value)) for path, entry in flat.items()]
    else:
        try:
            chosen = [bool(flag) for flag in jax.tree.leaves(jax.tree.map(lambda _, m: m, params, trainable))]
        except ValueError as error:
            raise PlanError(f"The trainable mask has not the structure of params: {error}") from error
    return [
        flag and bool(jnp.issubdtype(entry.dtype, jnp.inexact))
        for flag, entry in zip(chosen, flat.values(), strict=True)
    ]


def trainable_only(plan: Plan, tree: Any) -> Any:
    """The tree with every frozen leaf replaced by ``optax.MaskedNode``, which holds nothing."""
    if all(leaf.trainable for leaf in plan.leaves):
        return tree
    flat = plan.treedef.flatten_up_to(tree)
    kept = [v if leaf.trainable else optax.MaskedNode() for v, leaf in zip(flat, plan.leaves, strict=True)]
    return jax.tree.unflatten(plan.treedef, kept)


def path_predicate(paths: Any) -> Callable[[str], bool]:
    """A predicate of paths from None, a predicate, or a collection of prefixes."""
    if paths is None:
        return lambda path: False
    if callable(paths):
        return lambda path: bool(paths(path))
    prefixes: Collection[str] = (paths,) if isinstance(paths, str) else paths
    return lambda path: any(path == p or path.startswith(p.rstrip("/") + "/") for p in prefixes)


def model_axes(sharding: Any, zero_axes: Sequence[str], ndim: int) -> tuple[tuple[str, ...] | None, ...]:
    """For each dim the axes of the user's own model parallelism, read off a leaf's sharding."""
    if not isinstance(sharding, NamedSharding) or not ndim:
        return ()
    entries = (*sharding.spec, *(None,) * (ndim - len(sharding.spec)))
    named = (((e,) if isinstance(e, str) else tuple(e or ())) for e in entries)
    found = tuple(tuple(a for a in names if a not in zero_axes) or None for names in named)
    return found if any(found) else ()


def mirrored(keys: tuple[Any, ...], by_keys: Mapping[tuple[Any, ...], ParamLeaf]) -> ParamLeaf | None:
    """The param whose path is the longest suffix of an optimizer-state leaf's path."""
    for start in range(len(keys)):
        if keys[start:] in by_keys:
            return by_keys[keys[start:]]
    return by_keys.get(())


def abstract_init(tx: optax.GradientTransformation, masters: Any) -> tuple[Any, bool]:
    """The optimizer state's shapes, and whether its init needs real values (it then gets zeros here).

    Raises:
        PlanError: the state has a typed random key, which has no place in files and no dtype to plan with.
    """
    try:
        shapes, concrete = jax.eval_shape(tx.init, masters), False
    except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError):
        zeros = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), masters)
        state, concrete = tx.init(zeros), True
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), jnp.result_type(x)), state)
    keys = [path for path, x in flatten(shapes)[0].items() if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)]
    if keys:
        raise PlanError(
            f"The optimizer keeps a typed random key in its state ({', '.join(keys)}), which a plan cannot lay "
            "out: let its init return jax.random.key_data(key), and its update begin with "
            "jax.random.wrap_key_data(state_key)."
        )
    return shapes, concrete


def auto_mesh(mesh: Mesh) -> Mesh:
    """The same devices and axes with automatic axis types: constraints then guide, not type-check."""
    automatic = (AxisType.Auto,) * len(mesh.axis_names)
    if mesh.axis_types == automatic:
        return mesh
    if isinstance(mesh, Mesh):
        return Mesh(mesh.devices, mesh.axis_names, axis_types=automatic)
    return mesh.update(axis_types=automatic)
