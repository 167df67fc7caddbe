"""An update taken apart gives what the whole one gives, and each part reads its own leaf alone."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zeroj as zj
from tests import oracle
from tests.test_contract import optimizer
from zeroj import _compat
from zeroj.optimizer.partition import SplitUpdate, split_update
from zeroj.plan import tree

pytestmark = pytest.mark.usefixtures("compile_fast")

NAMES = "sgd adamw adafactor lion lamb muon schedule_free multi_transform multi_steps apply_if_finite".split()
SHAPES = {"a": (6, 10), "b": (10,), "c": (4, 8), "d": (), "e": (3, 8, 8)}


def params() -> dict[str, jax.Array]:
    rng = np.random.default_rng(3)
    return {k: jnp.asarray(oracle.normal(rng, *s)) for k, s in SHAPES.items()}


def taken_apart(tx: Any, small: int = 1) -> tuple[Any, SplitUpdate, Any, list[int | None]]:
    """(update, its parts, (grads, state, params, applied), owners of the inputs)."""
    values = params()
    state = tx.init(values)
    update_of = optax.with_extra_args_support(tx).update

    def update(grads: Any, state: Any, values: Any, applied: jax.Array) -> Any:
        updates, after = update_of(grads, state, values, value=jnp.float32(1), grad=grads)
        new = optax.apply_updates(values, updates), after
        return jax.tree.map(lambda n, o: jnp.where(applied, n, o), new, (values, state))

    grads = jax.tree.map(lambda p: 0.1 * p + 0.02, values)
    args = (grads, state, values, jnp.bool_(True))
    program, _ = _compat.trace(update, *args)
    by_keys = {(jax.tree_util.DictKey(k),): i for i, k in enumerate(SHAPES)}
    found, _ = tree.flatten(state)
    of_state = [
        next((by_keys[e.keys[n:]] for n in range(len(e.keys)) if e.keys[n:] in by_keys), None)
        for e in found.values()
    ]
    own = list(range(len(SHAPES)))
    inputs = [*own, *of_state, *own, None]
    return update, split_update(program, inputs, [*own, *of_state], small), args, inputs


def evaluate(split: SplitUpdate, args: Any, owners: list[int | None]) -> list[Any]:
    """All outputs, with every part kept from reading anything but its own."""
    flat = jax.tree.leaves(args)

    def read_shared(i: int) -> Any:
        assert owners[i] is None or i in split.shared_inputs
        return flat[i]

    values, outs = split.shared(read_shared)
    for k, group in enumerate(split.groups):

        def read(i: int, group: Any = group, k: int = k) -> Any:
            assert owners[i] is None or (owners[i] in group and i in split.inputs[k])
            return flat[i]

        outs |= split.part(k, read, values)
    return [outs[i] for i in range(len(outs))]


@pytest.mark.parametrize("name", NAMES)
def test_parts_give_what_the_whole_gives(name: str) -> None:
    update, split, args, owners = taken_apart(optax.chain(optax.clip_by_global_norm(0.1), optimizer(name)))
    whole_of, parts_of = jax.jit(update), jax.jit(lambda args: evaluate(split, args, owners))
    for _ in range(3):
        whole, parts = whole_of(*args), parts_of(args)
        for mine, theirs in zip(parts, jax.tree.leaves(whole), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=2e-6, atol=1e-7)
        args = (args[0], whole[1], whole[0], args[3])


@pytest.mark.parametrize("name", NAMES)
def test_every_leaf_is_a_group_of_its_own(name: str) -> None:
    tx = optax.chain(optax.clip_by_global_norm(0.1), optimizer(name))
    _, split, _, owners = taken_apart(tx)
    assert [g for g in split.groups if len(g) > 1] == []
    grads = range(len(SHAPES))
    large = [i for i in split.shared_inputs if i not in grads]
    flat = jax.tree.leaves(taken_apart(tx)[2])
    assert all(flat[i].size <= 1 for i in large), "the shared phase reads gradients and scalars alone"


def test_a_step_that_is_not_applied_changes_nothing() -> None:
    _, split, args, owners = taken_apart(optimizer("adamw"))
    outs = evaluate(split, (*args[:3], jnp.bool_(False)), owners)
    for new, old in zip(outs, jax.tree.leaves((args[2], args[1])), strict=True):
        np.testing.assert_array_equal(new, old)


def test_a_clip_after_the_update_reads_each_leaf_in_the_shared_phase_too() -> None:
    tx = optax.chain(optax.adam(1e-2), optax.clip_by_global_norm(0.1))
    update, split, args, owners = taken_apart(tx)
    assert len(split.groups) == len(SHAPES)
    flat = jax.tree.leaves(args)
    assert sum(flat[i].size > 1 for i in split.shared_inputs) == 3 * (len(SHAPES) - 1)  # gradient and moments
    for mine, theirs in zip(evaluate(split, args, owners), jax.tree.leaves(update(*args)), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=2e-6, atol=1e-7)


def test_leaves_of_which_large_values_mix_are_one_group() -> None:
    def tie(grads: Any, state: Any, values: Any = None, **_: Any) -> Any:
        return {**grads, "a": grads["a"] + grads["c"].sum() + grads["b"]}, state

    mixing = optax.GradientTransformation(lambda p: optax.EmptyState(), tie)
    update, split, args, owners = taken_apart(optax.chain(mixing, optax.adam(1e-2)))
    names = [tuple(list(SHAPES)[k] for k in group) for group in split.groups]
    assert sorted(names) == [("a", "b"), ("c",), ("d",), ("e",)]
    for mine, theirs in zip(evaluate(split, args, owners), jax.tree.leaves(update(*args)), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=2e-6, atol=1e-7)


def test_every_output_is_made_once() -> None:
    _, split, args, _ = taken_apart(optimizer("multi_steps"))
    made = [i for part in split.outputs for i in part] + list(split.shared_outputs)
    assert sorted(made) == list(range(len(jax.tree.leaves((args[2], args[1])))))
    assert split.shared_outputs  # the counters


def test_a_side_effect_is_refused() -> None:
    def loud(grads: Any, state: Any, values: Any = None, **_: Any) -> Any:
        jax.debug.print("norm {}", optax.global_norm(grads))
        return grads, state

    with pytest.raises(zj.PlanError, match="side effect"):
        taken_apart(optax.GradientTransformation(lambda p: optax.EmptyState(), loud))


@functools.cache
def _many() -> Any:
    values = {f"w{i:03}": jnp.ones((4, 4)) for i in range(300)}
    return values


def test_hundreds_of_leaves_are_taken_apart_quickly() -> None:
    values = _many()
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    state = tx.init(values)

    def update(grads: Any, state: Any, values: Any) -> Any:
        updates, after = tx.update(grads, state, values)
        return optax.apply_updates(values, updates), after

    program, shapes = _compat.trace(update, values, state, values)
    own: list[int | None] = list(range(300))
    owners = [*own, None, *own, *own, *own]
    split = split_update(program, owners, [*own, None, *own, *own], 1)
    assert len(split.groups) == 300
    assert all(len(part) == 4 for part in split.inputs)
    assert len(split.outputs[7]) == 3
