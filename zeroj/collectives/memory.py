"""Between a device's memory and the host's, inside a program: whole values, and layers of stacks."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from zeroj import _compat


def here(value: jax.Array) -> jax.Array:
    """The same on the device."""
    return jax.device_put(value, jax.memory.Space.Device) if _compat.is_on_host(value) else value


def beside(old: jax.Array, new: jax.Array) -> jax.Array:
    """``new``, in the memory that ``old`` is in."""
    return jax.device_put(new, jax.memory.Space.Host) if _compat.is_on_host(old) else new


def layer_of(stack: jax.Array, index: jax.Array) -> jax.Array:
    """One layer of a stack, on the device; ``index`` is an integer scalar."""
    return here(jax.lax.dynamic_index_in_dim(stack, index, keepdims=False))


def put_layers(
    stacks: Sequence[jax.Array], layers: Sequence[jax.Array], index: jax.Array
) -> tuple[jax.Array, ...]:
    """Several stacks, each with one layer replaced; see :func:`put_layer`."""
    return tuple(put_layer(*pair, index) for pair in zip(stacks, layers, strict=True))


def put_layer(stack: jax.Array, layer: jax.Array, index: jax.Array) -> jax.Array:
    """The stack with one layer replaced, in the memory where it is: in a loop's carry this is done in place."""
    return jax.lax.dynamic_update_index_in_dim(stack, beside(stack, layer), index, 0)
