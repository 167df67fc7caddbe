"""What every trajectory is held against: plain optax, one device, the same arrays, the whole batch at once.

Also the small models that the tests train. Their shapes divide by nothing on purpose.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import zeroj as zj

#: Divisible by N x accumulation for every N in {1, 2, 3, 5, 8} and accumulation in {1, 4}.
BATCH = 480
VOCAB, WIDTH, HEADS, HIDDEN, LENGTH, LAYERS = 17, 12, 2, 20, 5, 2


class Model(NamedTuple):
    """A loss, its first params as numpy arrays, and its batches."""

    loss: Callable[..., Any]
    params: Any
    batches: list[Any]


class Run(NamedTuple):
    """A trajectory: loss and gradient norm at every step, params after the last one."""

    losses: np.ndarray
    norms: np.ndarray
    params: Any


def normal(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> np.ndarray:
    return np.asarray(rng.normal(size=shape) * scale, np.float32)


def toy_params(hidden: int = 36) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    return {
        "emb": normal(rng, 7, 5),
        "w1": normal(rng, 5, hidden, scale=0.4),
        "b1": normal(rng, hidden, scale=0.1),
        "w2": normal(rng, hidden, 4, scale=0.2),
        "scale": np.float32(1.1) * np.ones((), np.float32),
        "gate": normal(rng, 1),
        "unused": normal(rng, 9),
    }


def toy_loss(params: Any, batch: Any) -> jax.Array:
    """A two-layer MLP; ``gate`` counts only where the batch says so, ``unused`` never."""
    hidden = jnp.tanh(params["emb"][batch["x"]] @ params["w1"] + params["b1"]) * params["scale"]
    out = hidden @ params["w2"] + params["gate"] * batch["gated"][:, None].astype(hidden.dtype)
    return jnp.mean((out.astype(jnp.float32) - batch["y"]) ** 2)


def toy_batches(count: int = 20, size: int = BATCH) -> list[Any]:
    rng = np.random.default_rng(11)
    return [
        {
            "x": rng.integers(0, 7, size).astype(np.int32),
            "y": normal(rng, size, 4),
            "gated": (np.arange(size) < size // 3).astype(np.float32),
        }
        for _ in range(count)
    ]


def gpt_params(stacked: bool) -> dict[str, Any]:
    rng = np.random.default_rng(5)

    def block() -> dict[str, np.ndarray]:
        return {
            "norm1": 1 + normal(rng, WIDTH, scale=0.1),
            "qkv": normal(rng, WIDTH, 3 * WIDTH, scale=0.3),
            "out": normal(rng, WIDTH, WIDTH, scale=0.3),
            "norm2": 1 + normal(rng, WIDTH, scale=0.1),
            "up": normal(rng, WIDTH, HIDDEN, scale=0.3),
            "bias": normal(rng, HIDDEN, scale=0.1),
            "down": normal(rng, HIDDEN, WIDTH, scale=0.3),
        }

    blocks: Any = [block() for _ in range(LAYERS)]
    if stacked:
        blocks = jax.tree.map(lambda *leaves: np.stack(leaves), *blocks)
    return {"tokens": normal(rng, VOCAB, WIDTH), "places": normal(rng, LENGTH, WIDTH), "blocks": blocks}


def gpt_block(p: Any, x: jax.Array) -> jax.Array:
    batch, length, width = x.shape
    q, k, v = jnp.split(_norm(x, p["norm1"]) @ p["qkv"], 3, axis=-1)
    q, k, v = (a.reshape(batch, length, HEADS, width // HEADS) for a in (q, k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(width // HEADS).astype(x.dtype)
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -jnp.inf)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(batch, length, width)
    x = x + mixed @ p["out"]
    return x + jax.nn.gelu(_norm(x, p["norm2"]) @ p["up"] + p["bias"]) @ p["down"]


def gpt_logits(params: Any, tokens: jax.Array, *, remat: bool) -> jax.Array:
    """Logits of a decoder whose output layer is its embedding; a stack of blocks is scanned, a list unrolled."""
    block = jax.checkpoint(gpt_block) if remat else gpt_block
    x = params["tokens"][tokens] + params["places"][: tokens.shape[1]]
    if isinstance(params["blocks"], list):
        for p in params["blocks"]:
            x = block(p, x)
    else:
        x, _ = jax.lax.scan(lambda h, p: (block(p, h), None), x, params["blocks"])
    return x @ params["tokens"].T


def gpt_loss(params: Any, batch: Any, *, remat: bool = False) -> jax.Array:
    logits = gpt_logits(params, batch["tokens"][:, :-1], remat=remat).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:]).mean()


def gpt_batches(count: int = 20, size: int = BATCH) -> list[Any]:
    rng = np.random.default_rng(13)
    return [{"tokens": rng.integers(0, VOCAB, (size, LENGTH + 1)).astype(np.int32)} for _ in range(count)]


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5) * scale


@functools.cache
def model(name: str) -> Model:
    """One of the models by name; "gpt" is unrolled, "scan" scanned, "-remat" with ``jax.checkpoint``."""
    if name == "toy":
        return Model(toy_loss, toy_params(), toy_batches())
    loss = functools.partial(gpt_loss, remat=name.endswith("-remat"))
    return Model(loss, gpt_params(stacked=name.startswith("scan")), gpt_batches())


def oracle(
    m: Model,
    tx: optax.GradientTransformation,
    *,
    clip: float | None = None,
    parts: int = 1,
    fp32: bool = True,
) -> Run:
    """Trains with plain optax on one device.

    Args:
        m: the model.
        tx: the optimizer.
        clip: the gradient's global norm is clipped to this.
        parts: the batch is cut into so many, whose losses and gradients are averaged: the same mathematics in
            another order of summation, which shows how much of a difference is rounding.
        fp32: otherwise params are cast to bf16 for the loss.
    """

    gradient = _gradient(m.loss, parts, fp32)

    @jax.jit
    def update(params: Any, state: Any, grads: Any) -> Any:
        norm = optax.global_norm(grads)
        if clip is not None:
            grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, clip / (norm + 1e-6)), grads)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, norm

    params = jax.tree.map(jnp.asarray, m.params)
    state = jax.jit(tx.init)(params)
    seen = []
    for batch in m.batches:
        loss, grads = gradient(params, batch)
        params, state, norm = update(params, state, grads)
        seen.append((loss, norm))
    losses, norms = (np.asarray(x) for x in zip(*jax.device_get(seen), strict=True))
    return Run(losses, norms, jax.device_get(params))


@functools.cache
def _gradient(loss: Callable[..., Any], parts: int, fp32: bool) -> Callable[..., Any]:
    """The jitted gradient: compiled once for all optimizers."""

    def widen(tree: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(jnp.float32), tree)

    @jax.jit
    def run(params: Any, batch: Any) -> Any:
        seen = params if fp32 else jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
        if parts == 1:
            return widen(jax.value_and_grad(loss)(seen, batch))
        pieces = jax.tree.map(lambda x: x.reshape(parts, -1, *x.shape[1:]), batch)

        def add(total: Any, piece: Any) -> Any:
            return jax.tree.map(jnp.add, total, widen(jax.value_and_grad(loss)(seen, piece))), None

        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), (jnp.float32(0), params))
        total, _ = jax.lax.scan(add, zeros, pieces)
        return jax.tree.map(lambda x: x / parts, total)

    return run


def mesh_of(count: int) -> jax.sharding.Mesh:
    """A mesh of ``count`` devices: 8 as two nodes of four, so that both axes are at work."""
    devices = jax.devices()[:count]
    return zj.make_mesh(node=2, local=4, devices=devices) if count == 8 else zj.make_mesh(devices=devices)


def train(
    m: Model,
    tx: optax.GradientTransformation,
    plan: zj.Plan,
    *,
    accumulation: int = 1,
    clip: float | None = None,
    watch: Callable[[zj.TrainState], None] | None = None,
) -> Run:
    """Trains with zeroj; ``watch`` is called with the first state and after every step."""
    state = zj.init_state(m.params, tx, plan)
    step = zj.make_train_step(m.loss, tx, plan, accumulation_steps=accumulation, clip_norm=clip)
    watch = watch or (lambda state: None)
    watch(state)
    seen = []
    for batch in m.batches:
        state, metrics = step(state, batch)
        # read at once: simulated devices give up on each other when many steps are queued on a busy machine
        seen.append(jax.device_get((metrics["loss"], metrics["grad_norm"])))
        watch(state)
    losses, norms = (np.asarray(x) for x in zip(*seen, strict=True))
    return Run(losses, norms, zj.full_params(state, plan))


def distance(found: Any, wanted: Any) -> float:
    """Relative distance by norm over all leaves of two trees (or two arrays), in float64."""
    pairs = list(zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True))
    assert all(np.shape(a) == np.shape(b) for a, b in pairs)
    wide = [(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in pairs]
    apart = sum(float(np.sum((a - b) ** 2)) for a, b in wide)
    size = sum(float(np.sum(b**2)) for _, b in wide)
    return float(np.sqrt(apart / size)) if size else float(np.sqrt(apart))


def run_distances(found: Run, wanted: Run) -> dict[str, float]:
    """The largest relative difference of loss and norm at any step, and the distance of the params."""
    return {
        "loss": float(np.max(np.abs(found.losses - wanted.losses) / np.abs(wanted.losses))),
        "grad_norm": float(np.max(np.abs(found.norms - wanted.norms) / np.abs(wanted.norms))),
        "params": distance(found.params, wanted.params),
    }


def assert_equals_oracle(found: Run, wanted: Run, floor: Sequence[Callable[[], Run]]) -> None:
    """Within 1e-6 relative, or three times the oracle's own noise.

    Args:
        found: zeroj's trajectory.
        wanted: the oracle's.
        floor: functions that give the oracle in other orders of summation; the largest distance of them is the
            noise. Each is called only where what the ones before it allow is passed.
    """
    apart = run_distances(found, wanted)
    allowed = dict.fromkeys(apart, 1e-6)
    for other in [None, *floor]:
        noise = run_distances(other(), wanted) if other else {}
        allowed = {what: max(bound, 3 * noise.get(what, 0.0)) for what, bound in allowed.items()}
        wrong = {what: (apart[what], allowed[what]) for what in apart if not apart[what] <= allowed[what]}
        if not wrong:
            return
    raise AssertionError(f"(found, allowed) relative to plain optax: {wrong}")


def pull_loss(params: Any, batch: Any) -> jax.Array:
    """A loss for params of any shapes: each element is pulled towards one of its own, by a weight per example."""
    total = jnp.float32(0)
    for leaf in jax.tree.leaves(params):
        aim = jnp.cos(jnp.arange(leaf.size, dtype=jnp.float32)).reshape(leaf.shape)
        total += jnp.sum((leaf.astype(jnp.float32) - aim) ** 2) / leaf.size
    return jnp.mean(batch["weight"]) * total + jnp.mean(batch["weight"] ** 2)


def pull_model(params: Any, steps: int = 5, size: int = 120) -> Model:
    """Any params under :func:`pull_loss`."""
    rng = np.random.default_rng(3)
    return Model(pull_loss, params, [{"weight": 1 + normal(rng, size, scale=0.1)} for _ in range(steps)])


def compare(
    m: Model, tx: optax.GradientTransformation, stage: int, devices: int = 8, **options: Any
) -> tuple[zj.Plan, Run]:
    """Trains ``m`` with every leaf sharded that can be, asserts that it is plain optax, and returns what came out."""
    zero = zj.Zero(stage=stage, stage3_param_persistence_threshold=0)
    plan = zj.make_plan(m.params, tx, mesh_of(devices), zero, **options)
    found = train(m, tx, plan)
    assert_equals_oracle(found, oracle(m, tx), [lambda: oracle(m, tx, parts=max(devices, 2))])
    return plan, found
