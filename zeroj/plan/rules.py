"""One pure function that decides, for one leaf, which dims are sharded over which axes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from jax.sharding import PartitionSpec

from zeroj.plan.wire import PLAIN, Wire

#: Padding below this share of a leaf is preferred to splitting a second dim (a second collective).
PADDING_TOLERANCE = 0.02
#: Leaves that stay whole by zeroj's own choice may add at most this share to total / N bytes per device.
WHOLE_SHARE = 0.02
#: The largest leaf, in elements, that stays whole by zeroj's own choice; DeepSpeed's default threshold.
WHOLE_LIMIT = 100_000
#: A first dim of at most this size may be a stack of layers.
STACK_LIMIT = 128

#: Not a memory kind of JAX's: what a placement's ``memory`` says of an array that lies in files.
NVME = "nvme"


@dataclass(frozen=True)
class Placement:
    """Where the elements of one leaf live.

    Attributes:
        shape: the user's shape.
        padded: the stored shape, each sharded dim rounded up to what its axes divide.
        dims: (dim, axes) for each sharded dim; empty for a leaf that every device holds whole.
        model: for each dim the axes of the user's own model parallelism on it, or None.
        note: why the leaf is whole, or what was padded; empty when there is nothing to say.
        wire: in what form it is gathered and its gradient reduced.
        memory: the memory kind that the stored array lives in; empty: the device's own.
    """

    shape: tuple[int, ...]
    padded: tuple[int, ...]
    dims: tuple[tuple[int, tuple[str, ...]], ...] = ()
    model: tuple[tuple[str, ...] | None, ...] = ()
    note: str = ""
    wire: Wire = PLAIN
    memory: str = ""

    @property
    def sharded(self) -> bool:
        """Whether any dim is split over a ZeRO axis."""
        return bool(self.dims)

    @property
    def kept_whole(self) -> bool:
        """Whether a step gathers the leaf once and keeps it to its end (``reshard_after_forward: false``)."""
        return self.wire.keeps and set(self.wire.first) == set(self.axes)

    @property
    def axes(self) -> tuple[str, ...]:
        """All ZeRO axes that split this leaf."""
        return tuple(axis for _, axes in self.dims for axis in axes)

    @property
    def zero_spec(self) -> PartitionSpec:
        """The PartitionSpec over the ZeRO axes alone: what ``shard_map`` takes."""
        entries = dict(self.dims)
        return PartitionSpec(*(_entry(entries.get(dim, ())) for dim in range(len(self.shape))))

    @property
    def spec(self) -> PartitionSpec:
        """The PartitionSpec of the stored array, the user's own model axes included."""
        entries = dict(self.dims)
        model = self.model or (None,) * len(self.shape)
        return PartitionSpec(
            *(_entry((*entries.get(dim, ()), *(model[dim] or ()))) for dim in range(len(self.shape)))
        )

    def whole(self, note: str = "") -> Placement:
        """The same leaf, held whole by every device."""
        return Placement(self.shape, self.shape, (), self.model, note)

    def over(self, axes: Collection[str]) -> Placement:
        """The stored array, split over those of its axes that are among ``axes`` alone."""
        dims = ((dim, tuple(a for a in names if a in axes)) for dim, names in self.dims)
        return replace(self, shape=self.padded, dims=tuple((dim, names) for dim, names in dims if names))

    def at(self, memory: str) -> Placement:
        """The same leaf, stored in another memory kind; empty: the device's own."""
        return replace(self, memory=memory)

    def cut(self, dim: int, size: int) -> Placement:
        """The placement of a piece of ``size`` along ``dim``, which must be neither sharded nor padded."""
        shape, padded = list(self.shape), list(self.padded)
        shape[dim] = padded[dim] = size
        return replace(self, shape=tuple(shape), padded=tuple(padded))

    def without_dim0(self) -> Placement:
        """The placement of one slice of a stack of layers. Dim 0 must not be sharded."""
        return self.without((0,))

    def without(self, gone: Collection[int]) -> Placement:
        """The placement without some dims, none of which may be sharded."""
        assert all(dim not in gone for dim, _ in self.dims)
        left = [dim for dim in range(len(self.shape)) if dim not in gone]
        dims = tuple((left.index(dim), axes) for dim, axes in self.dims)
        model = tuple(self.model[dim] for dim in left) if self.model else ()
        shape, padded = (tuple(sizes[dim] for dim in left) for sizes in (self.shape, self.padded))
        return replace(self, shape=shape, padded=padded, dims=dims, model=model)

    def stacked(self, length: int) -> Placement:
        """The placement of a stack of ``length`` such leaves."""
        dims = tuple((dim + 1, axes) for dim, axes in self.dims)
        model = (None, *self.model) if self.model else ()
        shape, padded = (length, *self.shape), (length, *self.padded)
        return replace(self, shape=shape, padded=padded, dims=dims, model=model)

    def resized(self, shape: Sequence[int]) -> Placement | None:
        """The placement of a leaf that differs in unsplit dims alone; None where a split dim differs."""
        split = {dim for dim, _ in self.dims} | {dim for dim, axes in enumerate(self.model) if axes}
        if any(shape[dim] != self.shape[dim] for dim in split):
            return None
        padded = tuple(self.padded[dim] if dim in split else n for dim, n in enumerate(shape))
        return replace(self, shape=tuple(shape), padded=padded)

    def transposed(self, permutation: Sequence[int]) -> Placement:
        """The placement after ``jax.lax.transpose`` by ``permutation``."""
        new_dim = {old: new for new, old in enumerate(permutation)}
        shape, padded = (tuple(sizes[p] for p in permutation) for sizes in (self.shape, self.padded))
        model = tuple(self.model[p] for p in permutation) if self.model else ()
        dims = tuple((new_dim[dim], axes) for dim, axes in self.dims)
        return replace(self, shape=shape, padded=padded, dims=dims, model=model)


