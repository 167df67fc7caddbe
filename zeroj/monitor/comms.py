"""The collectives of a compiled step as a table: DeepSpeed's comms_logger without anything at run time."""

from __future__ import annotations

import collections
from collections.abc import Sequence

from zeroj.aot.text import size, table
from zeroj.aot.traffic import Collective

#: The names that DeepSpeed's users write in ``prof_ops``, and XLA's.
DEEPSPEED_OPS = {
    "all_gather": "all-gather",
    "all_gather_base": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "all_reduce": "all-reduce",
    "inference_all_reduce": "all-reduce",
    "reduce_scatter": "reduce-scatter",
    "reduce_scatter_base": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
    "all_to_all": "all-to-all",
    "all_to_all_single": "all-to-all",
    "broadcast": "collective-broadcast",
    "send": "collective-permute",
    "recv": "collective-permute",
}


def comms_table(collectives: Sequence[Collective], ops: Sequence[str] | None = None) -> str:
    """The collectives of one step, alike ones together, those that send most first.

    Args:
        collectives: of one step.
        ops: names of those to show, XLA's or DeepSpeed's; left out, all.

    Returns:
        A table of: op, dtype, devices in a group, whether it crosses nodes, bytes of one run, runs per step,
        bytes that one device sends per step; with a sum, and a line for each of ``ops`` that does not occur.
    """
    wanted = None if ops is None else {DEEPSPEED_OPS.get(op, op) for op in ops}
    times: collections.Counter[tuple[str, str, int, str, int]] = collections.Counter()
    sent: collections.Counter[tuple[str, str, int, str, int]] = collections.Counter()
    for each in collectives:
        if wanted is None or each.op in wanted:
            key = (each.op, each.dtype, each.group_size, each.reach, each.payload)
            times[key] += each.times
            sent[key] += round(each.wire_per_step)
    rows = [
        [op, dtype, str(group), reach, size(payload), str(times[key]), size(sent[key])]
        for key in sorted(times, key=lambda k: (-sent[k], k))
        for op, dtype, group, reach, payload in [key]
    ]
    rows.append(["all", "", "", "", "", str(sum(times.values())), size(sum(sent.values()))])
    heads = ["collective", "dtype", "group", "reach", "bytes", "per step", "sent per device"]
    absent = sorted((wanted or set()) - {each.op for each in collectives})
    return "\n".join([table(heads, rows), *(f"no {op} in the step" for op in absent)])
