"""`zj.Trainer`: train, evaluate, predict, save and resume, in Hugging Face's words."""

from __future__ import annotations

import math
import os
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from zeroj.checkpoint.together import arrive
from zeroj.engine import Engine
from zeroj.errors import ConfigError, ZerojError
from zeroj.plan.mesh import make_mesh, zero_axes_of
from zeroj.trainer import building, evaluation, generation, loop
from zeroj.trainer.arguments import TrainingArguments
from zeroj.trainer.callbacks import CallbackHandler, DefaultFlowCallback
from zeroj.trainer.collate import PaddingCollator
from zeroj.trainer.data import Loader, Shape, is_sized, kept_columns, updates_per_epoch
from zeroj.trainer.models import as_model
from zeroj.trainer.movement import MovementCallback
from zeroj.trainer.progress import PlotCallback, ProgressCallback
from zeroj.trainer.reporting import ReportCallback
from zeroj.trainer.results import Results
from zeroj.trainer.saving import export_model, newest_checkpoint
from zeroj.trainer.state import STATE_FILE, TrainerControl, TrainerState
from zeroj.trainer.steps import Losses
from zeroj.trainer.timing import Times


class TrainOutput(NamedTuple):
    """What train() returns: updates made, mean loss over them, and the run's metrics."""

    global_step: int
    training_loss: float
    metrics: dict[str, float]


