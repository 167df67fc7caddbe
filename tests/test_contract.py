"""The contract: every stage, optimizer, accumulation, clipping, N, model and precision is plain optax.

One table. The whole of it is marked ``full``; what always runs is a cover of all pairs of its columns.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zeroj as zj
from tests import oracle


class Case(NamedTuple):
    """One row of the table."""

    stage: int
    optimizer: str
    accumulation: int
    clip: bool
    devices: int
    model: str
    precision: str


COLUMNS: Case = Case(  # the values of every column, in the order of a row
    stage=(0, 1, 2, 3),  # type: ignore[arg-type]
    optimizer=(  # type: ignore[arg-type]
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
    ),
    accumulation=(1, 4),  # type: ignore[arg-type]
    clip=(False, True),  # type: ignore[arg-type]
    devices=(1, 2, 3, 5, 8),  # type: ignore[arg-type]
    model=("toy", "gpt", "gpt-remat", "scan", "scan-remat"),  # type: ignore[arg-type]
    precision=("fp32", "bf16"),  # type: ignore[arg-type]
)
#: Below every gradient norm that the models meet, so that clipping is always active.
CLIP = 0.02


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


def pairs_cover(columns: Sequence[Sequence[Any]]) -> list[Case]:
    """Rows in which every two values of every two columns meet: greedy, and the same every time."""
    missing = {
        (i, a, j, b) for i, j in itertools.combinations(range(len(columns)), 2)
        for a in columns[i] for b in columns[j]
    }  # fmt: skip
    order = {pair: n for n, pair in enumerate(sorted(missing, key=repr))}
    rows = []
    while missing:
        i, a, j, b = min(missing, key=order.__getitem__)
        row: dict[int, Any] = {i: a, j: b}
        for column in sorted(set(range(len(columns))) - {i, j}, key=lambda c: (-len(columns[c]), c)):
            row[column] = max(columns[column], key=lambda v: _gain(row, column, v, missing))
        rows.append(Case(*(row[column] for column in range(len(columns)))))
        missing -= set(_pairs(rows[-1]))
    return rows


def _pairs(row: Sequence[Any]) -> list[tuple[int, Any, int, Any]]:
    return [(i, row[i], j, row[j]) for i, j in itertools.combinations(range(len(row)), 2)]


def _gain(row: dict[int, Any], column: int, value: Any, missing: set[Any]) -> int:
    new = {**row, column: value}
    met = ((i, new[i], j, new[j]) for i, j in itertools.combinations(sorted(new), 2) if column in (i, j))
    return sum(pair in missing for pair in met)


COVER = pairs_cover(COLUMNS)
WHOLE = [Case(*row) for row in itertools.product(*COLUMNS)]


def name(case: Case) -> str:
    clip = "clip" if case.clip else "noclip"
    return f"{case.optimizer}-{case.model}-z{case.stage}-n{case.devices}-a{case.accumulation}-{clip}-{case.precision}"


@pytest.fixture(autouse=True, scope="module")
def compile_fast() -> Iterator[None]:
    """The machine code of each of these programs runs for milliseconds: not worth seconds of optimizing."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@functools.lru_cache(maxsize=64)
def reference(model: str, optimizer_name: str, clip: bool, parts: int = 1) -> oracle.Run:
    return oracle.oracle(
        oracle.model(model), optimizer(optimizer_name), clip=CLIP if clip else None, parts=parts
    )


@functools.lru_cache(maxsize=64)
def zeroj_run(case: Case) -> oracle.Run:
    m, tx = oracle.model(case.model), optimizer(case.optimizer)
    plan = zj.make_plan(
        m.params, tx, oracle.mesh_of(case.devices), zj.Zero(stage=case.stage), precision=case.precision
    )
    clip = CLIP if case.clip else None
    return oracle.train(m, tx, plan, accumulation=case.accumulation, clip=clip)


def check(case: Case) -> None:
    found = zeroj_run(case)
    if case.precision == "fp32":
        wanted = reference(case.model, case.optimizer, case.clip)
        in_parts = functools.partial(reference, case.model, case.optimizer, case.clip)
        oracle.assert_equals_oracle(found, wanted, [lambda: in_parts(max(2, case.devices))])
        if case.clip:
            assert np.min(wanted.norms) > CLIP, "clipping was not always active"
    else:
        assert_within_one_ulp(found, zeroj_run(case._replace(stage=0)))


def assert_within_one_ulp(found: oracle.Run, wanted: oracle.Run) -> None:
    """Loss and norm at every step, and every parameter, as bf16 numbers: equal or neighbours."""
    pairs = {
        "loss": (found.losses, wanted.losses),
        "grad_norm": (found.norms, wanted.norms),
        **{
            jax.tree_util.keystr(path): (a, b)
            for (path, a), b in zip(
                jax.tree_util.tree_leaves_with_path(found.params), jax.tree.leaves(wanted.params), strict=True
            )
        },
    }
    apart = {what: int(np.max(np.abs(_order(a) - _order(b)))) for what, (a, b) in pairs.items()}
    assert max(apart.values()) <= 1, f"distance in bf16 ulps: {apart}"


def _order(x: Any) -> np.ndarray:
    """bf16 numbers as integers in the order of their values, so that neighbours differ by one."""
    bits = np.asarray(jnp.asarray(x, jnp.bfloat16)).view(np.uint16).astype(np.int64)
    return np.where(bits >= 0x8000, 0x8000 - bits, bits)


@pytest.mark.parametrize("case", COVER, ids=name)
def test_trajectory_is_that_of_plain_optax(case: Case) -> None:
    check(case)


@pytest.mark.full
@pytest.mark.parametrize("case", [case for case in WHOLE if case not in set(COVER)], ids=name)
def test_trajectory_is_that_of_plain_optax_in_the_whole_table(case: Case) -> None:
    check(case)


def test_the_cover_meets_every_pair() -> None:
    met = {pair for row in COVER for pair in _pairs(row)}
    wanted = {pair for row in WHOLE for pair in _pairs(row)}
    assert met == wanted and len(COVER) < 80
