"""The engine, for people who come from DeepSpeed: one object that holds config, plan, state and step."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from zeroj.checkpoint.checkpointer import Checkpointer
from zeroj.config.batch import BatchSizes
from zeroj.config.config import Config
from zeroj.errors import ConfigError
from zeroj.gather.scanned import find_scanned
from zeroj.plan.mesh import make_mesh, zero_axes_of
from zeroj.plan.plan import Plan, make_plan
from zeroj.plan.precision import make_precision
from zeroj.step.batch import cast_floats, shard_batch
from zeroj.step.state import TrainState, init_state
from zeroj.step.train_step import make_eval_step, make_train_step

#: What ``Config.needs()`` may name that the engine can do.
SUPPORTED = frozenset({"fp16", "fp16:auto_cast", "communication_data_type", "grad_accum_dtype"})


class Engine:
    """Trains a loss under a ds_config.json. Made by :func:`initialize`.

    Attributes:
        config: the checked config.
        plan: where every array lives.
        state: the current :class:`zeroj.TrainState`.
        batch_sizes: global batch, micro-batch per device and accumulation steps.
        tx: the optax optimizer in use.
        global_steps: updates attempted so far, skipped ones included, as DeepSpeed counts them.
    """

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        config: Config,
        plan: Plan,
        tx: optax.GradientTransformation,
        state: TrainState,
        batch_sizes: BatchSizes,
        schedule: optax.Schedule | None = None,
    ) -> None:
        self.config, self.plan, self.tx, self.state = config, plan, tx, state
        self.batch_sizes = batch_sizes
        self.global_steps = 0
        self.loss_fn = loss_fn
        self._configured = bool(config.resolved()["optimizer"])
        self._schedule = schedule or (config.make_schedule() if self._configured else None)
        self._metrics: dict[str, Any] = {}
        self._checkpointers: dict[str, Checkpointer] = {}
        self._steps: dict[int, Callable[..., Any]] = {}
        self._step = self._step_of(batch_sizes.accumulation)
        self._eval = make_eval_step(loss_fn, plan)

    def train_batch(self, batch: Any, *, accumulation_steps: int | None = None) -> dict[str, Any]:
        """One update on a global batch.

        Args:
            batch: leaves of shape (train_batch_size, ...), numpy or jax arrays; with several processes each
                passes the whole global batch and takes its own slice.
            accumulation_steps: micro-batches of this update alone, of any size that the devices divide: for
                what is left at the end of the data. Left out, the config's.

        Returns:
            The step's metrics (see :func:`zeroj.make_train_step`), as scalars still on the device.

        Raises:
            PlanError: the batch is not of ``train_batch_size``.
            CheckpointError: a save in the background has failed.
        """
        for checkpoints in self._checkpointers.values():
            checkpoints.check()  # a save in the background that failed stops the run here
        size = self.batch_sizes.train if accumulation_steps is None else None
        step = self._step if accumulation_steps is None else self._step_of(accumulation_steps)
        self.state, self._metrics = step(self.state, self._prepare(batch, size))
        self.global_steps += 1
        every = self.config.steps_per_print
        if every and self.global_steps % every == 0 and jax.process_index() == 0:
            shown = {
                k: float(v) for k, v in self._metrics.items() if k in ("loss", "grad_norm", "loss_scale")
            }
            print(f"step={self.global_steps}, skipped={self.skipped_steps}, lr={self.get_lr()}, {shown}")
        return self._metrics

    def eval_batch(self, batch: Any) -> dict[str, Any]:
        """The loss of a global batch of any size that the devices divide, without an update."""
        return self._eval(self.state, self._prepare(batch, None))

    @property
    def skipped_steps(self) -> int:
        """Updates skipped so far because a gradient was not finite, or nothing was counted."""
        return int(self.state.skipped)

    def was_step_applied(self) -> bool:
        """Whether the last ``train_batch`` changed the params."""
        return bool(self._metrics) and bool(self._metrics["applied"])

    def get_lr(self) -> list[float]:
        """The learning rate of the next update, as a list of one, as DeepSpeed returns it.

        Raises:
            ConfigError: the optimizer is the user's own, and its state holds no ``learning_rate``.
        """
        if self._schedule is not None:
            return [float(self._schedule(self.state.step))]
        found = optax.tree_utils.tree_get(self.state.opt_state.inner, "learning_rate", default=None)
        if found is None and self._configured:
            section = self.config.resolved()["optimizer"] or {}
            found = section.get("params", {}).get("lr")
        if found is None:
            raise ConfigError(
                "get_lr: the optimizer is your own and its state has no 'learning_rate'. "
                "Make it with optax.inject_hyperparams, or configure 'optimizer' or 'scheduler'."
            )
        return [float(found)]

    def get_global_grad_norm(self) -> float | None:
        """The global gradient norm of the last update, before clipping; None before the first."""
        return float(self._metrics["grad_norm"]) if self._metrics else None

    def get_batch_info(self) -> tuple[int, int, int]:
        """(train_batch_size, micro-batch per device, accumulation steps)."""
        return self.batch_sizes.train, self.batch_sizes.micro, self.batch_sizes.accumulation

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
            CheckpointError: an earlier save failed, or not every process called this.
        """
        tag = f"global_step{self.global_steps}" if tag is None else tag
        extra = {"global_steps": self.global_steps, "client_state": dict(client_state or {})}
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
            self.plan, tx=self.tx, tag=tag, weights_only=load_module_only, loss_scale=self.config.loss_scale
        )
        if not load_module_only:
            self.global_steps = int(extra.get("global_steps", int(self.state.step) + int(self.state.skipped)))
        return str(checkpoints.directory), dict(extra.get("client_state", {}))

    def close(self) -> None:
        """Waits for saves in the background.

        Raises:
            CheckpointError: a save failed.
        """
        for checkpoints in self._checkpointers.values():
            checkpoints.close()
        self._checkpointers.clear()

    def _step_of(self, accumulation: int) -> Callable[..., Any]:
        """The step for a number of micro-batches, built once."""
        if accumulation not in self._steps:
            self._steps[accumulation] = make_train_step(
                self.loss_fn,
                self.tx,
                self.plan,
                accumulation_steps=accumulation,
                clip_norm=self.config.gradient_clipping,
                loss_scale=self.config.loss_scale,
                skip_nonfinite=self.config.check_grad_overflow,
            )
        return self._steps[accumulation]

    def _checkpoints(self, directory: str | os.PathLike[str]) -> Checkpointer:
        folder = os.path.abspath(directory)
        if folder not in self._checkpointers:
            self._checkpointers[folder] = Checkpointer(folder, keep=None)
        return self._checkpointers[folder]

    def _prepare(self, batch: Any, size: int | None) -> Any:
        if self.config.auto_cast:
            batch = cast_floats(batch, self.plan.precision)
        return shard_batch(self.plan, batch, size)


