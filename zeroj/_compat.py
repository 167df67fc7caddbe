"""Every private JAX name and every difference between JAX versions lives in this file."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

# --- Compiling for GPUs that are not there (zeroj.aot) ------------------------------------------------------

_NO_SUCH_OPTION = re.compile(r"No such compile option: '([^']+)'")


def gpu_compiler_installed() -> bool:
    """Whether the CUDA plugin of jax, which holds the GPU compiler, is installed."""
    return any(importlib.util.find_spec(f"jax_cuda{v}_plugin") is not None for v in (13, 12))


def compile_only_devices(target_config: str, nodes: int, gpus_per_node: int) -> list[Any]:
    """Returns the devices of a cluster of GPUs that is described but not there, numbered node by node."""
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(
        "", platform="cuda", target_config=target_config, topology=f"1x{nodes}x{gpus_per_node}"
    )
    return list(topology.devices)


class GpuLowering:
    """A traced function lowered for CUDA, ready for a compile-only client."""

    def __init__(self, traced: Any):
        computation = traced.lower(lowering_platforms=("cuda",))._lowering
        arguments = computation.compile_args
        self._computation = computation
        self._in_shardings = arguments["in_shardings"]
        self._out_shardings = arguments["out_shardings"]
        self._num_ordered_effects = len(arguments["ordered_effects"])
        self.num_devices: int = arguments["num_devices"]
        self.has_callbacks = bool(arguments["host_callbacks"])
        self.options: dict[str, Any] = dict(computation._compiler_options_kvs)

    def stablehlo(self) -> str:
        """Returns the text of the program before XLA."""
        return str(self._computation.stablehlo())

    def compile(self, devices: list[Any], options: Mapping[str, Any]) -> tuple[Any, dict[str, str]]:
        """Compiles for compile-only devices.

        Args:
          devices: what :func:`compile_only_devices` returned.
          options: XLA's flags by name; those that this version does not know are left out.

        Returns:
          The executable, and the flags left out with the compiler's reason.
        """
        from jax._src.lib import xla_client

        used = dict(options)
        dropped: dict[str, str] = {}
        client = devices[0].client
        while True:
            try:
                executable = client.compile(
                    self._computation.stablehlo(),
                    executable_devices=xla_client.DeviceList(tuple(devices)),
                    compile_options=self._compile_options(devices, used),
                )
                return executable, dropped
            except jax.errors.JaxRuntimeError as error:
                unknown = _NO_SUCH_OPTION.search(str(error))
                if unknown is None or unknown.group(1) not in used:
                    raise
                used.pop(unknown.group(1))
                dropped[unknown.group(1)] = f"unknown to the compiler of jax {jax.__version__}"

    def _compile_options(self, devices: list[Any], options: Mapping[str, Any]) -> Any:
        from jax._src import compiler
        from jax._src.interpreters import pxla

        compile_options = compiler.get_compile_options(
            num_replicas=1,
            num_partitions=len(devices),
            device_assignment=np.arange(len(devices)).reshape(1, -1),
            env_options_overrides=dict(options),
            backend=devices[0].client,
        )
        inputs, outputs = pxla.get_prop_to_input_output(
            self._in_shardings, self._out_shardings, self._num_ordered_effects
        )
        build = compile_options.executable_build_options
        build.allow_spmd_sharding_propagation_to_parameters = list(inputs)
        build.allow_spmd_sharding_propagation_to_output = list(outputs)
        return compile_options


def executable_text(executable: Any) -> str:
    """Returns the text of a compiled module, schedule included."""
    return executable.hlo_modules()[0].to_string()
