"""Compiles a jitted function for GPUs that are not there."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any

import jax

from zeroj import _compat, flags
from zeroj.errors import PlanError, ZerojError

if TYPE_CHECKING:
    from zeroj.aot.target import Target

_CALLBACKS = (
    "the step calls back into Python (pure_callback, io_callback, debug.print), or holds another operation"
    " that needs real devices: it cannot be compiled for GPUs that are not there. Leave the callbacks out, or"
    " plan without spill to disk."
)

_NEEDS_DEVICES = ("require devices to be present", "different from the lowering platform")
"""How jax says, at lowering, that an operation needs the devices: on a mesh without any, and on a CPU."""


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the compiler gave: the text of the program, its memory statistics, the flags, seconds it took."""

    hlo: str
    memory: Any
    flags: dict[str, Any]
    dropped: dict[str, str]
    seconds: float


def compile_step(
    target: Target,
    step: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    profile: str,
    options: dict[str, Any],
) -> Compiled:
    """Traces, lowers and compiles; see :meth:`zeroj.aot.target.Target.compile`."""
    begin = time.perf_counter()
    chosen = flags.profile_flags(profile)
    if not _compat.gpu_compiler_installed():
        raise ZerojError(
            "compiling for a cluster needs the GPU compiler, which is not installed: pip install 'zeroj[aot]'"
        )
    lowering = _lower(step, args, kwargs)
    if lowering.num_devices not in (1, target.num_devices):
        raise PlanError(
            f"the step is for {lowering.num_devices} devices, the cluster has {target.num_devices}:"
            " build the plan and the abstract arguments on target.mesh()"
        )
    devices = _compat.compile_only_devices(
        target.hardware.target_config(), target.nodes, target.gpus_per_node
    )
    wanted = {**chosen, **lowering.options, **options}
    try:
        executable, dropped = lowering.compile(devices, wanted)
    except jax.errors.JaxRuntimeError as error:
        raise ZerojError(f"XLA:GPU could not compile the step for {target}: {error}") from error
    used = {name: value for name, value in wanted.items() if name not in dropped}
    text = _compat.executable_text(executable)
    seconds = time.perf_counter() - begin
    return Compiled(text, executable.get_compiled_memory_stats(), used, dropped, seconds)


def _lower(step: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _compat.GpuLowering:
    if not hasattr(step, "trace"):
        raise PlanError(
            f"{step!r} is not a jitted function: pass jax.jit(step), or what zj.make_train_step returns"
        )
    try:
        traced = step.trace(*args, **kwargs)
    except ZerojError:
        raise
    except Exception as error:
        raise PlanError(f"the step failed to trace on the abstract arguments: {error}") from error
    try:
        lowering = _compat.GpuLowering(traced)
    except ValueError as error:
        if any(text in str(error) for text in _NEEDS_DEVICES):
            raise ZerojError(_CALLBACKS) from error
        raise PlanError(f"the step failed to lower for CUDA: {error}") from error
    if lowering.has_callbacks:
        raise ZerojError(_CALLBACKS)
    return lowering
