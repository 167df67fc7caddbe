"""The engine, for people who come from DeepSpeed: one object that holds config, plan, state and step."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from zeroj.checkpoint.saves import Saves
from zeroj.config.batch import Batch, BatchSizes
from zeroj.config.config import Config
from zeroj.config.scheduled import scheduled
from zeroj.errors import ConfigError
from zeroj.gather.gradients import value_and_grad
from zeroj.gather.scanned import find_scanned
from zeroj.monitor.recompile import CompileWatch
from zeroj.monitor.run import RunMonitor
from zeroj.plan.mesh import make_mesh, zero_axes_of
from zeroj.plan.plan import SUPPORTED as plan_features
from zeroj.plan.plan import Plan, make_plan
from zeroj.plan.precision import make_precision
from zeroj.plan.tree import abstract_init
from zeroj.step.batch import cast_floats, shard_batch
from zeroj.step.overflow import OverflowWatch
from zeroj.step.state import TrainState, init_state
from zeroj.step.train_step import make_eval_step, make_train_step

#: What ``Config.needs()`` may name that the engine can do.
SUPPORTED = plan_features


class Engine(Saves):
    """Trains a loss under a ds_config.json. Made by :func:`initialize`.

    Attributes:
        config: the checked config.
        plan: where every array lives.
        state: the current :class:`zeroj.TrainState`.
        batch_sizes: global batch, micro-batch per device and accumulation steps.
        tx: the optax optimizer in use.
        global_steps: updates attempted so far, skipped ones included, as DeepSpeed counts them.
        global_samples: examples in them.
        keep: how many checkpoints a folder keeps; None for all.
        monitor: what is watched; see :class:`zeroj.monitor.run.RunMonitor`.
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
        self.global_steps = self.global_samples = 0
        self.loss_fn = loss_fn
        self._configured = bool(config.resolved()["optimizer"])
        self._schedule = schedule or config.make_schedule()
        self._metrics: dict[str, Any] = {}
        self._checkpointers = {}
        self._gradients: Callable[..., Any] | None = None
        self._steps: dict[int, Callable[..., Any]] = {}
        self._step = self._step_of(batch_sizes.accumulation)
        self._eval = make_eval_step(loss_fn, plan)
        self.monitor = RunMonitor(config, plan)
        self._overflow, self._compiles = OverflowWatch(plan), CompileWatch()

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
            ZerojError: in fp16, the step before overflowed with the loss scale at its floor; names the leaves.
        """
        self._check_checkpoints()  # a save in the background that failed stops the run here
        monitor = self.monitor
        monitor.batch_arrived()
        size = self.batch_sizes.train if accumulation_steps is None else None
        step = self._step if accumulation_steps is None else self._step_of(accumulation_steps)
        with monitor.phase("transfer") as made:
            placed = made(self._prepare(batch, size))
        monitor.before_step(step, self.state, placed)
        before = self.state
        with monitor.phase("step") as made:
            self.state, self._metrics = made(step(before, placed))
        self._compiles.called(step, before, placed, self.global_steps + 1)
        self._overflow.see(self._metrics)
        self.global_steps += 1
        self.global_samples += next(x.shape[0] for x in jax.tree.leaves(placed) if x.ndim)
        shown = (
            self._metrics | {"lr": next(iter(self._learning_rates()), None)}
            if monitor.reads
            else self._metrics
        )
        monitor.after_step(self.global_steps, self.global_samples, shown)
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
        """The learning rate of the next update of each group of params; of a configured optimizer there is one.

        Groups are those of an optimizer of the user's own: each ``optax.inject_hyperparams`` in it, in the order
        of its state.

        Raises:
            ConfigError: the optimizer is the user's own, and its state holds no ``learning_rate``.
        """
        found = self._learning_rates()
        if not found:
            raise ConfigError(
                "get_lr: the optimizer is your own and its state has no 'learning_rate'. "
                "Make it with optax.inject_hyperparams, or configure 'optimizer' or 'scheduler'."
            )
        return [float(rate) for rate in found]

    def _learning_rates(self) -> list[Any]:
        """The rates of the next update, on the device or off it; none where they cannot be known."""
        inner = self.state.opt_state.inner
        found = [rate for _, rate in optax.tree_utils.tree_get_all_with_path(inner, "learning_rate")]
        if self._schedule is not None:
            return [self._schedule(self.state.step)] * max(len(found), 1)
        if not found and self._configured:
            section = self.config.resolved()["optimizer"] or {}
            found = [section.get("params", {}).get("lr")]
        return [jnp.copy(rate) if isinstance(rate, jax.Array) else rate for rate in found if rate is not None]

    def get_global_grad_norm(self) -> float | None:
        """The global gradient norm of the last update, before clipping; None before the first."""
        return float(self._metrics["grad_norm"]) if self._metrics else None

    def get_batch_info(self) -> tuple[int, int, int]:
        """(train_batch_size, micro-batch per device, accumulation steps)."""
        return self.batch_sizes.train, self.batch_sizes.micro, self.batch_sizes.accumulation

    def set_train_batch_size(self, size: int) -> None:
        """Changes the global batch, and with it the accumulation steps; the micro-batch stays.

        Raises:
            ConfigError: micro-batch x devices does not divide it.
        """
        self._resize(size, self.batch_sizes.micro, None)

    def set_train_micro_batch_size(self, size: int) -> None:
        """Changes the micro-batch per device, and with it the global batch; the accumulation steps stay."""
        self._resize(None, size, self.batch_sizes.accumulation)

    def _resize(self, train: int | None, micro: int, accumulation: int | None) -> None:
        self.batch_sizes = Batch(train, micro, accumulation).resolve(self.plan.degree, "the ZeRO axes")
        self._step = self._step_of(self.batch_sizes.accumulation)

    def compute_gradients(self, batch: Any) -> tuple[jax.Array, Any]:
        """Loss and gradients of a global batch, without an update; in the layout of ``plan.grads``.

        ``zj.get_full(grads, engine.plan, path, "grad")`` is one of them, whole. They are neither scaled nor clipped.
        """
        if self._gradients is None:
            away = self.config.offload_activations
            self._gradients = jax.jit(value_and_grad(self.loss_fn, self.plan, offload_activations=away))
        rng = jax.random.fold_in(self.state.rng, self.state.scale.iteration)
        carried = self.state.model_state
        value, grads = self._gradients(self.state.params, self._prepare(batch, None), rng, carried)
        return (value[0] if isinstance(value, tuple) else value), grads

    def close(self) -> None:
        """Waits for saves in the background, writes out what the monitors hold, and looks at the last step.

        Raises:
            CheckpointError: a save failed.
            ZerojError: in fp16, the last step overflowed with the loss scale at its floor.
        """
        try:
            self._overflow.see(None)
        finally:
            self.monitor.close()
            self.close_checkpoints()

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
                reduce_op=self.config.gradient_allreduce_op,
                offload_activations=self.config.offload_activations,
            )
        return self._steps[accumulation]

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
    keep: int | None = None,
    model_state: Any = (),
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
        keep: how many of the last checkpoints each folder keeps; left out, all.
        model_state: what the model carries beside its params; see :func:`zeroj.init_state`.
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
    precision = make_precision(
        config.precision,
        config.communication_dtype,
        config.grad_accum_dtype,
        low_master=config.master_dtype != "fp32",
    )
    shapes = jax.eval_shape(params) if callable(params) else params
    if scanned is None and example_batch is not None:
        carried = jax.eval_shape(model_state) if callable(model_state) else model_state
        scanned = find_scanned(loss_fn, shapes, example_batch, carried)
    tx = _under_schedule(config, tx, shapes)
    options = {"trainable": trainable, "scanned": scanned, "aio": config.aio}
    plan = make_plan(shapes, tx, mesh, config.zero, precision=precision, **options)
    state = init_state(params, tx, plan, rng=rng, loss_scale=config.loss_scale, model_state=model_state)
    engine = Engine(loss_fn, config, plan, tx, state, sizes, schedule)
    engine.keep = keep
    return engine


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
    return configured if tx is None else tx


def _under_schedule(config: Config, tx: optax.GradientTransformation, params: Any) -> Any:
    """An optimizer of the user's own under the config's schedule, if there is one."""
    rate = config.make_schedule()
    if rate is None or config.resolved()["optimizer"]:
        return tx
    section: Any = config.resolved()["scheduler"]
    if section["type"] == "OneCycle" and section["params"].get("cycle_momentum", True):
        raise ConfigError(
            "scheduler.params.cycle_momentum: OneCycle cannot set the momentum of an optimizer given as tx=. "
            "Set it to false, or configure the section 'optimizer'."
        )
    state, _ = abstract_init(tx, params)
    return scheduled(tx, rate, state)


def _check_supported(config: Config) -> None:
    lacking = [need for need in config.needs() if need not in SUPPORTED]
    if lacking:
        raise ConfigError(
            "The config asks for what this version of zeroj does not do yet:\n  - " + "\n  - ".join(lacking)
        )
