"""What "auto" becomes, by the rules of Hugging Face's Trainer and accelerate.

A rule takes a key's value from the arguments of `Config.load`. A key that says "auto" gets it; a key that
says something else has to agree with it; a key that is left out is filled with it, if its section is there.
"""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Callable, Mapping
from typing import Any

from zeroj.config.faults import Fault, Path
from zeroj.config.names import nearest, subsection
from zeroj.config.old import look_up, put
from zeroj.config.rows import Section, row_of, shown

AUTO = "auto"


def _identity(value: Any) -> Any:
    return value


@dataclasses.dataclass(frozen=True)
class AutoRule:
    """How one key gets its value.

    Args:
        arguments: the arguments that it is made from.
        make: the value, from these arguments.
        match: whether a written value has to agree, and a missing key is filled; if not, only "auto" is.
    """

    arguments: tuple[str, ...]
    make: Callable[..., Any] = _identity
    match: bool = True


AUTO_RULES: dict[str, AutoRule] = {
    "train_batch_size": AutoRule(("train_batch_size",)),
    "micro_batch_size": AutoRule(("per_device_train_batch_size",)),
    "gradient_accumulation_steps": AutoRule(("gradient_accumulation_steps",)),
    "gradient_clipping": AutoRule(("max_grad_norm",)),
    "fp16": AutoRule(("fp16",)),
    "bf16": AutoRule(("bf16",)),
    "learning_rate": AutoRule(("learning_rate",)),
    "betas": AutoRule(("adam_beta1", "adam_beta2"), lambda b1, b2: [b1, b2]),
    "adam_epsilon": AutoRule(("adam_epsilon",)),
    "weight_decay": AutoRule(("weight_decay",)),
    "warmup_min_lr": AutoRule((), lambda: 0.0, match=False),
    "warmup_steps": AutoRule(("warmup_steps",)),
    "num_training_steps": AutoRule(("num_training_steps",)),
    "reduce_bucket": AutoRule(("hidden_size",), lambda h: h * h, match=False),
    "prefetch": AutoRule(("hidden_size",), lambda h: 9 * h * h // 10, match=False),
    "persistence": AutoRule(("hidden_size",), lambda h: 10 * h, match=False),
    "zero_stage": AutoRule(("zero_stage",)),
    "offload_optimizer_device": AutoRule(("offload_optimizer_device",)),
    "offload_optimizer_nvme_path": AutoRule(("offload_optimizer_nvme_path",)),
    "offload_param_device": AutoRule(("offload_param_device",)),
    "offload_param_nvme_path": AutoRule(("offload_param_nvme_path",)),
    "save_16bit": AutoRule(("zero3_save_16bit_model",)),
}
ARGUMENTS: tuple[str, ...] = tuple(dict.fromkeys(a for rule in AUTO_RULES.values() for a in rule.arguments))

# sections that an argument alone may call into being
_CREATED = ("fp16", "bf16", "zero_optimization")
_TRIPLE = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def check_arguments(arguments: Mapping[str, Any]) -> list[Fault]:
    """Faults of the arguments' names, and of hidden_size, which "auto" computes with."""
    faults = []
    hidden = arguments.get("hidden_size")
    if hidden is not None and not _is_size(hidden):
        text = f"the argument hidden_size has to be a whole number of at least 1, got {shown(hidden)}"
        faults.append(Fault((), text))
    for name in arguments:
        if name not in ARGUMENTS:
            near = nearest(name, list(ARGUMENTS))
            known = f'Did you mean "{near}"?' if near else f"Known: {', '.join(ARGUMENTS)}."
            faults.append(Fault((), f'unknown argument "{name}" of Config.load. {known}'))
    return faults


def fill(
    data: dict[str, Any], root: type[Section], arguments: Mapping[str, Any]
) -> tuple[dict[str, str], list[Fault]]:
    """Resolve "auto" in `data`, in place, and hold the file against the arguments.

    Args:
        data: the file.
        root: its schema.
        arguments: what the caller knows; None stands for left out.

    Returns:
        Where each filled key got its value from, by dotted path; and the faults: "auto" that cannot be
        resolved, and disagreements between file and arguments.
    """
    given = _usable(arguments)
    origins: dict[str, str] = {}
    faults: list[Fault] = []
    _infer_triple(data, given, origins)
    _one_precision(data, given)
    for path, rule in _ruled(root, data, ()):
        fault = _settle(data, path, rule, given, origins)
        if fault is not None:
            faults.append(fault)
    return origins, faults


def _settle(
    data: dict[str, Any], path: Path, rule: AutoRule, given: Mapping[str, Any], origins: dict[str, str]
) -> Fault | None:
    """Apply one rule to the key at `path`: resolve, fill, or hold the written value against the arguments."""
    value = look_up(data, path)
    is_auto = isinstance(value, str) and value == AUTO
    missing = [name for name in rule.arguments if name not in given]
    if missing:
        if not is_auto:
            return None
        look_up(data, path[:-1]).pop(path[-1])
        needed = ", ".join(f"{name}=..." for name in missing)
        return Fault(path, f'is "auto", which needs {needed} in Config.load; or write a value')
    made = rule.make(*(given[name] for name in rule.arguments))
    source = "argument " + ", ".join(rule.arguments) if rule.arguments else "the rule for auto"
    if is_auto or (value is None and rule.match and _may_fill(data, path, made)):
        put(data, path, made)
        origins[".".join(path)] = source
    elif value is not None and rule.match and not _agree(value, made):
        return Fault(path, f"the file says {shown(value)}, the {source} says {shown(made)}")
    return None


def _ruled(model: type[Section], data: Any, path: Path) -> list[tuple[Path, AutoRule]]:
    """Every key below `model` that has a rule; where a section has types, those of the file's type."""
    found: list[tuple[Path, AutoRule]] = []
    for name in model.model_fields:
        row = row_of(model, name)
        if row.auto:
            found.append(((*path, _spelling(model, name, data)), AUTO_RULES[row.auto]))
        below = subsection(model, name)
        inside = data.get(name) if isinstance(data, dict) else None
        if name in model.variants and isinstance(data, dict):
            below = variant(model, name, data.get("type"))
        if below is not None:
            found += _ruled(below, inside, (*path, name))
    return found


def _spelling(model: type[Section], name: str, data: Any) -> str:
    """The spelling of a key that the file uses."""
    if isinstance(data, dict) and name not in data:
        for other, real in model.aliases.items():
            if real == name and other in data:
                return other
    return name


def variant(model: type[Section], name: str, kind: Any) -> type[Section] | None:
    """The section that `name` holds when its neighbour "type" says `kind`, in any case."""
    if not isinstance(kind, str):
        return None
    return {known.lower(): section for known, section in model.variants[name].items()}.get(kind.lower())


def _may_fill(data: dict[str, Any], path: Path, made: Any) -> bool:
    if len(path) == 1 or isinstance(look_up(data, path[:-1]), dict):
        return True
    return path[0] in _CREATED and path[0] not in data and made not in (False, "none", 0)


def _infer_triple(data: dict[str, Any], given: Mapping[str, Any], origins: dict[str, str]) -> None:
    """Leave out the one batch size that is "auto" where the other two give it, once the mesh is known."""
    by_argument = dict(zip(_TRIPLE, ("train_batch_size", "per_device_train_batch_size", _TRIPLE[2])))
    open_ = [key for key in _TRIPLE if data.get(key) == AUTO and by_argument[key] not in given]
    known = [key for key in _TRIPLE if data.get(key, AUTO) != AUTO or by_argument[key] in given]
    if len(open_) == 1 and len(known) == 2:
        del data[open_[0]]
        origins[open_[0]] = "the other two batch sizes, once the mesh is known"


def _usable(arguments: Mapping[str, Any]) -> dict[str, Any]:
    given = {name: value for name, value in arguments.items() if value is not None}
    if not _is_size(given.get("hidden_size")):
        given.pop("hidden_size", None)
    return given


def _is_size(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= 1


def _one_precision(data: dict[str, Any], given: dict[str, Any]) -> None:
    """With one of bf16 and fp16 switched on by argument, the other one's "auto" is off."""
    for on, off in (("bf16", "fp16"), ("fp16", "bf16")):
        if given.get(on) is True and look_up(data, (off, "enabled")) == AUTO:
            given.setdefault(off, False)


def _agree(written: Any, made: Any) -> bool:
    if isinstance(written, bool) or isinstance(made, bool):
        return written is made
    if isinstance(written, list | tuple) and isinstance(made, list | tuple):
        return len(written) == len(made) and all(_agree(a, b) for a, b in zip(written, made))
    if isinstance(written, str) != isinstance(made, str):
        return False
    return bool(written == made)
