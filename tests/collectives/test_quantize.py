"""Block quantisation: its error bound, what is exact, what survives, and what the padding does not do."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroj.collectives.quantize import dequantize, quantize
from zeroj.plan.wire import Format

pytestmark = pytest.mark.usefixtures("compile_fast")
FORMATS = [Format(8), Format(4, 64)]
both = pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f"{f}-{f.block}")


@functools.partial(jax.jit, static_argnums=1)
def both_ways(values: jax.Array, fmt: Format) -> tuple[jax.Array, jax.Array]:
    packed = quantize(values, fmt)
    return packed, dequantize(packed, fmt, values.shape[-1], np.dtype(np.float32))


def there_and_back(values: np.ndarray, fmt: Format) -> np.ndarray:
    packed, found = both_ways(values, fmt)
    assert packed.dtype == jnp.int8
    assert packed.shape == (*values.shape[:-1], fmt.packed_bytes(values.shape[-1]))
    return np.asarray(found)


def per_block(values: np.ndarray, block: int) -> np.ndarray:
    """The largest magnitude of the block of each element."""
    extra = -values.shape[-1] % block
    padded = np.pad(np.abs(values), [(0, 0)] * (values.ndim - 1) + [(0, extra)])
    largest = padded.reshape(*values.shape[:-1], -1, block).max(-1)
    return np.repeat(largest, block, -1)[..., : values.shape[-1]]


@given(
    lead=st.lists(st.integers(1, 3), max_size=2).map(tuple),
    count=st.sampled_from((1, 63, 64, 200, 256, 257, 700)),
    spread=st.floats(0, 20),
    exponent=st.integers(-30, 30),
    fmt=st.sampled_from(FORMATS),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=20, deadline=None)
def test_the_error_is_at_most_half_a_step_of_the_block(
    lead: tuple[int, ...], count: int, spread: float, exponent: int, fmt: Format, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(*lead, count)) * 10 ** (rng.uniform(-spread, 0, (*lead, count)) + exponent)
    values = values.astype(np.float32)
    found = there_and_back(values, fmt)
    bound = per_block(values, fmt.block) / (2 * fmt.largest)
    slack = 1 + 2e-6 * fmt.largest  # the rounding of three fp32 operations, as a part of half a step
    assert np.all(np.abs(found.astype(np.float64) - values) <= bound * slack + 1e-37)


@both
def test_zero_and_the_largest_magnitude_of_a_block_are_exact(fmt: Format) -> None:
    values = np.random.default_rng(0).normal(size=(50, fmt.block)).astype(np.float32)
    values[:, 3] = 0
    values[7] = 0
    found = there_and_back(values, fmt)
    largest = np.argmax(np.abs(values), -1)
    rows = np.arange(50)
    np.testing.assert_array_equal(found[rows, largest], values[rows, largest])
    np.testing.assert_array_equal(found[:, 3], 0)
    np.testing.assert_array_equal(found[7], 0)


@both
@pytest.mark.parametrize("value", [1.0, -1.0, 1 / 8, 0.1, 3e-5, 65504.0])
def test_a_block_of_one_value_is_exact(fmt: Format, value: float) -> None:
    values = np.full((3, 300), value, np.float32)
    np.testing.assert_array_equal(there_and_back(values, fmt), values)


@both
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_bad_element_makes_its_block_non_finite_and_no_other(fmt: Format, bad: float) -> None:
    values = np.random.default_rng(1).normal(size=4 * fmt.block).astype(np.float32)
    values[fmt.block + 5] = bad
    found = there_and_back(values, fmt).reshape(4, fmt.block)
    assert not np.isfinite(found[1]).any()
    assert np.isfinite(found[[0, 2, 3]]).all()


@both
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_what_comes_out_has_the_dtype_asked_for(fmt: Format, dtype: type) -> None:
    values = jnp.linspace(-2, 2, 300).astype(dtype)
    found = dequantize(quantize(values, fmt), fmt, 300, dtype)
    assert found.dtype == dtype
    assert float(jnp.max(jnp.abs(found.astype(jnp.float32) - values.astype(jnp.float32)))) <= 2 / fmt.largest


@both
def test_ties_go_to_even(fmt: Format) -> None:
    """Halves of a step round to the even neighbour."""
    values = np.array([fmt.largest, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5], np.float32)
    np.testing.assert_array_equal(there_and_back(values, fmt), [fmt.largest, 0, 2, 2, 0, -2, -2])


@both
def test_every_integer_comes_back(fmt: Format) -> None:
    values = np.arange(-fmt.largest, fmt.largest + 1).astype(np.float32)
    values = np.stack([values, np.full_like(values, fmt.largest)], -1)  # each beside the largest
    values = np.pad(values, ((0, 0), (0, fmt.block - 2))).ravel()
    np.testing.assert_allclose(there_and_back(values, fmt), values, rtol=2e-7)


def test_very_different_magnitudes_share_the_block_s_bound() -> None:
    """1e-6 beside 1e3 beside an outlier of 1e4: the small ones are lost, and no more than the bound."""
    values = np.array([1e-6, 1e3, -1e-6, 1e4, 1e3, 0.0], np.float32)
    found = there_and_back(values, Format(8))
    np.testing.assert_allclose(found, values, atol=1e4 / 254)
    assert found[3] == 1e4 and found[0] == 0


@both
def test_stochastic_rounding_is_unbiased(fmt: Format) -> None:
    """The mean over 1000 keys is within five standard errors of the value, where rounding to nearest is not."""
    values = jnp.linspace(-1, 1, 37)
    keys = jax.random.split(jax.random.key(0), 1000)
    draws = jax.vmap(lambda k: dequantize(quantize(values, fmt, k), fmt, 37, jnp.float32))(keys)
    step = 1 / fmt.largest
    error = np.abs(np.asarray(draws.mean(0) - values))
    assert error.max() <= 5 * (step / 2) / math.sqrt(1000)
    assert np.abs(np.asarray(draws) - np.asarray(values)).max() <= step * 1.0001
    if fmt.bits == 4:
        assert np.abs(there_and_back(np.asarray(values), fmt) - values).max() > 5 * (step / 2) / math.sqrt(
            1000
        )


def test_two_nibbles_share_a_byte() -> None:
    assert Format(4).packed_bytes(1000) == 4 * (128 + 4)
    assert Format(8).packed_bytes(1000) == 4 * (256 + 4)
