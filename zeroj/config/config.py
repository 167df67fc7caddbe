"""`zj.Config`: a checked ds_config.json, and what it means for zeroj."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

import optax

from zeroj.config.batch import Batch
from zeroj.config.load import Loaded, load
from zeroj.config.offload import Aio
from zeroj.config.optimizers import describe, make_optimizer
from zeroj.config.precision import LossScale, loss_scale_of
from zeroj.config.reader import Source
from zeroj.config.schedules import make_schedule
from zeroj.config.table import report_of, resolved_of
from zeroj.config.zero import Zero

Precision = Literal["fp32", "bf16", "fp16"]


@dataclasses.dataclass(frozen=True)
class Config:
    """A config that has been read and checked. Make one with :meth:`load`.

    Args:
        loaded: the checked file; its own attributes are the stable way to it.

    Example:
        >>> config = Config.load({"train_batch_size": 32, "bf16": {"enabled": True}})
        >>> config.precision, config.zero.stage, config.batch.resolve(8, "local=8").micro
        ('bf16', 0, 4)
    """

    loaded: Loaded

    @classmethod
    def load(cls, source: Source, **arguments: Any) -> Config:
        """Read a ds_config.json and check all of it.

        Args:
            source: a path, a dict, or JSON text. Comments and trailing commas are taken, and keys that start
                with an underscore are comments too.
            **arguments: what "auto" resolves to, and what the file is held against, by the names of Hugging
                Face's TrainingArguments (learning_rate, per_device_train_batch_size, max_grad_norm, ...), and
                hidden_size, num_training_steps. None is the same as left out.

        Returns:
            The config.

        Raises:
            ConfigError: with every fault of the file in one message.
        """
        return cls(load(source, arguments))

    @functools.cached_property
    def zero(self) -> Zero:
        """The section "zero_optimization"."""
        section = self.loaded.file.zero_optimization
        return Zero(**{name: getattr(section, name) for name in section.model_fields_set})

    @property
    def precision(self) -> Precision:
        """The dtype of computation."""
        file = self.loaded.file
        return "fp16" if file.fp16.enabled else "bf16" if file.bf16.enabled else "fp32"

    @property
    def master_dtype(self) -> Precision:
        """The dtype of the params that the optimizer updates: "fp32" unless the file asks for less."""
        file = self.loaded.file
        low = file.fp16.fp16_master_weights_and_grads or file.bf16.bf16_master_weights_and_grads
        return self.precision if low else "fp32"

    @property
    def optimizer_state_dtype(self) -> Precision:
        """The dtype in which `make_optimizer` keeps moments: "fp32" unless the file asks for less."""
        return "bf16" if self.loaded.file.bf16.bf16_optimizer_states else "fp32"

    @property
    def gradient_clipping(self) -> float | None:
        """The largest global norm, 1.0 where the file leaves it out; None for no clipping."""
        return self.loaded.file.gradient_clipping or None

    @property
    def gradient_allreduce_op(self) -> Literal["mean", "sum"]:
        """Whether gradients are those of the mean or of the sum over devices."""
        return self.loaded.file.gradient_allreduce_op

    @property
    def offload_activations(self) -> bool:
        """Whether what ``jax.checkpoint`` regions keep for the backward pass waits in host memory."""
        return self.loaded.file.activation_checkpointing.cpu_checkpointing

    @property
    def batch(self) -> Batch:
        """The batch sizes, to be resolved once the mesh is known."""
        file = self.loaded.file
        return Batch(
            file.train_batch_size, file.train_micro_batch_size_per_gpu, file.gradient_accumulation_steps
        )

    @property
    def loss_scale(self) -> LossScale:
        """The loss scale; the fixed scale 1 unless fp16 is enabled."""
        return loss_scale_of(self.loaded.file.fp16)

    @property
    def check_grad_overflow(self) -> bool:
        """Whether a step with gradients that are not finite is skipped: always in fp16, by a key in bf16."""
        file = self.loaded.file
        return file.fp16.enabled or (file.bf16.enabled and file.bf16.check_grad_overflow)

    @property
    def auto_cast(self) -> bool:
        """Whether floating-point leaves of the batch are cast to fp16."""
        return self.loaded.file.fp16.enabled and self.loaded.file.fp16.auto_cast

    @property
    def communication_dtype(self) -> str | None:
        """The dtype in which gradients are reduced; None for the compute dtype."""
        return self.loaded.file.communication_data_type

    @property
    def grad_accum_dtype(self) -> str | None:
        """The dtype in which micro-batches' gradients are added up; None for fp32."""
        return self.loaded.file.data_types.grad_accum_dtype

    @property
    def steps_per_print(self) -> int | None:
        """Updates between two printed lines; None for no printing."""
        return self.loaded.file.steps_per_print

    @property
    def aio(self) -> Aio | None:
        """How files are read and written; None where the file has no such section."""
        file = self.loaded.file
        return file.aio if "aio" in file.model_fields_set else None

    @property
    def notes(self) -> tuple[str, ...]:
        """What holds but may surprise, old spellings included."""
        return self.loaded.notes

    @property
    def optimizer_text(self) -> str:
        """The optax chain that `make_optimizer` builds, in words."""
        return describe(self.loaded, self.optimizer_state_dtype)

    def make_schedule(self) -> optax.Schedule | None:
        """The learning rate by update, or None where the file has no scheduler.

        Returns:
            A jittable function from an int32 count of successful updates to an fp32 learning rate.
        """
        return make_schedule(self.loaded)

    def make_optimizer(
        self, learning_rate: optax.ScalarOrSchedule | None = None
    ) -> optax.GradientTransformation | None:
        """The optimizer of the file, or None where it has none.

        Args:
            learning_rate: a number or a schedule of your own; left out, the file's scheduler, or else its lr.

        Returns:
            An optax transformation that computes in fp32 and keeps its moments in `optimizer_state_dtype`,
            whatever the dtype of the params it is given.
        """
        return make_optimizer(self.loaded, self.optimizer_state_dtype, learning_rate)

    def needs(self) -> tuple[str, ...]:
        """Names of the features that the file asks for, so that an engine can refuse one that it lacks."""
        return self.zero.needs()

    def report(self) -> str:
        """Each key of the file with its value, whether it is honoured, not needed or off, and why."""
        return report_of(self.loaded, self.optimizer_text)

    def resolved(self) -> dict[str, Any]:
        """Every value in force, defaults included, as plain data."""
        return resolved_of(self.loaded)
