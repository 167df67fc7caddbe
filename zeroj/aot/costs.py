"""What one instruction of a compiled program reads, writes and multiplies."""

from __future__ import annotations

import collections
import dataclasses
import math
import re

from zeroj.aot.hlo import Computation, Instruction, Module
from zeroj.aot.shapes import Array, HloError, Shape, leaves, nbytes

FREE = frozenset(
    "parameter constant get-tuple-element tuple bitcast iota after-all partition-id replica-id"
    " opt-barrier add-dependency while conditional call".split()
)
"""Opcodes that move and compute nothing themselves."""

_SLICES = ("dynamic-slice", "slice", "gather")
_UNSEEN_FLOPS = re.compile(r"custom_call_target=\"(__cudnn\$fmha[^\"]*|[^\"]*triton[^\"]*|mosaic[^\"]*)\"")


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes that an instruction reads and writes, in device memory and in host memory, slices as slices."""

    device: int
    host_read: int
    host_written: int


def result_arrays(instruction: Instruction) -> list[Array]:
    """Returns the arrays that an instruction makes, without the operands that -start forms list too."""
    shape = instruction.shape
    if instruction.op == "copy-start" and isinstance(shape, tuple):
        shape = shape[0]
    elif instruction.op.endswith("-start") and isinstance(shape, tuple):
        shape = shape[1]
    return list(leaves(shape))


def traffic(module: Module, computation: Computation, instruction: Instruction) -> Traffic:
    """Returns what an instruction reads and writes.

    A slice reads its result only; an update in place (dynamic-update-slice, also at the root of a fusion)
    writes the update only and does not read the buffer. Elements that a fusion reads twice count once.
    """
    if instruction.op in FREE or instruction.op.endswith(("-done", "-update")):
        return Traffic(0, 0, 0)
    if 'custom_call_target="AllocateBuffer"' in instruction.attributes:
        return Traffic(0, 0, 0)
    operands = computation.operand_shapes(instruction)
    body = _fused(module, instruction)
    if body is not None:
        reads = [_parameter_reads(body, i, nbytes(shape)) for i, shape in enumerate(operands)]
        writes = _root_writes(body)
    else:
        reads = [_reads(instruction, i, nbytes(shape)) for i, shape in enumerate(operands)]
        writes = [_written(computation, instruction)] if _in_place(instruction) else []
    results = result_arrays(instruction)
    if len(writes) != len(results):
        writes = [a.nbytes for a in results]
    read_host = sum(b for b, shape in zip(reads, operands) if _on_host(shape))
    written_host = sum(b for b, a in zip(writes, results) if a.on_host)
    return Traffic(sum(reads) + sum(writes) - read_host - written_host, read_host, written_host)


def _fused(module: Module, instruction: Instruction) -> Computation | None:
    """The computation inside a fusion or an async wrapper."""
    if instruction.op.removesuffix("-start") in ("fusion", "async") and instruction.called:
        return module.computations[instruction.called[0]]
    return None


def _on_host(shape: Shape) -> bool:
    return any(a.on_host for a in leaves(shape))


def _in_place(instruction: Instruction) -> bool:
    return instruction.op.removesuffix("-start") == "dynamic-update-slice"


def _reads(instruction: Instruction, position: int, whole: int) -> int:
    """Bytes that an instruction reads of its operand at a position."""
    op = instruction.op.removesuffix("-start")
    if position == 0 and op in _SLICES:
        return sum(a.nbytes for a in result_arrays(instruction))
    return 0 if position == 0 and _in_place(instruction) else whole


def _written(computation: Computation, instruction: Instruction) -> int:
    """Bytes that an instruction writes: the update of an update in place, else its result."""
    if _in_place(instruction):
        return nbytes(computation.instructions[instruction.operands[1]].shape)
    return sum(a.nbytes for a in result_arrays(instruction))


def _parameter_reads(body: Computation, number: int, whole: int) -> int:
    """Bytes that a fused computation reads of its parameter: the slices that it takes, or the whole."""
    names = {i.name for i in body.instructions.values() if i.op == "parameter" and i.arguments == str(number)}
    total = 0
    for each in body.instructions.values():
        for position, operand in enumerate(each.operands):
            if operand not in names:
                continue
            if each.op == "bitcast":
                names.add(each.name)
            else:
                total += _reads(each, position, whole)
    return min(total, whole)


def _root_writes(body: Computation) -> list[int]:
    root = body.root
    ends = [body.instructions[name] for name in root.operands] if root.op == "tuple" else [root]
    return [_written(body, _behind_bitcasts(body, end)) for end in ends]


def _behind_bitcasts(body: Computation, instruction: Instruction) -> Instruction:
    while instruction.op == "bitcast":
        instruction = body.instructions[instruction.operands[0]]
    return instruction


def flops(module: Module, computation: Computation, instruction: Instruction) -> collections.Counter[str]:
    """Returns the floating-point operations of matrix products and convolutions, by element type.

    A multiply-add counts two. Elementwise operations are not counted: their time is that of their bytes.
    """
    counts: collections.Counter[str] = collections.Counter()
    op = instruction.op.removesuffix("-start")
    if op == "dot":
        contracted = _dims(instruction, r"lhs_contracting_dims=\{([\d,]*)\}")
        counts.update(_dot_flops(computation, instruction, contracted))
    elif op == "convolution" or (op == "custom-call" and '"__cudnn$conv' in instruction.attributes):
        counts.update(_convolution_flops(computation, instruction))
    elif op == "custom-call" and '"__cublas$' in instruction.attributes:
        contracted = _dims(instruction, r'"lhs_contracting_dimensions":\[([^\]]*)\]')
        counts.update(_dot_flops(computation, instruction, contracted))
    elif (body := _fused(module, instruction)) is not None:
        for inner in body.instructions.values():
            counts.update(flops(module, body, inner))
    return counts


def unseen(instruction: Instruction) -> str | None:
    """Returns the name of a custom kernel whose operations cannot be counted from its shapes, or None."""
    match = _UNSEEN_FLOPS.search(instruction.attributes) if instruction.op == "custom-call" else None
    return match.group(1) if match else None


def _dot_flops(
    computation: Computation, instruction: Instruction, contracted: list[int]
) -> collections.Counter[str]:
    """2 x elements of the result x elements of the contracted dims."""
    lhs = _array(computation, instruction, 0)
    depth = math.prod(lhs.dims[d] for d in contracted)
    return collections.Counter({lhs.dtype: 2 * result_arrays(instruction)[0].size * depth})


def _array(computation: Computation, instruction: Instruction, position: int) -> Array:
    return next(leaves(computation.instructions[instruction.operands[position]].shape))


def _dims(instruction: Instruction, pattern: str) -> list[int]:
    text = instruction.attribute(pattern)
    if text is None:
        raise HloError(f"contracting dims not understood: {instruction.line[:400]}")
    return [int(d) for d in text.replace('"', "").split(",") if d]


def _convolution_flops(computation: Computation, instruction: Instruction) -> collections.Counter[str]:
    """2 x outputs x (kernel elements / output features), whichever of the three arrays is the result."""
    labels = instruction.attribute(r"dim_labels=\w+_(\w+)->")
    if labels is None:
        raise HloError(f"dim_labels not understood: {instruction.line[:400]}")
    first, second = _array(computation, instruction, 0), _array(computation, instruction, 1)
    result = result_arrays(instruction)[0]
    output, kernel = result, second
    if "convBackwardInput" in instruction.attributes:
        output, kernel = first, second
    elif "convBackwardFilter" in instruction.attributes:
        output, kernel = second, result
    per_output = kernel.size // kernel.dims[labels.index("o")]
    return collections.Counter({first.dtype: 2 * output.size * per_output})
