"""Saving and loading as DeepSpeed's engine has them: a folder, tags, and client state."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import Any

import optax

from zeroj.checkpoint.checkpointer import Checkpointer
from zeroj.checkpoint.retention import step_tag
from zeroj.checkpoint.together import same_tag
from zeroj.config.batch import BatchSizes
from zeroj.config.config import Config
from zeroj.step.holder import StateHolder


def warn_of_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Warns of settings that were others when the checkpoint was made: the curve of the run will bend there.

    Args:
        before: name -> value in the checkpoint; one that lacks a name says nothing of it.
        now: name -> value here.
    """
    changed = [
        f"{key}: {before[key]} then, {now.get(key)} now" for key in before if before[key] != now.get(key)
    ]
    if changed:
        warnings.warn(
            "The run goes on with other settings than those that the checkpoint was made with; step counts and "
            "moments are kept:\n  - " + "\n  - ".join(changed),
            stacklevel=3,
        )


class Saves(StateHolder):
    """The checkpoints of an engine.

    Attributes:
        config: the checked config.
        tx: the optax optimizer in use.
        batch_sizes: global batch, micro-batch per device and accumulation steps.
        global_steps: updates attempted so far, skipped ones included, as DeepSpeed counts them.
        global_samples: examples in them.
        keep: how many checkpoints a folder keeps; None for all.
    """

    config: Config
    tx: optax.GradientTransformation
    batch_sizes: BatchSizes
    global_steps: int
    global_samples: int
    keep: int | None = None
    _checkpointers: dict[str, Checkpointer]

    def save_checkpoint(
        self,
        directory: str | os.PathLike[str],
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        *,
        wait: bool = False,
    ) -> str:
        """Saves the whole state. Every process must call it.

        Args:
            directory: the folder of checkpoints; one that all processes see.
            tag: a name to load it by; left out, "global_step{N}".
            client_state: plain data to get back from :meth:`load_checkpoint`.
            wait: whether to return only when the checkpoint is complete; otherwise files are written in the
                background, and a failure is raised by the next save, load or :meth:`close`.

        Returns:
            The tag.

        Raises:
            CheckpointError: an earlier save failed, not every process called this, or tags differ between
                processes where checkpoint.tag_validation is "Fail" (a warning where it is "Warn").
        """
        tag = step_tag(self.global_steps) if tag is None else tag
        same_tag(tag, self.config.loaded.file.checkpoint.tag_validation.lower())
        extra = {
            "global_steps": self.global_steps,
            "global_samples": self.global_samples,
            "client_state": dict(client_state or {}),
            "run": self._run(),
        }
        self._checkpoints(directory).save(
            self.state, self.plan, extra, step=self.global_steps, tag=tag, wait=wait
        )
        return tag

    def load_checkpoint(
        self,
        directory: str | os.PathLike[str],
        tag: str | None = None,
        *,
        load_module_only: bool = False,
    ) -> tuple[str, dict[str, Any]]:
        """Restores a state that was saved under any stage, mesh and precision. Every process must call it.

        Args:
            directory: the folder of checkpoints.
            tag: which; left out, the newest.
            load_module_only: whether to take only the params: masters are derived from them, the optimizer
                and the counters start anew.

        Returns:
            (folder of the checkpoint, client_state).

        Raises:
            CheckpointError: there is no such checkpoint, it is damaged, or it does not fit the plan.
        """
        checkpoints = self._checkpoints(directory)
        self.state, extra = checkpoints.restore(
            self.plan,
            tx=self.tx,
            tag=tag,
            weights_only=load_module_only,
            loss_scale=self.config.loss_scale,
            model_state=self.state.model_state,
        )
        if not load_module_only:
            warn_of_changes(extra.get("run", {}), self._run())
            self.global_steps = int(extra.get("global_steps", int(self.state.step) + int(self.state.skipped)))
            self.global_samples = int(extra.get("global_samples", self.global_steps * self.batch_sizes.train))
        return str(checkpoints.directory), dict(extra.get("client_state", {}))

    def _run(self) -> dict[str, Any]:
        """What should be the same when the run goes on."""
        scheduler = self.config.resolved()["scheduler"] or {}
        params = {f"scheduler.params.{key}": value for key, value in scheduler.get("params", {}).items()}
        return {
            "train_batch_size": self.batch_sizes.train,
            "scheduler.type": scheduler.get("type"),
            **params,
        }

    def _check_checkpoints(self) -> None:
        """Raises if a save in the background has failed; does not block."""
        for checkpoints in self._checkpointers.values():
            checkpoints.check()

    def close_checkpoints(self) -> None:
        """Waits for saves in the background.

        Raises:
            CheckpointError: a save failed.
        """
        for checkpoints in self._checkpointers.values():
            checkpoints.close()
        self._checkpointers.clear()

    def _checkpoints(self, directory: str | os.PathLike[str]) -> Checkpointer:
        folder = os.path.abspath(directory)
        if folder not in self._checkpointers:
            self._checkpointers[folder] = Checkpointer(folder, keep=self.keep)
        return self._checkpointers[folder]
