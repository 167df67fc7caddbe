"""Does a GPT learn as well under ZeRO++? Loss curves of stage 3 and of each part of it, on two simulated nodes of four.

    python benchmarks/zeropp_convergence.py                                      the whole comparison: hours on CPU
    python benchmarks/zeropp_convergence.py --steps 60 --seeds 1 --layers 2 --width 128   a short form

The model is the example GPT (4 million params as a default), the text this Python's standard library, the same batches
for every form, in bf16 with adamw and clipping. Writes results/zeropp_convergence.json after every run, goes on from it
where it was stopped, and draws results/zeropp_convergence.png. A claim needs the default size: 2,000 steps, 3 seeds.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import time
from typing import Any

import jax

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "examples"))

import gpt
import numpy as np
import optax
import text

import zeroj as zj

RESULTS = pathlib.Path(__file__).parent / "results"
NODES, LOCAL, BATCH, CONTEXT, HELD_OUT = 2, 4, 16, 128, 8
HPZ = {"zero_hpz_partition_size": LOCAL}
QWZ, QGZ = {"zero_quantized_weights": True}, {"zero_quantized_gradients": True}
FORMS: dict[str, dict[str, Any]] = {
    "stage 3": {},
    "qwZ": QWZ,
    "hpZ": HPZ,
    "qgZ int8": {**QGZ, "zero_quantized_gradients_bits": 8},
    "qgZ int4": QGZ,
    "all three": {**QWZ, **HPZ, **QGZ},
}


def run(form: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """Trains one form from one seed; losses by step, and the validation loss at ten points."""
    shape = gpt.GPTConfig(context=CONTEXT, layers=args.layers, width=args.width, heads=args.width // 64)
    definition, init_fn = gpt.build(shape, seed)
    loss_fn, corpus = gpt.make_loss_fn(definition), text.load()
    params = jax.eval_shape(init_fn)
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-3, max(1, args.steps // 20), args.steps, 1e-4)
    tx = optax.adamw(schedule, weight_decay=0.1)
    mesh, zero = zj.make_mesh(node=NODES, local=LOCAL), zj.Zero(stage=3, **FORMS[form])
    batches = text.Batches(corpus.train, BATCH, CONTEXT, seed=seed)
    held_out = text.Batches(corpus.validation, BATCH, CONTEXT)
    fixed = [next(held_out) for _ in range(HELD_OUT)]
    scanned = zj.find_scanned(loss_fn, params, fixed[0])
    plan = zj.make_plan(params, tx, mesh, zero, precision="bf16", scanned=scanned)
    step, evaluate = zj.make_train_step(loss_fn, tx, plan, clip_norm=1.0), zj.make_eval_step(loss_fn, plan)
    state, train, validation, begin = zj.init_state(init_fn, tx, plan), [], [], time.time()
    every = max(1, args.steps // 10)
    for number in range(1, args.steps + 1):
        state, metrics = step(state, next(batches))
        train.append(float(metrics["loss"]))
        if number % every == 0 or number == args.steps:
            loss = float(np.mean([evaluate(state, batch)["loss"] for batch in fixed]))
            validation.append((number, loss))
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    return {"train": train, "validation": validation, "params": count, "seconds": round(time.time() - begin)}


def draw(runs: dict[str, Any], path: pathlib.Path, title: str) -> None:
    """All forms in one picture: the validation loss, averaged over seeds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for form in FORMS:
        found = [r["validation"] for name, r in runs.items() if name.startswith(f"{form}, ")]
        if found:
            steps = [step for step, _ in found[0]]
            axes.plot(
                steps, np.mean([[loss for _, loss in r] for r in found], axis=0), "o-", ms=3, label=form
            )
    axes.set(xlabel="step", ylabel="validation loss (nats per byte)", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=130)


def table(runs: dict[str, Any]) -> list[str]:
    """Final validation loss of each form: mean over seeds, spread, and beside stage 3."""
    finals = {
        form: [r["validation"][-1][1] for name, r in runs.items() if name.startswith(f"{form}, ")]
        for form in FORMS
    }
    base = float(np.mean(finals["stage 3"])) if finals["stage 3"] else float("nan")
    return [
        f"{form:<10} {np.mean(found):.4f} (seeds {min(found):.4f} to {max(found):.4f}), "
        f"{np.mean(found) / base - 1:+.2%} of stage 3"
        for form, found in finals.items()
        if found
    ]


def main() -> None:
    """Train what is missing, print and draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in (("steps", 2000), ("seeds", 3), ("layers", 5), ("width", 256)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--forms", nargs="*", choices=list(FORMS), default=list(FORMS))
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", NODES * LOCAL)
    size = {
        "steps": args.steps,
        "layers": args.layers,
        "width": args.width,
        "batch": BATCH,
        "context": CONTEXT,
    }
    path = RESULTS / "zeropp_convergence.json"
    held = json.loads(path.read_text()) if path.exists() else {}
    runs: dict[str, Any] = held["runs"] if held.get("size") == size else {}
    for seed in range(args.seeds):
        for form in args.forms:
            name = f"{form}, seed {seed}"
            if name not in runs:
                runs[name] = run(form, seed, args)
                path.write_text(json.dumps({"size": size, "jax": jax.__version__, "runs": runs}) + "\n")
                print(name, runs[name]["validation"][-1], f"{runs[name]['seconds']} s", flush=True)
    print("\n".join(table(runs)))
    params = next(iter(runs.values()))["params"]
    title = (
        f"GPT of {params / 1e6:.1f}M params, {args.steps} steps, {args.seeds} seeds, 2 x 4 simulated devices"
    )
    draw(runs, path.with_suffix(".png"), title)


if __name__ == "__main__":
    main()
