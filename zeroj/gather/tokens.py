"""When a shard is gathered: one bucket of parameters ahead of its use, and never further.

XLA may start an all-gather as soon as its operand is ready, and parameters are ready from the beginning: left
alone it may gather everything at once, or merge the gathers of the forward and of the backward pass. A token,
a scalar threaded through optimization barriers, orders them: the gathers of a bucket wait until the first use
of the bucket before is about to start. Every output of a barrier must be used, or XLA drops the barrier.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from zeroj.collectives import memory
from zeroj.gather import lazy
from zeroj.gather.kept import Kept, Key, Near, near_of
from zeroj.gather.lazy import Shard
from zeroj.plan.rules import NVME, Placement


class Gather(Protocol):
    """Makes a whole parameter from a stored shard, in two halves."""

    def near(self, array: jax.Array, placement: Placement) -> jax.Array:
        """What a later gather of the same parameter may start from."""

    def gather(self, near: jax.Array, placement: Placement, dtype: np.dtype) -> jax.Array:
        """The whole parameter, in the user's shape."""

    def read(self, ticket: jax.Array, path: str, placement: Placement) -> jax.Array:
        """The stored shard of a parameter that lies in files, from its ticket."""


Tokens = tuple[jax.Array, ...]


class Progress(NamedTuple):
    """Where in its buckets a straight piece of program stands."""

    free_start: bool
    started: bool
    in_bucket: int
    opens: bool
    unheld: int
    in_region: bool


