"""Old spellings that DeepSpeed still takes, each rewritten to the new one with one warning."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from zeroj.config.faults import Fault, Path


def _same(value: Any) -> Any:
    return value


def _on_cpu(value: Any) -> Any:
    return {"device": "cpu"} if value is True else {"device": "none"} if value is False else value


def _stage(value: Any) -> Any:
    return {"stage": 1 if value else 0} if isinstance(value, bool) else value


@dataclasses.dataclass(frozen=True)
class Old:
    """One old spelling.

    Args:
        path: where it stands.
        new: where its value belongs now.
        convert: its value in the new form.
        only_if: whether a value is the old form; the new form passes by.
    """

    path: Path
    new: Path
    convert: Callable[[Any], Any] = _same
    only_if: Callable[[Any], bool] = lambda value: True


_ZERO = "zero_optimization"
OLD: tuple[Old, ...] = (
    Old((_ZERO,), (_ZERO,), _stage, lambda value: isinstance(value, bool)),
    Old(("bfloat16",), ("bf16",)),
    Old(("allgather_size",), (_ZERO, "allgather_bucket_size")),
    Old(("seq_parallel_comm_data_type",), ("seq_parallel_communication_data_type",)),
    Old((_ZERO, "cpu_offload"), (_ZERO, "offload_optimizer"), _on_cpu),
    Old((_ZERO, "cpu_offload_param"), (_ZERO, "offload_param"), _on_cpu),
    Old((_ZERO, "cpu_offload_params"), (_ZERO, "offload_param"), _on_cpu),
    Old((_ZERO, "cpu_offload_use_pin_memory"), (_ZERO, "offload_optimizer", "pin_memory")),
    Old(
        (_ZERO, "stage3_gather_fp16_weights_on_model_save"),
        (_ZERO, "stage3_gather_16bit_weights_on_model_save"),
    ),
    Old(("aio", "thread_count"), ("aio", "intra_op_parallelism")),
)


def modernise(data: dict[str, Any]) -> tuple[list[str], list[Fault]]:
    """Rewrite old spellings in `data`, in place.

    Returns:
        One warning for each old spelling found, and a fault where the new one is given as well.
    """
    notes: list[str] = []
    faults: list[Fault] = []
    for old in OLD:
        parent = look_up(data, old.path[:-1])
        name = old.path[-1]
        if not isinstance(parent, dict) or name not in parent or not old.only_if(parent[name]):
            continue
        value = old.convert(parent.pop(name))
        there = look_up(data, old.new[:-1])
        if isinstance(there, dict) and old.new[-1] in there:
            faults.append(
                Fault(
                    old.path,
                    f'is the old spelling of "{".".join(old.new)}", which is given as well; leave it out',
                )
            )
            continue
        put(data, old.new, value)
        notes.append(f'"{".".join(old.path)}" is an old spelling; write "{".".join(old.new)}"')
    return notes, faults


def look_up(data: Any, path: Path) -> Any:
    """The value at `path`, or None."""
    for name in path:
        data = data.get(name) if isinstance(data, dict) else None
    return data


def put(data: dict[str, Any], path: Path, value: Any) -> None:
    """Set the value at `path`, making the sections on the way; do nothing where one of them is no section."""
    for name in path[:-1]:
        data = data.setdefault(name, {})
        if not isinstance(data, dict):
            return
    data[path[-1]] = value
