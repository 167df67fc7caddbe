"""Gradients that leave for host memory as they are made, and what is to be known of them before they come back."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from zeroj.gather.sinks import Measured, ReadsNothing


@dataclass(frozen=True)
class HostGradient(ReadsNothing):
    """Sends a leaf's gradient, or that of its layers one by one, to host memory; keeps the sum of its squares.

    Attributes:
        dtype: that of a gradient on the device; the squares are those of the gradient in it.
        squares: of a layer: the sum of squares of the layers before.
    """

    dtype: np.dtype
    squares: jax.Array | None = None

    def plus(self, addend: jax.Array) -> Measured:
        """The gradient in host memory, in the dtype in which it arises."""
        away = jax.device_put(addend, jax.memory.Space.Host)
        return Measured(away, squares_of(addend.astype(self.dtype)))

    def layer(self, stack: jax.Array, index: jax.Array) -> HostGradient:
        """That of one layer, where ``stack`` is the sum of squares so far."""
        del index
        return replace(self, squares=stack)

    def start(self, first: int, step: int) -> jax.Array:
        """No squares yet."""
        del first, step
        return jnp.zeros((), jnp.float32)

    def put(self, made: Measured) -> jax.Array:
        """The sum of squares with the layer's."""
        assert self.squares is not None
        return self.squares + made.squares

    def given(self, made: Measured) -> jax.Array:
        """The layer's gradient, which the loop stacks."""
        return made.grad

    def whole(self, carried: jax.Array, given: jax.Array) -> Measured:
        """The stack."""
        return Measured(given, carried)


def squares_of(value: jax.Array) -> jax.Array:
    """The sum of the squares of an array on the device, an fp32 scalar."""
    return jnp.sum(jnp.square(value.astype(jnp.promote_types(value.dtype, jnp.float32))))
