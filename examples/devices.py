"""Which devices an example runs on: the GPUs that are there, otherwise simulated CPU devices."""

from __future__ import annotations

import importlib.util
import os
import pathlib


def request_devices(simulated: int) -> None:
    """Ask JAX for this many CPU devices, which it uses where it finds no accelerator.

    Call it before anything touches a JAX device: the number is read once, when the backend starts.

    Args:
        simulated: number of simulated CPU devices.
    """
    compiler_only = importlib.util.find_spec("jax_plugins.xla_cuda13") or importlib.util.find_spec(
        "jax_plugins.xla_cuda12"
    )
    if compiler_only and not pathlib.Path("/dev/nvidiactl").exists() and not os.environ.get("JAX_PLATFORMS"):
        os.environ["JAX_PLATFORMS"] = (
            "cpu"  # the GPU compiler is installed, but no GPU: say so before JAX looks
        )
    import jax

    jax.config.update("jax_num_cpu_devices", simulated)
