"""Reads the text of a compiled XLA program into computations, instructions and shapes.

The text is what ``executable.hlo_modules()[0].to_string()`` prints, in the forms of jax 0.10 to 0.12.
Whatever is not understood raises :class:`HloError` with the line, because a line that is skipped would be a
silent zero in a table of bytes.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import re

from zeroj.aot.shapes import HloError, Shape, read_shape

_INSTRUCTION = re.compile(r"\s*(ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r"\s*([a-z][\w\-]*)\(")
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_CALLED_LISTS = re.compile(r"(?:branch_computations|called_computations)=\{([^}]*)\}")
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")


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

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """The instructions that take each instruction as an operand."""
        users: dict[str, list[Instruction]] = collections.defaultdict(list)
        for instruction in self.instructions.values():
            for operand in instruction.operands:
                users[operand].append(instruction)
        return users

    @functools.cached_property
    def positions(self) -> dict[str, int]:
        """The place of each instruction in the schedule."""
        return {name: i for i, name in enumerate(self.instructions)}

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
    shape, at = read_shape(line, head.end())
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


def _closing(line: str, at: int) -> int:
    """Position of the parenthesis that closes the one at `at`."""
    depth = 0
    for i in range(at, len(line)):
        depth += (line[i] == "(") - (line[i] == ")")
        if depth == 0:
            return i
    raise HloError(f"no closing parenthesis in: {line.strip()[:400]}")
