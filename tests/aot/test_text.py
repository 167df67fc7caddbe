"""Numbers and tables as text."""

from __future__ import annotations

import pytest

from zeroj.aot.text import milliseconds, size, table, yes


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (67108864, "67.11 MB"), (2.5e15, "2500.00 TB")],
)
def test_sizes(count: float, text: str) -> None:
    assert size(count) == text


def test_the_rest() -> None:
    assert milliseconds(0.0123) == "12.30 ms"
    assert (yes(True), yes(False)) == ("yes", "no")
    assert table(["a", "bb"], [["x", "1"]]) == "a  bb\n-  --\nx   1"
