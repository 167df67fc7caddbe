"""How the elements of one leaf travel between devices: as they are, or as small integers with a scale a block."""

from __future__ import annotations

from dataclasses import dataclass

#: Elements that share one fp32 scale. 256: 1.6 % more bytes at int8 and 3.1 % at int4; docs/choices.md has the
#: errors of other sizes.
BLOCK = 256


@dataclass(frozen=True)
class Format:
    """Integers of ``bits`` bits, 8 or 4 (two in a byte), and one fp32 scale for each ``block`` of them."""

    bits: int
    block: int = BLOCK

    @property
    def largest(self) -> int:
        """The integer that stands for the largest magnitude of a block: 127 or 7."""
        return int(2 ** (self.bits - 1)) - 1

    def packed_bytes(self, count: int) -> int:
        """Bytes that ``count`` elements take, scales and padding to whole blocks included."""
        return -(-count // self.block) * (self.block * self.bits // 8 + 4)

    def __str__(self) -> str:
        return f"int{self.bits}"


@dataclass(frozen=True)
class Wire:
    """How one leaf is gathered and its gradient reduced.

    Attributes:
        weights: the format in which the leaf is gathered (qwZ), or None: in its compute dtype.
        grads: the format in which its gradient crosses the outermost axis (qgZ), or None: reduce-scattered.
        kept: the axes that are gathered over first; what that gives, a shard over the other axes alone, is
            kept for later gathers in the same step (hpZ). Empty: nothing is kept.
        note: why the leaf is not quantised though the config asks for it.
    """

    weights: Format | None = None
    grads: Format | None = None
    kept: tuple[str, ...] = ()
    note: str = ""
