"""XLA:GPU's flags by profile. A flag that a version does not know is dropped, with a note where one is kept."""

from __future__ import annotations

import functools

import jax

from zeroj import _compat
from zeroj.errors import PlanError

ALWAYS: dict[str, object] = {"xla_gpu_autotune_level": 0}
"""There is no GPU to try kernels on."""

PROFILES: dict[str, dict[str, object]] = {
    "default": {},
    "overlap": {
        "xla_gpu_enable_latency_hiding_scheduler": True,
        # A layer's four gathers and what is left of the layer before may be under way. XLA starts each as late as
        # hides it alone: with more at once it forgets that they queue, with fewer one starts when another is done.
        # Hidden, 16 layers, d = 4096, with 2, 3, 4, 5, 8: unrolled on 8 GPUs 0.93, 0.94, 0.96, 0.97, 0.97; scanned on
        # 8 with 4, 5, 8: 0.83, 0.98, 0.98; scanned on 64 with 2, 3, 5, 6, 8: 0.91, 0.99, 0.99, 0.91, 0.88.
        "xla_gpu_experimental_parallel_collective_overlap_limit": 5,
        # Copies to and from the host are "async computations": of a layer's state all arrays, both ways, are under way.
        # Hidden, 6 layers, d = 1024, everything but activations offloaded, with 2, 4, 16: 0.17, 0.28, 0.37; 13B,
        # rotated, with 16 and 64: 0.83, 0.97.
        "xla_gpu_experimental_parallel_async_compute_limit": 64,
        # One collective a layer: combined ones wait for the last of their operands and keep all outputs
        # alive.
        "xla_gpu_all_gather_combine_threshold_bytes": 1,
        "xla_gpu_reduce_scatter_combine_threshold_bytes": 1,
        # XLA's own rematerialization searches for minutes where a step does not fit, and undoes the schedule.
        "xla_disable_hlo_passes": "rematerialization",
        # Gathers of the next iteration start in this one. The first two names are of jax 0.10, then 0.12.
        "xla_gpu_enable_pipelined_all_gather": True,
        "xla_gpu_enable_pipelined_reduce_scatter": True,
        "xla_gpu_pipeline_all_gather": "COLLECTIVE_PIPELINING_MODE_ON",
        "xla_gpu_pipeline_reduce_scatter": "COLLECTIVE_PIPELINING_MODE_ON",
    },
}


def profile_flags(profile: str) -> dict[str, object]:
    """Returns the flags of a profile: "default" (XLA's own) or "overlap".

    Raises:
      PlanError: for another name.
    """
    if profile not in PROFILES:
        raise PlanError(f"no profile {profile!r} of compiler flags: there are {', '.join(PROFILES)}")
    return {**ALWAYS, **PROFILES[profile]}


@functools.cache
def step_options() -> dict[str, object] | None:
    """The compiler options of a train step here: the overlap profile on a GPU, as far as XLA knows it."""
    if jax.default_backend() != "gpu":
        return None
    return _compat.known_options(PROFILES["overlap"])
