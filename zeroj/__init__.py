"""zeroj: the ZeRO family for JAX. Use as ``import zeroj as zj``."""

from zeroj import aot as aot
from zeroj.checkpoint.checkpointer import Checkpointer as Checkpointer
from zeroj.checkpoint.inspect import convert as convert_checkpoint  # noqa: F401
from zeroj.checkpoint.inspect import inspect as inspect_checkpoint  # noqa: F401
from zeroj.checkpoint.modules import load_module as load_module
from zeroj.checkpoint.preemption import EXIT_PREEMPTED as EXIT_PREEMPTED
from zeroj.checkpoint.preemption import Preemption as Preemption
from zeroj.checkpoint.safetensors import export_safetensors as export_safetensors
from zeroj.checkpoint.safetensors import load_safetensors as load_safetensors
from zeroj.checkpoint.universal import load_universal as load_universal
from zeroj.config.config import Config as Config
from zeroj.config.precision import LossScale as LossScale
from zeroj.config.zero import Zero as Zero
from zeroj.engine import Engine as Engine
from zeroj.engine import initialize as initialize
from zeroj.errors import CheckpointError as CheckpointError
from zeroj.errors import ConfigError as ConfigError
from zeroj.errors import PlanError as PlanError
from zeroj.errors import SpillError as SpillError
from zeroj.errors import ZerojError as ZerojError
from zeroj.gather.gradients import value_and_grad as value_and_grad
from zeroj.gather.loss import Mean as Mean
from zeroj.gather.scanned import find_scanned as find_scanned
from zeroj.optimizer.zero import wrap_optimizer as wrap_optimizer
from zeroj.plan.memory import MemoryReport as MemoryReport
from zeroj.plan.mesh import make_mesh as make_mesh
from zeroj.plan.plan import Plan as Plan
from zeroj.plan.plan import make_plan as make_plan
from zeroj.plan.precision import Precision as Precision
from zeroj.step.batch import shard_batch as shard_batch
from zeroj.step.state import TrainState as TrainState
from zeroj.step.state import abstract_state as abstract_state
from zeroj.step.state import full_params as full_params
from zeroj.step.state import init_state as init_state
from zeroj.step.state import shard_params as shard_params
from zeroj.step.train_step import make_eval_step as make_eval_step
from zeroj.step.train_step import make_train_step as make_train_step
from zeroj.trainer.arguments import TrainingArguments as TrainingArguments
from zeroj.trainer.callbacks import EarlyStoppingCallback as EarlyStoppingCallback
from zeroj.trainer.callbacks import TrainerCallback as TrainerCallback
from zeroj.trainer.collate import PaddingCollator as PaddingCollator
from zeroj.trainer.evaluation import EvalPrediction as EvalPrediction
from zeroj.trainer.trainer import Trainer as Trainer
