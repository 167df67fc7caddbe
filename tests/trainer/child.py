"""One run of a Trainer in a process of its own: ``python -m tests.trainer.child FOLDER STEPS RESUME``."""

from __future__ import annotations

import os
import pathlib
import sys
from typing import Any

import jax
import numpy as np


class StopAt:
    """Stops a run early, as a lost machine would, after the checkpoint of that step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = control.should_training_stop or state.global_step == self.step


def run(folder: pathlib.Path, stop: int, resume: bool) -> dict[str, np.ndarray]:
    """Trains up to step ``stop`` of 18, and returns the params."""
    import zeroj as zj
    from tests.trainer import toy

    args = zj.TrainingArguments(
        str(folder),
        deepspeed={"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}},
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=18,
        learning_rate=1e-2,
        warmup_steps=3,
        logging_steps=4,
        save_steps=5,
        eval_strategy="steps",
        eval_steps=6,
        metric_for_best_model="loss",
        include_num_input_tokens_seen=True,
        disable_tqdm=True,
    )
    trainer = zj.Trainer(
        toy.net(dropout=0.1),
        args,
        train_dataset=toy.text(230),
        eval_dataset=toy.text(11, seed=2),
        callbacks=[StopAt(stop), zj.EarlyStoppingCallback(9)],
    )
    trainer.train(resume_from_checkpoint=resume or None)
    trainer.save_state()
    params = zj.full_params(trainer.engine.state, trainer.engine.plan)
    return {jax.tree_util.keystr(k): np.asarray(v) for k, v in jax.tree_util.tree_leaves_with_path(params)}


def main() -> None:
    folder, stop, resume = sys.argv[1:]
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_disable_most_optimizations", True)
    cache = pathlib.Path(__file__).parent.parent.parent / ".cache" / "jax"
    jax.config.update("jax_compilation_cache_dir", os.environ.get("ZEROJ_TEST_CACHE", str(cache)))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    np.savez(pathlib.Path(folder) / "params.npz", **run(pathlib.Path(folder), int(stop), resume == "resume"))


if __name__ == "__main__":
    main()
