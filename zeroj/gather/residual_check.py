"""Whether this backend offloads activations rightly: a known fault by version, and a small program run both ways."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from zeroj import _compat
from zeroj.errors import PlanError
from zeroj.gather.residuals import offload_residuals
from zeroj.plan.plan import Plan

#: Up to here activations that a loop offloads gave wrong gradients on GPUs, without any error.
LAST_WRONG_ON_GPU = (0, 11, 0)
#: What may be offloaded so, as messages name it.
ACTIVATIONS = "Offloaded activations (cpu_checkpointing)"
NEAR = "hpZ with offload_param (zero_hpz_partition_size), which keeps its second shards in host memory"
#: Largest difference of gradients, relative by norm.
TOLERANCE = 1e-6


def check_offload(mesh: Any, what: str = ACTIVATIONS) -> None:
    """Refuses to hand values from forward to backward through host memory where that is known, or found, to give other
    gradients.

    On a GPU a small program (four layers in a loop) is run once a process, with and without. On a CPU the tests
    have done so; a mesh without devices is only compiled for.

    Raises:
        PlanError: it is not safe here; says why, of ``what``.
    """
    devices = mesh.devices.flat if isinstance(mesh, Mesh) else ()
    device = next((d for d in devices if d.process_index == jax.process_index()), None)
    if device is not None and device.platform in ("gpu", "cuda"):
        refuse_known(_compat.jaxlib_version(), what)
        compare(device)


def check_near(plan: Plan) -> None:
    """The same for the second shards of hpZ, where they wait in host memory."""
    if any(leaf.placement.wire.near_memory for leaf in plan.leaves):
        check_offload(plan.mesh, NEAR)


def refuse_known(version: tuple[int, ...], what: str = ACTIVATIONS) -> None:
    """Refuses the versions of jaxlib whose GPU programs are known to be wrong."""
    if version <= LAST_WRONG_ON_GPU:
        last, this = (".".join(map(str, v)) for v in (LAST_WRONG_ON_GPU, version))
        raise PlanError(
            f"{what}: what a loop hands to its backward pass through host memory gave wrong gradients on GPUs, without "
            f"any error, up to jaxlib {last}; this is {this}. Take a newer jax (it needs Python 3.12), or leave it out."
        )


@functools.cache
def compare(device: jax.Device, offload: Callable[..., Any] = offload_residuals) -> None:
    """Runs a small program on ``device`` with offloaded activations and without.

    Args:
        device: where to run.
        offload: what to put to the test.

    Raises:
        PlanError: the gradients differ.
    """
    layers, width = 4, 64
    weights = np.sin(np.arange(layers * width * width, dtype=np.float32)).reshape(layers, width, width) / 8
    x = np.cos(np.arange(16 * width, dtype=np.float32)).reshape(16, width)

    def loss(weights: jax.Array, x: jax.Array) -> jax.Array:
        layer = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None))
        return jnp.mean(jax.lax.scan(layer, x, weights)[0] ** 2)

    def gradient(weights: jax.Array, x: jax.Array, seed: jax.Array) -> Any:
        return jax.vjp(loss, weights, x)[1](seed)

    args = jax.device_put((weights, x, np.float32(1)), device)
    program, _ = _compat.trace(gradient, *args)
    moved = offload(program, [True, False, False], [False, False, True], smallest=1)
    plain, other = (jax.jit(functools.partial(_compat.evaluate, p))(*args) for p in (program, moved))
    for wanted, found in zip(plain, other, strict=True):
        apart = float(jnp.linalg.norm(wanted - found) / jnp.linalg.norm(wanted))
        if not apart <= TOLERANCE:
            raise PlanError(
                "What waits in host memory between forward and backward pass (cpu_checkpointing, hpZ with "
                f"offload_param) gives other gradients on {device}: a small program of four layers in a loop differs "
                f"by {apart:.1e}, relative by norm, where {TOLERANCE:.0e} is allowed. Leave "
                "the setting out, and report this with the versions of jax and CUDA."
            )
