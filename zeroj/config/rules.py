"""Combinations that cannot be honoured, as a table: the form of a rule, and those of "zero_optimization"."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from zeroj.config.faults import Fault, Path


@dataclasses.dataclass(frozen=True)
class Rule:
    """One impossible combination.

    Args:
        keys: dotted paths of the keys involved; the fault is shown at the first.
        broken: whether a section (of valid values) breaks the rule.
        text: the reason; `{0}` is the section.
    """

    keys: tuple[str, ...]
    broken: Callable[[Any], bool]
    text: str


def _on(section: Any) -> bool:
    return section is not None and section.device != "none"


def _nvme(section: Any) -> bool:
    return section is not None and section.device == "nvme"


def _stage3(key: str, asked: Callable[[Any], bool], why: str) -> Rule:
    return Rule(
        (key, "stage"), lambda z: asked(z) and z.stage < 3, why + ", so it needs stage 3, not {0.stage}"
    )


ZERO_RULES: tuple[Rule, ...] = (
    _stage3(
        "offload_param.device",
        lambda z: _on(z.offload_param),
        "below stage 3 every device holds the params whole",
    ),
    Rule(
        ("offload_optimizer.device", "stage"),
        lambda z: _on(z.offload_optimizer) and z.stage == 0,
        "at stage 0 no state is sharded, and every device would stream all of it; use stage 1, 2 or 3",
    ),
    Rule(
        ("offload_optimizer.nvme_path", "offload_optimizer.device"),
        lambda z: _nvme(z.offload_optimizer) and not z.offload_optimizer.nvme_path,
        'is required when offload_optimizer.device is "nvme"',
    ),
    Rule(
        ("offload_param.nvme_path", "offload_param.device"),
        lambda z: _nvme(z.offload_param) and not z.offload_param.nvme_path,
        'is required when offload_param.device is "nvme"',
    ),
    _stage3(
        "zero_hpz_partition_size",
        lambda z: z.zero_hpz_partition_size > 1,
        "hpZ keeps a second shard of params",
    ),
    _stage3(
        "zero_quantized_weights", lambda z: z.zero_quantized_weights, "qwZ quantises the gather of params"
    ),
    _stage3(
        "zero_quantized_nontrainable_weights",
        lambda z: z.zero_quantized_nontrainable_weights,
        "frozen params are quantised in their shards",
    ),
    Rule(
        ("zero_quantized_nontrainable_weights", "offload_param"),
        lambda z: (
            z.zero_quantized_nontrainable_weights and z.offload_param and z.offload_param.device != "none"
        ),
        "keeps frozen params on the device as int8; with offload_param they live in host memory; choose one",
    ),
    _stage3(
        "zero_quantized_gradients",
        lambda z: z.zero_quantized_gradients,
        "qgZ reduces gradients straight into the shards of the params",
    ),
    Rule(
        ("zeropp_loco_param", "zero_quantized_gradients"),
        lambda z: z.zeropp_loco_param is not None and not z.zero_quantized_gradients,
        "feeds back the error of quantised gradients, so it needs zero_quantized_gradients",
    ),
    _stage3("mics_shard_size", lambda z: z.mics_shard_size > 0, "MiCS shards the params within a group"),
    Rule(
        ("mics_shard_size",),
        lambda z: z.mics_shard_size == 0,
        "0 is neither off (-1) nor the size of a group (1 or more)",
    ),
    Rule(
        ("mics_shard_size", "zero_hpz_partition_size"),
        lambda z: z.mics_shard_size > 0 and z.zero_hpz_partition_size > 1,
        "MiCS and hpZ (zero_hpz_partition_size) each define the group that gathers params; choose one",
    ),
    Rule(
        ("mics_hierarchical_params_gather", "mics_shard_size"),
        lambda z: z.mics_hierarchical_params_gather and z.mics_shard_size <= 0,
        "is a gather of MiCS, so it needs mics_shard_size",
    ),
    _stage3(
        "reshard_after_forward",
        lambda z: not z.reshard_after_forward,
        "only gathered params can be kept or freed",
    ),
)


def broken_rules(rules: Sequence[Rule], section: Any, path: Path, skip: Sequence[Path] = ()) -> list[Fault]:
    """The faults of `section` against `rules`.

    Args:
        rules: the table.
        section: a section all of whose values are valid by themselves.
        path: where the section stands in the file.
        skip: paths of keys that were at fault before: a rule that involves one of them says nothing.
    """
    return [
        Fault((*path, *rule.keys[0].split(".")), rule.text.format(section))
        for rule in rules
        if not any(_touches((*path, *key.split(".")), bad) for key in rule.keys for bad in skip)
        and rule.broken(section)
    ]


def _touches(path: Path, bad: Path) -> bool:
    shorter = min(len(path), len(bad))
    return path[:shorter] == bad[:shorter]


def zero_faults(zero: Any, path: Path = (), skip: Sequence[Path] = ()) -> list[Fault]:
    """The impossible combinations within "zero_optimization"."""
    return broken_rules(ZERO_RULES, zero, path, skip)


def device_faults(zero: Any, world: int, local: int, path: Path = ()) -> list[Fault]:
    """What does not fit `world` devices, `local` of them in each node."""
    faults = []
    hpz, mics = zero.zero_hpz_partition_size, zero.mics_shard_size
    if hpz > 1 and (world == local or local % hpz):
        why = (
            "all devices are in one node, where its second shard would save no traffic; leave it out"
            if world == local
            else f"it has to divide the {local} devices of a node, so that its group stays inside one"
        )
        faults.append(Fault((*path, "zero_hpz_partition_size"), f"{hpz} on {world} devices: {why}"))
    if mics > 0 and world % mics:
        text = f"{mics} does not divide the {world} devices into equal groups"
        faults.append(Fault((*path, "mics_shard_size"), text))
    if zero.mics_hierarchical_params_gather and mics > local and mics % local:
        text = f"a group of {mics} devices is not a number of whole nodes of {local}; gather it in one"
        faults.append(Fault((*path, "mics_hierarchical_params_gather"), text))
    return faults
