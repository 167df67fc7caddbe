"""From a list of examples to one batch of numpy arrays, padded to few different lengths."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from zeroj.errors import PlanError
from zeroj.trainer.losses import IGNORED

LABELS = ("labels", "label", "label_ids")
_RENAMED = {"label": "labels", "label_ids": "labels"}


@dataclasses.dataclass(frozen=True)
class PaddingCollator:
    """Stacks examples, and pads sequences on the right.

    Every new length compiles the step again, so lengths are rounded up to a few: 16, 24, 32, 48, 64, 96, ...
    A mask of ones is added for the padded inputs where the examples have "input_ids" but no "attention_mask".

    Args:
        pad_token_id: what fills "input_ids".
        pad_to: one length for every batch, the cheapest choice where lengths vary; left out, rounded up.
        pad_to_multiple_of: lengths are rounded up to a multiple of this in place of the few above.
        label_pad: what fills labels that are sequences; such a position does not count.
        fill: column -> what fills it, where it is not 0.

    Example:
        >>> PaddingCollator(pad_to=4)([{"input_ids": [5, 6]}, {"input_ids": [7]}])["input_ids"]
        array([[5, 6, 0, 0],
               [7, 0, 0, 0]], dtype=int32)
    """

    pad_token_id: int = 0
    pad_to: int | None = None
    pad_to_multiple_of: int | None = None
    label_pad: int = IGNORED
    fill: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __call__(
        self, examples: Sequence[Mapping[str, Any]], length: int | None = None
    ) -> dict[str, np.ndarray]:
        """The batch.

        Args:
            examples: mappings with the same keys: numbers, sequences or arrays.
            length: the length to pad sequences to; left out, this collator's own for these examples.

        Raises:
            PlanError: a column cannot be made one array, or is longer than ``pad_to``.
        """
        length = self.length(examples) if length is None else length
        texts = _sequences(examples)
        columns = {name: [np.asarray(example[name]) for example in examples] for name in examples[0]}
        batch = {
            _RENAMED.get(name, name): self._column(name, rows, length if name in texts else None)
            for name, rows in columns.items()
        }
        if "input_ids" in batch and "attention_mask" not in batch and batch["input_ids"].ndim == 2:
            sizes = np.array([len(row) for row in columns["input_ids"]])
            batch["attention_mask"] = (np.arange(batch["input_ids"].shape[1]) < sizes[:, None]).astype(
                np.int32
            )
        return batch

    def length(self, examples: Sequence[Mapping[str, Any]]) -> int:
        """What sequences of different lengths in these examples are padded to."""
        texts = _sequences(examples)
        longest = max((len(example[name]) for example in examples for name in texts), default=0)
        if self.pad_to is not None:
            if longest > self.pad_to:
                raise PlanError(
                    f"An example has {longest} positions, more than pad_to={self.pad_to}: truncate it."
                )
            return self.pad_to
        step = self.pad_to_multiple_of
        return -(-longest // step) * step if step else rounded_up(longest)

    def _column(self, name: str, rows: list[np.ndarray], length: int | None) -> np.ndarray:
        if any(not _numeric(row) for row in rows):
            raise PlanError(
                f"The column {name!r} holds {rows[0].dtype} values, which no device can hold: remove it from the "
                "dataset, or pass a data_collator that does."
            )
        if length is None:
            shapes = sorted({row.shape for row in rows})
            if len(shapes) > 1:
                raise PlanError(f"The column {name!r} has different shapes: {shapes}. Pass a data_collator.")
            return _narrow(np.stack(rows))
        fill = self.fill.get(name, self._fill(name))
        out = np.full((len(rows), length), fill, np.result_type(*rows))
        for target, row in zip(out, rows, strict=True):
            target[: len(row)] = row
        return _narrow(out)

    def _fill(self, name: str) -> int:
        if name in LABELS:
            return self.label_pad
        return self.pad_token_id if name == "input_ids" else 0


def rounded_up(length: int) -> int:
    """The next of 16, 24, 32, 48, 64, 96, ...: half a power of two apart, at most a third is padding."""
    size = 16
    while size < length:
        if size + size // 2 >= length:
            return size + size // 2
        size *= 2
    return size


def _sequences(examples: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    """Names of the columns to pad: one dim, and of different lengths, or as long as "input_ids" everywhere."""

    def sizes(name: str) -> list[int] | None:
        rows = [example[name] for example in examples]
        return [len(row) for row in rows] if all(np.ndim(row) == 1 for row in rows) else None

    found = {name: sizes(name) for name in examples[0]}
    tokens = found.get("input_ids")
    return frozenset(n for n, s in found.items() if s is not None and (s == tokens or len(set(s)) > 1))


def _numeric(value: Any) -> bool:
    return np.asarray(value).dtype.kind in "biuf"


def _narrow(array: np.ndarray) -> np.ndarray:
    """64-bit numbers as 32-bit ones, as JAX would make them."""
    narrower = {
        np.dtype(np.int64): np.int32,
        np.dtype(np.uint64): np.uint32,
        np.dtype(np.float64): np.float32,
    }
    return array.astype(narrower[array.dtype]) if array.dtype in narrower else array
