"""One of two processes under a Trainer, of which process 0 does alone what both have to do.

Run as ``python -m tests.multihost.lone_worker PROCESS PROCESSES PORT FOLDER CASE``.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import jax
import numpy as np


def run(folder: Path) -> list[str]:
    """What process 0 is told; process 1 only waits for it."""
    import zeroj as zj
    from tests.trainer import toy

    args = zj.TrainingArguments(
        str(folder / "run"),
        deepspeed={"zero_optimization": {"stage": 3}},
        per_device_train_batch_size=1,
        max_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        ddp_timeout=120,
    )
    rows = toy.text(8, varied=False)
    trainer = zj.Trainer(toy.net(), args, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    trainer.evaluate()
    told = []
    try:
        trainer.evaluate(iter(toy.text(4, varied=False, seed=jax.process_index())))
    except zj.PlanError as error:
        told.append(str(error))
    trainer.args.ddp_timeout = 2
    if jax.process_index() == 0:
        for call in (trainer.evaluate, lambda: trainer.predict(rows), trainer.save_model):
            try:
                call()
            except zj.ZerojError as error:
                told.append(str(error))
        (folder / "told").touch()
    while not (folder / "told").exists():
        time.sleep(0.1)
    return told


def main() -> None:
    process, processes, port, folder, _ = sys.argv[1:]
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_disable_most_optimizations", True)
    if os.environ.get("ZEROJ_TEST_CACHE"):
        jax.config.update("jax_compilation_cache_dir", os.environ["ZEROJ_TEST_CACHE"])
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.distributed.initialize(f"localhost:{port}", int(processes), int(process))
    np.savez(Path(folder) / f"process{process}.npz", told=np.array(run(Path(folder)), dtype=str))


if __name__ == "__main__":
    main()
