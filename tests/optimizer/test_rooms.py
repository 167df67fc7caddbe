"""Results in memory that is used again: in place where nobody looks at it any more, elsewhere where somebody does."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from zeroj.optimizer.rooms import Rooms

SHAPE = (256, 256)


def add(x: jax.Array, room: jax.Array) -> jax.Array:
    del room
    return x + 1


def setting() -> tuple[Rooms, jax.ShapeDtypeStruct, jax.Array]:
    x = jnp.ones(SHAPE, jnp.float32)
    return Rooms(), jax.ShapeDtypeStruct(SHAPE, jnp.float32, sharding=x.sharding), x


PROGRAM = jax.jit(add, donate_argnums=1, keep_unused=True)


def test_a_result_is_made_in_the_memory_of_one_that_was_written() -> None:
    rooms, struct, x = setting()
    made = PROGRAM(x, *rooms.take([struct]))
    place = made.unsafe_buffer_pointer()
    written = np.asarray(made.addressable_shards[0].data)  # as a store is given it
    assert written.ctypes.data == place and written[0, 0] == 2
    del written
    rooms.give_back([struct], [made])
    del made
    again = PROGRAM(x + 1, *rooms.take([struct]))
    assert again.unsafe_buffer_pointer() == place
    assert again[0, 0] == 3


def test_what_somebody_still_looks_at_is_not_overwritten() -> None:
    rooms, struct, x = setting()
    made = PROGRAM(x, *rooms.take([struct]))
    seen = np.asarray(made.addressable_shards[0].data)
    rooms.give_back([struct], [made])
    again = PROGRAM(x + 1, *rooms.take([struct]))
    assert again[0, 0] == 3 and seen[0, 0] == 2


def test_each_shape_has_its_own() -> None:
    rooms, struct, x = setting()
    other = jax.ShapeDtypeStruct((2, 3), jnp.bfloat16, sharding=x.sharding)
    first = rooms.take([struct, other, other])
    assert [(a.shape, a.dtype) for a in first] == [(s.shape, s.dtype) for s in (struct, other, other)]
    assert first[1] is not first[2]
    rooms.give_back([struct, other], first[:2])
    again = rooms.take([other, struct, struct])
    assert again[0] is first[1] and again[1] is first[0] and again[2] is not first[0]
