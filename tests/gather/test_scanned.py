"""Which params are stacks of layers: those a scan runs over, and those that are indexed layer by layer."""

from __future__ import annotations

import jax
import pytest

import zeroj as zj
from tests.gather.kinds import FORMS

STACKS = {
    "scan_layers": ("b", "v", "w"),
    "scan_casts_before": ("b", "v", "w"),
    "sliced_stack": ("v", "w"),
    "fori_loop_slices": ("v", "w"),
    "plain_layers": (),
    "tied_embedding": (),
}


@pytest.mark.parametrize("name", STACKS)
def test_stacks_are_found(name: str) -> None:
    params, loss_fn, batch = FORMS[name]()
    assert zj.find_scanned(loss_fn, params, batch) == STACKS[name]
    structs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (params, batch))
    assert zj.find_scanned(loss_fn, *structs) == STACKS[name]
