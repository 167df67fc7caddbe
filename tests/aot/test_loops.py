"""Trip counts: the annotation, the condition where there is none, and loops that depend on data."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st

from zeroj.aot import hlo
from zeroj.aot.loops import trip_count

TEXT = """HloModule m

%less (p0: s32[]) -> pred[] {{
  %p0 = s32[] parameter(0)
  %limit = s32[] constant({limit})
  ROOT %c = pred[] compare(%p0, %limit), direction={direction}
}}

%more (p0: s32[]) -> s32[] {{
  %p0 = s32[] parameter(0)
  %one = s32[] constant({step})
  ROOT %a = s32[] add(%p0, %one)
}}

%cond (t: (f32[], s32[])) -> pred[] {{
  %t = (f32[], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%t), index=1
  ROOT %f = pred[] fusion(%i), kind=kLoop, calls=%less
}}

%body (t: (f32[], s32[])) -> (f32[], s32[]) {{
  %t = (f32[], s32[]) parameter(0)
  %x = f32[] get-tuple-element(%t), index=0
  %i = s32[] get-tuple-element(%t), index=1
  %k = s32[] copy(%i)
  %n = s32[] fusion(%k), kind=kLoop, calls=%more
  ROOT %r = (f32[], s32[]) tuple(%x, %n)
}}

ENTRY %e (x: f32[], s: s32[]) -> (f32[], s32[]) {{
  %x = f32[] parameter(0)
  %s = s32[] parameter(1)
  %zero = s32[] constant({start})
  %z = s32[] copy(%zero)
  %t = (f32[], s32[]) tuple(%x, {begin})
  ROOT %w = (f32[], s32[]) while(%t), condition=%cond, body=%body{config}
}}
"""


def count(
    start: int = 0, limit: int = 8, step: int = 1, direction: str = "LT", begin: str = "%z", config: str = ""
) -> int | None:
    text = TEXT.format(start=start, limit=limit, step=step, direction=direction, begin=begin, config=config)
    module = hlo.parse(text)
    return trip_count(module, module.entry, module.entry.root)


@hypothesis.given(st.integers(-5, 20), st.integers(-5, 20), st.integers(1, 4))
def test_the_condition_tells(start: int, limit: int, step: int) -> None:
    assert count(start, limit, step) == len(range(start, limit, step))
    assert count(start, limit, step, "LE") == len(range(start, limit + 1, step))


def test_the_annotation_wins() -> None:
    assert count(config=', backend_config={"known_trip_count":{"n":"3"}}') == 3


def test_loops_that_depend_on_data_have_no_count() -> None:
    assert count(begin="%s") is None
    assert count(direction="NE") is None
    assert count(step=0) is None
