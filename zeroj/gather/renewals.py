"""Params whose update is still to be made when a program begins: it is made in the loop that first uses them.

A stack of layers is renewed layer by layer, in front of each layer's forward pass, so that what comes from host memory
for it, and goes back, hides behind the layers around it. A param that is first used in another way is renewed there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import jax
from jax.sharding import PartitionSpec

from zeroj import _compat
from zeroj.gather import lazy
from zeroj.gather.sinks import Hold
from zeroj.plan.plan import Plan


class Renewed(NamedTuple):
    """A leaf after its update: its stored param; its master, if it has one of its own, and its optimizer state."""

    param: Any
    stored: tuple[Any, ...]


class Renewal(Protocol):
    """What renews one stack of layers."""

    def start(self, first: int, step: int) -> Any:
        """What a loop over layers carries of it at first; it begins with layer ``first`` and goes on by ``step``."""

    def layer(self, carried: Any, index: jax.Array) -> tuple[jax.Array, Any]:
        """The new param of one layer, on the device, and what is worked on in the iteration."""

    def due(self, working: Any, hold: Hold) -> Any:
        """The same with what comes of the next layer passed through ``hold``, which is to wait for it."""

    def write_first(self, working: Any, hold: Hold) -> Any:
        """The same with the results of the layer before written first, and passed through ``hold``."""

    def put(self, working: Any) -> Any:
        """What the loop carries on."""

    def whole(self, carried: Any) -> Renewed:
        """The stack, from what the loop carried."""

    def at_once(self) -> Renewed:
        """The stack, renewed in a loop of its own."""


@dataclass(frozen=True)
class Renewing:
    """The leaves that a program is to renew.

    Attributes:
        values: path -> global arrays that are used for it.
        specs: path -> the PartitionSpec, over the ZeRO axes, of each of them and of the param.
        also: replicated arrays that are used for all.
        make: (path, this device's shards of its values, this device's shard of its param, ``also``) -> the renewal.
        stored: how many arrays are stored beside each param.
    """

    values: Mapping[str, tuple[jax.Array, ...]]
    specs: Mapping[str, PartitionSpec]
    also: Any
    make: Callable[..., Renewal]
    stored: Mapping[str, int]

    @property
    def value_specs(self) -> dict[str, tuple[PartitionSpec, ...]]:
        """Path -> the PartitionSpec of each of ``values``."""
        return {path: (self.specs[path],) * len(arrays) for path, arrays in self.values.items()}

    @property
    def out_specs(self) -> dict[str, Renewed]:
        """Path -> the PartitionSpecs of what is made."""
        return {path: Renewed(spec, (spec,) * self.stored[path]) for path, spec in self.specs.items()}

    def of(self, plan: Plan, values: Mapping[str, Any], params: Sequence[jax.Array], also: Any) -> Renewals:
        """On one device: what is to be renewed, by its stored param."""
        shards = {leaf.path: shard for leaf, shard in zip(plan.leaves, params, strict=True)}
        found = {path: self.make(path, arrays, shards[path], also) for path, arrays in values.items()}
        return Renewals({id(shards[path]): (path, shards[path], each) for path, each in found.items()})


@dataclass
class Renewals:
    """What of a program's params is renewed, and what still has to be, while the program is walked.

    Attributes:
        waiting: id of a stored param -> its path, itself, and what renews it.
        done: path -> what was made.
        now: id of a stored param -> itself, which keeps the id taken, and the new one.
    """

    waiting: dict[int, tuple[str, jax.Array, Renewal]] = field(default_factory=dict)
    done: dict[str, Renewed] = field(default_factory=dict)
    now: dict[int, tuple[jax.Array, jax.Array]] = field(default_factory=dict)

    def finish(self, key: int, made: Renewed) -> None:
        """Notes what a stored param has become."""
        path, old, _ = self.waiting.pop(key)
        self.done[path], self.now[key] = made, (old, made.param)

    def renew(self, values: Sequence[Any]) -> None:
        """Renews, each in a loop of its own, what lazy values are made of."""
        for shard in (shard for value in values for shard in lazy.shards_of(value)):
            key = id(shard.array)
            if key in self.waiting:
                self.finish(key, self.waiting[key][2].at_once())

    def rest(self) -> dict[str, Renewed]:
        """Everything that was to be renewed, once the program is walked: also what it did not use."""
        for key in list(self.waiting):
            self.finish(key, self.waiting[key][2].at_once())
        return self.done

    def current(self, value: Any) -> Any:
        """A value of the program with new params in place of old ones."""
        if not lazy.is_lazy(value):
            return value
        parts = {
            shard: replace(shard, array=self.now[id(shard.array)][1])
            for shard in lazy.shards_of(value)
            if id(shard.array) in self.now
        }
        return lazy.substitute(value, parts) if parts else value


class Coming:
    """What comes from host memory for the next layer while one is worked on, and what goes back.

    XLA begins a copy as late as it thinks will do, and does not reckon with the queue. So each use of a leaf waits for
    what comes for the leaf that was used before it, and that one's results of the layer before are written after
    it. The leaf that is used last has nothing behind which it could be written: it is written first, by the time half
    of the leaves are used, and comes then.

    Args:
        working: key -> (the leaf's new param, what renews it, what is worked on of it).
        order: the new params, in the order in which they are used.
    """

    def __init__(
        self,
        working: Mapping[int, tuple[jax.Array, Renewal, Any]] | None = None,
        order: Sequence[jax.Array] = (),
    ) -> None:
        self.working = {key: (renewal, value) for key, (_, renewal, value) in (working or {}).items()}
        self._keys = {id(param): key for key, (param, _, _) in (working or {}).items()}
        self._order = [self._keys[id(param)] for param in order if id(param) in self._keys]
        self._used: list[int] = []

    def before_use(self, values: list[jax.Array], shards: Sequence[lazy.Shard]) -> list[jax.Array]:
        """``values`` that are used with ``shards``, after what is due."""
        keys = [self._keys.pop(id(shard.array)) for shard in shards if id(shard.array) in self._keys]
        if not keys or not values:
            return values
        held = values

        def hold(arrays: Sequence[jax.Array]) -> list[jax.Array]:
            nonlocal held
            held, arrived = jax.lax.optimization_barrier((held, list(arrays)))
            return arrived

        half, last = len(self._order) // 2, self._order[-1]
        if len(self._used) <= half < len(self._used) + len(keys) and last not in keys:
            self._change(last, lambda renewal, working: renewal.write_first(working, hold))
        for key in self._used[-1:]:
            self._change(key, lambda renewal, working: renewal.due(working, hold))
        self._used += keys
        return held

    def _change(self, key: int, change: Callable[[Renewal, Any], Any]) -> None:
        renewal, working = self.working[key]
        self.working[key] = renewal, change(renewal, working)

    def put(self) -> dict[int, Any]:
        """What the loop carries on, by key."""
        return {key: renewal.put(working) for key, (renewal, working) in self.working.items()}


def until_used(eqn: _compat.Eqn) -> bool:
    """Whether an equation is a call, within which params are first used where they are used there."""
    return eqn.primitive.name not in REGIONS and _compat.called_program(eqn) is not None


#: Regions whose params may be gathered before they begin.
REGIONS = frozenset({"remat2", "checkpoint"})
