"""Which of the two engines a plan's files are written with."""

from __future__ import annotations

from zeroj.config.spill import SpillSettings
from zeroj.spill.direct_store import DirectStore
from zeroj.spill.orbax_store import OrbaxStore
from zeroj.spill.store import Store


def engine_of(settings: SpillSettings, folder: str) -> Store:
    """The store that the settings ask for, in an existing folder."""
    if not settings.direct:
        return OrbaxStore(folder, verify=settings.verify)
    return DirectStore(
        folder,
        block_size=settings.block_size,
        queue_depth=settings.queue_depth,
        threads=settings.threads,
        verify=settings.verify,
    )
