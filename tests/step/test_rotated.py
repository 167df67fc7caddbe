"""A step that leaves its stacks' update to the next one: the same losses, and after ``settle`` the same state."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import pytest

import zeroj as zj
from tests import oracle
from tests.optimizer import test_layerwise as forms
from zeroj.step.rotated import RotatedStep

pytestmark = pytest.mark.usefixtures("compile_fast")

HOST = {"device": "cpu"}
OPTIMIZER: dict[str, Any] = {"offload_optimizer": HOST}
BOTH: dict[str, Any] = {**OPTIMIZER, "offload_param": HOST}
#: Which step gets a NaN, in half precision: its update is skipped while the one before it is still pending.
BROKEN = 3
TX = optax.adamw(1e-3)


def batches(half: bool) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [dict(batch) for batch in forms.batches()]
    if half:
        found[BROKEN]["x"] = found[BROKEN]["x"] * np.float32(np.nan)
    return found


def train(
    loss: Callable[..., Any], plan: zj.Plan, tx: Any = TX, rotate: bool = True, **step_options: Any
) -> tuple[zj.TrainState, np.ndarray]:
    """Five steps, clipped; what is returned is settled."""
    step = zj.make_train_step(loss, tx, plan, clip_norm=0.5, rotate=rotate, **step_options)
    state, seen = zj.init_state(forms.params(), tx, plan), []
    for batch in batches(plan.precision.half):
        state, metrics = step(state, batch)
        seen.append([float(metrics[k]) for k in ("loss", "grad_norm", "clip_factor", "skipped", "step")])
    if rotate:
        assert isinstance(step, RotatedStep)
        assert state.pending
        state = step.settle(state)
    return state, np.array(seen)


def same(found: Any, wanted: Any) -> None:
    """Kinds of memory, losses, params and every array of the state."""
    (state, seen), (other, by_hand) = found, wanted
    np.testing.assert_allclose(seen, by_hand, rtol=2e-6)
    assert jax.tree.structure(state) == jax.tree.structure(other)
    for a, b in zip(
        jax.tree.leaves(state._replace(rng=())), jax.tree.leaves(other._replace(rng=())), strict=True
    ):
        assert a.sharding.memory_kind == b.sharding.memory_kind
    assert oracle.distance(state.params, other.params) <= 1e-6
    assert oracle.distance(state.opt_state, other.opt_state) <= 1e-6


LOSSES = {
    "scanned": forms.scanned,
    "remat": forms.remat,
    "backwards": forms.backwards,
    "nested": forms.nested,
    "by index": forms.by_index,  # no loop runs over the stack: it is renewed before it
    "twice": forms.twice,  # two loops do: the first one renews it
    "counted": forms.counted,  # a batch that counts nothing, and so is not applied
    "counted by params": forms.counted_by_params,
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_trajectory_is_that_of_the_step_that_is_not_rotated(name: str) -> None:
    plan = forms.plan_for(TX, "bf16", **BOTH)
    same(train(LOSSES[name], plan), train(LOSSES[name], plan, rotate=False))


@pytest.mark.parametrize("zero", [OPTIMIZER, BOTH], ids=["optimizer", "both"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_whatever_is_offloaded_and_in_every_precision(
    zero: dict[str, Any], precision: str, accumulation: int
) -> None:
    plan = forms.plan_for(TX, precision, **zero)
    steps = accumulation
    same(
        train(forms.remat, plan, accumulation_steps=steps),
        train(forms.remat, plan, rotate=False, accumulation_steps=steps),
    )


@pytest.mark.parametrize("name", forms.ELEMENTWISE)
def test_with_every_optimizer_that_is_elementwise(name: str) -> None:
    tx = forms.optimizer(name)
    plan = forms.plan_for(tx, "bf16", **BOTH)
    same(train(forms.scanned, plan, tx), train(forms.scanned, plan, tx, rotate=False))


def test_sums_of_the_devices_means() -> None:
    plan = forms.plan_for(TX, "fp16", **BOTH)
    options = {"reduce_op": "sum"}
    same(train(forms.scanned, plan, **options), train(forms.scanned, plan, rotate=False, **options))


def test_a_state_can_be_settled_at_any_time_and_a_settled_one_goes_on() -> None:
    plan = forms.plan_for(TX, "bf16", **BOTH)
    step = zj.make_train_step(forms.scanned, TX, plan, clip_norm=0.5, rotate=True)
    state, seen = zj.init_state(forms.params(), TX, plan), []
    for number, batch in enumerate(batches(half=True)):
        state, metrics = step(state, batch)
        seen.append([float(metrics["loss"]), float(metrics["grad_norm"])])
        if number % 2:
            state = step.settle(step.settle(state))
    wanted, by_hand = train(forms.scanned, plan, rotate=False)
    np.testing.assert_allclose(seen, by_hand[:, :2], rtol=2e-6)
    assert oracle.distance(step.settle(state).params, wanted.params) <= 1e-6


def test_another_step_makes_what_is_pending_first() -> None:
    """A step of another loss, say: it finds the params up to date."""
    plan = forms.plan_for(TX, "bf16", **BOTH)
    rotated = zj.make_train_step(forms.scanned, TX, plan, rotate=True)
    plain = zj.make_train_step(forms.scanned, TX, plan)
    first, second, *_ = forms.batches()
    state, _ = plain(rotated(zj.init_state(forms.params(), TX, plan), first)[0], second)
    wanted, _ = plain(plain(zj.init_state(forms.params(), TX, plan), first)[0], second)
    assert not state.pending
    assert oracle.distance(state._replace(rng=()), wanted._replace(rng=())) <= 1e-6


def test_a_step_that_updates_in_the_backward_pass_makes_what_is_pending_first_too() -> None:
    plan = forms.plan_for(TX, "bf16", **BOTH)
    rotated = zj.make_train_step(forms.scanned, TX, plan, skip_nonfinite=False, rotate=True)
    early = zj.make_train_step(forms.scanned, TX, plan, skip_nonfinite=False)
    first, second, *_ = forms.batches()
    state, _ = early(rotated(zj.init_state(forms.params(), TX, plan), first)[0], second)
    wanted, _ = early(early(zj.init_state(forms.params(), TX, plan), first)[0], second)
    assert oracle.distance(state._replace(rng=()), wanted._replace(rng=())) <= 1e-6


def test_under_the_global_view_what_is_pending_is_settled_before() -> None:
    plan = forms.plan_for(TX, "bf16", **BOTH)
    rotated = zj.make_train_step(forms.scanned, TX, plan, rotate=True)
    batch = forms.batches()[0]
    state, _ = rotated(zj.init_state(forms.params(), TX, plan), batch)
    step = zj.make_train_step(forms.scanned, TX, plan, loss_over="global")
    with pytest.raises(zj.PlanError, match=r"settle\(state\)"):
        step(state, batch)
    assert step(rotated.settle(state), batch)[1]["step"] == 2


@pytest.mark.parametrize("accumulation", [1, 2])
def test_second_shards_of_hpz_serve_as_they_do_without_rotation(accumulation: int) -> None:
    """Across nodes a rotated step gathers each leaf once, and trains alike."""
    mesh = zj.make_mesh(node=2, local=4)
    section = zj.Zero(stage=3, zero_hpz_partition_size=4, stage3_param_persistence_threshold=64, **BOTH)
    plan = zj.make_plan(forms.params(), TX, mesh, section, precision="bf16", scanned=["blocks"])
    rotated, plain = (
        zj.make_train_step(forms.remat, TX, plan, accumulation, clip_norm=0.5, rotate=rotate)
        for rotate in (True, False)
    )
    state, batch = zj.abstract_state(TX, plan), forms.batches()[0]

    def gathers(step: Any, state: Any) -> int:
        text = str(step.trace(state, batch).jaxpr)
        return len(re.findall(r"all_gather\[[^\]]*axis_name=\('node',\)", text))

    assert gathers(plain, state) == gathers(rotated, rotated.pending_state(state, batch)) > 0
    options = {"accumulation_steps": accumulation}
    same(train(forms.remat, plan, **options), train(forms.remat, plan, rotate=False, **options))


def test_what_reads_a_state_refuses_one_with_an_update_pending(tmp_path: pathlib.Path) -> None:
    plan = forms.plan_for(TX, "bf16", **BOTH)
    step = zj.make_train_step(forms.scanned, TX, plan, rotate=True)
    batch = forms.batches()[0]
    state, _ = step(zj.init_state(forms.params(), TX, plan), batch)
    readers: dict[str, Callable[[], Any]] = {
        "full_params": lambda: zj.full_params(state, plan),
        "evaluation": lambda: zj.make_eval_step(forms.scanned, plan)(state, batch),
        "offload_states": lambda: zj.offload_states(state),
        "a leaf": lambda: zj.get_full(state, plan, "blocks/a"),
        "a checkpoint": lambda: zj.Checkpointer(tmp_path / "a").save(state, plan, wait=True),
        "safetensors": lambda: zj.export_safetensors(state, tmp_path / "b.safetensors", plan=plan),
    }
    for name, read in readers.items():
        with pytest.raises(zj.PlanError, match=r"blocks/a, blocks/b pending.*step\.settle\(state\)"):
            read()
            pytest.fail(name)
    state = step.settle(state)
    for read in readers.values():
        read()


@pytest.mark.parametrize(
    ("zero", "tx", "options"),
    [
        ({}, TX, {}),
        (OPTIMIZER, forms.optimizer("adafactor"), {}),
        (OPTIMIZER, TX, {"loss_over": "global"}),
    ],
    ids=["nothing is offloaded", "not elementwise", "the global view"],
)
def test_what_cannot_be_rotated_is_refused(zero: Any, tx: Any, options: dict[str, Any]) -> None:
    plan = forms.plan_for(tx, "bf16", **zero)
    with pytest.raises(zj.PlanError, match="rotate=True needs stage 3.*Leave rotate out"):
        zj.make_train_step(forms.scanned, tx, plan, rotate=True, **options)
