"""Every private JAX name and every difference between JAX versions lives in this file."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax._src import source_info_util
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


def bind(eqn: Eqn, args: Sequence[Any]) -> list[Any]:
    """Evaluates one equation on ``args``, keeping the user's source line and name scopes."""
    params = eqn.primitive.get_bind_params(eqn.params)
    with source_of(eqn):
        out = eqn.primitive.bind(*args, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


@contextlib.contextmanager
def source_of(eqn: Eqn) -> Iterator[None]:
    """Operations made inside carry the source line and name scope of ``eqn``."""
    stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    with source_info_util.user_context(eqn.source_info.traceback, name_stack=stack), eqn.ctx.manager:
        yield


def source_line(eqn: Eqn) -> str:
    """The user's ``file:line (function)`` from which ``eqn`` was traced."""
    return source_info_util.summarize(eqn.source_info)


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
