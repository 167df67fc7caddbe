"""How often a loop of a compiled program runs its body."""

from __future__ import annotations

import dataclasses
import re

from zeroj.aot.hlo import Computation, Instruction, Module


@dataclasses.dataclass(frozen=True)
class _Linear:
    """A value inside a loop: element ``index`` of the loop's tuple (None: no element) plus a constant."""

    index: int | None
    constant: int


def trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """Returns how often a while loop runs its body, or None where that depends on data.

    XLA's own annotation is taken where there is one. Else the loop must count: its condition compares an
    element of its tuple with a constant, the body adds a constant to that element, and it begins with a
    constant.

    Args:
      module: the program.
      computation: where the loop stands.
      loop: the ``while`` instruction.
    """
    known = loop.attribute(r'"known_trip_count":\{"n":"(\d+)"')
    if known:
        return int(known)
    condition = module.computations[loop.attribute(r"condition=%?([\w.\-]+)") or ""]
    body = module.computations[loop.attribute(r"body=%?([\w.\-]+)") or ""]
    bound = _bound(module, condition)
    if bound is None:
        return None
    index, limit, inclusive = bound
    start = _initial(computation, loop, index)
    step = _step(module, body, index)
    if start is None or step is None or step <= 0:
        return None
    return max(0, -(-(limit - start + inclusive) // step))


def _bound(module: Module, condition: Computation) -> tuple[int, int, bool] | None:
    """Index, limit and whether the limit itself is run, of a condition ``tuple[index] < limit`` or ``<=``."""
    where, root = _unfused(module, condition, condition.root, {})
    if root.op != "compare":
        return None
    left, right = (_linear(module, condition, *where, name) for name in root.operands)
    direction = root.attribute(r"direction=(\w+)")
    if direction in ("GT", "GE"):
        left, right, direction = right, left, {"GT": "LT", "GE": "LE"}[direction]
    if left is None or right is None or left.index is None or right.index is not None:
        return None
    if direction not in ("LT", "LE"):
        return None
    return left.index, right.constant - left.constant, direction == "LE"


def _step(module: Module, body: Computation, index: int) -> int | None:
    if body.root.op != "tuple":
        return None
    value = _linear(module, body, body, {}, body.root.operands[index])
    return value.constant if value and value.index == index else None


def _initial(computation: Computation, loop: Instruction, index: int) -> int | None:
    start = computation.instructions[loop.operands[0]]
    if start.op != "tuple":
        return None
    value = computation.instructions[start.operands[index]]
    while value.op in ("copy", "bitcast"):
        value = computation.instructions[value.operands[0]]
    return _integer(value)


def _integer(instruction: Instruction) -> int | None:
    text = instruction.arguments.strip()
    return int(text) if instruction.op == "constant" and re.fullmatch(r"-?\d+", text) else None


def _unfused(
    module: Module, computation: Computation, value: Instruction, names: dict[str, str]
) -> tuple[tuple[Computation, dict[str, str]], Instruction]:
    """Goes into a fusion: the computation that holds the real root, and its parameters' names outside."""
    if value.op != "fusion":
        return (computation, names), value
    body = module.computations[value.called[0]]
    parameters = {
        p.name: value.operands[int(p.arguments)] for p in body.instructions.values() if p.op == "parameter"
    }
    return (body, parameters), body.root


def _linear(
    module: Module, outer: Computation, inner: Computation, names: dict[str, str], name: str
) -> _Linear | None:
    """A value as an element of the loop's tuple plus a constant; `names` lead out of a fusion."""
    if name in names:
        return _linear(module, outer, outer, {}, names[name])
    value = inner.instructions[name]
    if (constant := _integer(value)) is not None:
        return _Linear(None, constant)
    if value.op == "get-tuple-element":
        return _Linear(int(value.attribute(r"index=(\d+)") or 0), 0)
    if value.op in ("copy", "bitcast"):
        return _linear(module, outer, inner, names, value.operands[0])
    if value.op == "fusion":
        (body, parameters), root = _unfused(module, inner, value, names)
        return _linear(module, outer, body, parameters, root.name)
    if value.op == "add":
        parts = [_linear(module, outer, inner, names, operand) for operand in value.operands]
        found = [p for p in parts if p is not None]
        indices = [p.index for p in found if p.index is not None]
        if len(found) == 2 and len(indices) < 2:
            return _Linear(indices[0] if indices else None, sum(p.constant for p in found))
    return None
