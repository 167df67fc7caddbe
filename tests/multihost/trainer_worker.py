"""One of two processes with four CPU devices each that runs a Trainer; or one with eight, for comparison.

Run as ``python -m tests.multihost.trainer_worker PROCESS PROCESSES PORT FOLDER``.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np


class Recorded(list[Any]):
    """Examples that remember which of them were read."""

    def __init__(self, rows: list[Any]) -> None:
        super().__init__(rows)
        self.read: list[int] = []

    def __getitem__(self, index: Any) -> Any:
        self.read.append(int(index))
        return super().__getitem__(index)


def train(folder: Path) -> dict[str, Any]:
    """Metrics, state, what was read and printed, and params of a short run."""
    import zeroj as zj
    from tests import oracle
    from tests.trainer import toy

    args = zj.TrainingArguments(
        str(folder),
        deepspeed={"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}},
        per_device_train_batch_size=1,
        per_device_eval_batch_size=1,
        gradient_accumulation_steps=2,
        max_steps=5,
        learning_rate=1e-2,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=5,
        save_steps=4,
        report_to="csv",
        disable_tqdm=True,
    )
    mesh = zj.make_mesh() if jax.process_count() > 1 else oracle.mesh_of(8)
    assert dict(mesh.shape) == {"node": 2, "local": 4}
    data = Recorded(toy.text(37, length=40))
    trainer = zj.Trainer(toy.net(), args, train_dataset=data, eval_dataset=toy.text(13, seed=5), mesh=mesh)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        trainer.train()
        predictions = trainer.predict(toy.text(13, seed=5)).predictions
        trainer.save_model(folder / "model")
    logs = [
        {k: v for k, v in log.items() if "second" not in k and "time" not in k}
        for log in trainer.state.log_history
    ]
    params = zj.full_params(trainer.engine.state, trainer.engine.plan)
    return {
        "logs": logs,
        "read": data.read,
        "printed": printed.getvalue(),
        "predictions": predictions.tolist(),
        "params": [np.asarray(x).tolist() for x in jax.tree.leaves(params)],
    }


def main() -> None:
    process, processes, port, folder = sys.argv[1:]
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_disable_most_optimizations", True)
    jax.distributed.initialize(f"localhost:{port}", int(processes), int(process))
    found = train(Path(folder) / "run")
    (Path(folder) / f"process{process}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
