"""Does a GPT learn as well under ZeRO++? Loss curves of stage 3 and of each part of it, on two simulated nodes of four.

    python benchmarks/zeropp_convergence.py --seeds 1         every form from one seed: about an hour on two cores
    python benchmarks/zeropp_convergence.py                   three seeds; goes on from what results/ has
    python benchmarks/zeropp_convergence.py --layers 6 --width 128    1.2 million params: two thirds of the time

The model is the example GPT (3.2 million params as a default, 8 x 64 bytes a step), the text this Python's standard
library, the same batches for every form, in bf16 with adamw and clipping. Writes results/zeropp_convergence.json (with
the size in its name where that is given) after every run, goes on from it where it was stopped, and draws what there is
beside it.
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
NODES, LOCAL = 2, 4
#: Steps over which the training losses are averaged in what is kept.
WINDOW = 20
#: Batches of the text held out, over which every validation loss is the mean.
HELD_OUT = 32
HPZ = {"zero_hpz_partition_size": LOCAL}
QWZ, QGZ = {"zero_quantized_weights": True}, {"zero_quantized_gradients": True}
FORMS: dict[str, dict[str, Any]] = {
    "stage 3": {},
    "qwZ": QWZ,
    "hpZ": HPZ,
    "qgZ int8": {**QGZ, "zero_quantized_gradients_bits": 8},
    "qgZ int4": QGZ,
    "all three": {**QWZ, **HPZ, **QGZ},
    "all three + LoCo": {**QWZ, **HPZ, **QGZ, "zeropp_loco_param": {}},
}


def run(form: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """Trains one form from one seed; training losses, and the validation loss at ten points."""
    shape = gpt.GPTConfig(context=args.context, layers=args.layers, width=args.width, heads=args.width // 64)
    definition, init_fn = gpt.build(shape, seed)
    loss_fn, corpus = gpt.make_loss_fn(definition), text.load()
    params = jax.eval_shape(init_fn)
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-3, max(1, args.steps // 20), args.steps, 1e-4)
    tx = optax.adamw(schedule, weight_decay=0.1)
    mesh, zero = zj.make_mesh(node=NODES, local=LOCAL), zj.Zero(stage=3, **FORMS[form])
    batches = text.Batches(corpus.train, args.batch, args.context, seed=seed)
    held_out = text.Batches(corpus.validation, args.batch, args.context)
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
    means = [round(float(np.mean(train[at : at + WINDOW])), 4) for at in range(0, len(train), WINDOW)]
    return {"train": means, "validation": validation, "params": count, "seconds": round(time.time() - begin)}


def draw(runs: dict[str, Any], path: pathlib.Path, steps: int) -> None:
    """All forms in one picture: validation loss of the first seed, and the distance from stage 3 of the same seeds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5), layout="constrained")
    for form in FORMS:
        curves = _curves(runs, form)
        if curves:
            left.plot(*zip(*curves[min(curves)].items(), strict=True), "o-", ms=3)
        apart = _apart(runs, form)
        if apart:
            means = {step: 100 * float(np.mean(found)) for step, found in apart.items()}
            right.plot(
                *zip(*means.items(), strict=True), "o-", ms=3, label=f"{form} ({len(_seeds(runs, form))})"
            )
    left.set(xlabel="step", ylabel="validation loss (nats per byte)")
    right.set(xlabel="step", ylabel="beside stage 3 of the same seeds, mean (%)")
    params = next(iter(runs.values()))["params"]
    figure.suptitle(
        f"GPT of {params / 1e6:.1f}M params, {steps} steps, 2 x 4 simulated devices; in brackets: seeds"
    )
    for axes in (left, right):
        axes.grid(alpha=0.3)
    right.legend(loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _curves(runs: dict[str, Any], form: str) -> dict[str, dict[int, float]]:
    """Seed -> step -> validation loss of a form."""
    named = ((name.rpartition(", seed "), run) for name, run in runs.items())
    return {seed: dict(run["validation"]) for (found, _, seed), run in named if found == form}


def _seeds(runs: dict[str, Any], form: str) -> list[str]:
    """The seeds from which both the form and stage 3 were trained."""
    return sorted(_curves(runs, form).keys() & _curves(runs, "stage 3").keys())


def _apart(runs: dict[str, Any], form: str) -> dict[int, list[float]]:
    """Step -> for each of :func:`_seeds` the loss over that of stage 3, less one."""
    found: dict[int, list[float]] = {}
    for seed in _seeds(runs, form):
        base = _curves(runs, "stage 3")[seed]
        for step, loss in _curves(runs, form)[seed].items():
            found.setdefault(step, []).append(loss / base[step] - 1)
    return found


def table(runs: dict[str, Any]) -> list[str]:
    """Final validation loss of each form by seed, and beside stage 3 from the same seeds."""
    rows = []
    for form in FORMS:
        curves, apart = _curves(runs, form), _apart(runs, form)
        if curves:
            losses = " ".join(f"{curves[seed][max(curves[seed])]:.4f}" for seed in sorted(curves))
            beside = " ".join(f"{x:+.2%}" for x in apart[max(apart)]) if apart else "no stage 3"
            rows.append(f"{form:<16} {losses}   beside stage 3 of the same seed: {beside}")
    return rows


def main() -> None:
    """Train what is missing, print and draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = {"steps": 2000, "seeds": 3, "layers": 4, "width": 256, "batch": 8, "context": 64}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--forms", nargs="*", choices=list(FORMS), default=list(FORMS))
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", NODES * LOCAL)
    size = {name: getattr(args, name) for name in sizes if name != "seeds"}
    usual = (args.layers, args.width) == (sizes["layers"], sizes["width"])
    path = RESULTS / f"zeropp_convergence{'' if usual else f'_{args.layers}x{args.width}'}.json"
    held = json.loads(path.read_text()) if path.exists() else {}
    runs: dict[str, Any] = held["runs"] if held.get("size") == size else {}
    for seed in range(args.seeds):
        for form in args.forms:
            name = f"{form}, seed {seed}"
            if name not in runs:
                runs[name] = run(form, seed, args)
                path.write_text(json.dumps({"size": size, "jax": jax.__version__, "runs": runs}) + "\n")
                print(name, runs[name]["validation"][-1], f"{runs[name]['seconds']} s", flush=True)
                draw(runs, path.with_suffix(".png"), args.steps)
    draw(runs, path.with_suffix(".png"), args.steps)
    print("\n".join(table(runs)))


if __name__ == "__main__":
    main()
