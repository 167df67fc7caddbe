"""Every private JAX name and every difference between JAX versions lives in this file."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ctypes
import functools
import importlib.util
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jaxlib.version
import numpy as np
from jax._src import distributed, source_info_util
from jax._src.interpreters import partial_eval as pe
from jax.extend import core as jex_core

# --------------------------------------------------------------------------------------------------
# Traced programs (jaxprs)
# --------------------------------------------------------------------------------------------------

Var = jex_core.Var
Literal = jex_core.Literal
Jaxpr = Any  # jax.extend.core.Jaxpr; the class was merged with ClosedJaxpr in jax 0.12
Eqn = Any


class Program(NamedTuple):
    """An open jaxpr and the values of its constants, the same on every JAX version."""

    jaxpr: Jaxpr
    consts: Sequence[Any]


def program(closed: Any) -> Program:
    """Splits a closed (or open) jaxpr into its equations and its constants."""
    return Program(getattr(closed, "jaxpr", closed), tuple(getattr(closed, "consts", ())))


def trace(fun: Callable[..., Any], *args: Any) -> tuple[Program, Any]:
    """Traces ``fun`` to a program without its dead equations; also returns the output's tree of shapes."""
    closed, out_shape = jax.make_jaxpr(fun, return_shape=True)(*args)
    jaxpr, consts = program(closed)
    live, _ = pe.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)
    return Program(live, consts), out_shape


def only(program: Program, outputs: Sequence[bool]) -> tuple[Program, list[bool]]:
    """The part of a program that makes some of its outputs, with all inputs; and which inputs it reads."""
    _, used = pe.dce_jaxpr(program.jaxpr, list(outputs), instantiate=False)
    live, _ = pe.dce_jaxpr(program.jaxpr, list(outputs), instantiate=True)
    return Program(live, program.consts), used


def bind(eqn: Eqn, args: Sequence[Any]) -> list[Any]:
    """Evaluates one equation on ``args``, keeping the user's source line and name scopes."""
    params = eqn.primitive.get_bind_params(eqn.params)
    with source_of(eqn):
        out = eqn.primitive.bind(*args, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


def evaluate(program: Program, *args: Any) -> list[Any]:
    """Runs a program on arrays."""
    return jax.core.eval_jaxpr(program.jaxpr, program.consts, *args)


def jaxlib_version() -> tuple[int, ...]:
    """The version of jaxlib, which brings XLA."""
    return tuple(jaxlib.version.__version_info__)


@contextlib.contextmanager
def source_of(eqn: Eqn) -> Iterator[None]:
    """Operations made inside carry the source line and name scope of ``eqn``."""
    stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    with source_info_util.user_context(eqn.source_info.traceback, name_stack=stack), eqn.ctx.manager:
        yield


def source_line(eqn: Eqn) -> str:
    """The user's ``file:line (function)`` from which ``eqn`` was traced."""
    return source_info_util.summarize(eqn.source_info)


def scope_of(eqn: Eqn) -> tuple[Any, ...]:
    """The name scopes of an equation and the context that it is compiled in."""
    metadata = tuple(sorted((eqn.ctx.xla_metadata or {}).items()))
    return str(eqn.source_info.name_stack), eqn.ctx.compute_type, eqn.ctx.threefry_partitionable, metadata


class ScanLayout(NamedTuple):
    """What one scan equation says, the same on every JAX version."""

    body: Program
    num_consts: int
    num_carry: int
    length: int
    reverse: bool
    unroll: int


def scan_layout(eqn: Eqn) -> ScanLayout:
    """Reads the parameters of a scan equation."""
    p = eqn.params
    if "num_consts" in p:
        num_consts, num_carry = p["num_consts"], p["num_carry"]
    else:  # jax >= 0.11 keeps trees of the operands instead of counts
        consts, carry, _ = p["ft_in"].update(range(len(eqn.invars))).unpack()
        num_consts, num_carry = len(list(consts)), len(list(carry))
    return ScanLayout(program(p["jaxpr"]), num_consts, num_carry, p["length"], p["reverse"], p["unroll"])


#: Equations that only call a sub-program: name of the primitive -> parameter that holds it.
CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
    "custom_lin": "jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
}


def called_program(eqn: Eqn) -> Program | None:
    """The sub-program of an equation that does nothing but call it, or None for any other equation."""
    key = CALLS.get(eqn.primitive.name)
    if key is None:
        return None
    if key not in eqn.params:
        key = next((k for k in ("call_jaxpr", "jaxpr", "fun_jaxpr") if k in eqn.params), "")
        if not key:
            return None
    return program(eqn.params[key])


