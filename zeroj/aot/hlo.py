"""Reads the text of a compiled XLA program into computations, instructions and shapes.

The text is what ``executable.hlo_modules()[0].to_string()`` prints, in the forms of jax 0.10 to 0.12.
Whatever is not understood raises :class:`HloError` with the line, because a line that is skipped would be a
silent zero in a table of bytes.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator

from zeroj.errors import ZerojError

HOST_SPACE = 5
"""The number that XLA:GPU prints for host memory: ``f32[8]{0:S(5)}``."""

_BITS = {
    "pred": 8,
    "token": 0,
    "opaque": 0,
    "c64": 64,
    "c128": 128,
    "bf16": 16,
    "f16": 16,
    "f32": 32,
    "f64": 64,
}
_NAMED_BITS = re.compile(r"[su](\d+)|f(\d+)e\w+")
_ARRAY = re.compile(r"([a-z]\w*)\[([^\]]*)\](\{[^}]*\})?")
_INSTRUCTION = re.compile(r"\s*(ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r"\s*([a-z][\w\-]*)\(")
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_CALLED_LISTS = re.compile(r"(?:branch_computations|called_computations)=\{([^}]*)\}")
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")


class HloError(ZerojError):
    """Text of a compiled program that zeroj does not understand. The message shows the line."""


@dataclasses.dataclass(frozen=True, slots=True)
class Array:
    """One array of a shape: its dtype as XLA prints it, its dims, its memory space (0 device, 5 host)."""

    dtype: str
    dims: tuple[int, ...]
    space: int = 0
    bits: int = 32

    @property
    def size(self) -> int:
        """Number of elements."""
        return functools.reduce(lambda a, b: a * b, self.dims, 1)

    @property
    def nbytes(self) -> int:
        """Bytes; sub-byte elements that are packed count their bits."""
        return -(-self.size * self.bits // 8)

    @property
    def on_host(self) -> bool:
        """Whether the array lies in host memory."""
        return self.space == HOST_SPACE


Shape = Array | tuple["Shape", ...]


def leaves(shape: Shape) -> Iterator[Array]:
    """Yields the arrays of a shape, tuples flattened, in order."""
    if isinstance(shape, Array):
        yield shape
    else:
        for part in shape:
            yield from leaves(part)


def nbytes(shape: Shape) -> int:
    """Bytes of all arrays of a shape."""
    return sum(a.nbytes for a in leaves(shape))


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
    """One line of a computation.

    ``op`` is the opcode as printed (``all-gather-start``), ``operands`` the names of its operands,
    ``arguments`` the text between the parentheses (a parameter's number, a constant's value), ``attributes``
    the text after.
    """

    name: str
    op: str
    shape: Shape
    operands: tuple[str, ...]
    arguments: str
    attributes: str
    is_root: bool
    line: str

    @property
    def called(self) -> tuple[str, ...]:
        """Names of the computations that the instruction calls."""
        names = _CALLED.findall(self.attributes)
        for group in _CALLED_LISTS.findall(self.attributes):
            names.extend(part.strip().lstrip("%") for part in group.split(","))
        return tuple(n for n in names if n)

    def attribute(self, pattern: str) -> str | None:
        """Returns the first group of a regular expression in the attributes, or None."""
        match = re.search(pattern, self.attributes)
        return match.group(1) if match else None


@dataclasses.dataclass(frozen=True)
class Computation:
    """A computation: its instructions by name, in the order of the schedule."""

    name: str
    instructions: dict[str, Instruction]

    @property
    def root(self) -> Instruction:
        """The instruction whose value the computation returns."""
        return next(i for i in self.instructions.values() if i.is_root)

    def operand_shapes(self, instruction: Instruction) -> list[Shape]:
        """Returns the shapes of an instruction's operands."""
        return [self.instructions[name].shape for name in instruction.operands]


@dataclasses.dataclass(frozen=True)
class Module:
    """A compiled program. ``entry`` is the computation that a step runs."""

    name: str
    header: str
    computations: dict[str, Computation]
    entry: Computation
    tables: dict[str, dict[int, str]]

    def source(self, instruction: Instruction) -> str:
        """Returns "file:line" of the Python line of an instruction; without one its op_name, or its name."""
        direct = re.search(r'source_file="([^"]*)" source_line=(\d+)', instruction.attributes)
        if direct:
            return f"{direct.group(1)}:{direct.group(2)}"
        frame = instruction.attribute(r"stack_frame_id=(\d+)")
        location = re.search(r"file_location_id=(\d+)", self.tables["StackFrames"].get(int(frame or 0), ""))
        place = self.tables["FileLocations"].get(int(location.group(1)), "") if location else ""
        found = re.search(r"file_name_id=(\d+).*?[ {]line=(\d+)", place)
        if found:
            return f"{self.tables['FileNames'][int(found.group(1))]}:{found.group(2)}"
        return instruction.attribute(r'op_name="([^"]*)"') or instruction.name