class Trainer(Results):
    """Trains a model under a ds_config.json.

    Args:
        model: an ``nnx.Module``, a function of nothing that makes one (its params are then born sharded), a linen
            module with ``params``, or a loss ``(params, batch[, rng])`` with ``params``. A module gets the columns
            of a batch by name. It returns an object or a dict with ``loss``, or logits: then the loss is
            cross-entropy over the labels that are not -100, every token weighing the same.
        args: the arguments; a transformers.TrainingArguments is taken too.
        data_collator: from a list of examples to a dict of numpy arrays; left out, :class:`PaddingCollator`.
        train_dataset: a sequence of dicts, a ``datasets.Dataset``, or an iterable of dicts (then set max_steps).
        eval_dataset: the same, or a dict of several, whose names become part of the metrics' names.
        processing_class: a tokenizer: its pad token fills "input_ids", and save_model saves it too.
        model_init: a function of nothing that makes the model, in place of ``model``.
        compute_loss_func: ``(outputs, labels)`` -> loss, in place of the model's or the default one.
        compute_metrics: ``EvalPrediction`` -> dict of numbers, from all predictions on the host.
        callbacks: objects with Hugging Face's events; see :class:`TrainerCallback`.
        optimizers: (optax transformation, schedule); where given, the ds_config must not have one.
        preprocess_logits_for_metrics: ``(logits, labels)`` -> what to keep for compute_metrics.
        params: the params, where the model does not hold them; of a linen module all variables, of which those
            beside "params" (such as "batch_stats") are carried from step to step.
        mesh: the devices; left out, all of them.
        trainable: which leaves train; see :func:`zeroj.make_plan`.

    Attributes:
        state: where the run stands, as in trainer_state.json.
        engine: the :class:`zeroj.Engine` underneath, made when first needed.

    Raises:
        ConfigError: arguments, ds_config, data and model do not fit together.

    Example:
        >>> args = zj.TrainingArguments("out", deepspeed="ds_config.json", max_steps=100)
        >>> zj.Trainer(model, args, train_dataset=dataset).train()
    """

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        data_collator: Callable[..., Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Callable[[], Any] | None = None,
        compute_loss_func: Callable[..., Any] | None = None,
        compute_metrics: Callable[..., Mapping[str, float]] | None = None,
        callbacks: Iterable[Any] | None = None,
        optimizers: tuple[optax.GradientTransformation | None, optax.Schedule | None] = (None, None),
        preprocess_logits_for_metrics: Callable[..., Any] | None = None,
        *,
        params: Any = None,
        mesh: Mesh | None = None,
        trainable: Any = None,
    ) -> None:
        self.args = TrainingArguments.of(args if args is not None else TrainingArguments())
        self.model = as_model(model_init if model is None else model, params)
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.processing_class = processing_class
        pad = getattr(processing_class, "pad_token_id", None)
        self.data_collator = data_collator or PaddingCollator(pad_token_id=0 if pad is None else pad)
        self.compute_metrics, self.preprocess_logits = compute_metrics, preprocess_logits_for_metrics
        self.optimizers, self.trainable = optimizers, trainable
        self.mesh = make_mesh() if mesh is None else mesh
        self.world = math.prod(self.mesh.shape[axis] for axis in zero_axes_of(self.mesh, None))
        labels = self.args.label_names or ["labels"]
        self.losses = Losses(self.model, labels[0], self.args.label_smoothing_factor, compute_loss_func)
        self.is_in_train, self.times = False, Times()
        self.state, self.control = TrainerState(), TrainerControl()
        self.schedule: optax.Schedule | None = None
        self._engine: Engine | None = None
        self._evaluation: evaluation.Programs | None = None
        self.decoders: dict[Any, Callable[..., Any]] = {}
        self.callbacks = CallbackHandler([DefaultFlowCallback, *(callbacks or [])])
        self._call("on_init_end")

    # -- what it is made of ------------------------------------------------------------------------

    @property
    def engine(self) -> Engine:
        """The engine; made on first use, for which a dataset must be there."""
        if self._engine is None:
            self._engine = building.make_engine(self)
        return self._engine

    def add_callback(self, callback: Any) -> None:
        """Adds a callback, or a class of one."""
        self.callbacks.add(callback)

    @property
    def train_shape(self) -> Shape:
        """The layout of a batch of training."""
        return Shape(self.args.per_device_train_batch_size, self.args.gradient_accumulation_steps, self.world)

    def epoch_updates(self) -> int | None:
        """Updates of one pass over the training data; None where it has no length."""
        if self.train_dataset is None or not is_sized(self.train_dataset):
            return None
        count = len(self.train_dataset)
        updates = updates_per_epoch(count, self.train_shape, self.args.dataloader_drop_last)
        if updates == 0:
            raise ConfigError(
                f"The training data has {count} examples, less than one micro-batch of "
                f"{self.args.per_device_train_batch_size} x {self.world} devices, and dataloader_drop_last is set."
            )
        return updates

    def total_updates(self) -> int:
        """Updates of the whole run."""
        if self.args.max_steps > 0:
            return self.args.max_steps
        updates = self.epoch_updates()
        if updates is None:
            if self.train_dataset is None:
                return 1  # to evaluate alone; no schedule is ever asked
            raise ConfigError("The training data has no length: set max_steps.")
        return math.ceil(self.args.num_train_epochs * updates)

    def loader(self, dataset: Any, shape: Shape, updates: bool = True) -> Loader:
        """Global batches of a dataset."""
        plan = self.engine.plan
        whole = updates and bool(jax.tree.leaves(building.shapes_of(self.model.carried)))
        by_labels = self.losses.by_labels and not whole
        return Loader(dataset, self.data_collator, plan, shape, self.kept, by_labels, updates, whole)

    def kept(self, example: Any) -> dict[str, Any]:
        """The columns of an example that the model takes."""
        names = self.model.columns if self.args.remove_unused_columns else None
        return kept_columns(example, names, self.args.label_names or ())

    # -- doing it ----------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None) -> TrainOutput:
        """Trains to the end of the run. Every process must call it.

        Args:
            resume_from_checkpoint: a checkpoint's folder, or True for the newest in output_dir.

        Returns:
            Updates, mean training loss, metrics.

        Raises:
            ConfigError: there is no training data, or no checkpoint to resume from.
        """
        if self.train_dataset is None:
            raise ConfigError("train() needs Trainer(train_dataset=...).")
        if self.state.global_step:
            raise ConfigError(
                "This Trainer has trained already. Make a new one; with train(resume_from_checkpoint=True) and "
                "larger max_steps or num_train_epochs it goes on from the newest checkpoint."
            )
        folder = self._resume_folder(resume_from_checkpoint)
        self._watch()
        self.is_in_train = True
        try:
            return loop.run(self, folder)
        finally:
            self.is_in_train = False

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Loss and metrics on the evaluation data. Every process must call it; each gets the same numbers.

        Args:
            eval_dataset: the data; left out, the Trainer's.
            ignore_keys: not supported.
            metric_key_prefix: what the metrics' names start with.
        """
        if ignore_keys is not None:
            raise ConfigError(
                "evaluate(ignore_keys=...) is not supported: return only what you need as logits."
            )
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if dataset is None:
            raise ConfigError("evaluate() needs Trainer(eval_dataset=...) or evaluate(eval_dataset=...).")
        if isinstance(dataset, Mapping) and not is_columns(dataset):
            found: dict[str, float] = {}
            for name, part in dataset.items():
                found |= self.evaluate(part, metric_key_prefix=f"{metric_key_prefix}_{name}")
            return found
        self._arrive(f"evaluation {metric_key_prefix!r}")
        with self.times.of("evaluate"):
            keep = self.compute_metrics is not None and not self.args.prediction_loss_only
            output = evaluation.run(self, dataset, metric_key_prefix, keep_predictions=keep)
        self.log(dict(output.metrics))
        self._call("on_evaluate", metrics=output.metrics)
        return output.metrics | {"epoch": self.state.epoch}

    def predict(
        self, test_dataset: Any, ignore_keys: Any = None, metric_key_prefix: str = "test"
    ) -> evaluation.PredictionOutput:
        """Predictions for a dataset, whole on every host. Every process must call it.

        Args:
            test_dataset: the data; with labels there is a loss too.
            ignore_keys: not supported.
            metric_key_prefix: what the metrics' names start with.

        Returns:
            Predictions, label_ids (None without labels), metrics.
        """
        if ignore_keys is not None:
            raise ConfigError(
                "predict(ignore_keys=...) is not supported: return only what you need as logits."
            )
        self._arrive("prediction")
        output = evaluation.run(self, test_dataset, metric_key_prefix, keep_predictions=True)
        self._call("on_predict", metrics=output.metrics)
        return output

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int = 32,
        temperature: float = 0.0,
        eos_token_id: int | None = None,
        seed: int = 0,
    ) -> list[list[int]]:
        """Continues prompts with the present params, under any stage. Every process must call it.

        Args:
            prompts: token ids, of any lengths.
            max_new_tokens: how many tokens to add; a fixed number of rounds, so that devices stay in step.
            temperature: divides the logits before a token is drawn; 0 takes the likeliest.
            eos_token_id: a token that ends its text.
            seed: seed of the draws.

        Returns:
            The prompts with what was added, whole on every host.
        """
        self._arrive("generation")
        return generation.generate(self, prompts, max_new_tokens, temperature, eos_token_id, seed)

    def save_model(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        dtype: Any = None,
        only: Callable[[str], bool] | None = None,
    ) -> list[pathlib.Path]:
        """Writes params and running statistics as safetensors, and the model's config. Every process must call it.

        Nothing is gathered: every process writes its own shards into the files.

        Args:
            output_dir: the folder; left out, the run's.
            dtype: "fp32", "bf16" or "fp16"; left out, the dtype of computation, as DeepSpeed's 16-bit weights.
            only: a predicate of paths: which params alone to write; left out, all.

        Returns:
            The safetensors files.
        """
        self._arrive("save_model")
        return export_model(self, pathlib.Path(output_dir or str(self.args.output_dir)), dtype, only)

    def log(self, logs: dict[str, Any]) -> None:
        """Adds numbers to the log history, and tells the callbacks."""
        logs = {**logs, "epoch": round(self.state.epoch, 6)}
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self._call("on_log", logs=logs)

    # -- inside ------------------------------------------------------------------------------------

    def _arrive(self, what: str) -> None:
        """Waits until every process has come to what all of them have to do."""
        arrive(f"{what} after update {self.state.global_step}", self.args.ddp_timeout, ZerojError)

    def _call(self, event: str, **kwargs: Any) -> None:
        model = self.model.source
        self.control = self.callbacks.call(
            event, self.args, self.state, self.control, model=model, trainer=self, **kwargs
        )

    def _watch(self) -> None:
        """The callbacks that show how it goes, unless the user brought their own."""
        kinds = {type(callback) for callback in self.callbacks.callbacks}
        if ProgressCallback not in kinds:
            self.add_callback(
                ProgressCallback(None if self.args.disable_tqdm is None else not self.args.disable_tqdm)
            )
        if self.args.reporters and ReportCallback not in kinds:
            self.add_callback(ReportCallback())
        if MovementCallback not in kinds:
            self.add_callback(MovementCallback())
        if PlotCallback not in kinds:
            self.add_callback(PlotCallback())

    def _resume_folder(self, asked: str | bool | None) -> pathlib.Path | None:
        if not asked:
            return None
        folder = newest_checkpoint(str(self.args.output_dir)) if asked is True else pathlib.Path(str(asked))
        if folder is None or not (folder / STATE_FILE).is_file():
            raise ConfigError(
                f"resume_from_checkpoint={asked!r}: no complete checkpoint in "
                f"{self.args.output_dir if asked is True else folder}."
            )
        return folder


def is_columns(dataset: Mapping[str, Any]) -> bool:
    """Whether a mapping is a dataset's columns and not several datasets: it holds arrays or lists of numbers."""
    return any(isinstance(value, np.ndarray) for value in dataset.values())
