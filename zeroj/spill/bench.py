"""How fast a disk reads and writes pieces of state, by block size, depth and threads, through the direct engine."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from zeroj.spill.buffers import aligned
from zeroj.spill.direct_store import DirectStore
from zeroj.spill.folder import RunFolder, file_system
from zeroj.spill.store import Pending

#: What is tried where nothing else is asked for.
BLOCKS, DEPTHS, THREADS = (256 << 10, 1 << 20, 4 << 20, 16 << 20), (4, 8, 16), (1, 2)
#: Pieces of which reads or writes are in flight at once.
AHEAD = 4
#: A setting within this share of the best is as good: disks are not steadier than that.
AS_GOOD = 0.97


@dataclass(frozen=True)
class Measured:
    """Bytes per second of one setting of the "aio" section."""

    block_size: int
    queue_depth: int
    threads: int
    read: float
    write: float

    @property
    def seconds_per_byte(self) -> float:
        """Of state that is read once and written once at each step."""
        return 1 / self.read + 1 / self.write


def sweep(
    path: str,
    *,
    size: int = 1 << 30,
    piece: int = 64 << 20,
    blocks: Sequence[int] = BLOCKS,
    depths: Sequence[int] = DEPTHS,
    threads: Sequence[int] = THREADS,
    rounds: int = 2,
    verify: bool = False,
) -> list[Measured]:
    """Measures every setting on the same files: bytes are written and read ``rounds`` times, the best counts.

    Args:
        path: the folder; a subfolder of its own is made and deleted.
        size: bytes of all files.
        piece: bytes of one file.
        blocks: block sizes in bytes.
        depths: queue depths.
        threads: numbers of threads.
        rounds: how often; the first writes of new files are slower than later ones.
        verify: whether with checksums.

    Raises:
        SpillError: the path cannot be used, or has too little space.
    """
    folder = RunFolder(path)
    with contextlib.closing(folder):
        names = {f"piece{i}": piece for i in range(max(size // piece, 1))}
        found = []
        base = DirectStore(folder.path)
        base.reserve(names)
        timed(names, base.write, piece, 1)  # so that no setting pays for touching new space
        for block in blocks:
            for depth in depths:
                for count in threads:
                    store = base.tuned(block_size=block, queue_depth=depth, threads=count, verify=verify)
                    write = timed(names, store.write, piece, rounds)
                    read = timed(names, store.read, piece, rounds)
                    found.append(Measured(block, depth, count, read, write))
                    store.close()
        base.close()
    return found


def timed(
    names: dict[str, int], move: Callable[[str, np.ndarray], Pending], piece: int, rounds: int
) -> float:
    """Bytes per second of moving every piece, a few in flight at once; the best of some rounds."""
    buffers = [aligned(piece)[:piece] for _ in range(AHEAD)]
    for i, buffer in enumerate(buffers):
        buffer[:] = np.random.default_rng(i).integers(0, 256, piece, dtype=np.uint8)
    best = 0.0
    for _ in range(rounds):
        start = time.perf_counter()
        pending: list[Pending] = []
        for i, name in enumerate(names):
            if len(pending) == AHEAD:
                pending.pop(0).result()
            pending.append(move(name, buffers[i % AHEAD]))
        for rest in pending:
            rest.result()
        best = max(best, len(names) * piece / (time.perf_counter() - start))
    return best


def best(found: Sequence[Measured]) -> Measured:
    """The setting with the least time for a read and a write; among equals the smallest depth and block."""
    least = min(m.seconds_per_byte for m in found)
    good = [m for m in found if m.seconds_per_byte * AS_GOOD <= least]
    return min(good, key=lambda m: (m.queue_depth * m.threads, m.block_size))


def aio_section(chosen: Measured) -> dict[str, dict[str, int]]:
    """The section of a ds_config.json."""
    return {
        "aio": {
            "block_size": chosen.block_size,
            "queue_depth": chosen.queue_depth,
            "intra_op_parallelism": chosen.threads,
        }
    }


def table(path: str, found: Sequence[Measured]) -> str:
    """The sweep as text, with the best section and what it means for a step."""
    chosen = best(found)
    return "\n".join(_lines(path, found, chosen))


def _lines(path: str, found: Sequence[Measured], chosen: Measured) -> Iterator[str]:
    yield f"{path} ({file_system(path) or 'unknown file system'})"
    yield f"{'block_size':>12} {'queue_depth':>12} {'threads':>8} {'read GB/s':>10} {'write GB/s':>10}"
    for m in found:
        mark = "  best" if m is chosen else ""
        yield (
            f"{m.block_size:>12} {m.queue_depth:>12} {m.threads:>8} {m.read / 1e9:>10.3g} {m.write / 1e9:>10.3g}{mark}"
        )
    yield ""
    yield f"State that is read and written at each step: {chosen.seconds_per_byte * 1e9:.2f} s per GB."
    rate = 2 / chosen.seconds_per_byte
    yield f"For the planner: zeroj plan --nvme-rate {rate / 1e9:.2f}GB"
    yield json.dumps(aio_section(chosen), indent=2)
