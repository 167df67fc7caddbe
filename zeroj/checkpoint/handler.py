"""How Orbax saves a state: Orbax gives the atomic folder and the background thread, zeroj the contents."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import orbax.checkpoint as ocp

from zeroj.checkpoint import arrays, database
from zeroj.checkpoint.layout import Stored
from zeroj.checkpoint.manifest import EXTRA_FILE, MANIFEST_FILE, Manifest, extra_to_json


class StateHandler(ocp.AsyncCheckpointHandler):
    """Writes arrays, manifest and the user's extra data into one folder."""

    async def async_save(self, directory: Any, args: StateSave) -> list[Any]:
        """Copies this process's parts to the host, and returns the writes still to be done."""
        parts = [p for s in args.leaves for p in arrays.pieces(s.spec, s.value, copy=args.copy)]
        specs = [s.spec for s in args.leaves] if jax.process_index() == 0 else []
        texts = {MANIFEST_FILE: args.manifest.to_json(), EXTRA_FILE: extra_to_json(args.extra)}
        write = self._write(directory, specs, parts, texts, beside_training=args.copy)
        return [ocp.future.CommitFutureAwaitingContractedSignals(write, name="zeroj_save")]

    async def _write(
        self, directory: Any, specs: Any, parts: Any, texts: dict[str, str], *, beside_training: bool
    ) -> None:
        if beside_training:
            database.give_way()
        if jax.process_index() == 0:
            for name, text in texts.items():
                (directory / name).write_text(text)
        await database.write(str(directory), jax.process_index(), specs, parts)

    def save(self, directory: Any, args: StateSave) -> None:
        """Saves and waits."""
        ocp.AsyncCheckpointer(self).save(directory, args=args)

    def restore(self, directory: Any, args: Any = None) -> Manifest:
        """Reads the manifest; arrays are read for a plan, by :mod:`zeroj.checkpoint.restore`."""
        return Manifest.read(directory)

    def finalize(self, directory: Any) -> None:
        """Joins what the processes wrote; Orbax calls it on one process when all have finished."""
        database.merge(str(directory), range(jax.process_count()))


@ocp.args.register_with_handler(StateHandler, for_save=True, for_restore=True)
@dataclasses.dataclass
class StateSave(ocp.args.CheckpointArgs):
    """What :class:`StateHandler` saves.

    Attributes:
        leaves: the arrays.
        manifest: their description.
        extra: the user's own data.
        copy: whether to copy to the host before returning, so that the next step may donate the state.
    """

    leaves: list[Stored]
    manifest: Manifest
    extra: dict[str, Any]
    copy: bool = True
