"""A whole update of state in files beside its three parts: what is read, computed and written."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from disks import BLOCK, WORKERS, folders
from figure import Figure

from zeroj import init_state, make_mesh, make_plan
from zeroj.optimizer.norms import Unfinished
from zeroj.optimizer.spill import SpilledUpdate
from zeroj.optimizer.update import Arrays
from zeroj.spill.buffers import aligned
from zeroj.spill.tier import is_spilled

ROUNDS = 4
#: Nothing is left to do to these gradients, which are on the device.
ALL_DONE = Unfinished(None, None, None)


class Best:
    """The least seconds of each thing that is done again and again, and the CPU seconds of that time."""

    def __init__(self) -> None:
        self.wall: dict[str, float] = {}
        self.cpu: dict[str, float] = {}

    def seen(self, what: str, wall: float, cpu: float) -> None:
        """Keeps the faster."""
        if wall < self.wall.get(what, math.inf):
            self.wall[what], self.cpu[what] = wall, cpu

    def __call__(self, what: str, do: Callable[[], Any]) -> Any:
        """Does it, and looks at the clocks."""
        start, busy = time.perf_counter(), time.process_time()
        out = do()
        self.seen(what, time.perf_counter() - start, time.process_time() - busy)
        return out


def update_pass(engine: str, name: str, disk: Any = None) -> list[Figure]:
    """A whole update of 1 GiB of AdamW's state on one device, beside its three parts: each alone, and all at once.

    Args:
        engine: "direct" or "orbax".
        name: what the rows call it.
        disk: a store to use in place of the engine's.
    """
    best = Best()
    with folders() as folder:
        plan, state, update = _one_update(folder("pass"), engine)
        grads = [jnp.full(x.placement.padded, 1e-3, x.dtype) for x in plan.leaves]
        arrays = Arrays(*([jax.tree.leaves(t) for t in (state.params, state.params, state.opt_state.inner)]))
        spilled = [x for x in arrays.inner if is_spilled(x)]
        views = {shard.name: aligned(shard.nbytes)[: shard.nbytes] for x in spilled for shard in x.shards}
        if disk is not None:
            disk.reserve({name: view.nbytes for name, view in views.items()})
            spilled[0].tier.store = disk
        store = spilled[0].tier.store

        def whole() -> Arrays:
            done: Arrays = jax.block_until_ready(
                update.begin(arrays).run(list(grads), jnp.float32(0), ALL_DONE)
            )
            return done

        arrays = whole()  # compiles
        # one piece is not read and written at once; written is from memory aligned as a CPU's results are
        results = {name: aligned(view.nbytes + 64)[64 : view.nbytes + 64] for name, view in views.items()}
        half = [
            tuple(dict(itertools.islice(side.items(), at, None, 2)) for side in (views, results))
            for at in (0, 1)
        ]
        moves: dict[str, Callable[[], Any]] = {
            "read": lambda: _moved(store.read, views),
            "write": lambda: _moved(store.write, results),
        }
        for _ in range(ROUNDS):
            arrays = best("whole", whole)
            for what, move in moves.items():
                best(what, move)
            best("both", lambda: _turned(store, half))
            best("update", partial(_run, _programs(update, arrays, grads)))
            best("at once", partial(_beside, lambda: _turned(store, half), _programs(update, arrays, grads)))
    return _pass_figures(name, best)


def _pass_figures(engine: str, best: Best) -> list[Figure]:
    """The pass beside its slowest part; and beside what the machine needs for all of them, were there no order.

    Most disks do not read and write at once, and here the device is the cores and the memory that move the bytes:
    there the second figure says what the pass itself costs.
    """
    name, whole = f"whole update pass, {engine}", best.wall["whole"]
    parts = {what: best.wall[what] for what in ("read", "write", "update")}
    slowest = max(parts, key=lambda what: parts[what])
    note = ", ".join(f"{what} {seconds:.2f} s (CPU {best.cpu[what]:.2f})" for what, seconds in parts.items())
    both = f"reads and writes at once, without an update: {best.wall['both']:.2f} s"
    return [
        Figure(name, whole, "s", parts[slowest], 1.15, note=f"{note}; beside {slowest}"),
        Figure(name, whole, "s", best.wall["at once"], 1.15, note=f"beside all three at once; {both}"),
        Figure(name, whole, "s", sum(parts.values()), note="beside all three in turn"),
    ]


def _moved(move: Callable[[str, np.ndarray], Any], views: dict[str, np.ndarray]) -> None:
    for pending in [move(name, view) for name, view in views.items()]:
        pending.result()


def _turned(store: Any, halves: list[tuple[dict[str, np.ndarray], ...]]) -> None:
    """Reads everything and writes everything at once: one half is read while the other is written, twice."""
    for (read, _), (_, written) in (halves, halves[::-1]):
        with ThreadPoolExecutor(2) as pool:
            jobs = [pool.submit(_moved, store.read, read), pool.submit(_moved, store.write, written)]
        for job in jobs:
            job.result()


def _beside(move: Callable[[], None], programs: list[Callable[[], Any]]) -> None:
    """Computes the whole update while bytes move that have nothing to do with it."""
    with ThreadPoolExecutor(1) as pool:
        moving = pool.submit(move)
        _run(programs)
    moving.result()


def _one_update(folder: str, engine: str = "direct") -> tuple[Any, Any, SpilledUpdate]:
    """32 matrices of 16 MiB with two moments each: 1 GiB in files."""
    params = {f"w{i:02}": np.full((2048, 2048), 0.01, np.float32) for i in range(32)}
    section = {"device": "nvme", "nvme_path": folder, "pipeline_read": True, "pipeline_write": True}
    zero = {"stage": 3, "offload_optimizer": section}
    mesh = make_mesh(local=1, devices=jax.devices()[:1])
    tx = optax.adamw(1e-3)
    aio = {"block_size": BLOCK, "queue_depth": WORKERS} if engine == "direct" else None
    plan = make_plan(params, tx, mesh, zero, aio=aio)
    return plan, init_state(params, tx, plan), SpilledUpdate(optax.with_extra_args_support(tx), plan)


def _programs(update: SpilledUpdate, arrays: Arrays, grads: list[jax.Array]) -> list[Callable[[], Any]]:
    """The programs of all parts, with inputs of their own that are on the device already; each to be run once."""
    values = [*arrays.masters, *grads, *arrays.inner, jnp.float32(0)]
    shared, _ = update.shared(values, ALL_DONE)

    def one(part: Any) -> Callable[[], Any]:
        given = [[_alone(values[i]) for i in some] for some in update.inputs_of(part)]
        room = [] if update.rooms is None else [jnp.zeros(s.shape, s.dtype) for s in update.room(part)]
        program = update.program(part, shared, ALL_DONE)
        jax.block_until_ready([given, room])
        return lambda: jax.block_until_ready(program(*given, shared, [], room, ALL_DONE, np.int32(0)))

    return [one(part) for part in update.parts]


def _alone(value: Any) -> jax.Array:
    return jnp.full(value.shape, 1e-4, value.dtype) if is_spilled(value) else jnp.copy(value)


def _run(programs: list[Callable[[], Any]]) -> None:
    """Runs each, and lets go of its results and inputs."""
    while programs:
        programs.pop(0)()
