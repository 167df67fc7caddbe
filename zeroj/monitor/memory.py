"""Bytes in use on this process's first device and on its host."""

from __future__ import annotations

import collections
import math
import pathlib
import resource

import jax

from zeroj.aot.text import size


def live_bytes(device: jax.Device | None = None) -> dict[str, int]:
    """Bytes of all live arrays on one device, by memory kind ("device", "pinned_host").

    Args:
        device: left out, this process's first.
    """
    device = jax.local_devices()[0] if device is None else device
    found: collections.Counter[str] = collections.Counter()
    for array in jax.live_arrays():
        if device in array.sharding.device_set:
            # by its shape: to ask for a shard makes an array of it, which lives from then on and would count again
            part = math.prod(array.sharding.shard_shape(array.shape))
            found[array.sharding.memory_kind or "device"] += part * array.dtype.itemsize
    return dict(found)


def host_bytes() -> tuple[int, int]:
    """Resident bytes of this process, now and at most."""
    try:
        lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    except OSError:  # not Linux: the most alone, in which a parent that it was forked from counts too
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return peak, peak
    sizes = {line.split(":")[0]: line.split()[1] for line in lines if line.startswith("Vm")}
    return int(sizes["VmRSS"]) * 1024, int(sizes["VmHWM"]) * 1024


def memory_text(when: str) -> str:
    """One line: arrays by memory kind, the allocator's own count where it has one, and the process on its host.

    Args:
        when: what has just happened.
    """
    device = jax.local_devices()[0]
    parts = [f"{kind} {size(count)}" for kind, count in sorted(live_bytes(device).items())]
    stats = device.memory_stats() or {}
    if "bytes_in_use" in stats:
        peak = stats.get("peak_bytes_in_use", stats["bytes_in_use"])
        parts.append(f"allocated {size(stats['bytes_in_use'])}, at most {size(peak)}")
    now, most = host_bytes()
    return f"memory {when}: {', '.join(parts) or 'no arrays'}; process {size(now)}, at most {size(most)}"
