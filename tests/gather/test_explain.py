"""What ``zj.explain`` says of a step: where each param is gathered, how often, and what stays whole."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import zeroj as zj
from tests.gather.forms import D, L, data, normal, square
from tests.gather.kinds import FORMS

TX = optax.adam(0.1)


def explained(params: Any, loss_fn: Any, batch: Any, over: str = "device", **zero: Any) -> zj.Explanation:
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0} | zero
    plan = zj.make_plan(params, TX, zj.make_mesh(node=2, local=4), zj.Zero(**zero))
    step = zj.make_train_step(loss_fn, TX, plan, loss_over=over)
    return zj.explain(step, plan, zj.abstract_state(TX, plan), batch)


@pytest.mark.parametrize("name", ["scan_remat", "fori_loop_slices", "fori_loop_slices_remat"])
@pytest.mark.parametrize("over", ["device", "global"])
def test_layers_in_a_loop_are_gathered_slice_by_slice_forward_and_backward(name: str, over: str) -> None:
    found = explained(*FORMS[name](), over)
    for path in ("v", "w"):
        assert found.times(path) == pytest.approx(2)
        assert {(g.times, g.elements) for g in found.gathers[path]} == {(L, 2 * D * D)}
        assert all("forms.py:" in g.line for g in found.gathers[path])
    assert found.excessive == ()


def test_a_param_gathered_more_often_than_the_formula_is_named_with_its_lines() -> None:
    def loss(p: Any, x: jax.Array) -> jax.Array:
        for i in range(3):
            x = jnp.tanh(jnp.tanh(x @ p["often"]) @ p["layers"][i])
        return square(x)

    params = {"often": normal(1, D, D), "layers": [normal(i, D, D) for i in range(3)]}
    found = explained(params, loss, data(), stage3_prefetch_bucket_size=0)
    assert found.excessive == ("often",) and found.times("often") > 2
    text = str(found)
    assert "often float32[8, 8]: gathered" in text and "MORE THAN THE FORMULA" in text
    assert "test_explain.py:" in text.split("often float32")[1]


def test_what_stays_whole_is_told_with_the_reason() -> None:
    assert "stays whole through the loop at" in str(explained(*FORMS["scan_consts"]()))
    params, loss_fn, batch = FORMS["used_never_and_twice"]()
    assert "never float32[11, 7]: never gathered" in str(explained(params, loss_fn, batch))
    assert "whole on every device (stage 2 does not shard params)" in str(
        explained(params, loss_fn, batch, stage=2)
    )
    kept = explained(*FORMS["scan_layers"](), reshard_after_forward=False)
    assert kept.expected == 1 and kept.times("w") == pytest.approx(1) and not kept.excessive
    assert "reshard_after_forward is false" in str(kept)


def test_an_argument_that_holds_no_params_is_refused() -> None:
    params, loss_fn, batch = FORMS["lora"]()
    plan = zj.make_plan(params, TX, zj.make_mesh(), zj.Zero(stage=3))
    with pytest.raises(zj.PlanError, match="TrainState, or the plan's params"):
        zj.explain(zj.make_train_step(loss_fn, TX, plan), plan, batch)
