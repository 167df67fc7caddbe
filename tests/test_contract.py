"""The contract: every stage, optimizer, accumulation, clipping, N and model is plain optax; bf16 is alike.

One table. The whole of it is marked ``full``. What always runs is a cover of pairs of its columns in two parts:
every optimizer on the TOY, where a row costs about a second, and every form of GPT under AdamW.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import pytest

import zeroj as zj
from tests import oracle

pytestmark = pytest.mark.usefixtures("compile_fast")


class Case(NamedTuple):
    """One row of the table, in fp32."""

    stage: int
    optimizer: str
    accumulation: int
    clip: bool
    devices: int
    model: str


class Columns(NamedTuple):
    """The values of every column of :class:`Case`, in the same order."""

    stage: tuple[int, ...] = (0, 1, 2, 3)
    optimizer: tuple[str, ...] = (
        "sgd",
        "adamw",
        "adafactor",
        "lion",
        "lamb",
        "muon",
        "schedule_free",
        "multi_transform",
        "multi_steps",
        "apply_if_finite",
    )
    accumulation: tuple[int, ...] = (1, 4)
    clip: tuple[bool, ...] = (False, True)
    devices: tuple[int, ...] = (1, 2, 3, 5, 8)
    model: tuple[str, ...] = ("toy", "gpt", "gpt-remat", "scan", "scan-remat")


TOY = Columns(model=("toy",))
GPT = Columns(stage=(1, 3), optimizer=("adamw",), model=("gpt", "gpt-remat", "scan", "scan-remat"))
#: Pairs of columns that need not meet in each part: those that would add rows and no new code path.
LOOSE = (("optimizer", "devices"), ("stage", "devices"), ("devices", "model"))
#: Optimizers that look at a whole matrix or stack, on stacked and on unstacked layers; and stages 0 and 2.
BY_HAND = (
    Case(3, "muon", 4, False, 8, "scan-remat"),
    Case(3, "adafactor", 1, True, 5, "scan"),
    Case(2, "lamb", 1, False, 3, "gpt"),
    Case(0, "adamw", 4, True, 8, "scan"),
)
#: Below every gradient norm that the models meet, so that clipping is always active.
CLIP = 0.02
#: The spacing of bf16 numbers, relative to their size: 8 bits of mantissa.
BF16_ULP = 2.0**-8


@functools.cache
def optimizer(name: str) -> optax.GradientTransformation:
    return {
        "sgd": lambda: optax.sgd(0.05, momentum=0.9),
        "adamw": lambda: optax.adamw(3e-3, weight_decay=0.01),
        "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
        "lion": lambda: optax.lion(1e-3, weight_decay=0.01),
        "lamb": lambda: optax.lamb(3e-3, weight_decay=0.01),
        "muon": lambda: optax.contrib.muon(3e-3),
        "schedule_free": lambda: optax.contrib.schedule_free_adamw(3e-3, warmup_steps=4),
        "multi_transform": lambda: optax.multi_transform(
            {"matrix": optax.adamw(3e-3), "rest": optax.sgd(0.05)},
            lambda params: jax.tree.map(lambda p: "matrix" if p.ndim > 1 else "rest", params),
        ),
        "multi_steps": lambda: optax.MultiSteps(optax.adam(3e-3), 2).gradient_transformation(),
        "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(3e-3), 3),
    }[name]()


def pairs_cover(columns: Columns, loose: Sequence[tuple[str, str]]) -> list[Case]:
    """Rows in which every two values of every two columns meet: greedy, and the same every time."""
    missing = pairs_wanted(columns, loose)
    order = {pair: n for n, pair in enumerate(sorted(missing, key=repr))}
    rows = []
    while missing:
        i, a, j, b = min(missing, key=order.__getitem__)
        row: dict[int, Any] = {i: a, j: b}
        for column in sorted(set(range(len(columns))) - {i, j}, key=lambda c: (-len(columns[c]), c)):
            # among values of equal gain another one at each row, so that loose pairs are mixed too
            values = columns[column]
            turned = values[len(rows) % len(values) :] + values[: len(rows) % len(values)]
            row[column] = max(turned, key=lambda v: _gain(row, column, v, missing))
        rows.append(Case(*(row[column] for column in range(len(columns)))))
        missing -= set(_pairs(rows[-1]))
    return rows


def pairs_wanted(columns: Columns, loose: Sequence[tuple[str, str]]) -> set[tuple[int, Any, int, Any]]:
    return {
        (i, a, j, b)
        for i, j in itertools.combinations(range(len(columns)), 2)
        if (Case._fields[i], Case._fields[j]) not in loose
        for a in columns[i]
        for b in columns[j]
    }


def _pairs(row: Sequence[Any]) -> list[tuple[int, Any, int, Any]]:
    return [(i, row[i], j, row[j]) for i, j in itertools.combinations(range(len(row)), 2)]


def _gain(row: dict[int, Any], column: int, value: Any, missing: set[Any]) -> int:
    new = {**row, column: value}
    met = ((i, new[i], j, new[j]) for i, j in itertools.combinations(sorted(new), 2) if column in (i, j))
    return sum(pair in missing for pair in met)


#: (columns, pairs that need not meet) of each part.
PARTS = ((TOY, LOOSE[:1]), (GPT, LOOSE[1:]))
COVER = [*pairs_cover(*PARTS[0]), *pairs_cover(*PARTS[1]), *BY_HAND]
WHOLE = [Case(*row) for row in itertools.product(*Columns())]


def name(case: Case) -> str:
    clip = "clip" if case.clip else "noclip"
    return f"{case.optimizer}-{case.model}-z{case.stage}-n{case.devices}-a{case.accumulation}-{clip}"


@functools.lru_cache(maxsize=64)
def reference(
    model: str, optimizer_name: str, clip: bool, parts: int = 1, backwards: bool = False
) -> oracle.Run:
    m = oracle.model(model)
    if backwards:
        m = m._replace(batches=[jax.tree.map(lambda x: x[::-1], batch) for batch in m.batches])
    return oracle.oracle(m, optimizer(optimizer_name), clip=CLIP if clip else None, parts=parts)


def zeroj_run(case: Case, precision: str = "fp32") -> oracle.Run:
    m, tx = oracle.model(case.model), optimizer(case.optimizer)
    scanned = zj.find_scanned(m.loss, m.params, m.batches[0])
    mesh, zero = oracle.mesh_of(case.devices), zj.Zero(stage=case.stage)
    plan = zj.make_plan(m.params, tx, mesh, zero, precision=precision, scanned=scanned)
    clip = CLIP if case.clip else None
    return oracle.train(m, tx, plan, accumulation=case.accumulation, clip=clip)


def check(case: Case) -> None:
    plain = case.model.removesuffix("-remat")  # the same mathematics: one oracle for both
    wanted = reference(plain, case.optimizer, case.clip)
    # the batch in N parts; one order of summation is one sample of the noise, so those of the table's other N too,
    # and all of them with the rows of the batch in the opposite order
    parts = dict.fromkeys((max(2, case.devices), *Columns().devices[1:]))
    orders = [(n, backwards) for backwards in (False, True) for n in parts]
    in_parts = [functools.partial(reference, plain, case.optimizer, case.clip, *order) for order in orders]
    oracle.assert_equals_oracle(zeroj_run(case), wanted, in_parts)
    if case.clip:
        assert np.min(wanted.norms) > CLIP, "clipping was not always active"


@pytest.mark.parametrize("case", COVER, ids=name)
def test_trajectory_is_that_of_plain_optax(case: Case) -> None:
    check(case)


@pytest.mark.full
@pytest.mark.parametrize("case", [case for case in WHOLE if case not in set(COVER)], ids=name)
def test_trajectory_is_that_of_plain_optax_in_the_whole_table(case: Case) -> None:
    check(case)


def test_the_cover_meets_every_pair() -> None:
    for columns, loose in PARTS:
        met = {pair for row in pairs_cover(columns, loose) for pair in _pairs(row)}
        assert pairs_wanted(columns, loose) <= met
    assert {value for row in COVER for value in row} == {value for column in Columns() for value in column}
    assert len(COVER) <= 64


BF16 = (
    Case(0, "adamw", 1, True, 8, "toy"),
    Case(0, "adamw", 4, True, 8, "toy"),
    Case(0, "adamw", 4, False, 5, "scan"),
)


@pytest.mark.parametrize("case", BF16, ids=lambda case: name(case).replace("-z0", ""))
def test_in_bf16_stages_equal_each_other(case: Case) -> None:
    """Where stages round alike, the loss is bit for bit the same at all 20 steps: all of them without
    accumulation, else 0 with 1 and 2 with 3.

    The norm and the fp32 masters may differ in the last bit of fp32, since sums over shards and fused updates
    are evaluated in another order; the bf16 numbers of the next step do not. With accumulation, stages 0 and 1
    round the sum of the micro-batches to bf16 once, for the one reduction of the update, and stages 2 and 3
    round every micro-batch: within one bf16 ulp, by norm.
    """
    runs = [zeroj_run(case._replace(stage=stage), "bf16") for stage in (0, 1, 2, 3)]
    alike = [(0, 1), (2, 3)] if case.accumulation > 1 else [(0, 1), (0, 2), (0, 3)]
    for a, b in alike:
        np.testing.assert_array_equal(runs[a].losses, runs[b].losses, err_msg=f"stages {a} and {b}")
        assert max(oracle.run_distances(runs[a], runs[b]).values()) <= 1e-6, (a, b)
    assert runs[0].losses[-1] < runs[0].losses[0], "nothing was learned"
    for found in runs[1:]:
        apart = oracle.run_distances(found, runs[0])
        assert max(apart.values()) <= BF16_ULP, apart


def test_bf16_stays_near_plain_optax_in_bf16() -> None:
    """Stages that agree could all be wrong: the oracle's own bf16 gradients give the same losses."""
    wanted = oracle.oracle(oracle.model("toy"), optimizer("adamw"), fp32=False)
    apart = oracle.run_distances(zeroj_run(Case(3, "adamw", 1, False, 8, "toy"), "bf16"), wanted)
    assert apart["loss"] <= BF16_ULP and apart["params"] <= BF16_ULP, apart