class Gathers:
    """The gathers of one straight piece of program: issued in order, remembered while they may be reused.

    Args:
        gather: makes a whole parameter from a stored shard.
        bucket: elements that are gathered together, one bucket ahead of their use.
        reuse: a whole parameter is used again, rather than gathered again, while at most this many elements
            were gathered since; 0 means only within its bucket.
        free_start: whether the first bucket waits for nothing: in a loop's body XLA can then start its gathers
            in the iteration before.
    """

    def __init__(self, gather: Gather, bucket: int, reuse: int = 0, free_start: bool = False) -> None:
        self._gather = gather
        self.bucket = bucket
        self.reuse = reuse
        self.free_start = free_start
        self.gate = jnp.zeros((), jnp.float32)
        self.ready = jnp.zeros((), jnp.float32)
        self.made = jnp.zeros((), jnp.float32)
        self._reduced = jnp.zeros((), jnp.float32)
        self._reduced_earlier = jnp.zeros((), jnp.float32)
        self._total = 0
        self._in_bucket = 0
        self._opens = False
        self._unheld = 0
        self._outer: list[tuple[bool, int]] = []
        self._in_region = False
        self._whole: dict[tuple[int, str], tuple[int, Shard, jax.Array]] = {}
        self._next: dict[tuple[int, str], tuple[int, str]] = {}
        self.kept: Kept = {}

    def tokens(self) -> Tokens:
        """What a part of the program that is a function of its own takes in and gives out."""
        return self.gate, self.ready, self.made, self._reduced, self._reduced_earlier

    def progress(self) -> Progress:
        """What the next gathers depend on beside the tokens."""
        started = bool(self._total)
        return Progress(self.free_start, started, self._in_bucket, self._opens, self._unheld, self._in_region)

    def part(self, tokens: Tokens) -> Gathers:
        """Gathers that go on from here within such a part."""
        inner = Gathers(self._gather, self.bucket, self.reuse)
        inner._go_on(tokens, self.progress())
        return inner

    def after(self, tokens: Tokens, progress: Progress) -> None:
        """Goes on where the gathers of such a part stopped, none of which is used again."""
        self._go_on(tokens, progress)
        self._whole = {}

    def _go_on(self, tokens: Tokens, progress: Progress) -> None:
        self.gate, self.ready, self.made, self._reduced, self._reduced_earlier = tokens
        self.free_start, started, self._in_bucket, self._opens, self._unheld, self._in_region = progress
        self._total = int(started)  # distances count from here: nothing that was gathered before is at hand

    def issue(self, shards: Sequence[Shard]) -> None:
        """Gathers those of ``shards`` that are not at hand."""
        wanted = {_key(s): s for s in shards}
        new = {key: shard for key, shard in wanted.items() if key not in self._whole}
        if not new:
            return
        size = sum(shard.size for shard in new.values())
        if self._total == 0 or self._in_bucket >= self.bucket:
            self._open(keep=wanted)
        self._total += size
        self._in_bucket += size
        near = {key: near_of(self.kept, shard) for key, shard in new.items()}
        kept = {key: value for key, value in near.items() if value is not None}
        arrays = [kept[key] if key in kept else lazy.stored(s) for key, s in new.items()]
        if self._total > size or not self.free_start:
            arrays, self.gate = jax.lax.optimization_barrier((arrays, self.gate))
        for (key, shard), array in zip(new.items(), arrays, strict=True):
            wire = shard.placement.wire
            if key in kept:
                start = memory.here(array)
            else:
                start = self._gather.near(self._fetched(array, shard), shard.placement)
            if key not in kept and wire.kept:
                waits = jax.device_put(start, jax.memory.Space.Host) if wire.near_memory else start
                self.kept[Key(*key)] = Near(shard, waits)
            self._whole[key] = (self._total, shard, self._gather.gather(start, shard.placement, shard.dtype))

    def _fetched(self, array: jax.Array, shard: Shard) -> jax.Array:
        """What waited at the gate, on the device and in the dtype that travels."""
        if shard.placement.memory != NVME:
            return lazy.fetched(array, shard)
        return self._gather.read(array, shard.path, shard.placement).astype(shard.dtype)

    def before_use(self, values: Sequence[jax.Array], shards: Sequence[Shard]) -> list[jax.Array]:
        """Marks the start of the first use in a bucket; the next bucket's gathers wait for ``values``.

        In a region ``values`` also wait for the params of the next use: XLA starts a gather as late as it thinks
        will do, and does not reckon with those that are under way before it.
        """
        held = list(values)
        following = [self._next[key] for key in map(_key, shards) if key in self._next]
        following = [key for key in following if key in self._whole]
        if following and held:
            count, shard, whole = self._whole[following[-1]]
            held, whole = jax.lax.optimization_barrier((held, whole))
            self._whole[following[-1]] = count, shard, whole
        if not (self._opens and held):
            return held
        return self.hold(held if self._in_region else self.after_gradients(held))

    def hold(self, values: Sequence[jax.Array]) -> list[jax.Array]:
        """Puts ``values`` behind a barrier, and the next bucket's gathers behind ``values``."""
        self._opens = False
        held, self.ready = jax.lax.optimization_barrier((list(values), self.ready))
        return held

    def after_gradients(self, values: Sequence[jax.Array]) -> list[jax.Array]:
        """Holds ``values`` until gradients are made, and those of the stretch before are reduced too.

        Nothing but the end of the step needs a weight's gradient, so XLA may put off making or reducing it,
        and keep alive, through the whole backward pass, what it is made from, or the full gradients.
        """
        held, made, earlier = jax.lax.optimization_barrier((list(values), self.made, self._reduced_earlier))
        self.made = made + earlier
        self._unheld = 0
        self._reduced_earlier = self._reduced
        self._reduced = jnp.zeros((), jnp.float32)
        return held

    def gradients_are_due(self) -> bool:
        """Whether a bucket of gradients was marked since anything was held for them."""
        return self._unheld >= self.bucket

    def reduce(
        self, grad: jax.Array, reduction: Callable[[jax.Array], jax.Array], late: bool = False
    ) -> jax.Array:
        """Reduces a gradient over devices, in step with the backward pass.

        Args:
            grad: this device's addend.
            reduction: sums it.
            late: whether it is made in step, but summed when it suits: a small one holds no memory, and XLA joins
                the sums of many layers to one, where each would cost its latency between two large ones.
        """
        self._unheld += grad.size
        grad, self.made = jax.lax.optimization_barrier((grad, self.made))
        if late:
            return reduction(grad)
        reduced, self._reduced = jax.lax.optimization_barrier((reduction(grad), self._reduced))
        return reduced

    def with_gradients(self, values: Sequence[jax.Array]) -> list[jax.Array]:
        """``values`` that are to be there when the gradients made so far are; see :meth:`after_gradients`."""
        held, self.made = jax.lax.optimization_barrier((list(values), self.made))
        return held

    def in_step(self, values: Sequence[jax.Array]) -> list[jax.Array]:
        """``values`` that only the end of the step needs, waited for like a reduced gradient: XLA would put off
        writing them to where they belong, and hold them twice."""
        held, self._reduced = jax.lax.optimization_barrier((list(values), self._reduced))
        return held

    def enter_region(self, shards: Sequence[Shard], max_live: int) -> None:
        """Starts a region that shares its gathered parameters, and no others.

        Args:
            shards: all shards that the region may use. They are gathered at once, ahead of the region's
                activations, if twice their size is at most ``max_live`` (this region and the next are alive
                together), otherwise bucket by bucket.
            max_live: in elements.
        """
        self._outer.append((self._in_region, self.reuse))
        self._in_region = True
        self.reuse, self._whole = max_live, self._at_hand(shards)
        if shards:
            self._open()
            if 2 * sum(shard.size for shard in shards) <= max_live:
                keys = [_key(shard) for shard in shards]
                self._next = dict(itertools.pairwise(keys))
                self._in_bucket = -max_live
                self.issue(shards)

    def has(self, shards: Sequence[Shard]) -> bool:
        """Whether one of ``shards`` is at hand: the last layer's, where the forward pass turns into the backward."""
        return bool(self._at_hand(shards))

    def _at_hand(self, shards: Sequence[Shard]) -> dict[tuple[int, str], tuple[int, Shard, jax.Array]]:
        return {key: self._whole[key] for key in map(_key, shards) if key in self._whole}

    def leave_region(self) -> None:
        """Ends the region: nothing that it gathered is used again."""
        self._in_region, self.reuse = self._outer.pop()
        self._next = {}
        self._whole = {}
        if self._total:
            self._open()

    def whole(self, shard: Shard) -> jax.Array:
        """The gathered parameter. It must have been issued."""
        return self._whole[_key(shard)][2]

    def token(self) -> jax.Array:
        """A zero that depends on every barrier; it must reach an output of the program."""
        return self.gate + self.ready + self.made + self._reduced + self._reduced_earlier

    def _open(self, keep: Collection[tuple[int, str]] = ()) -> None:
        """Starts a bucket: its gathers wait for the first use of the bucket before.

        Args:
            keep: keys of what is needed now, and so stays at hand.
        """
        self.gate = self.gate + self.ready
        self.ready = self.gate
        self._in_bucket = 0
        self._opens = True
        farthest = self._total - self.reuse if self.reuse else math.inf
        self._whole = {k: v for k, v in self._whole.items() if k in keep or v[0] >= farthest}


def _key(shard: Shard) -> tuple[int, str]:
    return id(shard.array), str(shard.dtype)
