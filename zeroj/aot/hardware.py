"""Numbers of the GPUs that zeroj can plan for, as data: ``hardware.json``, or a user's own."""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import json
import pathlib

from zeroj.errors import PlanError


@dataclasses.dataclass(frozen=True)
class Rate:
    """A rate: the data sheet's value (per second), the part of it that programs reach, the source."""

    value: float
    efficiency: float
    source: str

    @property
    def usable(self) -> float:
        """What a program is assumed to reach: value x efficiency."""
        return self.value * self.efficiency


@dataclasses.dataclass(frozen=True)
class Gpu:
    """One kind of GPU and its place in a node. Copy one with ``dataclasses.replace`` to describe your own.

    Rates are per GPU and per second: ``flops_bf16`` dense bf16 operations, ``hbm`` bytes of device memory,
    ``nvlink`` bytes to the GPUs of the node (one way), ``network`` bytes to other nodes (one way), ``pcie``
    bytes to the host (one way). Sizes are in bytes. Latencies are seconds of a collective inside a node, of
    one across nodes, and of a kernel launch.
    """

    description: str
    compute_capability: str
    core_count: int
    fpus_per_core: int
    clock_ghz: float
    shared_memory_per_core: int
    shared_memory_per_block_optin: int
    l2_bytes: int
    memory_bytes: int
    flops_bf16: Rate
    hbm: Rate
    nvlink: Rate
    network: Rate
    pcie: Rate
    nvlink_latency: float
    network_latency: float
    launch_latency: float

    def with_network(self, gigabits: float, gpus_per_node: int) -> Gpu:
        """Returns this GPU in a node whose link to other nodes its GPUs share.

        Args:
          gigabits: gigabits per second of a whole node, one way.
          gpus_per_node: GPUs that share them.
        """
        source = f"{gigabits:g} Gb/s a node, shared by {gpus_per_node} GPUs"
        rate = Rate(gigabits * 1e9 / 8 / gpus_per_node, self.network.efficiency, source)
        return dataclasses.replace(self, network=rate)

    def target_config(self) -> str:
        """Returns XLA's GpuTargetConfigProto in text form, with what its compiler needs to know."""
        major, minor = self.compute_capability.split(".")
        capability = f"major: {major}" + (f" minor: {minor}" if minor != "0" else "")
        return (
            "gpu_device_info { threads_per_block_limit: 1024 threads_per_warp: 32"
            " shared_memory_per_block: 49152"
            f" shared_memory_per_core: {self.shared_memory_per_core}"
            f" threads_per_core_limit: 2048 core_count: {self.core_count} fpus_per_core: {self.fpus_per_core}"
            " block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535"
            f" memory_bandwidth: {int(self.hbm.value)} l2_cache_size: {self.l2_bytes}"
            f" clock_rate_ghz: {self.clock_ghz} device_memory_size: {self.memory_bytes}"
            f" shared_memory_per_block_optin: {self.shared_memory_per_block_optin}"
            f" cuda_compute_capability {{ {capability} }}"
            " registers_per_core_limit: 65536 registers_per_block_limit: 65536 }"
            ' platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 patch: 0 }'
            f' device_description_str: "{self.description}"'
        )


@functools.cache
def table() -> dict[str, Gpu]:
    """Returns the GPUs of ``hardware.json`` by name."""
    text = importlib.resources.files("zeroj.aot").joinpath("hardware.json").read_text()
    return {name: _gpu(entry) for name, entry in json.loads(text).items()}


def _gpu(entry: dict[str, object]) -> Gpu:
    values = {key: Rate(**value) if isinstance(value, dict) else value for key, value in entry.items()}
    return Gpu(**values)  # type: ignore[arg-type]


def as_json(gpu: Gpu) -> str:
    """Returns a description as the JSON that :func:`load` reads."""
    return json.dumps(dataclasses.asdict(gpu), indent=1)


def load(path: str | pathlib.Path) -> Gpu:
    """Reads a description that ``zeroj plan --calibrate`` wrote, or one written by hand after it.

    Raises:
      PlanError: for a file that is not there, is not JSON, or does not hold exactly the fields of a Gpu.
    """
    try:
        return _gpu(json.loads(pathlib.Path(path).read_text()))
    except OSError as error:
        raise PlanError(f"no hardware description at {path}: {error.strerror}") from error
    except (ValueError, TypeError, AttributeError) as error:
        fields = ", ".join(field.name for field in dataclasses.fields(Gpu))
        raise PlanError(f"{path} is no hardware description ({error}): it must hold {fields}") from error


def find(gpu: str | Gpu) -> Gpu:
    """Returns the numbers of a GPU by name; a :class:`Gpu` passes through.

    Raises:
      PlanError: for a name that is not in the table; the message lists those that are.
    """
    if isinstance(gpu, Gpu):
        return gpu
    known = table()
    if gpu not in known:
        raise PlanError(
            f"no GPU named {gpu!r}: known are {', '.join(known)}. For another one pass your own description,"
            " dataclasses.replace(zj.aot.hardware.table()['h100'], memory_bytes=..., ...)"
        )
    return known[gpu]
