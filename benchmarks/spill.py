"""The stores of spilled state beside the raw disk and bare TensorStore: same files' sizes, same buffers, one run.

    python benchmarks/run.py spill

Set ZEROJ_NVME to a folder on the disk to be measured; left out, the temporary folder's.
"""

from __future__ import annotations

import itertools
import os
import statistics
from collections import defaultdict
from typing import Any

from disks import BLOCK, NAMES, PIECE, STEADY, WORKERS, Bare, Raw, Steady, folders
from figure import Figure
from spill_pass import update_pass

from zeroj.spill.bench import timed
from zeroj.spill.direct_store import DirectStore
from zeroj.spill.orbax_store import OrbaxStore

ROUNDS = 10


Rates = dict[tuple[str, str], float]


def rates(stores: dict[str, Any]) -> tuple[Rates, Rates]:
    """Bytes per second of every store, reading and writing; taking turns, so that all see the same disk.

    Medians of every other round, and of the others: which configuration is the best is told from the second, what it
    does from the first, or the best of several would be the luckiest of them. What one store left in the page cache is
    synced before the next one's turn, so that nobody waits for another's bytes.
    """
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for store in stores.values():
        timed(NAMES, store.write, PIECE, 1)  # no store pays for touching new space
    for _, (name, store) in itertools.product(range(ROUNDS), stores.items()):
        for what, move in (("write", store.write), ("read", store.read)):
            os.sync()
            found[name, what].append(timed(NAMES, move, PIECE, 1))
    one, other = ({k: statistics.median(v[half::2]) for k, v in found.items()} for half in (0, 1))
    return one, other


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
        found, tried = rates(stores)
    best = {what: max(bare, key=lambda name: tried[name, what]) for what in ("read", "write")}
    rows = [figure for what in best for figure in _figures(what, found, list(bare), best[what])]
    steady = f"a simulated disk of {STEADY / 1e9:g} GB/s each way"
    passes = [("direct", "direct", None), ("orbax", "orbax", None), ("direct", steady, Steady())]
    return [*rows, *(figure for args in passes for figure in update_pass(*args))]


def _figures(what: str, found: Rates, bare: list[str], best: str) -> list[Figure]:
    raw = found["raw", what] / 1e9
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
