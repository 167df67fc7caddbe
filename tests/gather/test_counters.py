"""Which indices of a loop are seen to take every layer in turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from zeroj import _compat
from zeroj.gather.counters import counting

LAYERS = 3


def fori(start: int, index: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda p, x: jax.lax.fori_loop(start, start + LAYERS, lambda i, x: x @ p[index(i)], x)


def scan(order: Callable[[], Any], **how: Any) -> Callable[..., Any]:
    return lambda p, x: jax.lax.scan(lambda x, i: (x @ p[i], None), x, order(), **how)[0]


@pytest.mark.parametrize(
    ("loop", "seen"),
    [
        (fori(0, lambda i: i), True),
        (fori(2, lambda i: i - 2), True),
        (fori(0, lambda i: i + 1 - 1), True),
        (fori(1, lambda i: i), False),
        (fori(0, lambda i: 2 - i), False),
        (fori(0, lambda i: i // 2), False),
        (scan(lambda: jnp.arange(LAYERS)), True),
        (scan(lambda: jnp.arange(LAYERS), reverse=True), False),
        (scan(lambda: jnp.arange(LAYERS)[::-1]), False),
        (scan(lambda: jnp.array([0, 1, 2])), False),
    ],
)
def test_an_index_is_seen_to_count_or_not(loop: Callable[..., Any], seen: bool) -> None:
    program = jax.make_jaxpr(loop)(jnp.ones((LAYERS, 2, 2)), jnp.ones((2, 2))).jaxpr
    (eqn,) = (e for e in program.eqns if e.primitive.name == "scan")
    layout = _compat.scan_layout(eqn)
    (taken,) = (e for e in layout.body.jaxpr.eqns if e.primitive.name == "dynamic_slice")
    assert counting(layout, eqn, program).takes_all(taken.invars[1], LAYERS) is seen
