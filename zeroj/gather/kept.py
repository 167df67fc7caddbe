"""What a step keeps of its gathers for later ones, and how that goes into a scan and comes out of it.

hpZ keeps a node's share of a parameter; ``reshard_after_forward: false`` the whole, as hpZ in a group of one would.

The first gather of a shard leaves its near shard behind: within a node, no later gather of the same parameter
needs the network. Layers in a loop leave theirs stack by stack: the forward loop gives a stack of near shards
out, which the backward loop takes in. A loop that takes all layers of a stack by index, in their order, leaves what one
over the stack would. Nothing outlives the step, so nothing can be stale. With the params off the
device near shards wait in host memory, and come to the device where they are gathered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax

from zeroj.collectives import memory
from zeroj.gather.lazy import Shard


class Key(NamedTuple):
    """Whose near shard: the id of the shard's array, the dtype, and how many loops have sliced it since."""

    array: int
    dtype: str
    depth: int = 0


class Near(NamedTuple):
    """A near shard; ``shard`` is what it was made from, and keeps the id in its key taken."""

    shard: Shard
    value: jax.Array


Kept = dict[Key, Near]


def near_of(kept: Kept, shard: Shard) -> jax.Array | None:
    """The near shard of ``shard``, or that of its layer in a stack whose near shards are there; None: neither."""
    found = kept.get(Key(id(shard.array), str(shard.dtype)))
    if found is not None:
        return found.value
    layer = shard.layer
    if layer is None or not layer.alone:
        return None
    stack = kept.get(Key(id(layer.stack.array), str(shard.dtype), 1))
    if stack is None:
        return None
    return memory.layer_of(stack.value, layer.index)


def stacks_in(kept: Kept, stacks: Mapping[int, Shard]) -> Kept:
    """The near shards of slices of ``stacks`` (id of the array -> stack)."""
    return {key: near for key, near in kept.items() if key.array in stacks and key.depth > 0}


def sliced(stacks: Kept, values: Sequence[jax.Array], slices: Mapping[int, jax.Array]) -> Kept:
    """The same within one iteration.

    Args:
        stacks: what goes into the loop.
        values: the iteration's slice of each.
        slices: id of a stack's array -> the iteration's slice of it.
    """
    return {
        Key(id(slices[key.array]), key.dtype, key.depth - 1): Near(near.shard, value)
        for (key, near), value in zip(stacks.items(), values, strict=True)
    }


def stacked(inside: Kept, before: Kept, origin: Mapping[int, Shard], made: Sequence[Shard] = ()) -> Kept:
    """What one iteration kept anew, by the stacks that it belongs to; the values are still the iteration's.

    Args:
        inside: what was kept at the iteration's end.
        before: what was kept at its start.
        origin: id of a slice -> the stack that it was cut from.
        made: shards that the iteration made itself and gives out (``p[i]``, ``i`` of no order that is seen): the loop
            will stack them.
    """
    layers = {key.array: stack for key, near in inside.items() if (stack := near.shard.stack)}
    belongs = layers | {id(shard.array): shard for shard in made} | dict(origin)
    new = {key: near for key, near in inside.items() if key not in before and key.array in belongs}
    return {
        Key(id(belongs[key.array].array), key.dtype, key.depth + 1): Near(belongs[key.array], near.value)
        for key, near in new.items()
    }


def renewed(kept: Kept, now: Mapping[int, tuple[jax.Array, jax.Array]]) -> Kept:
    """The same near shards, by the params that these have become: id of the old array -> it and the new one."""
    return {
        key._replace(array=id(now[key.array][1])) if key.array in now else key: near
        for key, near in kept.items()
    }


def with_values(kept: Kept, values: Sequence[jax.Array], stacks: Mapping[int, Shard]) -> Kept:
    """The same near shards, as the loop stacked them.

    Args:
        kept: what :func:`stacked` gave.
        values: the stack of each.
        stacks: id of a shard's array that an iteration made -> the stack of them.
    """
    found: Kept = {}
    for (key, near), value in zip(kept.items(), values, strict=True):
        shard = stacks.get(key.array, near.shard)
        found[key._replace(array=id(shard.array))] = Near(shard, value)
    return found
