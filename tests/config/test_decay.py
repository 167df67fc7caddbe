"""Which leaves weight decay spares, by the names in their paths."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from zeroj.config.decay import decay_mask, is_bias_or_norm, is_muon_matrix


def path(*names: str | int) -> tuple:
    return tuple(
        jax.tree_util.DictKey(n) if isinstance(n, str) else jax.tree_util.SequenceKey(n) for n in names
    )


@pytest.mark.parametrize(
    "names",
    [
        ("dense", "bias"),
        ("layers", 0, "q_bias"),
        ("LayerNorm_0", "scale"),
        ("ln_1", "weight"),
        ("ln1", "weight"),
        ("final_norm", "w"),
        ("RMSNorm", "kernel"),
        ("bn2", "mean"),
        ("scale",),
    ],
)
def test_spared(names: tuple) -> None:
    assert is_bias_or_norm(path(*names))


@pytest.mark.parametrize(
    "names", [("dense", "kernel"), ("lnx", "w"), ("bias", "kernel"), ("embedding",), ("line", "w"), (), (0,)]
)
def test_decayed(names: tuple) -> None:
    assert not is_bias_or_norm(path(*names))


def test_the_mask_has_the_tree_of_the_params() -> None:
    params = {"dense": {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}, "norm": [jnp.ones(2)]}
    assert decay_mask(params) == {"dense": {"kernel": True, "bias": False}, "norm": [False]}


def test_nnx_models() -> None:
    class Block(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.dense = nnx.Linear(2, 3, rngs=rngs)
            self.layernorm = nnx.LayerNorm(3, rngs=rngs)

    state = nnx.state(Block(nnx.Rngs(0)), nnx.Param)
    mask = {
        jax.tree_util.keystr(p): value for p, value in jax.tree_util.tree_leaves_with_path(decay_mask(state))
    }
    assert len(mask) == 4
    for name, value in mask.items():
        assert value == ("kernel" in name), name


def test_muon() -> None:
    matrix, vector = jnp.ones((3, 4)), jnp.ones(3)
    assert is_muon_matrix(path("attention", "q"), matrix)
    assert not is_muon_matrix(path("attention", "q"), vector)
    for name in ("token_embedding", "lm_head", "wte"):
        assert not is_muon_matrix(path(name, "kernel"), matrix)
