"""Which example goes where: global batches in a fixed order, each process reading its own rows alone."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding

from zeroj.errors import PlanError
from zeroj.gather.inputs import batch_specs
from zeroj.plan.plan import Plan
from zeroj.trainer import streams
from zeroj.trainer.collate import LABELS, PaddingCollator
from zeroj.trainer.steps import REAL

Examples = Sequence[Any]


@dataclasses.dataclass(frozen=True)
class GlobalBatch:
    """One global batch.

    Args:
        arrays: its columns, (rows, ...): numpy with one process, global arrays with several.
        real: how many rows are examples; the others repeat the last one and do not count.
        accumulation: micro-batches it is to be split into.
        weighted: whether the column ``REAL`` says which rows count; otherwise their labels do.
        tokens: elements of "input_ids", over all processes.
    """

    arrays: dict[str, Any]
    real: int
    accumulation: int
    weighted: bool
    tokens: int


@dataclasses.dataclass(frozen=True)
class Shape:
    """How rows are laid out: micro-batch per device, micro-batches per update, devices."""

    micro: int
    accumulation: int
    world: int

    @property
    def rows(self) -> int:
        """Rows of a whole batch."""
        return self.micro * self.accumulation * self.world


def is_sized(dataset: Any) -> bool:
    """Whether the dataset has an end and is read by index; otherwise it is iterated over."""
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        return False
    return len(dataset) < sys.maxsize  # the length of a grain.MapDataset that repeats for ever


def kept_rows(count: int, shape: Shape, drop_last: bool) -> int:
    """Examples of an epoch that are used: all, or with ``drop_last`` those in whole micro-batches."""
    micro = shape.micro * shape.world
    return count - count % micro if drop_last else count


def updates_per_epoch(count: int, shape: Shape, drop_last: bool) -> int:
    """Updates of one pass over ``count`` examples, the last one of however many are left."""
    return -(-kept_rows(count, shape, drop_last) // shape.rows)


class Loader:
    """Global batches of a dataset.

    Args:
        dataset: a sequence of dicts, a ``datasets.Dataset``, a dataset or loader of grain, or an iterable of dicts.
        collate: from a list of examples to a dict of numpy arrays.
        plan: the plan, whose ZeRO axes split the rows.
        shape: the layout of a whole batch.
        kept: from an example to the columns that the model takes.
        weigh_labels: whether rows that only fill up are left out by their labels alone, so that a last batch runs
            in the same program as the others; otherwise it is laid out anew and its rows carry weights.
        updates: whether a batch is one update, whose micro-batches are run by one program.
        whole: whether every micro-batch must be full of examples, as running statistics need it.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Callable[..., dict[str, np.ndarray]],
        plan: Plan,
        shape: Shape,
        kept: Callable[[Any], dict[str, Any]],
        weigh_labels: bool,
        updates: bool = True,
        whole: bool = False,
    ) -> None:
        self.dataset, self.collate, self.plan, self.shape = dataset, collate, plan, shape
        self.kept = kept
        self.weigh_labels, self.updates, self.whole = weigh_labels, updates, whole
        self.stream: Any = None

    def epoch(
        self, epoch: int, seed: int | None, *, drop_last: bool = False, skip: int = 0, place: Any = None
    ) -> Iterator[GlobalBatch]:
        """The batches of one pass.

        Args:
            epoch: its number, which gives the order together with the seed.
            seed: seed of the order; None for the dataset's own order.
            drop_last: whether to leave out a last micro-batch that is not full.
            skip: batches to leave out at the start, without reading them where the dataset has a length.
            place: what :meth:`place` gave after these batches, where it gave something: they are not read then.
        """
        if is_sized(self.dataset):
            yield from self._by_index(epoch, seed, drop_last, skip)
        else:
            yield from self._by_iteration(epoch, drop_last, skip, place)

    def place(self) -> Any:
        """Where an iterator that can tell, such as grain's, stands after the last batch, as JSON; else None."""
        return streams.place_of(self.stream)

    def _by_index(self, epoch: int, seed: int | None, drop_last: bool, skip: int) -> Iterator[GlobalBatch]:
        kept = kept_rows(len(self.dataset), self.shape, drop_last)
        self._laid_out(kept)  # raises before the first update, not at the last
        order = order_of(len(self.dataset), epoch, seed)[:kept]
        for start in range(skip * self.shape.rows, len(order), self.shape.rows):
            chosen = order[start : start + self.shape.rows]
            yield from self._batches(len(chosen), partial(self._read, chosen))

    def _by_iteration(self, epoch: int, drop_last: bool, skip: int, place: Any) -> Iterator[GlobalBatch]:
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        self.stream = stream = iter(self.dataset)
        if place is not None:
            streams.go_to(stream, place)
        else:
            next(itertools.islice(stream, skip * self.shape.rows, skip * self.shape.rows), None)
        first = True
        while chosen := list(itertools.islice(stream, self.shape.rows)):
            if first and jax.process_count() > 1:
                streams.check_same([self.kept(example) for example in chosen])
            first = False
            count = kept_rows(len(chosen), self.shape, drop_last)
            if count:
                yield from self._batches(count, partial(_pick, chosen))

    def _read(self, chosen: np.ndarray, rows: np.ndarray) -> list[Any]:
        many = getattr(self.dataset, "__getitems__", None)
        numbers = [int(i) for i in chosen[rows]]
        return list(many(numbers)) if many is not None else [self.dataset[i] for i in numbers]

    def _batches(self, real: int, read: Callable[[np.ndarray], list[Any]]) -> Iterator[GlobalBatch]:
        """One batch, or without accumulation as many as it takes to lay out a rest one row a device."""
        shape, weighted = self._laid_out(real)
        if self.updates or not weighted:
            yield self._batch(shape, weighted, real, read)
            return
        for start in range(0, real, shape.world):
            part = dataclasses.replace(shape, accumulation=1)
            count = min(shape.world, real - start)
            yield self._batch(part, weighted, count, partial(_later, read, start))

    def _batch(
        self, shape: Shape, weighted: bool, real: int, read: Callable[[np.ndarray], list[Any]]
    ) -> GlobalBatch:
        rows = np.minimum(np.arange(shape.rows), real - 1)
        counts = np.arange(shape.rows) < real
        mine = own_rows(self.plan, shape.rows)
        arrays = self.collate([self.kept(example) for example in read(rows[mine])])
        if weighted:
            arrays = arrays | {REAL: counts[mine].astype(np.float32)}
        elif not counts.all():
            arrays = _uncounted(arrays, counts[mine])
        whole = self._global(arrays, shape.rows)
        tokens = int(np.prod(whole["input_ids"].shape)) if "input_ids" in whole else 0
        return GlobalBatch(whole, real, shape.accumulation, weighted, tokens)

    def _laid_out(self, real: int) -> tuple[Shape, bool]:
        """The layout of ``real`` rows, and whether they need weights.

        Whole micro-batches need neither weights nor filling up. Anything else goes one row a device, so that
        a loss that is a plain mean is one row's, and can be weighed.
        """
        shape, micro = self.shape, self.shape.micro * self.shape.world
        if real == shape.rows or self.weigh_labels:
            return shape, False
        if real % micro == 0:
            return dataclasses.replace(shape, accumulation=real // micro), False
        if self.whole:
            raise PlanError(
                f"The last {real % micro} of {real} examples do not fill a micro-batch of {shape.micro} x "
                f"{shape.world} devices, and the model carries statistics of its batches, in which rows that fill "
                "it up would count. Set dataloader_drop_last=True, or use another number of examples."
            )
        return dataclasses.replace(shape, micro=1, accumulation=-(-real // shape.world)), True

    def _global(self, arrays: dict[str, np.ndarray], rows: int) -> dict[str, Any]:
        """With several processes, arrays that each process holds its own rows of."""
        if jax.process_count() == 1:
            return arrays
        arrays = _same_lengths(arrays, self.collate)
        specs = batch_specs(self.plan, arrays)
        return {
            name: jax.make_array_from_process_local_data(
                NamedSharding(self.plan.mesh, specs[name]), value, (rows, *value.shape[1:])
            )
            for name, value in arrays.items()
        }


def _pick(examples: list[Any], rows: np.ndarray) -> list[Any]:
    return [examples[i] for i in rows]


def _later(read: Callable[[np.ndarray], list[Any]], start: int, rows: np.ndarray) -> list[Any]:
    return read(rows + start)


def order_of(count: int, epoch: int, seed: int | None) -> np.ndarray:
    """The order of an epoch, the same on every process and in every run."""
    if seed is None:
        return np.arange(count)
    return np.random.default_rng([seed, epoch]).permutation(count)


def own_rows(plan: Plan, rows: int) -> slice:
    """The rows of a global batch that this process's devices take; they lie together."""
    if jax.process_count() == 1:
        return slice(0, rows)
    sharding = NamedSharding(plan.mesh, jax.sharding.PartitionSpec(plan.zero_axes))
    spans = sorted(
        (index or ())[0].indices(rows)[:2]
        for index in sharding.addressable_devices_indices_map((rows,)).values()
    )
    if any(a[1] != b[0] and a != b for a, b in itertools.pairwise(spans)):
        raise PlanError(
            f"This process's devices take rows that do not lie together: {spans}. Use zj.make_mesh()."
        )
    return slice(spans[0][0], spans[-1][1])


def _uncounted(arrays: dict[str, np.ndarray], counts: np.ndarray) -> dict[str, np.ndarray]:
    """Rows that only fill up lose their labels; to predict, there need be none."""
    if "labels" not in arrays:
        return arrays
    labels = arrays["labels"].copy()
    labels[~counts] = np.nan if labels.dtype.kind == "f" else -100
    return arrays | {"labels": labels}


def _same_lengths(arrays: dict[str, np.ndarray], collate: Any) -> dict[str, np.ndarray]:
    """Pads to the longest that any process has; processes must agree on shapes."""
    names = sorted(arrays)
    local = np.array([arrays[n].shape[1] if arrays[n].ndim == 2 else 0 for n in names], np.int32)
    every = np.asarray(multihost_utils.process_allgather(local)).reshape(-1, len(names))
    if (every == every[0]).all():
        return arrays
    if not isinstance(collate, PaddingCollator):
        raise PlanError(
            f"The data_collator made other lengths on other processes (columns {names}: {every.tolist()}). "
            "Pad to one length, or use zj.PaddingCollator."
        )
    wider = dict(arrays)
    for name, width in zip(names, every.max(axis=0), strict=True):
        value = arrays[name]
        if value.ndim == 2 and value.shape[1] < width:
            fill = collate.fill.get(name, collate.label_pad if name in LABELS else 0)
            fill = collate.pad_token_id if name == "input_ids" else fill
            wider[name] = np.pad(value, ((0, 0), (0, width - value.shape[1])), constant_values=fill)
    return wider


def kept_columns(example: Any, names: frozenset[str] | None, labels: Sequence[str]) -> dict[str, Any]:
    """The columns of an example that are named or are labels; without names, all that hold numbers.

    Raises:
        PlanError: the example is no dict, or has no such column.
    """
    if example is None:
        raise PlanError(
            "The dataset has no example at some of its indices, as a grain.MapDataset with a filter: pass "
            "dataset.to_iter_dataset()."
        )
    if not hasattr(example, "keys"):
        raise PlanError(f"An example must be a dict of columns; the dataset gave a {type(example).__name__}.")
    wanted = None if names is None else names | {*LABELS, *labels}
    kept = {
        name: example[name]
        for name in example.keys()
        if (name in wanted if wanted is not None else _holds_numbers(example[name]))
    }
    if not kept:
        raise PlanError(
            f"No column of the dataset is one that the model takes: it has {sorted(example.keys())}, the model takes "
            f"{sorted(names or [])}. Rename columns, or set remove_unused_columns=False."
        )
    return kept


def _holds_numbers(value: Any) -> bool:
    return value is not None and np.asarray(value).dtype.kind in "biuf"
