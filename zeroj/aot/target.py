"""A cluster that is not here, as a mesh to plan on and a compiler to compile with."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jax.sharding import AbstractMesh, AxisType

from zeroj.aot import compile as compiler
from zeroj.aot import hardware
from zeroj.aot.report import Report
from zeroj.aot.traffic import Cluster
from zeroj.errors import PlanError


@dataclasses.dataclass(frozen=True)
class Target:
    """A cluster of GPUs, described.

    Args:
      gpu: "a100-40", "a100-80", "h100", "h200", "b200", or a :class:`zeroj.aot.hardware.Gpu` of your own.
      nodes: number of hosts.
      gpus_per_node: GPUs of each host.

    Raises:
      PlanError: for a GPU that is not known, or a size that is not a positive whole number.

    Example::

      target = zj.aot.Target("h100", nodes=8, gpus_per_node=8)
      mesh = target.mesh()                         # axes ("node", "local"), no devices behind it
      x = jax.ShapeDtypeStruct((64, 128), "float32", sharding=NamedSharding(mesh, P("node", "local")))
      print(target.compile(jax.jit(lambda x: x.sum()), x))
    """

    gpu: str | hardware.Gpu
    nodes: int = 1
    gpus_per_node: int = 8

    def __post_init__(self) -> None:
        wrong = [
            f"{name}={value!r}"
            for name, value in (("nodes", self.nodes), ("gpus_per_node", self.gpus_per_node))
            if not isinstance(value, int) or isinstance(value, bool) or value < 1
        ]
        if wrong:
            raise PlanError(f"a cluster has at least one node with one GPU: {', '.join(wrong)}")
        hardware.find(self.gpu)

    @property
    def hardware(self) -> hardware.Gpu:
        """The numbers of the GPU."""
        return hardware.find(self.gpu)

    @property
    def num_devices(self) -> int:
        """GPUs of the cluster."""
        return self.nodes * self.gpus_per_node

    @property
    def cluster(self) -> Cluster:
        """Number of GPUs and how many share a node."""
        return Cluster(self.num_devices, self.gpus_per_node)

    def mesh(self, **axes: int) -> AbstractMesh:
        """Returns a mesh of the cluster with automatic axes and no devices; memory kinds survive on it.

        Args:
          **axes: sizes by axis name, outermost first; they must multiply to the number of GPUs. Left out:
          "node"
            and "local", the shape of the cluster. GPUs are numbered node by node.

        Raises:
          PlanError: where the sizes do not multiply to the number of GPUs.
        """
        sizes = axes or {"node": self.nodes, "local": self.gpus_per_node}
        if math.prod(sizes.values()) != self.num_devices:
            shape = " x ".join(f"{name}={size}" for name, size in sizes.items())
            raise PlanError(
                f"mesh {shape} has {math.prod(sizes.values())} devices, the cluster {self.num_devices}"
                f" ({self.nodes} nodes of {self.gpus_per_node})"
            )
        return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))

    def compile(
        self,
        step: Any,
        *args: Any,
        profile: str = "default",
        compiler_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Report:
        """Compiles a step for the cluster with the real XLA:GPU compiler and reads the program.

        Nothing of the model is allocated: arguments are only looked at for shape, dtype and sharding.

        Args:
          step: any function under ``jax.jit``.
          *args: its arguments, as ``jax.ShapeDtypeStruct`` with shardings on ``self.mesh()`` (an argument
          without
            one is whole on every device).
          profile: "default" (XLA's own choices) or "overlap" (flags that hide communication).
          compiler_options: further XLA flags by name; they win over the profile's and over those of the jit.
          **kwargs: keyword arguments of the step.

        Returns:
          The report: bytes, collectives, transfers, predicted time, and the text of the program.

        Raises:
          ZerojError: where the extra ``zeroj[aot]`` is not installed, and where the program cannot be
          compiled
            for GPUs that are not there (host callbacks).
          PlanError: for a step that is not jitted, that fails to trace, or that is for another number of
          devices.
        """
        compiled = compiler.compile_step(self, step, args, kwargs, profile, dict(compiler_options or {}))
        return Report.of(compiled, self.cluster, self.hardware)
