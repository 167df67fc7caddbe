"""The reader of a compiled program's text: shapes, instructions, tables, and what it refuses."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import pytest

from zeroj.aot.hlo import parse, parse_instruction
from zeroj.aot.shapes import Array, HloError, leaves, nbytes

TEXT = """HloModule jit_step, is_scheduled=true, num_partitions=8

FileNames
1 "/home/me/train.py"

FunctionNames
1 "step"

FileLocations
1 {file_name_id=1 function_name_id=1 line=19 end_line=19 column=11 end_column=11}

StackFrames
1 {file_location_id=1 parent_frame_id=1}

%fused (p0: f32[8], p1: f32[8]) -> f32[8] {
  %p0 = f32[8]{0} parameter(0)
  %p1 = f32[8]{0} parameter(1)
  ROOT %sum = f32[8]{0} add(%p0, %p1)
}

ENTRY %main (x: f32[8], y: f32[8]) -> (f32[8]) {
  %x = f32[8]{0} parameter(0), metadata={op_name="x"}
  %y = f32[8]{0} parameter(1), metadata={op_name="y" source_file="lib.py" source_line=3}
  %f = f32[8]{0} fusion(%x, /*index=1*/%y), calls=%fused, metadata={op_name="add" stack_frame_id=1}
  ROOT %t = (f32[8]{0}) tuple(%f)
}
"""


def test_a_module() -> None:
    module = parse(TEXT)
    assert module.name == "jit_step"
    assert list(module.computations) == ["fused", "main"]
    assert module.entry.name == "main"
    assert [i.op for i in module.entry.instructions.values()] == ["parameter", "parameter", "fusion", "tuple"]
    fusion = module.entry.instructions["f"]
    assert fusion.operands == ("x", "y")
    assert fusion.called == ("fused",)
    assert module.entry.root.name == "t"
    assert module.source(fusion) == "/home/me/train.py:19"
    assert module.source(module.entry.instructions["y"]) == "lib.py:3"
    assert module.source(module.entry.instructions["x"]) == "x"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("f32[8,512]{1,0}", Array("f32", (8, 512))),
        ("bf16[]", Array("bf16", (), bits=16)),
        ("f32[4]{0:S(5)}", Array("f32", (4,), 5)),
        ("f32[4]{0:T(128)S(5)}", Array("f32", (4,), 5)),
        ("s4[5]{0:E(4)}", Array("s4", (5,), bits=4)),
        ("s4[5]{0}", Array("s4", (5,), bits=8)),
        ("pred[3]{0}", Array("pred", (3,), bits=8)),
        ("f8e4m3fn[7]{0}", Array("f8e4m3fn", (7,), bits=8)),
        ("s32[<=10]{0}", Array("s32", (10,))),
        ("c64[2]{0}", Array("c64", (2,), bits=64)),
    ],
)
def test_shapes(text: str, expected: Array) -> None:
    assert parse_instruction(f"  %a = {text} add(%x, %y)").shape == expected


def test_bytes_of_packed_and_of_tuple_shapes() -> None:
    assert nbytes(Array("s4", (5,), bits=4)) == 3
    shape = parse_instruction(
        "%a = ((f32[4]{0}, /*index=1*/s32[]), bf16[2]{0}, u32[]) fusion-start(%x)"
    ).shape
    assert nbytes(shape) == 16 + 4 + 4 + 4
    assert [a.dtype for a in leaves(shape)] == ["f32", "s32", "bf16", "u32"]


@st.composite
def shapes(draw: st.DrawFn, depth: int = 2) -> tuple[str, int]:
    """The text of a shape and its bytes."""
    if depth and draw(st.booleans()):
        parts = [draw(shapes(depth=depth - 1)) for _ in range(draw(st.integers(0, 3)))]
        return "(" + ", ".join(text for text, _ in parts) + ")", sum(size for _, size in parts)
    dtype, size = draw(st.sampled_from([("f32", 4), ("bf16", 2), ("s8", 1), ("pred", 1), ("c128", 16)]))
    dims = draw(st.lists(st.integers(0, 9), max_size=3))
    layout = "{" + ",".join(map(str, reversed(range(len(dims))))) + "}" if dims else ""
    for dim in dims:
        size *= dim
    return f"{dtype}[{','.join(map(str, dims))}]{layout}", size


@hypothesis.given(shapes())
def test_bytes_of_any_shape(drawn: tuple[str, int]) -> None:
    text, size = drawn
    assert nbytes(parse_instruction(f"  ROOT %a.1-b = {text} custom-call(%x.1, %y), a={{b}}").shape) == size


def test_parts_of_an_instruction() -> None:
    line = 'ROOT %w.1 = (s32[], f32[2]{0}) while(%t), condition=%c.1, body=%b.1, backend_config={"n":"3"}'
    instruction = parse_instruction(line)
    assert instruction.is_root and instruction.name == "w.1" and instruction.op == "while"
    assert instruction.operands == ("t",) and set(instruction.called) == {"c.1", "b.1"}
    branches = parse_instruction("%c = f32[] conditional(%i, %a, %b), branch_computations={%one, %two}")
    assert branches.called == ("one", "two")
    assert parse_instruction("%c = f32[2]{0} constant({1, 2})").arguments == "{1, 2}"
    assert parse_instruction("%c = f32[2]{0} constant({1, 2})").operands == ()


@pytest.mark.parametrize(
    "line",
    [
        "  what is this",
        "  %a = f32[2]{0}",
        "  %a = q7[2]{0} add(%x)",
        "  %a = f32[2]{0} add(%x",
        "  %a = {} add(%x)",
    ],
)
def test_a_line_that_is_not_understood_is_an_error_that_shows_it(line: str) -> None:
    with pytest.raises(HloError) as error:
        parse(TEXT.replace('  %x = f32[8]{0} parameter(0), metadata={op_name="x"}', line))
    assert line.strip() in str(error.value)


def test_text_that_is_no_program() -> None:
    with pytest.raises(HloError, match="begins with HloModule"):
        parse("module @jit_step {}")
    with pytest.raises(HloError, match="no ENTRY"):
        parse("HloModule empty\n")
    with pytest.raises(HloError, match="surprise"):
        parse(TEXT + "\nsurprise\n")
