"""Models that other people wrote, as they are on PyPI: two steps at stage 3 equal plain optax.

They are the extra ``models``, which ``make test`` installs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zeroj as zj

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("compile_fast"),
    pytest.mark.filterwarnings("ignore:The scan at", "ignore::DeprecationWarning", "ignore::FutureWarning"),
]

#: params, what the model carries beside them or None, loss(params, batch[, model_state]), batch.
Model = tuple[Any, Any, Callable[..., Any], Any]
MODELS: dict[str, Callable[[], Model]] = {}


def model(make: Callable[[], Model]) -> Callable[[], Model]:
    MODELS[make.__name__] = make
    return make


def tokens(vocabulary: int, length: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).integers(1, vocabulary, (16, length)))


def images(size: int, channels: int = 3) -> dict[str, jax.Array]:
    r = np.random.default_rng(0)
    pixels = jnp.asarray(r.normal(size=(16, size, size, channels)), jnp.float32)
    return {"x": pixels, "y": jnp.asarray(r.integers(0, 5, 16))}


def next_token(logits: jax.Array, batch: jax.Array) -> jax.Array:
    losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], batch[:, 1:])
    return losses.mean()


def classify(logits: jax.Array, batch: Any) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


@model
def transformers_gpt2() -> Model:
    from transformers import FlaxGPT2LMHeadModel, GPT2Config

    config = GPT2Config(vocab_size=67, n_positions=16, n_embd=24, n_layer=2, n_head=2)
    gpt2 = FlaxGPT2LMHeadModel(config, seed=0, input_shape=(1, 8))
    return gpt2.params, None, lambda p, b: next_token(gpt2(b, params=p).logits, b), tokens(67, 8)


@model
def transformers_vit() -> Model:
    from transformers import FlaxViTForImageClassification, ViTConfig

    config = ViTConfig(
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=40,
        image_size=8,
        patch_size=4,
        num_labels=5,
    )
    vit = FlaxViTForImageClassification(config, seed=0, input_shape=(1, 8, 8, 3))

    def loss(p: Any, b: Any) -> jax.Array:
        return classify(vit(jnp.moveaxis(b["x"], -1, 1), params=p).logits, b)

    return vit.params, None, loss, images(8)


@model
def nano_moe() -> Model:
    from nano_moe import NanoMoE, NanoMoEConfig

    config = NanoMoEConfig(vocab_size=67, n_layers=2, n_heads=2, d_model=24, d_ff=40, block_size=8)
    moe = NanoMoE(config)
    batch = tokens(67, 8)
    params = moe.init(jax.random.key(0), batch)["params"]
    return params, None, lambda p, b: next_token(moe.apply({"params": p}, b)[0], b), batch


@model
def mamba2() -> Model:
    from mamba2_jax import Mamba2Config, Mamba2ForCausalLM

    config = Mamba2Config(
        vocab_size=67, hidden_size=32, state_size=8, head_dim=16, chunk_size=4, num_hidden_layers=2
    )
    graph, params, rest = nnx.split(Mamba2ForCausalLM(config, rngs=nnx.Rngs(0)), nnx.Param, ...)
    return params, None, lambda p, b: next_token(nnx.merge(graph, p, rest)(b)["logits"], b), tokens(67, 8)


@model
def attnax_vision_transformer() -> Model:
    from attnax import VisionTransformer, VisionTransformerConfig

    config = VisionTransformerConfig(
        image_size=8, patch_size=4, num_classes=5, d_model=24, num_heads=2, num_layers=2, d_ff=40
    )
    graph, params, rest = nnx.split(VisionTransformer(nnx.Rngs(0), config), nnx.Param, ...)

    def loss(p: Any, b: Any) -> jax.Array:
        return classify(nnx.merge(graph, p, rest)(b["x"], deterministic=True), b)

    return params, None, loss, images(8)


@model
def haiku_resnet() -> Model:
    import haiku as hk

    def forward(x: jax.Array) -> jax.Array:
        net = hk.nets.ResNet(
            (1, 1, 1, 1),
            5,
            bottleneck=False,
            channels_per_group=(8, 8, 16, 16),
            use_projection=(True,) * 4,
        )
        return net(x, is_training=True)

    net = hk.without_apply_rng(hk.transform_with_state(forward))
    params, carried = net.init(jax.random.key(0), images(32)["x"])

    def loss(p: Any, b: Any, model_state: Any) -> Any:
        logits, new = net.apply(p, model_state, b["x"])
        return classify(logits, b), new

    return params, carried, loss, images(32)


@model
def haiku_lstm() -> Model:
    import haiku as hk

    def forward(b: jax.Array) -> jax.Array:
        core = hk.DeepRNN([hk.LSTM(24), jnp.tanh, hk.LSTM(20)])
        x = hk.Embed(67, 16)(b)
        y, _ = hk.dynamic_unroll(core, x, core.initial_state(b.shape[0]), time_major=False)
        return hk.Linear(67)(y)

    net = hk.without_apply_rng(hk.transform(forward))
    batch = tokens(67, 8)
    return net.init(jax.random.key(0), batch), None, lambda p, b: next_token(net.apply(p, b), b), batch


@model
def equinox_attention() -> Model:
    import equinox as eqx

    keys = jax.random.split(jax.random.key(0), 3)
    parts = {
        "embed": eqx.nn.Embedding(67, 24, key=keys[0]),
        "attention": eqx.nn.MultiheadAttention(2, 24, key=keys[1]),
        "mlp": eqx.nn.MLP(24, 67, 40, 2, key=keys[2]),
    }
    params, static = eqx.partition(parts, eqx.is_inexact_array)

    def loss(p: Any, b: jax.Array) -> jax.Array:
        parts = eqx.combine(p, static)

        def one(row: jax.Array) -> jax.Array:
            x = jax.vmap(parts["embed"])(row)
            mask = jnp.tri(x.shape[0], dtype=bool)
            return jax.vmap(parts["mlp"])(x + parts["attention"](x, x, x, mask=mask))

        return next_token(jax.vmap(one)(b), b)

    return params, None, loss, tokens(67, 8)


@pytest.mark.parametrize("name", MODELS)
def test_two_steps_equal_plain_optax(name: str) -> None:
    params, carried, loss_fn, batch = MODELS[name]()
    tx = optax.sgd(0.05, momentum=0.9)
    want, want_state = plain_steps(loss_fn, params, carried, batch, tx)
    plan = zj.make_plan(
        params,
        tx,
        zj.make_mesh(node=2, local=4),
        zj.Zero(stage=3, stage3_param_persistence_threshold=0),
    )
    over = "device" if carried is None else "global"
    step = zj.make_train_step(loss_fn, tx, plan, loss_over=over)
    state = zj.init_state(params, tx, plan, model_state=() if carried is None else carried)
    for _ in range(2):
        state, _ = step(state, batch)
    got = jax.tree.leaves(zj.full_params(state, plan))
    moved = np.sqrt(
        sum(float(jnp.sum((a - b) ** 2)) for a, b in zip(want, jax.tree.leaves(params), strict=True))
    )
    assert moved > 0
    for leaf, a, b in zip(plan.leaves, got, want, strict=True):
        assert np.linalg.norm(a - b) <= 2e-5 * moved, (leaf.path, moved)
    for a, b in zip(jax.tree.leaves(state.model_state), jax.tree.leaves(want_state), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    assert any(leaf.placement.sharded for leaf in plan.leaves)


def plain_steps(loss_fn: Any, params: Any, carried: Any, batch: Any, tx: Any) -> tuple[list[Any], Any]:
    """Two steps of plain optax on one device: (leaves of params, what the model carries)."""

    def loss(p: Any, s: Any) -> tuple[jax.Array, Any]:
        return (loss_fn(p, batch), s) if carried is None else loss_fn(p, batch, model_state=s)

    @jax.jit
    def one(params: Any, s: Any, opt: Any) -> Any:
        grads, s = jax.grad(loss, has_aux=True)(params, s)
        updates, opt = tx.update(grads, opt, params)
        return optax.apply_updates(params, updates), s, opt

    opt, s = tx.init(params), () if carried is None else carried
    for _ in range(2):
        params, s, opt = one(params, s, opt)
    return jax.tree.leaves(params), s
