"""Which devices an example runs on: the GPUs that are there, otherwise simulated CPU devices."""

from __future__ import annotations

import importlib.util
import pathlib

import jax


def request_devices(simulated: int) -> None:
    """Ask JAX for this many CPU devices, which it uses where it finds no accelerator.

    Call it before anything touches a JAX device: both settings are read once, when the backend starts.

    Args:
        simulated: number of simulated CPU devices.
    """
    jax.config.update("jax_num_cpu_devices", simulated)
    if not jax.config.jax_platforms and _has_gpu_compiler() and not pathlib.Path("/dev/nvidiactl").exists():
        jax.config.update("jax_platforms", "cpu")  # or JAX would print a long warning about the missing GPU


def _has_gpu_compiler() -> bool:
    plugins = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")
    return bool(importlib.util.find_spec("jax_plugins")) and any(map(importlib.util.find_spec, plugins))
