"""Numbers and tables as plain text."""

from __future__ import annotations


def yes(value: bool) -> str:
    """Returns "yes" or "no"."""
    return "yes" if value else "no"


def milliseconds(seconds: float) -> str:
    """Returns seconds as text in milliseconds."""
    return f"{seconds * 1e3:.2f} ms"


def size(count: float) -> str:
    """Returns a number of bytes as text in decimal units: 1.23 GB."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 1000 or unit == "TB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")


def table(heads: list[str], rows: list[list[str]]) -> str:
    """Returns a table as text: the first column to the left, the others to the right."""
    widths = [max(len(r[i]) for r in [heads, *rows]) for i in range(len(heads))]
    lines = []
    for row in [heads, *rows]:
        cells = [c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths))]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "  ".join("-" * w for w in widths))
    return "\n".join(lines)
