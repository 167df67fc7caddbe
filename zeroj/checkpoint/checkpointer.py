"""Checkpoints that open on any plan: any stage, N, mesh and precision."""

from __future__ import annotations

import pathlib
import warnings
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from zeroj.checkpoint.handler import ITEM, StateSave
from zeroj.checkpoint.layout import stored_leaves
from zeroj.checkpoint.manifest import Manifest, describe, extra_to_json, read_extra
from zeroj.checkpoint.restore import restore_state
from zeroj.checkpoint.retention import KeepManifests, Retention
from zeroj.config.precision import LossScale
from zeroj.errors import CheckpointError
from zeroj.plan.plan import Plan
from zeroj.step.state import TrainState


class Checkpointer:
    """Saves and restores training states in one folder, over Orbax's CheckpointManager.

    A checkpoint appears under its step's number when it is complete, never before. It holds the user's tree in
    the user's shapes: no padding, no mesh, params as their fp32 masters where there are any.

    Args:
        directory: the folder; made if absent. With several processes, one that all of them see.
        keep: how many of the last checkpoints to keep; None keeps all.
        keep_every: also keep each checkpoint whose step is a multiple of this.
        best: also keep the checkpoint with the best value of this metric (see ``save(metrics=...)``).
        best_mode: "min" or "max".
        timeout: seconds after which a save whose processes do not all arrive, or do not finish, fails.

    Example:
        >>> with zj.Checkpointer("checkpoints", keep=3) as checkpoints:
        ...     checkpoints.save(state, plan, extra={"epoch": 2})
        ...     state, extra = checkpoints.restore(plan)
    """

    def __init__(
        self,
        directory: str | pathlib.Path,
        keep: int | None = 3,
        *,
        keep_every: int | None = None,
        best: str | None = None,
        best_mode: str = "min",
        timeout: int = 1200,
    ) -> None:
        self.directory = (
            str(directory) if "://" in str(directory) else str(pathlib.Path(directory).absolute())
        )
        self.retention = Retention(keep, keep_every, best, best_mode)
        self._manifests: dict[int, Manifest] = {}
        options = ocp.CheckpointManagerOptions(
            preservation_policy=KeepManifests(self.retention, self._manifests),
            cleanup_tmp_directories=True,
            async_options=ocp.AsyncOptions(timeout_secs=timeout),
        )
        self._manager = ocp.CheckpointManager(self.directory, options=options)
        self._read_manifests()

    # -- saving ------------------------------------------------------------------------------------

    def save(
        self,
        state: TrainState,
        plan: Plan,
        extra: Mapping[str, Any] | None = None,
        *,
        step: int | None = None,
        tag: str | None = None,
        metrics: Mapping[str, Any] | None = None,
        wait: bool = False,
    ) -> int:
        """Saves a state. Every process must call it.

        Returns as soon as the state is copied to the host; files are written in the background. A failure
        there is raised by the next call of any method, at the latest by :meth:`close`.

        Args:
            state: the state, as the last step returned it.
            plan: its plan.
            extra: the user's own plain data: position in the data, client state. Process 0's is stored.
            step: the number to save under; left out, ``state.step``.
            tag: a name to restore it by; its newest checkpoint is kept whatever ``keep`` says.
            metrics: numbers for ``best``.
            wait: whether to return only when the checkpoint is complete; then nothing is copied.

        Returns:
            The step.

        Raises:
            CheckpointError: the state holds no data, extra is no plain data, or an earlier save failed.
        """
        self.wait()
        leaves = stored_leaves(state, plan)
        step = int(np.asarray(state.step.addressable_data(0))) if step is None else int(step)
        extra = dict(extra or {})
        extra_to_json(extra)
        manifest = describe(
            plan,
            state,
            [s.spec for s in leaves],
            serial=1 + max((m.serial for m in self._manifests.values()), default=0),
            step=step,
            tag=tag,
            metrics=metrics or {},
        )
        self._manifests[step] = manifest
        args = ocp.args.Composite(**{ITEM: StateSave(leaves, manifest, extra, copy=not wait)})
        self._manager.save(step, args=args, force=True)
        if wait:
            self.wait()
        return step

    def wait(self) -> None:
        """Blocks until every save is complete.

        Raises:
            CheckpointError: a save failed; the cause is chained.
        """
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise CheckpointError(f"Saving to {self.directory} failed: {error}") from error

    def close(self) -> None:
        """Waits, and frees what the checkpointer holds."""
        self.wait()
        self._manager.close()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- restoring ---------------------------------------------------------------------------------

    def restore(
        self,
        plan: Plan,
        step: int | None = None,
        *,
        tx: Any = None,
        tag: str | None = None,
        partial: bool = False,
        weights_only: bool = False,
        fill: Any = None,
        loss_scale: LossScale | None = None,
    ) -> tuple[TrainState, dict[str, Any]]:
        """Restores a state onto any plan. Every process must call it; each reads its own slices.

        Args:
            plan: the plan of the new run.
            step: which checkpoint; left out, the latest, or the newest of ``tag``.
            tx: the optimizer; needed only where its state starts anew (``partial``, ``weights_only``).
            tag: the name that it was saved with.
            partial: whether to go on with what fits; a warning lists what does not: another optimizer's state
                starts anew, params that are not in the checkpoint are taken from ``fill``.
            weights_only: whether to take only the params: masters are derived from them, optimizer, counters,
                loss scale and key start anew.
            fill: params in the user's shapes, for leaves that the checkpoint lacks.
            loss_scale: the loss scaler's settings, where it starts anew.

        Returns:
            The state, each leaf with exactly the plan's dtype and sharding, and the user's ``extra``.

        Raises:
            CheckpointError: there is no such checkpoint, it does not fit the plan, or it is damaged.
        """
        self.wait()
        step = self._find(step, tag)
        folder = self.folder(step)
        state = restore_state(
            folder,
            Manifest.read(folder),
            plan,
            tx=tx,
            partial=partial,
            weights_only=weights_only,
            fill=fill,
            loss_scale=loss_scale,
        )
        return state, read_extra(folder)

    def folder(self, step: int) -> str:
        """The folder that holds the arrays and the manifest of a step."""
        return f"{self.directory}/{step}/{ITEM}"

    def latest_step(self) -> int | None:
        """The step of the checkpoint that was saved last, or None where there is none."""
        steps = self.all_steps()
        return steps[-1] if steps else None

    def best_step(self) -> int | None:
        """The step with the best value of the metric ``best``, or None."""
        self.all_steps()
        return self.retention.best_step(self._manifests)

    def all_steps(self) -> list[int]:
        """The steps of all complete checkpoints, in the order of saving."""
        self.wait()
        return sorted(self._read_manifests(), key=lambda step: self._manifests[step].serial)

    def _find(self, step: int | None, tag: str | None) -> int:
        steps = self.all_steps()
        if tag is not None:
            steps = [s for s in steps if self._manifests[s].tag == tag]
        if step is None and steps:
            return steps[-1]
        if step in steps:
            assert step is not None
            return step
        known = ", ".join(
            f"{s} ({self._manifests[s].tag})" if self._manifests[s].tag else str(s) for s in self.all_steps()
        )
        wanted = " and ".join(f"{k} {v!r}" for k, v in (("step", step), ("tag", tag)) if v is not None)
        raise CheckpointError(
            f"{self.directory} holds no complete checkpoint{f' of {wanted}' if wanted else ''}. It holds: "
            f"{known or 'none'}."
        )

    def _read_manifests(self) -> dict[int, Manifest]:
        """Brings the manifests in line with the folder; a damaged one is left out, with a warning."""
        self._manager.reload()
        steps = set(self._manager.all_steps())
        for step in self._manifests.keys() - steps:
            del self._manifests[step]
        for step in sorted(steps - self._manifests.keys()):
            try:
                self._manifests[step] = Manifest.read(self.folder(step))
            except CheckpointError as error:
                warnings.warn(f"Checkpoint {step} is left out: {error}", stacklevel=3)
        return self._manifests
