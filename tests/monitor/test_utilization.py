"""The share of the peak rate, by hand; and that memory is told."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from zeroj.monitor.utilization import memory_line, utilization


def test_the_share_of_the_peak() -> None:
    found = utilization(7_000_000_000, 80_000.0, 8, "NVIDIA H100 80GB HBM3")
    assert found == pytest.approx(6 * 7e9 * 8e4 / (8 * 989.4e12), rel=2e-3)
    assert utilization(1, 1.0, 1, "cpu") is None
    a100 = utilization(10**9, 1e4, 1, "NVIDIA A100-SXM4-40GB")
    assert a100 == pytest.approx(6e13 / 312e12)


def test_memory_is_told() -> None:
    kept = jnp.ones((1000, 1000))
    text = memory_line()
    assert "device" in text and "host" in text and kept.nbytes == 4_000_000