def parse(text: str) -> Module:
    """Reads the text of a compiled module.

    Args:
      text: what ``to_string()`` of the compiled module prints; ``report.hlo`` holds it.

    Returns:
      The module, computations in the order of the text.

    Raises:
      HloError: for a line that is neither a computation, an instruction nor one of XLA's tables.

    Example::

      module = parse(report.hlo)
      [i.op for i in module.entry.instructions.values()]
    """
    lines = text.splitlines()
    if not lines or not lines[0].startswith("HloModule"):
        raise HloError(f"not the text of a compiled program, which begins with HloModule: {text[:80]!r}")
    tables: dict[str, dict[int, str]] = {name: {} for name in _TABLES}
    computations: dict[str, Computation] = {}
    entry = ""
    current: dict[str, Instruction] | None = None
    table: dict[int, str] | None = None
    for line in lines[1:]:
        stripped = line.strip()
        if current is not None:
            if stripped == "}" or stripped.startswith("}, "):
                current = None
            elif stripped:
                instruction = parse_instruction(line)
                current[instruction.name] = instruction
        elif stripped in _TABLES:
            table = tables[stripped]
        elif table is not None and stripped[:1].isdigit():
            number, _, rest = stripped.partition(" ")
            table[int(number)] = rest.strip('"')
        elif match := _COMPUTATION.match(line):
            current = {}
            computations[match.group(2)] = Computation(match.group(2), current)
            entry = match.group(2) if match.group(1) else entry
        elif stripped:
            raise HloError(f"line of a compiled program not understood: {line.strip()[:400]}")
    if not entry:
        raise HloError("the compiled program has no ENTRY computation")
    name = lines[0].split()[1].rstrip(",")
    return Module(name, lines[0], computations, computations[entry], tables)


def parse_instruction(line: str) -> Instruction:
    """Reads one instruction, for example ``%a = f32[8]{0} add(%x, %y), metadata={...}``."""
    head = _INSTRUCTION.match(line)
    if not head:
        raise HloError(f"instruction of a compiled program not understood: {line.strip()[:400]}")
    shape, at = _shape(line, head.end())
    opcode = _OPCODE.match(line, at)
    if not opcode:
        raise HloError(f"no opcode found after the shape in: {line.strip()[:400]}")
    end = _closing(line, opcode.end() - 1)
    arguments = line[opcode.end() : end]
    op = opcode.group(1)
    operands = () if op in ("constant", "parameter") else tuple(_NAME.findall(arguments))
    return Instruction(
        head.group(2), op, shape, operands, arguments, line[end + 1 :], bool(head.group(1)), line.strip()
    )


def _shape(line: str, at: int) -> tuple[Shape, int]:
    """Reads the shape that begins at `at`; returns it and the position after it."""
    while line[at] == " ":
        at += 1
    if line.startswith("/*", at):
        return _shape(line, line.index("*/", at) + 2)
    if line[at] != "(":
        return _array(line, at)
    parts: list[Shape] = []
    at += 1
    while line[at] != ")":
        part, at = _shape(line, at)
        parts.append(part)
        if line[at] == ",":
            at += 1
    return tuple(parts), at + 1


def _array(line: str, at: int) -> tuple[Array, int]:
    match = _ARRAY.match(line, at)
    if not match:
        raise HloError(f"shape not understood at {line[at : at + 60]!r} in: {line.strip()[:400]}")
    dtype, dims, layout = match.group(1), match.group(2), match.group(3) or ""
    space = re.search(r"S\((\d+)\)", layout)
    packed = re.search(r"E\((\d+)\)", layout)
    bits = int(packed.group(1)) if packed else _bits(dtype, line)
    sizes = tuple(int(d.lstrip("<=")) for d in dims.split(",") if d)
    return Array(dtype, sizes, int(space.group(1)) if space else 0, bits), match.end()


def _bits(dtype: str, line: str) -> int:
    """Bits that one element takes in memory: sub-byte types take a byte unless the layout packs them."""
    if dtype in _BITS:
        return _BITS[dtype]
    match = _NAMED_BITS.fullmatch(dtype)
    if not match:
        raise HloError(f"element type {dtype} not understood in: {line.strip()[:400]}")
    return max(8, int(match.group(1) or match.group(2)))


def _closing(line: str, at: int) -> int:
    """Position of the parenthesis that closes the one at `at`."""
    depth = 0
    for i in range(at, len(line)):
        depth += (line[i] == "(") - (line[i] == ")")
        if depth == 0:
            return i
    raise HloError(f"no closing parenthesis in: {line.strip()[:400]}")
