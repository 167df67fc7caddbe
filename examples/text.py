"""Real text that every machine with Python has: the standard library's own source, read as bytes.

One byte is one token, so the vocabulary is 256 and nothing has to be trained or downloaded. Files are split
into train and validation by a checksum of their path: a file stands on the same side on every machine.
"""

from __future__ import annotations

import dataclasses
import pathlib
import sysconfig
import zlib

import numpy as np

VOCAB_SIZE = 256
_SKIPPED = {"test", "tests", "idlelib", "site-packages", "dist-packages", "pydoc_data", "__pycache__"}
_VALIDATION_SHARE = 20  # one file in so many


@dataclasses.dataclass(frozen=True)
class Corpus:
    """The text as two arrays of token ids, uint8, and the number of files behind it."""

    train: np.ndarray
    validation: np.ndarray
    files: int


def load(root: str | pathlib.Path | None = None) -> Corpus:
    """Read every Python file below a folder.

    Args:
        root: the folder; None means this Python's standard library.

    Returns:
        The corpus, files in the order of their paths; folders of tests and third-party packages are left out.
    """
    folder = pathlib.Path(root or sysconfig.get_paths()["stdlib"])
    train, validation = bytearray(), bytearray()
    names = sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*.py")
        if not _SKIPPED.intersection(path.relative_to(folder).parts)
    )
    for name in names:
        held_out = zlib.crc32(name.encode()) % _VALIDATION_SHARE == 0
        (validation if held_out else train).extend((folder / name).read_bytes())
    if not train or not validation:
        raise FileNotFoundError(f"too few Python files below {folder} to train on: {len(names)}")
    return Corpus(np.frombuffer(train, np.uint8), np.frombuffer(validation, np.uint8), len(names))


def encode(text: str) -> np.ndarray:
    """Token ids (T,) of a text."""
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def decode(tokens: np.ndarray) -> str:
    """The text of token ids; bytes that are no UTF-8 show as the replacement character."""
    return bytes(np.asarray(tokens, np.uint8)).decode(errors="replace")


class Batches:
    """An endless, repeatable stream of batches that can be resumed at any position.

    The text is cut into windows of ``context + 1`` tokens; each epoch visits all of them once, in an order
    that follows from the seed and the epoch. A batch depends on ``(seed, position)`` alone, and so all that a
    checkpoint has to keep is ``position``.

    Args:
        tokens: the text, uint8 (n,).
        batch_size: windows in a batch.
        context: tokens that the model reads; a window has one more, the last target.
        seed: of the order.
        position: how many batches to skip, that is, how many were drawn before.

    Example:
        >>> batches = Batches(load().train, batch_size=8, context=128)
        >>> next(batches)["tokens"].shape
        (8, 129)
    """

    def __init__(
        self, tokens: np.ndarray, batch_size: int, context: int, seed: int = 0, position: int = 0
    ) -> None:
        windows = (len(tokens) - 1) // context
        if windows < batch_size:
            raise ValueError(
                f"{len(tokens)} tokens hold {windows} windows of {context}, fewer than {batch_size}"
            )
        self.position = position
        self._tokens, self._batch_size, self._context, self._seed = tokens, batch_size, context, seed
        self._per_epoch = windows // batch_size
        self._windows = windows
        self._order: tuple[int, np.ndarray] | None = None

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        epoch, index = divmod(self.position, self._per_epoch)
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, np.random.default_rng((self._seed, epoch)).permutation(self._windows)
        chosen = self._order[1][index * self._batch_size : (index + 1) * self._batch_size]
        spans = chosen[:, None] * self._context + np.arange(self._context + 1)
        self.position += 1
        return {"tokens": self._tokens[spans].astype(np.int32)}