def initialize(
    loss_fn: Callable[..., Any],
    params: Any,
    config: str | os.PathLike[str] | Mapping[str, Any] | Config,
    tx: optax.GradientTransformation | None = None,
    mesh: Mesh | None = None,
    *,
    trainable: Any = None,
    scanned: Any = None,
    example_batch: Any = None,
    rng: jax.Array | int = 0,
    schedule: optax.Schedule | None = None,
    **arguments: Any,
) -> Engine:
    """Builds an engine from a loss, params and a ds_config.json.

    Args:
        loss_fn: ``loss_fn(params, batch)`` or ``(params, batch, rng)``; see :func:`zeroj.value_and_grad`.
        params: the user's params, or a function of nothing that makes them (then they are born sharded).
        config: a path, JSON text, a dict, or a loaded :class:`zeroj.Config`.
        tx: an optax optimizer; left out, the config's. Not both.
        mesh: the mesh; left out, :func:`zeroj.make_mesh`.
        trainable: which leaves train; see :func:`zeroj.make_plan`.
        scanned: which leaves are stacks for ``lax.scan``; see :func:`zeroj.make_plan`.
        example_batch: a batch of any size, or ShapeDtypeStructs of one: the loss is traced on it, and the stacks
            are found, so that ``scanned`` can be left out.
        rng: a key or seed for the steps' randomness.
        schedule: the learning rate by update, for a config with an optimizer and without a scheduler.
        **arguments: what "auto" in the config resolves to; see :meth:`zeroj.Config.load`.

    Returns:
        The engine.

    Raises:
        ConfigError: the config is wrong, asks for what zeroj lacks, or names no optimizer while tx is left out.
        PlanError: params, tx and mesh do not fit together.

    Example:
        >>> engine = zj.initialize(loss_fn, params, config="ds_config.json")
        >>> metrics = engine.train_batch(batch)
    """
    config = config if isinstance(config, Config) else Config.load(config, **arguments)
    _check_supported(config)
    mesh = make_mesh() if mesh is None else mesh
    axes = zero_axes_of(mesh, None)
    counted = " x ".join(f"{axis}={mesh.shape[axis]}" for axis in axes)
    world = 1
    for axis in axes:
        world *= mesh.shape[axis]
    sizes = config.batch.resolve(world, counted)
    tx = _optimizer(config, tx, schedule)
    if tx is None:
        raise ConfigError(
            "No optimizer: give tx=, or the section 'optimizer' in the config, for example "
            '{"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}.'
        )
    precision = make_precision(config.precision, config.communication_dtype, config.grad_accum_dtype)
    shapes = jax.eval_shape(params) if callable(params) else params
    if scanned is None and example_batch is not None:
        scanned = find_scanned(loss_fn, shapes, example_batch)
    plan = make_plan(shapes, tx, mesh, config.zero, precision=precision, trainable=trainable, scanned=scanned)
    state = init_state(params, tx, plan, rng=rng, loss_scale=config.loss_scale)
    return Engine(loss_fn, config, plan, tx, state, sizes, schedule)


def _optimizer(
    config: Config, tx: optax.GradientTransformation | None, schedule: optax.Schedule | None = None
) -> optax.GradientTransformation | None:
    """The config's optimizer or the user's own; never both, and never two schedules."""
    if schedule is not None and config.make_schedule() is not None:
        raise ConfigError(
            "Two schedules: the config has the section 'scheduler', and schedule= was given. Leave one of them out."
        )
    configured = config.make_optimizer(schedule)
    if tx is not None and configured is not None:
        raise ConfigError(
            "Two optimizers: the config has the section 'optimizer', and tx= was given. Leave one of them out."
        )
    if tx is not None and config.make_schedule() is not None:
        warnings.warn(
            "The config's scheduler does not reach an optimizer of your own: make it with "
            "zj.Config.load(...).make_schedule() as its learning rate.",
            stacklevel=3,
        )
    return configured if tx is None else tx


def _check_supported(config: Config) -> None:
    lacking = [need for need in config.needs() if need not in SUPPORTED]
    if lacking:
        raise ConfigError(
            "The config asks for what this version of zeroj does not do yet:\n  - " + "\n  - ".join(lacking)
        )
