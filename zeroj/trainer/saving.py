"""Checkpoints of a Trainer: folders named checkpoint-N, with trainer_state.json beside the state."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import shutil
from typing import Any

import jax

from zeroj.checkpoint.safetensors import export_safetensors
from zeroj.trainer.state import STATE_FILE, TrainerState

_NAME = re.compile(r"checkpoint-(\d+)")


def save(trainer: Any, progress: dict[str, Any]) -> pathlib.Path:
    """Starts to save a checkpoint; files are written in the background. Every process must call it."""
    state: TrainerState = trainer.state
    folder = _output(trainer) / f"checkpoint-{state.global_step}"
    trainer.engine.close_checkpoints()  # the save before is complete, or raises here
    rotate(trainer, room=1)
    if state.best_global_step == state.global_step:
        state.best_model_checkpoint = str(folder)
    state.stateful_callbacks = {
        type(callback).__name__: callback.state()
        for callback in trainer.callbacks.callbacks
        if callable(getattr(callback, "state", None)) and hasattr(callback, "load_state")
    }
    client = {"progress": progress}
    trainer.engine.save_checkpoint(
        folder / "state", tag=f"global_step{state.global_step}", client_state=client
    )
    if jax.process_index() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        state.save_to_json(folder / STATE_FILE)
        text = json.dumps(trainer.args.to_dict(), indent=2, sort_keys=True, default=str)
        (folder / "training_args.json").write_text(text)
    return folder


def load(trainer: Any, folder: pathlib.Path) -> tuple[TrainerState, dict[str, Any]]:
    """Restores the engine, the callbacks, and (state, progress) from a checkpoint."""
    _, client = trainer.engine.load_checkpoint(folder / "state")
    state = TrainerState.load_from_json(folder / STATE_FILE)
    for callback in trainer.callbacks.callbacks:
        saved = state.stateful_callbacks.get(type(callback).__name__)
        if saved is not None and hasattr(callback, "load_state"):
            callback.load_state(saved)
    return state, client["progress"]


def finish(trainer: Any) -> None:
    """Waits for the last save, deletes what is too many, and loads the best model where it is asked for."""
    trainer.engine.close()
    rotate(trainer, room=0)
    best = trainer.state.best_model_checkpoint
    if trainer.args.load_best_model_at_end and best is not None:
        trainer.engine.load_checkpoint(pathlib.Path(best) / "state")
        trainer.engine.close_checkpoints()


def checkpoints(output_dir: str | pathlib.Path) -> list[pathlib.Path]:
    """The complete checkpoints in a folder, by number."""
    found = {
        int(match.group(1)): path
        for path in pathlib.Path(output_dir).glob("checkpoint-*")
        if (match := _NAME.fullmatch(path.name)) and is_complete(path)
    }
    return [found[number] for number in sorted(found)]


def newest_checkpoint(output_dir: str | pathlib.Path) -> pathlib.Path | None:
    """The complete checkpoint with the largest number, or None."""
    found = checkpoints(output_dir)
    return found[-1] if found else None


def is_complete(folder: pathlib.Path) -> bool:
    """Whether state and trainer_state.json are both there: a state appears under its number when it is whole."""
    state = folder / "state"
    return (folder / STATE_FILE).is_file() and any(p.name.isdigit() for p in state.glob("*"))


def rotate(trainer: Any, room: int) -> None:
    """Deletes the oldest checkpoints beyond save_total_limit, less ``room``; never the best one."""
    limit = trainer.args.save_total_limit
    if limit is None or limit <= 0 or jax.process_index() != 0:
        return
    best = trainer.state.best_model_checkpoint
    found = checkpoints(_output(trainer))
    best_here = [p for p in found if best is not None and p == pathlib.Path(best)]
    others = [p for p in found if p not in best_here]
    keep = max(0 if best_here or room else 1, limit - room - len(best_here))
    if room and not best_here and keep == 0:
        keep = 1  # the only one there is stays until the next is complete
    for path in others[: max(0, len(others) - keep)]:
        shutil.rmtree(path, ignore_errors=True)


def export_model(trainer: Any, folder: pathlib.Path, dtype: Any, only: Any) -> list[pathlib.Path]:
    """See :meth:`zeroj.Trainer.save_model`."""
    engine, model = trainer.engine, trainer.model
    half = engine.plan.precision.name if engine.plan.precision.half else None
    files = export_safetensors(
        engine.state,
        folder,
        dtype or half,
        plan=engine.plan,
        names=model.names,
        only=only,
        model_state=only is None,
    )
    if jax.process_index() == 0:
        _write_config(model.source, folder, dtype or half)
        if hasattr(trainer.processing_class, "save_pretrained"):
            trainer.processing_class.save_pretrained(str(folder))
    return files


def _write_config(source: Any, folder: pathlib.Path, dtype: Any) -> None:
    config: Any = getattr(source, "config", None)
    if hasattr(config, "to_dict"):
        data = config.to_dict()
    elif dataclasses.is_dataclass(config) and not isinstance(config, type):
        data = dataclasses.asdict(config)
    else:
        return
    long = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", None: "float32"}
    data = data | {"torch_dtype": long.get(dtype, str(dtype))}
    (folder / "config.json").write_text(json.dumps(data, indent=2, sort_keys=True, default=str) + "\n")


def _output(trainer: Any) -> pathlib.Path:
    return pathlib.Path(str(trainer.args.output_dir))
