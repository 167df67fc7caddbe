"""Every key of the schema, with a file around it in which each of its legal values may stand."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import annotated_types

from zeroj.config.domain import kind_of, literals
from zeroj.config.names import subsection
from zeroj.config.old import put
from zeroj.config.rows import Row, Section, row_of
from zeroj.config.schema import DsConfig

_STAGE3 = {"zero_optimization": {"stage": 3}}
_REQUIRED = {
    "WarmupDecayLR": {"total_num_steps": 5000},
    "WarmupCosineLR": {"total_num_steps": 5000},
    "OneCycle": {"cycle_min_lr": 0.0, "cycle_max_lr": 1e9},
}

# what has to stand beside a key for its values to be legal, by dotted path
_LOCO = {"zero_optimization.zero_quantized_gradients": True}
_BESIDE: dict[str, dict[str, Any]] = {
    "zero_optimization.offload_optimizer.device": {"zero_optimization.offload_optimizer.nvme_path": "/nvme"},
    "zero_optimization.offload_param.device": {"zero_optimization.offload_param.nvme_path": "/nvme"},
    "zero_optimization.zeropp_loco_param.err_beta": _LOCO,
    "zero_optimization.zeropp_loco_param.reset_T": _LOCO,
    "zero_optimization.mics_hierarchical_params_gather": {"zero_optimization.mics_shard_size": 2},
    "fp16.loss_scale_window": {"fp16.loss_scale": 128},
    "fp16.min_loss_scale": {"fp16.loss_scale": 128},
    "fp16.fp16_master_weights_and_grads": {"fp16.enabled": True, "zero_optimization.stage": 1},
    "bf16.bf16_master_weights_and_grads": {"bf16.enabled": True, "zero_optimization.stage": 1},
    "bf16.bf16_optimizer_states": {"bf16.enabled": True},
}

# values that a key's own declaration allows, and its surroundings do not; test_rules.py has them
_ELSEWHERE = {
    ("data_types.param_dtype", "fp16"),
    ("data_types.param_dtype", "bf16"),
    ("optimizer.params.adam_w_mode[AdamW]", False),
    ("zero_optimization.mics_shard_size", 0),
}


@dataclasses.dataclass(frozen=True)
class Key:
    """One key: its path, the section that declares it, its row, and a file that lacks only it."""

    path: tuple[str, ...]
    model: type[Section]
    row: Row
    base: dict[str, Any]
    kind: str = ""

    @property
    def name(self) -> str:
        return self.path[-1]

    @property
    def dotted(self) -> str:
        return ".".join(self.path)

    def file(self, value: Any) -> dict[str, Any]:
        """The file with the key set to `value`."""
        data = copy.deepcopy(self.base)
        put(data, self.path, value)
        return data

    @property
    def is_section(self) -> bool:
        return subsection(self.model, self.name) is not None or self.name in self.model.variants

    def __str__(self) -> str:
        return self.dotted + (f"[{self.kind}]" if self.kind else "")


def all_keys() -> list[Key]:
    """Every key of the schema, params of each optimizer and scheduler type included."""
    return list(_walk(DsConfig, (), {}, ""))


def _walk(model: type[Section], path: tuple[str, ...], base: dict[str, Any], kind: str) -> Iterator[Key]:
    for name in model.model_fields:
        here = (*path, name)
        yield Key(here, model, row_of(model, name), _around(here, base), kind)
        below = subsection(model, name)
        if below is not None:
            yield from _walk(
                below, here, copy.deepcopy(_STAGE3) if here[0] == "zero_optimization" else {}, ""
            )
        for type_, variant in model.variants.get(name, {}).items():
            yield from _walk(variant, here, _typed(path[0], type_), type_)


def _typed(section: str, type_: str) -> dict[str, Any]:
    data = {"optimizer": {"type": "AdamW"}}
    data[section] = {"type": type_, "params": dict(_REQUIRED.get(type_, {}))}
    return data


def _around(path: tuple[str, ...], base: dict[str, Any]) -> dict[str, Any]:
    data = copy.deepcopy(base)
    if path[0] in ("optimizer", "scheduler") and len(path) == 2:
        data = _typed(path[0], {"optimizer": "AdamW", "scheduler": "WarmupLR"}[path[0]])
    if path[0] == "scheduler" and path[-1] == "type":
        data["scheduler"]["params"] = {}
    for dotted, value in _BESIDE.get(".".join(path), {}).items():
        put(data, tuple(dotted.split(".")), value)
    return data


def legal_values(key: Key) -> list[Any]:
    """Values that the key's declaration, and the file around it, allow."""
    return [v for v in _declared(key) if isinstance(v, list | dict) or (str(key), v) not in _ELSEWHERE]


def _declared(key: Key) -> list[Any]:
    field = key.model.model_fields[key.name]
    if key.name == "betas":
        return [[0.0, 0.5], [0.8, 0.95]]
    if literals(key.model, key.name):
        return list(literals(key.model, key.name))
    kind = kind_of(key.model, key.name)
    if kind is bool:
        return [True, False]
    if kind is str:
        return {"optimizer.type": ["AdamW", "lion"], "scheduler.type": ["WarmupLR"]}.get(
            key.dotted, ["some text"]
        )
    if kind is tuple:
        return [["z1"], "z3", []] if key.name == "passes" else [["a", "b"], "a", []]
    if kind is dict:
        return [{"enabled": False}, {}] if key.row.status == "refused" else [{}]
    low, high = bounds(field)
    low = -7 if low is None else low
    high = low + 3 if high is None else high
    return [low, (low + high) / 2, high] if kind is float else [int(low), int(low) + 1, float(int(low) + 2)]


def bounds(field: Any) -> tuple[float | None, float | None]:
    """The smallest and the largest legal number of a field; open bounds are stepped inside."""
    low = high = None
    step = 1 if _is_int(field) else 1e-3
    for part in field.metadata:
        match part:
            case annotated_types.Ge():
                low = part.ge
            case annotated_types.Gt():
                low = part.gt + step
            case annotated_types.Le():
                high = part.le
            case annotated_types.Lt():
                high = part.lt - step
    return low, high


def _is_int(field: Any) -> bool:
    return "int" in str(field.annotation)


def illegal_values(key: Key) -> list[Any]:
    """Values of a wrong type, or out of range."""
    if key.is_section:
        return [3, "text", [1]]
    field = key.model.model_fields[key.name]
    kind = kind_of(key.model, key.name)
    if key.name == "betas":
        return [0.9, [0.9], [0.9, 1.0], [0.9, "0.9"], [0.1, 0.2, 0.3], "0.9"]
    if literals(key.model, key.name):
        return ["no such value", -3, [], {}]
    wrong = {
        bool: ["true", 1, 0, [], {}],
        int: ["8", True, 2.5, [8], {}, "1e9", float("inf"), float("nan")],
        float: ["0.1", False, [0.1], {}, float("inf"), float("nan")],
        str: [3, True, ["text"], {}],
        tuple: [3, [3], {}],
        dict: ["text", 3, [1]],
    }[kind]
    low, high = bounds(field)
    if low is not None:
        wrong.append(low - 1)
    if high is not None:
        wrong.append(high + 1)
    return wrong