def is_remat(eqn: Eqn) -> bool:
    """Whether ``eqn`` recomputes a forward region in a backward pass (jax.checkpoint)."""
    return eqn.primitive.name in ("remat2", "checkpoint")


# --------------------------------------------------------------------------------------------------
# Compiling for GPUs that are not there (zeroj.aot)
# --------------------------------------------------------------------------------------------------

_NO_SUCH_OPTION = re.compile(r"No such compile option: '([^']+)'")


def known_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of XLA's options that the compiler of this process knows; an unknown one would raise later."""
    known = dict(options)
    while True:
        try:
            jax.jit(lambda x: x + 1, compiler_options=known).lower(np.float32(0)).compile()
            return known
        except jax.errors.JaxRuntimeError as error:
            unknown = _NO_SUCH_OPTION.search(str(error))
            if unknown is None or unknown.group(1) not in known:
                raise
            known.pop(unknown.group(1))


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


# --------------------------------------------------------------------------------------------------
# Checkpoints
# --------------------------------------------------------------------------------------------------


def is_on_host(value: Any) -> bool:
    """Whether a traced array lives in host memory."""
    return is_host_type(jax.typeof(value))


def is_host_type(aval: Any) -> bool:
    """Whether values of a traced type live in host memory."""
    return getattr(aval, "memory_space", None) == jax.memory.Space.Host


def before_shutdown(callback: Callable[[], None]) -> None:
    """Has a function called when the main thread ends, while threads can still be started and waited for.

    ``atexit`` is too late for that: thread pools have closed by then. Where Python has no such hook, ``atexit`` it is.
    """

    def run() -> None:
        if (
            (3, 12, 0) <= sys.version_info[:3] < (3, 12, 3)
        ):  # these start no thread here: run what asks for one
            asyncio.to_thread = _in_line  # type: ignore[assignment]
        callback()

    register = getattr(threading, "_register_atexit", atexit.register)
    register(run)


async def _in_line(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


@functools.cache
def _malloc_trim() -> Callable[[int], Any] | None:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):  # another C library than glibc
        return None


def give_back_memory() -> None:
    """Returns what the C library holds of freed memory to the system; where it cannot, does nothing."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


def compiled_count(jitted: Any) -> int:
    """How many programs a jitted function has compiled, one for each kind of arguments; 0 where it cannot tell."""
    count = getattr(jitted, "_cache_size", None)
    return 0 if count is None else int(count())


def is_tracer(value: Any) -> bool:
    """Whether ``value`` stands for an array in a program that is being traced, and so holds no data."""
    return isinstance(value, jax.core.Tracer)


class ProcessesMissing(Exception):
    """Not every process came to a barrier in time.

    Attributes:
        missing: the indices of those that did not.
        last: for each process that ever came to one, the name of the last.
    """

    def __init__(self, missing: Sequence[int], last: dict[int, str]) -> None:
        super().__init__(f"processes {list(missing)} never arrived")
        self.missing, self.last = tuple(missing), last


#: Where each process keeps the name of the barrier that it came to last.
_LAST = "zeroj:last"


def wait_for_processes(name: str, seconds: int) -> None:
    """Blocks until every process has called this with the same name; one process never waits.

    Args:
        name: a name not used before.
        seconds: how long to wait.

    Raises:
        ProcessesMissing: some did not come.
    """
    client = distributed.global_state.client
    if client is None or jax.process_count() == 1:
        return
    client.key_value_set(f"{name}/{jax.process_index()}", "here")
    client.key_value_set(f"{_LAST}/{jax.process_index()}", name, allow_overwrite=True)
    try:
        client.wait_at_barrier(name, seconds * 1000)
    except jax.errors.JaxRuntimeError as error:
        came, last = (
            {int(key.rsplit("/", 1)[-1]): value for key, value in client.key_value_dir_get(f"{folder}/")}
            for folder in (name, _LAST)
        )
        raise ProcessesMissing(sorted(set(range(jax.process_count())) - came.keys()), last) from error


def cleaned_up(manager: Any) -> None:
    """Waits for an Orbax manager's removal of unfinished folders, which it begins when it is made.

    Nothing but its next save waits for that, and a program that ends before would have an error logged.
    """
    future = getattr(manager, "_cleanup_tmp_directory_future", None)
    if future is not None:
        future.result()
