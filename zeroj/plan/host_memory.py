"""Whether the host has the memory that a plan puts there: asked before anything is allocated."""

from __future__ import annotations

import math
import os
import pathlib

from jax.sharding import Mesh

from zeroj.errors import PlanError
from zeroj.plan.memory import show_bytes
from zeroj.plan.plan import Plan

#: The variable that sets how much page-locked memory a CUDA process may take, in GiB; read when the backend starts.
PINNED_VARIABLE = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
#: What it is where the variable is not set.
PINNED_DEFAULT_GB = 64
#: What the pool should hold beyond the state, for fragments.
MARGIN = 1.15


def check_host_memory(plan: Plan) -> None:
    """Refuses a plan whose state in host memory does not fit this host.

    Args:
        plan: the plan. One on a mesh without devices, or with nothing on the host, always passes.

    Raises:
        PlanError: the page-locked pool of CUDA, or the host's memory, is too small.
    """
    need = plan.memory().host_total
    if not need or not isinstance(plan.mesh, Mesh):
        return
    parts = ", ".join(f"{part} {show_bytes(count)}" for part, count in plan.memory().host.items())
    what = f"The plan keeps {show_bytes(need)} in host memory ({parts})"
    if plan.mesh.devices.flat[0].platform in ("gpu", "cuda") and need > pinned_pool():
        enough = math.ceil(MARGIN * need / 2**30)
        raise PlanError(
            f"{what}, but a CUDA process may take {show_bytes(pinned_pool())} of page-locked host memory. This is a "
            f"limit of the host's pool, not of the GPU: set {PINNED_VARIABLE}={enough} in the environment. JAX reads "
            "it when its backend starts, so in this process it is too late: start again with it set."
        )
    there = host_memory()
    if need > there:
        raise PlanError(
            f"{what}, and this host has {show_bytes(there)}. Offload less (offload_optimizer.ratio), or use more "
            "hosts."
        )


def host_memory() -> int:
    """Bytes of this host's memory: what the control group allows, at most what there is."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = pathlib.Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.exists() else "max"
    return min(total, int(text)) if text.isdigit() else total


def pinned_pool() -> int:
    """Bytes of page-locked host memory that one CUDA process may take."""
    return int(float(os.environ.get(PINNED_VARIABLE, PINNED_DEFAULT_GB)) * 2**30)
