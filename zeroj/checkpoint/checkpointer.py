"""Checkpoints that open on any plan: any stage, N, mesh and precision."""

from __future__ import annotations

import contextlib
import pathlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from zeroj import _compat
from zeroj.checkpoint.catalog import DELETED, ITEM, Catalog
from zeroj.checkpoint.handler import StateSave
from zeroj.checkpoint.layout import stored_leaves
from zeroj.checkpoint.manifest import Manifest, describe, extra_to_json, read_extra
from zeroj.checkpoint.restore import restore_state
from zeroj.checkpoint.retention import KeepManifests, Retention
from zeroj.checkpoint.together import arrive
from zeroj.config.precision import LossScale
from zeroj.errors import CheckpointError
from zeroj.plan.plan import Plan
from zeroj.spill.tier import is_spilled
from zeroj.step.state import TrainState

#: Checkpointers that are saving in the background: held until they are done, whoever else lets go of them.
_saving: set[Checkpointer] = set()


def _finish_all() -> None:
    """Completes what is being written when a program ends without closing: it was saved, so it shall be there."""
    for checkpointer in list(_saving):
        try:
            checkpointer.close()
        except Exception as error:  # nobody is left to catch it
            print(f"zeroj: at the end of the program: {error}", file=sys.stderr)


_compat.before_shutdown(_finish_all)


