"""``zeroj plan --calibrate``: measures on this machine's GPUs the rates that the planner assumes."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from zeroj.aot.hardware import Gpu, Rate, as_json, table
from zeroj.errors import PlanError, ZerojError

ROUNDS = 5


@dataclasses.dataclass(frozen=True)
class Loads:
    """How much each measurement moves.

    Args:
      matrix: side of the square bf16 matrices.
      products: matrix products in a row, so that the launch does not count.
      nbytes: bytes of the array that is read and written, copied to and from the host, or gathered.
    """

    matrix: int = 8192
    products: int = 16
    nbytes: int = 2**30


def run(path: str, gpu: str) -> str:
    """Measures this machine's GPUs, writes a description that ``--hardware`` takes, and returns a summary.

    Args:
      path: the JSON file to write.
      gpu: name of the GPU that what cannot be measured (sizes, the network, latencies) is taken from, where
        the GPU here is none that the table knows.

    Raises:
      ZerojError: where there is no GPU.
    """
    devices = gpus()
    known = next((g for g in table().values() if g.description == devices[0].device_kind), table().get(gpu))
    if known is None:
        raise PlanError(f"no GPU named {gpu!r}: known are {', '.join(table())}")
    found = calibrated(known, measure(devices, Loads()), devices[0].device_kind)
    pathlib.Path(path).write_text(as_json(found) + "\n")
    rows = [
        f"{name:<12} {rate.usable:.4g} of {rate.value:.4g} a second ({rate.efficiency:.2f}), {rate.source}"
        for name, rate in _rates(found).items()
    ]
    return "\n".join(
        [f"{len(devices)} x {devices[0].device_kind}", *rows, f"wrote {path}: pass --hardware {path}"]
    )


def gpus() -> Sequence[jax.Device]:
    """The GPUs of this process.

    Raises:
      ZerojError: where there is none.
    """
    devices = jax.local_devices()
    if devices[0].platform != "gpu":
        raise ZerojError(
            f"measuring needs a GPU, and JAX finds only {devices[0].device_kind} here: run it on the machine"
            " to be measured, with jax[cuda13] installed and JAX_PLATFORMS not set to cpu"
        )
    return devices


def measure(devices: Sequence[jax.Device], loads: Loads) -> dict[str, float]:
    """Measures rates per second: medians of a few runs, each after one that compiles.

    Args:
      devices: devices of one node, of any platform.
      loads: how much is moved.

    Returns:
      "flops_bf16" (operations), "hbm", "h2d", "d2h" (bytes), and with two or more devices "all_gather" and
      "reduce_scatter" (bytes that one device sends).
    """
    found = {"flops_bf16": _matmul(devices[0], loads), "hbm": _device_memory(devices[0], loads)}
    found |= _host_copies(devices[0], loads)
    return found | (_collectives(devices, loads) if len(devices) > 1 else {})


def calibrated(gpu: Gpu, rates: dict[str, float], kind: str) -> Gpu:
    """Returns a GPU's description with measured rates in place of assumed ones.

    A link that was measured both ways gets the slower one. What was not measured stays as it was.

    Args:
      gpu: the description to start from.
      rates: what :func:`measure` returned.
      kind: the measured device, for the source of the rates.
    """
    slower = {
        "flops_bf16": ("flops_bf16",),
        "hbm": ("hbm",),
        "pcie": ("h2d", "d2h"),
        "nvlink": ("all_gather", "reduce_scatter"),
    }
    changes: dict[str, Any] = {}
    for field, names in slower.items():
        values = [rates[name] for name in names if name in rates]
        if values:
            ceiling = max(getattr(gpu, field).value, min(values))
            changes[field] = Rate(
                ceiling, min(values) / ceiling, f"measured on {kind}, jax {jax.__version__}"
            )
    return dataclasses.replace(gpu, **changes)


def _rates(gpu: Gpu) -> dict[str, Rate]:
    return {name: value for name, value in vars(gpu).items() if isinstance(value, Rate)}


def _seconds(run: Callable[[], Any]) -> float:
    jax.block_until_ready(run())
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _matmul(device: jax.Device, loads: Loads) -> float:
    x = jax.device_put(jnp.full((loads.matrix, loads.matrix), 1 / loads.matrix, jnp.bfloat16), device)

    @jax.jit
    def chain(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, loads.products, lambda _, y: y @ x, x)

    return 2 * loads.matrix**3 * loads.products / _seconds(lambda: chain(x))


def _device_memory(device: jax.Device, loads: Loads) -> float:
    x = jax.device_put(np.zeros(loads.nbytes // 4, np.float32), device)
    add = jax.jit(lambda x: x + 1)
    return 2 * loads.nbytes / _seconds(lambda: add(x))


def _host_copies(device: jax.Device, loads: Loads) -> dict[str, float]:
    here = SingleDeviceSharding(device)
    there = SingleDeviceSharding(device, memory_kind="pinned_host")
    x = jax.device_put(np.zeros(loads.nbytes // 4, np.float32), here)
    y = jax.device_put(x, there)
    out = _seconds(lambda: jax.device_put(x, there))
    back = _seconds(lambda: jax.device_put(y, here))
    return {"d2h": loads.nbytes / out, "h2d": loads.nbytes / back}


def _collectives(devices: Sequence[jax.Device], loads: Loads) -> dict[str, float]:
    mesh = Mesh(np.array(devices), ("local",))
    n = len(devices)
    split, whole = PartitionSpec("local"), PartitionSpec()
    map_ = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)
    gather = jax.jit(
        map_(lambda x: jax.lax.all_gather(x, "local", tiled=True), in_specs=split, out_specs=whole)
    )
    scatter = jax.jit(
        map_(lambda x: jax.lax.psum_scatter(x, "local", tiled=True), in_specs=whole, out_specs=split)
    )
    count = loads.nbytes // 2 // n * n
    x = jax.device_put(np.zeros(count, jnp.bfloat16), NamedSharding(mesh, split))
    y = jax.device_put(np.zeros(count, jnp.bfloat16), NamedSharding(mesh, whole))
    sent = 2 * count * (n - 1) / n
    return {
        "all_gather": sent / _seconds(lambda: gather(x)),
        "reduce_scatter": sent / _seconds(lambda: scatter(y)),
    }
