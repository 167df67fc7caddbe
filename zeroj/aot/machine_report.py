"""What this machine is, as far as training is concerned: ``zeroj report``."""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import platform
import shutil
from typing import Any

import jax

from zeroj import _compat
from zeroj.aot.text import size
from zeroj.plan.host_memory import PINNED_VARIABLE, host_memory, pinned_pool

_PACKAGES = (
    "jax jaxlib flax optax orbax-checkpoint tensorstore numpy pydantic rich safetensors jax-cuda13-plugin"
    " jax-cuda12-plugin matplotlib transformers datasets torch tensorboardX wandb"
).split()
_VARIABLES = ("JAX_PLATFORMS", "XLA_FLAGS", "XLA_PYTHON_CLIENT_MEM_FRACTION", PINNED_VARIABLE)


def machine() -> dict[str, Any]:
    """Returns what ``zeroj report`` prints, as data that JSON can hold."""
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpus": os.cpu_count(),
        "host_memory_bytes": host_memory(),
        "disk_free_bytes": shutil.disk_usage(pathlib.Path.cwd()).free,
        "processes": jax.process_count(),
        "devices": [_device(d) for d in jax.local_devices()],
        "pinned_pool_bytes": pinned_pool(),
        "gpu_compiler": _compat.gpu_compiler_installed(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
        "environment": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _device(device: jax.Device) -> dict[str, Any]:
    stats = device.memory_stats() or {}
    return {
        "id": device.id,
        "kind": device.device_kind,
        "platform": device.platform,
        "memory_kinds": sorted(m.kind for m in device.addressable_memories()),
        "memory_bytes": stats.get("bytes_limit"),
    }


def text(found: dict[str, Any]) -> str:
    """Returns the report as text for people."""
    lines = [
        f"python {found['python']} on {found['system']}, {found['cpus']} cpus,"
        f" {size(found['host_memory_bytes'])} host memory, {size(found['disk_free_bytes'])} free disk here",
        f"processes: {found['processes']}; devices of this one: {len(found['devices'])}",
    ]
    for device in found["devices"]:
        memory = f", {size(device['memory_bytes'])}" if device["memory_bytes"] else ""
        lines.append(
            f"  {device['id']}: {device['kind']}{memory}; memory: {', '.join(device['memory_kinds'])}"
        )
    lines.append(
        f"pinned host memory of a CUDA process: at most {size(found['pinned_pool_bytes'])}"
        f" (set {PINNED_VARIABLE} before JAX starts to change it)"
    )
    compiler = "installed" if found["gpu_compiler"] else "not installed: pip install 'zeroj[aot]'"
    lines.append(f"GPU compiler for zeroj plan: {compiler}")
    lines.append("packages: " + ", ".join(f"{k} {v}" for k, v in found["packages"].items()))
    if found["environment"]:
        lines.append("environment: " + ", ".join(f"{k}={v}" for k, v in found["environment"].items()))
    return "\n".join(lines)
