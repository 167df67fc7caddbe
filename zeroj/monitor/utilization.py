"""How much of the hardware a run uses: the share of the peak rate, and bytes of memory."""

from __future__ import annotations

import jax

from zeroj.aot.hardware import find
from zeroj.aot.text import size
from zeroj.monitor.memory import host_bytes, live_bytes

#: Parts of a device's name -> the hardware table's.
KINDS = {"A100-SXM4-40": "a100-40", "A100": "a100-80", "H200": "h200", "H100": "h100", "B200": "b200"}
#: Operations of a step per param and token: 2 forward, 4 backward (Kaplan et al., "Scaling Laws for Neural
#: Language Models", 2020, section 2.1). What attention and recomputing add is left out.
FLOPS_PER_PARAM_AND_TOKEN = 6


def utilization(params: int, tokens_per_second: float, devices: int, kind: str) -> float | None:
    """The model's FLOPs over the peak bf16 rate ("MFU"); None where the peak is not known.

    Args:
        params: params that each token goes through.
        tokens_per_second: over all devices.
        devices: how many there are.
        kind: the device's name, as JAX gives it.

    Example:
        >>> utilization(7_000_000_000, 80_000.0, 8, "NVIDIA H100 80GB HBM3") > 0.4
        True
    """
    name = next((known for part, known in KINDS.items() if part in kind), None)
    if name is None:
        return None
    peak = find(name).flops_bf16.value * devices
    return FLOPS_PER_PARAM_AND_TOKEN * params * tokens_per_second / peak


def memory_line() -> str:
    """Bytes in use on this process's first device, by memory kind, and on its host."""
    device = jax.local_devices()[0]
    used = (device.memory_stats() or {}).get("bytes_in_use")
    parts = [f"device {size(used)}"] if used is not None else []
    if not parts:
        parts = [f"{kind} {size(count)}" for kind, count in sorted(live_bytes(device).items())]
    return ", ".join([*parts, f"host {size(host_bytes()[0])}"])
