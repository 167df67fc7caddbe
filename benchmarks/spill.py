"""The stores of spilled state beside the raw disk and bare TensorStore: same files' sizes, same buffers, one run.

    python benchmarks/run.py spill

Set ZEROJ_NVME to a folder on the disk to be measured; left out, the temporary folder's.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tensorstore as ts
from figure import Figure

from zeroj import init_state, make_mesh, make_plan
from zeroj.optimizer.norms import Unfinished
from zeroj.optimizer.spill import SpilledUpdate
from zeroj.optimizer.update import Arrays
from zeroj.spill.bench import timed
from zeroj.spill.buffers import aligned
from zeroj.spill.direct_store import DirectStore, supports_direct
from zeroj.spill.folder import RunFolder
from zeroj.spill.orbax_store import OrbaxStore
from zeroj.spill.store import Pending
from zeroj.spill.tier import is_spilled

PIECE, COUNT, BLOCK, WORKERS = 64 << 20, 16, 4 << 20, 8
ROUNDS = 5
#: Bytes per second, each way, of a disk that reads and writes at the same time.
STEADY = 0.5e9
NAMES = {f"piece{i}": PIECE for i in range(COUNT)}
#: Nothing is left to do to these gradients, which are on the device.
ALL_DONE = Unfinished(None, None, None)


class Raw:
    """Preallocated files, O_DIRECT, a pool of threads, and nothing else."""

    def __init__(self, folder: str) -> None:
        flags = os.O_RDWR | os.O_CREAT | (os.O_DIRECT if supports_direct(folder) else 0)
        self.handles = {name: os.open(f"{folder}/{name}", flags) for name in NAMES}
        for handle in self.handles.values():
            os.posix_fallocate(handle, 0, PIECE)
        self.pool = ThreadPoolExecutor(WORKERS)

    def _blocks(self, move: Callable[..., int], name: str, data: np.ndarray) -> _All:
        handle = self.handles[name]
        jobs = [
            self.pool.submit(move, handle, [data[at : at + BLOCK].data], at) for at in range(0, PIECE, BLOCK)
        ]
        return _All(jobs)

    def write(self, name: str, data: np.ndarray) -> _All:
        """Begins to write a file."""
        return self._blocks(os.pwritev, name, data)

    def read(self, name: str, out: np.ndarray) -> _All:
        """Begins to read a file."""
        return self._blocks(os.preadv, name, out)


class _All:
    def __init__(self, futures: list[Future[int]]) -> None:
        self.futures = futures

    def result(self) -> None:
        """Waits."""
        assert sum(f.result() for f in self.futures) == PIECE


class Bare:
    """TensorStore as it comes: zarr3 arrays of bytes, one chunk each, opened once."""

    def __init__(self, folder: str, sync: bool, mode: str | None, concurrency: int) -> None:
        context: dict[str, Any] = {"file_io_sync": sync, "file_io_concurrency": {"limit": concurrency}}
        if mode:
            context["file_io_mode"] = {"mode": mode}
        made = ts.Context(context)
        self.stores = {name: self._open(f"{folder}/{name}/", made) for name in NAMES}

    def _open(self, path: str, context: Any) -> Any:
        grid = {"name": "regular", "configuration": {"chunk_shape": [PIECE]}}
        metadata = {"shape": [PIECE], "data_type": "uint8", "chunk_grid": grid, "codecs": [{"name": "bytes"}]}
        spec = {
            "driver": "zarr3",
            "kvstore": {"driver": "file", "path": path},
            "metadata": metadata,
            "store_data_equal_to_fill_value": True,  # else all data are compared with zeros first
            "create": True,
        }
        return ts.open(ts.Spec(spec), context=context).result()

    def write(self, name: str, data: np.ndarray) -> Any:
        """Begins to write an array."""
        return self.stores[name].write(data, can_reference_source_data_indefinitely=True)

    def read(self, name: str, out: np.ndarray) -> Any:
        """Begins to read an array into the same buffers as the others, which is faster than into new memory."""
        return ts.array(out, copy=False, write=True).write(self.stores[name])


class Steady:
    """A simulated disk: host memory, at :data:`STEADY` bytes per second each way, reads and writes side by side."""

    def __init__(self) -> None:
        self._memory: dict[str, np.ndarray] = {}
        self._ways = {way: ThreadPoolExecutor(1) for way in ("read", "write")}

    def reserve(self, sizes: Mapping[str, int]) -> None:
        """Makes room."""
        self._memory |= {name: np.zeros(size, np.uint8) for name, size in sizes.items()}

    def write(self, name: str, data: np.ndarray) -> Pending:
        """Begins to write a piece."""
        return self._ways["write"].submit(self._move, self._memory[name], data)

    def read(self, name: str, out: np.ndarray) -> Pending:
        """Begins to read a piece."""
        return self._ways["read"].submit(self._move, out, self._memory[name])

    def _move(self, out: np.ndarray, data: np.ndarray) -> None:
        until = time.perf_counter() + data.nbytes / STEADY
        out[:] = data
        time.sleep(max(0.0, until - time.perf_counter()))


@contextlib.contextmanager
def folders() -> Iterator[Callable[[str], str]]:
    run = RunFolder(os.environ.get("ZEROJ_NVME", os.path.join(tempfile.gettempdir(), "zeroj-bench")))
    with contextlib.closing(run):

        def make(name: str) -> str:
            path = os.path.join(run.path, name)
            os.mkdir(path)
            return path

        yield make


def rates(stores: dict[str, Any]) -> dict[tuple[str, str], float]:
    """Bytes per second of every store, reading and writing; taking turns, so that all see the same disk.

    The median of the rounds: the best of several configurations' best rounds would be the luckiest of them. What one
    store left in the page cache is synced before the next one's turn, so that nobody waits for another's bytes.
    """
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for store in stores.values():
        timed(NAMES, store.write, PIECE, 1)  # no store pays for touching new space
    for _, (name, store) in itertools.product(range(ROUNDS + 2), stores.items()):
        for what, move in (("write", store.write), ("read", store.read)):
            os.sync()
            found[name, what].append(timed(NAMES, move, PIECE, 1))
    return {key: statistics.median(several) for key, several in found.items()}


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
            tuple(dict(itertools.islice(side.items(), at, None, 2)) for side in (views, results)) for at in (0, 1)
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
            programs = _programs(update, arrays, grads)
            best("update", lambda: _run(programs))
            programs = _programs(update, arrays, grads)
            best("at once", lambda: _beside(lambda: _turned(store, half), programs))
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


def figures() -> list[Figure]:
    """Reads and writes of 16 files of 64 MiB each, and a whole update."""
    options = {"block_size": BLOCK, "queue_depth": WORKERS}
    bare = {
        f"bare {sync} {mode} {limit}": (sync, mode, limit)
        for sync, mode, limit in (
            (False, None, 4),
            (False, None, 16),
            (False, "direct", 16),
            (True, None, 16),
        )
    }
    with folders() as folder:
        stores: dict[str, Any] = {
            "raw": Raw(folder("raw")),
            "direct": DirectStore(folder("direct"), verify=False, **options),
            "direct, checksums": DirectStore(folder("checked"), **options),
            "orbax": OrbaxStore(folder("orbax"), verify=False),
            "orbax, checksums": OrbaxStore(folder("orbax_checked")),
            **{name: Bare(folder(name.replace(" ", "_")), *how) for name, how in bare.items()},
        }
        for store in stores.values():
            if hasattr(store, "reserve"):
                store.reserve(NAMES)
        found = rates(stores)
    rows = [figure for what in ("read", "write") for figure in _figures(what, found, list(bare))]
    steady = f"a simulated disk of {STEADY / 1e9:g} GB/s each way"
    passes = [("direct", "direct", None), ("orbax", "orbax", None), ("direct", steady, Steady())]
    return [*rows, *(figure for args in passes for figure in update_pass(*args))]


def _figures(what: str, found: dict[tuple[str, str], float], bare: list[str]) -> list[Figure]:
    raw = found["raw", what] / 1e9
    best = max(bare, key=lambda name: found[name, what])
    best_bare = found[best, what] / 1e9

    def one(name: str, beside: float, target: float | None, note: str) -> Figure:
        rate = found[name, what] / 1e9
        return Figure(f"{what}, {name}", rate, "GB/s", beside, target, "higher", note=note)

    return [
        one("direct", raw, 0.9, "beside raw O_DIRECT"),
        one("direct, checksums", raw, None, "beside raw O_DIRECT: what checksums cost"),
        one("orbax", best_bare, 0.9, f"beside the best bare TensorStore ({best})"),
        one("orbax", raw, None, "through the page cache; beside raw O_DIRECT"),
        one("orbax, checksums", best_bare, None, "beside the best bare TensorStore"),
        *(one(name, raw, None, "sync, file_io_mode, files at once; beside raw O_DIRECT") for name in bare),
    ]
