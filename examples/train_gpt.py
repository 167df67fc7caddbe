"""Train the example GPT on the Python standard library's source, from a ds_config.json.

    python examples/train_gpt.py --config examples/ds_config.json --demo
    python examples/train_gpt.py --config examples/ds_config.json --resume --steps 200

Prints the plan, trains with a live line, evaluates, saves, and leaves under ``--out``: loss.png, memory.png,
sample.txt and checkpoints. ``--demo`` also resumes from the checkpoint before the last and shows that the
losses go on as they did, and exits with 1 if the validation loss has not fallen by 40 %. GPUs are used where
JAX finds them; otherwise ``--devices`` CPU devices are simulated.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import time

import gpt
import jax
import text
from devices import request_devices
from training import Run, Setup, draw, write_sample

import zeroj as zj

DEMO_DROP = 0.40  # of the first validation loss
RESUME_TOLERANCE = 1e-4  # of a loss; the same program on the same numbers gives the same losses
PROMPT = "def read_config(path):\n"


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--config", type=pathlib.Path, required=True, help="a ds_config.json")
    add("--out", type=pathlib.Path, default=pathlib.Path("out"), help="folder for all that is written")
    add("--steps", type=int, default=160, help="train up to this step")
    add("--eval-every", type=int, default=40, help="steps between evaluations")
    add("--save-every", type=int, default=40, help="steps between checkpoints")
    add("--resume", action="store_true", help="go on from the newest checkpoint under --out")
    add("--demo", action="store_true", help="check the 40 %% and a resume at the end")
    add("--devices", type=int, default=8, help="CPU devices to simulate where there is no accelerator")
    add("--layers", type=int, default=4)
    add("--heads", type=int, default=4)
    add("--width", type=int, default=160)
    add("--context", type=int, default=128, help="tokens that the model reads at once")
    add("--unrolled", action="store_true", help="a list of blocks in place of a scan over them")
    add("--remat", action="store_true", help="recompute blocks in the backward pass")
    add("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.demo and args.steps <= args.save_every:
        parser.error("--demo resumes from the checkpoint before the last: --save-every must be below --steps")
    return args


def make_setup(args: argparse.Namespace) -> Setup:
    """Read the config and the text, and define the model."""
    shape = gpt.GPTConfig(
        vocab_size=text.VOCAB_SIZE,
        context=args.context,
        layers=args.layers,
        heads=args.heads,
        width=args.width,
        scan=not args.unrolled,
        remat=args.remat,
    )
    definition, init_fn = gpt.build(shape, args.seed)
    config, mesh = zj.Config.load(args.config), zj.make_mesh()
    loss_fn = gpt.make_loss_fn(definition)
    make_engine = lambda: zj.initialize(loss_fn, init_fn, config=config, mesh=mesh)  # noqa: E731
    return Setup(definition, init_fn, text.load(), config, args.context, make_engine)


def check_resume(setup: Setup, run: Run, tag: str) -> bool:
    """Go on from an earlier checkpoint with a new engine, and compare its losses with those of the run."""
    again = Run.resume(setup, run.out, tag)
    print(f"resumed from {tag}: step, loss in the first run, loss now")
    good = True
    for step, before in run.train_losses[again.step : again.step + 3]:
        now = again.train_step()["loss"]
        good = good and abs(now - before) <= RESUME_TOLERANCE * before
        print(f"  {step:>5} {before:.6f} {now:.6f}")
    return good


def main() -> int:
    """Run, and say how it ended."""
    args, started = parse_args(), time.perf_counter()
    request_devices(args.devices)
    if not jax.config.jax_compilation_cache_dir:  # a resumed run does not compile again
        jax.config.update("jax_compilation_cache_dir", str(args.out.absolute() / "compiled"))
    setup = make_setup(args)
    run = Run.resume(setup, args.out) if args.resume else Run.fresh(setup, args.out)
    run.describe()
    run.train(args.steps, args.eval_every, args.save_every)
    run.engine.close()  # checkpoints are written in the background: wait for the last
    draw(run)
    write_sample(run, PROMPT)
    first, last = run.validation_losses[0][1], run.validation_losses[-1][1]
    drop = 1 - last / first
    minutes = (time.perf_counter() - started) / 60
    print(f"validation loss {first:.3f} -> {last:.3f}, {drop:.0%} lower, in {minutes:.1f} min; see {run.out}")
    if not args.demo:
        return 0
    good_resume = check_resume(setup, run, run.tags[-2])
    if drop < DEMO_DROP:
        print(f"FAILED: the validation loss fell by less than {DEMO_DROP:.0%}", file=sys.stderr)
    if not good_resume:
        print("FAILED: the resumed run does not repeat the losses of the first", file=sys.stderr)
    return 0 if good_resume and drop >= DEMO_DROP else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except zj.ZerojError as error:
        sys.exit(f"{type(error).__name__}: {error}")
