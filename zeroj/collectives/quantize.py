"""Block quantisation: small integers and one fp32 scale a block, in one array of bytes that travels in one launch.

Symmetric: a block's largest magnitude m becomes the largest integer L (127 or 7), and an element x becomes
round(x / m x L), to even at ties. So 0, m and -m are exact, and the error is at most m / (2 L). A block with a NaN
or an infinity has no finite element after dequantisation, so that an overflow is seen as it would be without.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from zeroj.plan.wire import Format

SCALE_BYTES = 4


def quantize(values: jax.Array, fmt: Format, key: jax.Array | None = None) -> jax.Array:
    """Packs the last dim of ``values`` into bytes.

    Args:
        values: floats (..., n).
        fmt: the format.
        key: a key for stochastic rounding, which is unbiased; left out, rounding is to nearest, ties to even.

    Returns:
        int8 (..., fmt.packed_bytes(n)): the integers of all blocks, then their scales.

    Example:
        >>> dequantize(quantize(jnp.array([0.0, 1.0, -4.0]), Format(8)), Format(8), 3, jnp.float32)
        Array([ 0.      ,  1.007874, -4.      ], dtype=float32)
    """
    blocks = _blocks(values.astype(jnp.float32), fmt.block)
    magnitude = jnp.where(jnp.isnan(blocks), jnp.inf, jnp.abs(blocks))
    largest = jnp.max(magnitude, axis=-1, keepdims=True)
    scaled = blocks / jnp.where(largest > 0, largest, 1.0) * fmt.largest
    if key is None:
        whole = jnp.round(scaled)
    else:
        whole = jnp.floor(scaled + jax.random.uniform(key, scaled.shape))
    integers = jnp.clip(jnp.where(jnp.isnan(whole), 0.0, whole), -fmt.largest, fmt.largest).astype(jnp.int8)
    payload = integers if fmt.bits == 8 else _nibbles(integers)
    scales = jax.lax.bitcast_convert_type(largest[..., 0], jnp.int8)
    lead = values.shape[:-1]
    return jnp.concatenate([payload.reshape(*lead, -1), scales.reshape(*lead, -1)], axis=-1)


def dequantize(packed: jax.Array, fmt: Format, count: int, dtype: np.dtype) -> jax.Array:
    """Undoes :func:`quantize`.

    Args:
        packed: int8 (..., fmt.packed_bytes(count)).
        fmt: the format.
        count: n, the number of elements that were packed.
        dtype: of the result.

    Returns:
        Floats (..., count).
    """
    blocks = -(-count // fmt.block)
    width = blocks * fmt.block * fmt.bits // 8
    lead = packed.shape[:-1]
    payload = packed[..., :width].reshape(*lead, blocks, -1)
    scales = packed[..., width:].reshape(*lead, blocks, SCALE_BYTES)
    largest = jax.lax.bitcast_convert_type(scales, jnp.float32)[..., None]
    integers = payload if fmt.bits == 8 else _integers(payload)
    values = integers.astype(jnp.float32) / fmt.largest * largest
    # XLA may reorder the product, and then the largest itself would be off in its last bit.
    values = jnp.where(
        integers == fmt.largest, largest, jnp.where(integers == -fmt.largest, -largest, values)
    )
    return values.astype(dtype).reshape(*lead, -1)[..., :count]


def _blocks(values: jax.Array, block: int) -> jax.Array:
    """(..., n) as (..., blocks, block), padded with zeros."""
    count = values.shape[-1]
    extra = -count % block
    if extra:
        values = jnp.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, extra)])
    return values.reshape(*values.shape[:-1], -1, block)


def _nibbles(integers: jax.Array) -> jax.Array:
    """Two integers of -8 to 7 in a byte: those of a block's first half in the low nibbles, of the second high."""
    low, high = jnp.split(integers, 2, axis=-1)
    return (low & 15) | (high << 4)


def _integers(nibbles: jax.Array) -> jax.Array:
    """Undoes :func:`_nibbles`; shifting right keeps the sign."""
    return jnp.concatenate([(nibbles << 4) >> 4, nibbles >> 4], axis=-1)
