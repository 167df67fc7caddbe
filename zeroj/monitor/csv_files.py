"""Scalars as CSV files, one for each name, as DeepSpeed's csv_monitor writes them."""

from __future__ import annotations

import csv
import pathlib
from collections.abc import Iterable


class CsvWriter:
    """Appends to ``folder/Train_Samples_train_loss.csv`` and so on, each with the columns "step" and its name.

    A resumed run appends to the files that are there.

    Args:
        folder: made if absent.
    """

    def __init__(self, folder: str | pathlib.Path) -> None:
        self.folder = pathlib.Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)

    def write(self, events: Iterable[tuple[str, float, int]]) -> None:
        """Appends one line an event."""
        for name, value, step in events:
            path = self.folder / (name.replace("/", "_").replace(" ", "_") + ".csv")
            new = not path.exists()
            with path.open("a", newline="") as file:
                rows = csv.writer(file)
                if new:
                    rows.writerow(["step", name.rsplit("/", 1)[-1]])
                rows.writerow([step, value])

    def close(self) -> None:
        """Nothing is held back."""
