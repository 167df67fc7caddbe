"""The checkpoints in one folder: which are complete, what they are, and which is being replaced."""

from __future__ import annotations

import pathlib
import shutil
import warnings
from collections.abc import Iterable

from zeroj.checkpoint.manifest import Manifest
from zeroj.errors import CheckpointError

#: The name of the item below each step's folder.
ITEM = "state"
#: An older checkpoint of a step waits under this name until the new one is complete.
ASIDE = "replaced-"
#: What is no longer kept is renamed into this folder first, so that no half-deleted step ever has a number.
DELETED = "deleted"


class Catalog:
    """The complete checkpoints below ``directory``.

    Attributes:
        directory: the folder.
        manifests: step -> manifest.
    """

    def __init__(self, directory: str | pathlib.Path) -> None:
        if "://" in str(directory):
            raise CheckpointError(
                f"{directory} is no path of a file system. Mount the bucket, and pass that path."
            )
        self.directory = pathlib.Path(directory).absolute()
        self.manifests: dict[int, Manifest] = {}

    def folder(self, step: int) -> str:
        """The folder that holds the arrays and the manifest of a step."""
        return str(self.directory / str(step) / ITEM)

    def refresh(self) -> list[int]:
        """Looks at the folder again. Returns the steps in the order of saving.

        A folder without a readable manifest is left out, with a warning: it never is the latest.
        """
        found = set(self._numbers(self.directory.iterdir())) if self.directory.is_dir() else set()
        for step in self.manifests.keys() - found:
            del self.manifests[step]
        for step in sorted(found - self.manifests.keys()):
            try:
                self.manifests[step] = Manifest.read(self.folder(step))
            except CheckpointError as error:
                warnings.warn(f"Checkpoint {step} is left out: {error}", stacklevel=3)
        return sorted(self.manifests, key=lambda step: self.manifests[step].serial)

    def find(self, step: int | None = None, tag: str | None = None) -> int:
        """The step asked for: the latest, the newest of a tag, or ``step`` itself.

        Raises:
            CheckpointError: it is not there; lists what is.
        """
        steps = self.refresh()
        fitting = [s for s in steps if tag is None or tag in self.manifests[s].tags]
        if step is None and fitting:
            return fitting[-1]
        if step is not None and step in fitting:
            return step
        known = ", ".join(str(s) + "".join(f" (tag {t!r})" for t in self.manifests[s].tags) for s in steps)
        wanted = " and ".join(f"{k} {v!r}" for k, v in (("step", step), ("tag", tag)) if v is not None)
        raise CheckpointError(
            f"{self.directory} holds no complete checkpoint{f' of {wanted}' if wanted else ''}. It holds: "
            f"{known or 'none'}."
        )

    def set_aside(self, step: int) -> None:
        """Renames a step, so that another can take its number; it comes back unless that one is completed."""
        aside = self.directory / f"{ASIDE}{step}"
        shutil.rmtree(aside, ignore_errors=True)
        (self.directory / str(step)).rename(aside)

    def settle(self) -> None:
        """Ends every replacement: deletes what was set aside if the new one is complete, else brings it back.
        Also deletes what is no longer kept.

        Never call it while a save is running.
        """
        if not self.directory.is_dir():
            return
        shutil.rmtree(self.directory / DELETED, ignore_errors=True)
        for aside in self.directory.glob(f"{ASIDE}*"):
            final = self.directory / aside.name.removeprefix(ASIDE)
            if final.exists():
                shutil.rmtree(aside)
            else:
                aside.rename(final)

    def _numbers(self, entries: Iterable[pathlib.Path]) -> list[int]:
        return [int(e.name) for e in entries if e.name.isdigit() and str(int(e.name)) == e.name]
