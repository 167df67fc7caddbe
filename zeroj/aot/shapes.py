"""Shapes as the text of a compiled program prints them."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator

from zeroj.errors import ZerojError

HOST_SPACE = 5
"""The number that XLA:GPU prints for host memory: ``f32[8]{0:S(5)}``."""

_BITS = {
    "pred": 8,
    "token": 0,
    "opaque": 0,
    "c64": 64,
    "c128": 128,
    "bf16": 16,
    "f16": 16,
    "f32": 32,
    "f64": 64,
}
_NAMED_BITS = re.compile(r"[su](\d+)|f(\d+)e\w+")
_ARRAY = re.compile(r"([a-z]\w*)\[([^\]]*)\](\{[^}]*\})?")


class HloError(ZerojError):
    """Text of a compiled program that zeroj does not understand. The message shows the line."""


@dataclasses.dataclass(frozen=True, slots=True)
class Array:
    """One array of a shape: its dtype as XLA prints it, its dims, its memory space (0 device, 5 host)."""

    dtype: str
    dims: tuple[int, ...]
    space: int = 0
    bits: int = 32

    @property
    def size(self) -> int:
        """Number of elements."""
        return functools.reduce(lambda a, b: a * b, self.dims, 1)

    @property
    def nbytes(self) -> int:
        """Bytes; sub-byte elements that are packed count their bits."""
        return -(-self.size * self.bits // 8)

    @property
    def on_host(self) -> bool:
        """Whether the array lies in host memory."""
        return self.space == HOST_SPACE


Shape = Array | tuple["Shape", ...]


def leaves(shape: Shape) -> Iterator[Array]:
    """Yields the arrays of a shape, tuples flattened, in order."""
    if isinstance(shape, Array):
        yield shape
    else:
        for part in shape:
            yield from leaves(part)


def nbytes(shape: Shape) -> int:
    """Bytes of all arrays of a shape."""
    return sum(a.nbytes for a in leaves(shape))


def read_shape(line: str, at: int) -> tuple[Shape, int]:
    """Reads the shape that begins at `at`; returns it and the position after it."""
    while line[at] == " ":
        at += 1
    if line.startswith("/*", at):
        return read_shape(line, line.index("*/", at) + 2)
    if line[at] != "(":
        return _array(line, at)
    parts: list[Shape] = []
    at += 1
    while line[at] != ")":
        part, at = read_shape(line, at)
        parts.append(part)
        if line[at] == ",":
            at += 1
    return tuple(parts), at + 1


def _array(line: str, at: int) -> tuple[Array, int]:
    match = _ARRAY.match(line, at)
    if not match:
        raise HloError(f"shape not understood at {line[at : at + 60]!r} in: {line.strip()[:400]}")
    dtype, dims, layout = match.group(1), match.group(2), match.group(3) or ""
    space = re.search(r"S\((\d+)\)", layout)
    packed = re.search(r"E\((\d+)\)", layout)
    bits = int(packed.group(1)) if packed else _bits(dtype, line)
    sizes = tuple(int(d.lstrip("<=")) for d in dims.split(",") if d)
    return Array(dtype, sizes, int(space.group(1)) if space else 0, bits), match.end()


def _bits(dtype: str, line: str) -> int:
    """Bits that one element takes in memory: sub-byte types take a byte unless the layout packs them."""
    if dtype in _BITS:
        return _BITS[dtype]
    match = _NAMED_BITS.fullmatch(dtype)
    if not match:
        raise HloError(f"element type {dtype} not understood in: {line.strip()[:400]}")
    return max(8, int(match.group(1) or match.group(2)))
