"""Which leaves weight decay spares, when asked."""

from __future__ import annotations

import re
from typing import Any

import jax

_LAST = re.compile(r"(.*_)?(bias|scale)", re.IGNORECASE)
_ANY = re.compile(r".*norm.*|ln(_.*|\d.*)?|bn(_.*|\d.*)?", re.IGNORECASE)


def is_bias_or_norm(path: tuple[Any, ...]) -> bool:
    """Whether a leaf is a bias, or belongs to a normalisation, by the names in its path.

    It is when its last name is "bias" or "scale", or ends in "_bias" or "_scale"; or when any name has "norm"
    in it, or is "ln" or "bn", or starts with "ln_", "bn_", "ln1", "bn1" and the like. Shapes are not looked
    at: under `jax.lax.scan` over layers a bias has two dims.

    Args:
        path: a key path of `jax.tree_util`. A last "value" (of an nnx Variable) is not a name.

    Example:
        >>> is_bias_or_norm((jax.tree_util.DictKey("ln_1"), jax.tree_util.DictKey("weight")))
        True
    """
    names = [_name(key) for key in path]
    if names and names[-1] in ("value", "raw_value"):
        names.pop()
    return bool(names) and (bool(_LAST.fullmatch(names[-1])) or any(_ANY.fullmatch(name) for name in names))


def decay_mask(params: Any) -> Any:
    """A tree of bools for `optax.add_decayed_weights(mask=...)`: False for biases and norms."""
    return jax.tree_util.tree_map_with_path(lambda path, _: not is_bias_or_norm(path), params)


def is_muon_matrix(path: tuple[Any, ...], leaf: Any) -> bool:
    """Whether Muon takes a leaf: two dims, and no embedding or head by the names in its path."""
    return leaf.ndim == 2 and not any(
        part in _name(key).lower() for key in path for part in ("embed", "head", "wte", "wpe")
    )


def _name(key: Any) -> str:
    return str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key))))