class Checkpointer:
    """Saves and restores training states in one folder, over Orbax's CheckpointManager.

    A checkpoint appears under its step's number when it is complete, never before. It holds the user's tree
    in the user's shapes: no padding, no mesh, params as their fp32 masters where there are any.

    Args:
        directory: the folder; made if absent. With several processes, one that all of them see.
        keep: how many of the last checkpoints to keep; None keeps all. A tag's newest one always stays.
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
        self.retention = Retention(keep, keep_every, best, best_mode)
        self.timeout = timeout
        self._catalog = Catalog(directory)
        self._pending: int | None = None
        self._failure: CheckpointError | None = None
        self._branch: set[int] = set()  # steps saved since the last restore: one history
        if jax.process_index() == 0:
            self._catalog.settle()
        options = ocp.CheckpointManagerOptions(
            preservation_policy=KeepManifests(self.retention, self._catalog.manifests),
            cleanup_tmp_directories=True,
            todelete_subdir=DELETED,
            async_options=ocp.AsyncOptions(timeout_secs=timeout),
        )
        self._manager = ocp.CheckpointManager(self.directory, options=options)
        _compat.cleaned_up(self._manager)
        self._catalog.refresh()

    @property
    def directory(self) -> pathlib.Path:
        """The folder of the checkpoints."""
        return self._catalog.directory

    @property
    def saving(self) -> bool:
        """Whether a save is being written in the background."""
        return self._manager.is_saving_in_progress()

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
        there is raised by the next call of any method, at the latest by :meth:`close`. An older checkpoint of
        the same step is replaced; it stays until the new one is complete, which keeps its tags unless a
        restore lies between the two.

        Args:
            state: the state, as the last step returned it.
            plan: its plan.
            extra: the user's own plain data: position in the data, client state. Process 0's is stored.
            step: the number to save under; left out, ``state.step``.
            tag: a name to restore it by.
            metrics: numbers for ``best``.
            wait: whether to return only when the checkpoint is complete; then nothing is copied. A state that is
                partly in files is always waited for: it is copied from file to file, and the next step
                overwrites it.

        Returns:
            The step.

        Raises:
            CheckpointError: the state holds no data, extra is no plain data, an earlier save failed, or not
                every process called this.
        """
        leaves = stored_leaves(state, plan)
        wait = wait or any(is_spilled(leaf.value) for leaf in leaves)
        step = int(np.asarray(state.step.addressable_data(0))) if step is None else int(step)
        extra = dict(extra or {})
        extra_to_json(extra)
        arrive(f"save of step {step} to {self.directory}", self.timeout)
        self.wait()
        known = self._catalog.manifests
        serial = 1 + max((m.serial for m in known.values()), default=0)
        specs = [leaf.spec for leaf in leaves]
        tags = list(known[step].tags) if step in self._branch and step in known else []
        tags += [tag] if tag is not None and tag not in tags else []
        manifest = describe(plan, state, specs, serial=serial, step=step, tags=tags, metrics=metrics or {})
        self._make_way(step)
        self._pending, known[step] = step, manifest
        args = ocp.args.Composite(**{ITEM: StateSave(leaves, manifest, extra, copy=not wait)})
        _saving.add(self)
        with self._failures():
            self._manager.save(step, args=args, force=True)
        self._branch.add(step)
        if wait:
            self.wait()
        return step

    def check(self) -> None:
        """Raises if a save in the background has failed; does not block. A training loop calls it each step.

        Raises:
            CheckpointError: a save failed; the cause is chained.
        """
        if not self.saving:
            self.wait()

    def wait(self) -> None:
        """Blocks until every save is complete.

        Raises:
            CheckpointError: a save failed; the cause is chained. Later saves are tried again.
        """
        try:
            with self._failures():
                self._manager.wait_until_finished()
        finally:
            _saving.discard(self)
        if self._pending is not None:
            self._pending, self._failure = None, None
            self._settle()

    def close(self) -> None:
        """Waits, and frees what the checkpointer holds.

        Raises:
            CheckpointError: the last save failed, even if that was raised before.
        """
        try:
            self.wait()
        finally:
            self._manager.close()
        if self._failure is not None:
            raise self._failure

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
        rng: jax.Array | int = 0,
        model_state: Any = (),
    ) -> tuple[TrainState, dict[str, Any]]:
        """Restores a state onto any plan. Every process must call it; each reads its own slices.

        Args:
            plan: the plan of the new run.
            step: which checkpoint; left out, the latest, or the newest of ``tag``.
            tx: the optimizer; needed only where its state starts anew (``partial``, ``weights_only``).
            tag: the name that it was saved with.
            partial: whether to go on with what fits; a warning lists what does not: another optimizer's state
                starts anew, params that are not in the checkpoint are taken from ``fill``.
            weights_only: whether to take only the params: masters are derived from them; optimizer, counters,
                loss scale and key start anew.
            fill: params in the user's shapes, for leaves that the checkpoint lacks; only with ``partial``.
            loss_scale: the loss scaler's settings, where it starts anew.
            rng: the key or seed, where it starts anew.
            model_state: what the model carries, as given to :func:`zeroj.init_state`; needed where it was saved.

        Returns:
            The state, each leaf with exactly the plan's dtype and sharding, and the user's ``extra``.

        Raises:
            CheckpointError: there is no such checkpoint, it does not fit the plan, or it is damaged.
        """
        arrive(f"restore from {self.directory}", self.timeout)
        self.wait()
        folder = self.folder(self._catalog.find(step, tag))
        self._branch.clear()
        state = restore_state(
            folder,
            Manifest.read(folder),
            plan,
            tx=tx,
            partial=partial,
            weights_only=weights_only,
            fill=fill,
            loss_scale=loss_scale,
            rng=rng,
            model_state=model_state,
        )
        return state, read_extra(folder)

    def folder(self, step: int) -> str:
        """The folder that holds the arrays and the manifest of a step."""
        return self._catalog.folder(step)

    def latest_step(self) -> int | None:
        """The step of the checkpoint that was saved last, or None where there is none."""
        steps = self.all_steps()
        return steps[-1] if steps else None

    def best_step(self) -> int | None:
        """The step with the best value of the metric ``best``, or None."""
        self.all_steps()
        return self.retention.best_step(self._catalog.manifests)

    def all_steps(self) -> list[int]:
        """The steps of all complete checkpoints, in the order of saving."""
        self.wait()
        return self._catalog.refresh()

    # -- several processes, and failures -----------------------------------------------------------

    def _make_way(self, step: int) -> None:
        """Sets an older checkpoint of the same step aside."""
        if not (self.directory / str(step)).exists():
            return
        arrive(f"replacement of step {step} in {self.directory}", self.timeout)
        if jax.process_index() == 0:
            self._catalog.set_aside(step)
        arrive(f"save of step {step} to {self.directory}", self.timeout)
        self._manager.reload()

    def _settle(self) -> None:
        if jax.process_index() == 0:
            self._catalog.settle()

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        """Turns a failed save into a CheckpointError, and brings back what it was to replace."""
        try:
            yield
        except Exception as error:
            if self._pending is not None:
                self._catalog.manifests.pop(self._pending, None)
            self._pending = None
            self._settle()
            self._manager.reload()
            self._failure = CheckpointError(f"Saving to {self.directory} failed: {error}")
            raise self._failure from error
