"""The building blocks of the schema: one row a key, with its type, default, what becomes of it, and why.

A section of ds_config.json is a frozen pydantic model. Each of its fields is made by `honoured`, `not_needed`
or `refused`, so that the reader, the report, the docs and the tests all read one table.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import numbers
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import pydantic
from pydantic_core import PydanticCustomError

Status = Literal["honoured", "not needed", "refused"]


@dataclasses.dataclass(frozen=True)
class Row:
    """What zeroj does with one key.

    Args:
        status: "honoured", "not needed" or "refused".
        text: for an honoured key what it does; otherwise the reason, in terms of JAX and XLA.
        instead: for a refused key, what to do instead.
        auto: name of the rule in `zeroj.config.auto` that decides the key when the file says "auto".
        keys: names inside a section that is refused as a whole.
    """

    status: Status
    text: str
    instead: str = ""
    auto: str | None = None
    keys: tuple[str, ...] = ()


def honoured(default: Any, text: str, *, auto: str | None = None, **bounds: Any) -> Any:
    """A field that zeroj acts on. `bounds` are pydantic's (ge, gt, le, lt, min_length...)."""
    return _field(default, Row("honoured", text, auto=auto), bounds)


def not_needed(default: Any, why: str, *, auto: str | None = None, **bounds: Any) -> Any:
    """A field that is checked and then has nothing to do, because JAX, XLA or the design does it already."""
    return _field(default, Row("not needed", why, auto=auto), bounds)


def refused(default: Any, why: str, instead: str, *, keys: tuple[str, ...] = (), **bounds: Any) -> Any:
    """A field whose default may be written, and whose other values are an error."""
    return _field(default, Row("refused", why, instead, keys=keys), bounds)


def _field(default: Any, row: Row, bounds: dict[str, Any]) -> Any:
    return pydantic.Field(default, description=row.text, json_schema_extra={"row": row}, **bounds)  # type: ignore[dict-item]


@functools.cache
def row_of(model: type[pydantic.BaseModel], name: str) -> Row:
    """The row of the field `name` of a section."""
    extra = model.model_fields[name].json_schema_extra
    assert isinstance(extra, dict), f"{model.__name__}.{name} has no row"
    row = extra["row"]
    assert isinstance(row, Row)
    return row


def shown(value: Any) -> str:
    """A value as the file would write it, and its type: `"8" (str)`."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):  # not JSON, a huge int, a cycle
        text = object.__repr__(value) if isinstance(value, int) else repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


def _whole(value: Any) -> Any:
    """Take 5e8 for an int, as DeepSpeed's users write; take neither a bool, nor text, nor 0.5."""
    if not _is_real(value) or value != int(value):
        raise PydanticCustomError("whole", "must be a whole number")
    return int(value)


def _number(value: Any) -> Any:
    if not _is_real(value):
        raise PydanticCustomError("number", "must be a finite number")
    return float(value)


def _is_real(value: Any) -> bool:
    """Whether `value` is a finite number, of Python or of numpy; a bool is none."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an int beyond the largest float
        return False


def _names(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


def _switched_off(value: Any) -> Any:
    """Let a refused section through only where it asks for nothing."""
    if value is None or value is False or value == {}:
        return None
    if isinstance(value, Mapping) and (value.get("enabled") is False or value.get("enabled") == "auto"):
        return {**value, "enabled": False}  # Hugging Face's old templates have an amp section of "auto"
    raise PydanticCustomError("switched_off", "is not supported")


Int = Annotated[int, pydantic.BeforeValidator(_whole)]
Float = Annotated[float, pydantic.BeforeValidator(_number)]
Bool = Annotated[bool, pydantic.Strict()]
Text = Annotated[str, pydantic.Strict()]
Names = Annotated[tuple[Text, ...], pydantic.BeforeValidator(_names)]
Off = Annotated[dict[str, Any] | None, pydantic.BeforeValidator(_switched_off)]
DType = Literal["fp32", "fp16", "bf16"]
Variants = Mapping[str, Mapping[str, Any]]  # key -> type -> the Section that the key then holds


class Section(pydantic.BaseModel):
    """Base of every section: frozen, and closed to names that it does not declare."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)
    aliases: ClassVar[Mapping[str, str]] = {}  # other legal spelling -> name of the field
    variants: ClassVar[Variants] = {}  # key -> type -> section that it holds

    @pydantic.model_validator(mode="before")
    @classmethod
    def _rename(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        both = [f'"{a}" and "{b}"' for a, b in cls.aliases.items() if a in data and b in data]
        if both:
            raise PydanticCustomError("both", "has the same setting twice: {both}", {"both": ", ".join(both)})
        return {cls.aliases.get(name, name): value for name, value in data.items()}

    @pydantic.field_validator("*", mode="after")
    @classmethod
    def _refuse(cls, value: Any, info: pydantic.ValidationInfo) -> Any:
        assert info.field_name is not None
        default = cls.model_fields[info.field_name].default
        switched_off = isinstance(value, dict)  # `Off` lets through no other section
        if row_of(cls, info.field_name).status == "refused" and value != default and not switched_off:
            raise PydanticCustomError("refused", "is not supported")
        return value
