"""The stage table: what each ZeRO stage shards."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """What one ZeRO stage shards. True: each device holds its part; False: each device holds the whole."""

    params: bool
    grads: bool
    accumulator: bool
    opt_state: bool


#: The stage table of ZeRO (arXiv 1910.02054, section 5). ``grads`` is what leaves the last micro-batch,
#: ``accumulator`` what the micro-batches before it add up in.
STAGES = {
    0: Stage(params=False, grads=False, accumulator=False, opt_state=False),
    1: Stage(params=False, grads=True, accumulator=False, opt_state=True),
    2: Stage(params=False, grads=True, accumulator=True, opt_state=True),
    3: Stage(params=True, grads=True, accumulator=True, opt_state=True),
}