def place(
    shape: Sequence[int],
    axes: Mapping[str, int],
    *,
    threshold: int,
    scanned: Collection[int] = (),
    model: Sequence[tuple[str, ...] | None] = (),
) -> Placement:
    """Decides how one leaf is sharded.

    Every axis is given to one dim. Among all ways to do so, one with at most 2 % padding and the fewest
    split dims wins, then the least padding, then the earlier dim (whose shards are contiguous in memory);
    a first dim of at most 128 comes last, since it may be a stack of layers that a scan runs over.

    Args:
        shape: the leaf's shape.
        axes: ZeRO axis -> size, outermost first.
        threshold: leaves of at most this many elements stay whole.
        scanned: dims that a ``lax.scan`` runs over; never sharded, since each step needs one whole slice.
        model: for each dim the axes of the user's own model parallelism; such dims are left alone.

    Returns:
        The placement; ``note`` says why a leaf stayed whole.

    Example:
        >>> place((50257, 1600), {"data": 8}, threshold=0).dims
        ((1, ('data',)),)
    """
    shape = tuple(int(n) for n in shape)
    splitting = {axis: size for axis, size in axes.items() if size > 1}
    degree = math.prod(splitting.values())
    numel = math.prod(shape)
    whole = Placement(shape, shape, (), tuple(model))
    if not splitting:
        return whole.whole("one device")
    if numel < degree:
        return whole.whole("scalar" if not shape else f"fewer elements than the {degree} devices")
    if numel <= threshold:
        return whole.whole(f"at most {threshold} elements")
    taken = {dim for dim, used in enumerate(model) if used}
    free = [dim for dim in range(len(shape)) if dim not in scanned and dim not in taken]
    if not free:
        return whole.whole("every dim is scanned or belongs to a model axis")
    choices = itertools.product(free, repeat=len(splitting))
    best = min((_candidate(shape, splitting, choice) for choice in choices), key=lambda c: c[0])
    _, padded, dims = best
    note = "" if padded == shape else f"padded to {padded}"
    return Placement(shape, padded, dims, tuple(model), note)


def auto_threshold(sizes: Sequence[int], degree: int) -> int:
    """The largest size at which all leaves up to it, kept whole, cost at most 2 % of total / N.

    Args:
        sizes: number of elements of every leaf.
        degree: N, the number of devices that share the state.

    Returns:
        A number of elements: leaves of at most that many stay whole.
    """
    allowed = WHOLE_SHARE * sum(sizes) / max(degree, 1)
    threshold, spent = 0, 0
    for size, group in itertools.groupby(sorted(sizes)):
        spent += sum(group)
        if size > WHOLE_LIMIT or spent > allowed:
            break
        threshold = size
    return threshold


def _candidate(
    shape: tuple[int, ...], axes: Mapping[str, int], choice: Sequence[int]
) -> tuple[tuple, tuple[int, ...], tuple[tuple[int, tuple[str, ...]], ...]]:
    """The order key, padded shape and dims of giving axis i to dim ``choice[i]``."""
    given: dict[int, tuple[str, ...]] = {}
    for axis, dim in zip(axes, choice, strict=True):
        given[dim] = (*given.get(dim, ()), axis)
    padded = list(shape)
    for dim, names in given.items():
        factor = math.prod(axes[a] for a in names)
        padded[dim] = -(-shape[dim] // factor) * factor
    waste = math.prod(padded) / math.prod(shape) - 1
    beyond = waste if waste > PADDING_TOLERANCE else 0.0
    maybe_stack = len(shape) > 1 and shape[0] <= STACK_LIMIT and 0 in given
    key = (beyond, len(given), waste, maybe_stack, tuple(choice))
    return key, tuple(padded), tuple(given.items())


def _entry(axes: tuple[str, ...]) -> str | tuple[str, ...] | None:
    """One entry of a PartitionSpec."""
    return None if not axes else axes[0] if len(axes) == 1 else axes
