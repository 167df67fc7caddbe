"""The optax chains against the optimizers' own equations; behaviours A8, D3, I1."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.config import keys
from zeroj.config import Config
from zeroj.config.optimizer_rows import OPTIMIZERS

STEPS = 6
LR, WD = 0.1, 0.05
PARAMS = {"w": np.array([[1.0, -2.0], [0.5, 3.0]], np.float32), "bias": np.array([0.3, -0.1], np.float32)}


def config_of(kind: str, **params: Any) -> Config:
    return Config.load({"optimizer": {"type": kind, "params": params}})


def grads_of(step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    return {name: rng.normal(size=p.shape).astype(np.float32) for name, p in PARAMS.items()}


def run(tx: optax.GradientTransformation | None, steps: int = STEPS) -> dict[str, np.ndarray]:
    assert tx is not None
    params = jax.tree.map(jnp.asarray, PARAMS)
    state = tx.init(params)
    update = jax.jit(tx.update)
    for step in range(steps):
        updates, state = update(grads_of(step), state, params)
        params = optax.apply_updates(params, updates)
    return {name: np.asarray(p) for name, p in params.items()}


def by_hand(rule: Any, steps: int = STEPS) -> dict[str, np.ndarray]:
    """Run `rule(param, grad, state, t)`, in float64, on each leaf by itself, from an empty state."""
    out = {}
    for name, param in PARAMS.items():
        p, state = param.astype(np.float64), {}
        for step in range(steps):
            p = rule(p, grads_of(step)[name].astype(np.float64), state, step + 1)
        out[name] = p
    return out


def adam_direction(g: Any, s: dict, t: int, b1: float, b2: float, eps: float, correct: bool = True) -> Any:
    s["m"] = b1 * s.get("m", 0) + (1 - b1) * g
    s["v"] = b2 * s.get("v", 0) + (1 - b2) * g * g
    m, v = (s["m"] / (1 - b1**t), s["v"] / (1 - b2**t)) if correct else (s["m"], s["v"])
    return m / (np.sqrt(v) + eps)


def adamw(p: Any, g: Any, s: dict, t: int) -> Any:
    return p - LR * (adam_direction(g, s, t, 0.8, 0.9, 1e-6) + WD * p)


def adam_l2(p: Any, g: Any, s: dict, t: int) -> Any:
    return p - LR * adam_direction(g + WD * p, s, t, 0.8, 0.9, 1e-6)


def adam_plain(p: Any, g: Any, s: dict, t: int) -> Any:
    return p - LR * (adam_direction(g, s, t, 0.8, 0.9, 1e-6, correct=False) + WD * p)


def adagrad(p: Any, g: Any, s: dict, t: int) -> Any:
    g = g + WD * p
    s["sum"] = s.get("sum", 0.25) + g * g
    return p - LR * g / (np.sqrt(s["sum"]) + 1e-10)


def lamb(p: Any, g: Any, s: dict, t: int) -> Any:
    u = adam_direction(g, s, t, 0.8, 0.9, 1e-6) + WD * p
    return p - LR * np.clip(np.linalg.norm(p) / np.linalg.norm(u), 0.5, 1.2) * u


def lion(p: Any, g: Any, s: dict, t: int) -> Any:
    m = s.get("m", 0)
    s["m"] = 0.9 * m + 0.1 * g
    return p - LR * (np.sign(0.8 * m + 0.2 * g) + WD * p)


def momentum(p: Any, g: Any, s: dict, t: int) -> Any:
    g = g + WD * p
    s["m"] = 0.9 * s.get("m", 0) + g
    return p - LR * s["m"]


def nesterov(p: Any, g: Any, s: dict, t: int) -> Any:
    g = g + WD * p
    s["m"] = 0.9 * s.get("m", 0) + g
    return p - LR * (g + 0.9 * s["m"])


ADAM = {"betas": [0.8, 0.9], "eps": 1e-6}
CASES = {
    "AdamW": ("AdamW", ADAM, adamw),
    "Adam": ("Adam", ADAM, adamw),
    "Adam L2": ("Adam", {**ADAM, "adam_w_mode": False}, adam_l2),
    "Adam without bias correction": ("adam", {**ADAM, "bias_correction": False}, adam_plain),
    "Adagrad": ("Adagrad", {"initial_accumulator_value": 0.25}, adagrad),
    "Lamb": ("Lamb", {**ADAM, "min_coeff": 0.5, "max_coeff": 1.2}, lamb),
    "Lion": ("Lion", {"betas": [0.8, 0.9]}, lion),
    "SGD": ("SGD", {"momentum": 0.9}, momentum),
    "SGD nesterov": ("sgd", {"momentum": 0.9, "nesterov": True}, nesterov),
    "SGD plain": ("SGD", {}, lambda p, g, s, t: p - LR * (g + WD * p)),
}


@pytest.mark.parametrize("case", CASES)
def test_trajectory(case: str) -> None:
    kind, params, rule = CASES[case]
    got = run(config_of(kind, lr=LR, weight_decay=WD, **params).make_optimizer())
    want = by_hand(rule)
    for name in PARAMS:
        np.testing.assert_allclose(got[name], want[name], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("kind", "params", "after", "words"),
    [
        ("AdamW", {}, 0.99, "scale_by_adam(b1=0.9, b2=0.999, eps=1e-08) -> add_decayed_weights(0.1)"),
        ("Adam", {}, 0.99, "scale_by_adam(b1=0.9, b2=0.999, eps=1e-08) -> add_decayed_weights(0.1)"),
        ("Adam", {"adam_w_mode": False}, 0.90, "add_decayed_weights(0.1) -> scale_by_adam"),
    ],
)
def test_where_decay_enters(kind: str, params: dict, after: float, words: str) -> None:
    """A8: weight_decay 0.1, gradient 0, param 1, lr 0.1, one step."""
    config = config_of(kind, lr=0.1, weight_decay=0.1, **params)
    tx = config.make_optimizer()
    assert tx is not None
    one, zero = jnp.ones(()), jnp.zeros(())
    updates, _ = tx.update(zero, tx.init(one), one)
    np.testing.assert_allclose(optax.apply_updates(one, updates), after, atol=1e-6)
    assert words in config.optimizer_text and config.optimizer_text in config.report()


def test_adam_says_that_it_is_adamw() -> None:
    assert any('"Adam" means AdamW' in note for note in config_of("Adam").notes)
    assert not any("AdamW" in note for note in config_of("Adam", adam_w_mode=False).notes)


@pytest.mark.parametrize("kind", [*OPTIMIZERS, "OneCycle"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_state_and_updates_are_fp32_whatever_the_params(kind: str, dtype: Any) -> None:
    tx = every(kind).make_optimizer()
    assert tx is not None
    params = jax.tree.map(lambda p: jnp.asarray(p, dtype), PARAMS)
    state = tx.init(params)
    updates, new = jax.jit(tx.update)(params, state, params)
    for leaf in (*jax.tree.leaves(state), *jax.tree.leaves(new), *jax.tree.leaves(updates)):
        assert leaf.dtype in (jnp.float32, jnp.int32)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == jax.tree.map(
        lambda x: (x.shape, x.dtype), new
    )
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(updates))


@pytest.mark.parametrize("kind", [*OPTIMIZERS, "OneCycle"])
def test_state_in_bf16_where_asked(kind: str) -> None:
    config = every(kind, bf16={"enabled": True, "bf16_optimizer_states": True})
    tx = config.make_optimizer()
    assert tx is not None and config.optimizer_state_dtype == "bf16"
    assert "moments in bf16" in config.optimizer_text
    params = jax.tree.map(jnp.asarray, PARAMS)
    state = tx.init(params)
    _, new = jax.jit(tx.update)(params, state, params)
    for tree in (state, new):
        floats = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating) and x.ndim]
        assert all(x.dtype == jnp.bfloat16 for x in floats)
        assert floats or kind == "SGD"


def every(kind: str, **file: Any) -> Config:
    """A config of each optimizer type, and of Adam with a cycled momentum."""
    if kind == "OneCycle":
        file["scheduler"] = {"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 1}}
        kind = "Adam"
    return Config.load({"optimizer": {"type": kind, "params": {"weight_decay": 0.1}}, **file})


def test_small_updates_of_bf16_params_are_kept_in_fp32() -> None:
    """I1: lr 1e-4 on a param of 1 with gradient 1, 100 steps: 1e-2 in all, where bf16 would stay at 1."""
    tx = Config.load({"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}).make_optimizer()
    assert tx is not None
    master, grad = jnp.ones((4,)), jnp.ones((4,), jnp.bfloat16)
    state = tx.init(master)
    for _ in range(100):
        updates, state = tx.update(grad, state, master)
        master = optax.apply_updates(master, updates)
    np.testing.assert_allclose(master, 1 - 1e-2, rtol=1e-4)


def test_the_schedule_moves_with_successful_updates() -> None:
    data = {
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_type": "linear"}},
    }
    config = Config.load(data)
    tx = config.make_optimizer()
    assert tx is not None
    w = jnp.zeros(())
    state = tx.init(w)
    moves = []
    for _ in range(7):
        updates, state = tx.update(jnp.ones(()), state, w)
        moves.append(-float(updates))
    np.testing.assert_allclose(moves, [0, 0, 0.25, 0.5, 0.75, 1, 1])
    assert "WarmupLR(" in config.optimizer_text


def test_the_four_combinations() -> None:
    optimizer = {"optimizer": {"type": "SGD", "params": {"lr": 0.5}}}
    scheduler = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1.0, "warmup_num_steps": 2}}}
    both, own_schedule = Config.load({**optimizer, **scheduler}), Config.load(optimizer)
    own_optimizer, neither = Config.load(scheduler), Config.load({})
    assert neither.make_optimizer() is None and neither.make_schedule() is None
    assert own_optimizer.make_optimizer() is None
    schedule = own_optimizer.make_schedule()
    assert schedule is not None and float(schedule(5)) == 1.0
    np.testing.assert_allclose(
        run(own_schedule.make_optimizer(lambda count: 0.25))["w"], sgd(0.25), rtol=1e-6
    )
    np.testing.assert_allclose(run(own_schedule.make_optimizer())["w"], sgd(0.5), rtol=1e-6)
    tx = both.make_optimizer()
    assert tx is not None
    assert float(tx.update(jnp.ones(()), tx.init(jnp.ones(())), jnp.ones(()))[0]) == 0.0


def sgd(lr: float) -> np.ndarray:
    return by_hand(lambda p, g, s, t: p - lr * g)["w"]


def test_one_cycle_moves_beta1_against_the_rate() -> None:
    data = {
        "optimizer": {"type": "Adam", "params": {"weight_decay": 0.0}},
        "scheduler": {
            "type": "OneCycle",
            "params": {"cycle_min_lr": LR, "cycle_max_lr": LR, "cycle_first_step_size": 2},
        },
    }

    def rule(p: Any, g: Any, s: dict, t: int) -> Any:
        # the first update has the lowest momentum; then it falls from 0.9 to 0.8 and rises again
        b1 = {1: 0.8, 2: 0.85, 3: 0.8, 4: 0.85}.get(t, 0.9)
        s["m"] = b1 * s.get("m", 0) + (1 - b1) * g
        s["v"] = 0.99 * s.get("v", 0) + 0.01 * g * g
        return p - LR * (s["m"] / (1 - b1**t)) / (np.sqrt(s["v"] / (1 - 0.99**t)) + 1e-8)

    got, want = run(Config.load(data).make_optimizer()), by_hand(rule)
    for name in PARAMS:
        np.testing.assert_allclose(got[name], want[name], rtol=2e-5, atol=2e-6)
    assert "b1=cycled" in Config.load(data).optimizer_text
    data["scheduler"]["params"]["cycle_momentum"] = False
    assert "b1=0.9" in Config.load(data).optimizer_text


def test_decay_spares_biases_and_norms_when_asked() -> None:
    kept = run(config_of("SGD", lr=LR, weight_decay=WD, decay_mask="no_bias_or_norm").make_optimizer())
    decayed = run(config_of("SGD", lr=LR, weight_decay=WD).make_optimizer())
    plain = run(config_of("SGD", lr=LR).make_optimizer())
    np.testing.assert_array_equal(kept["w"], decayed["w"])
    np.testing.assert_array_equal(kept["bias"], plain["bias"])
    assert not np.array_equal(decayed["bias"], plain["bias"])


def test_muon_takes_matrices_and_adamw_the_rest() -> None:
    rng = np.random.default_rng(0)
    shapes = {"wte": (9, 4), "w": (6, 4), "bias": (4,), "conv": (2, 2, 3, 4), "lm_head": (4, 9)}
    params = {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}
    grads = jax.tree.map(lambda p: p[::-1] * 2, params)
    config = config_of("Muon", muon_lr=0.02, adam_lr=0.001, weight_decay=0.1)
    tx = config.make_optimizer()
    assert tx is not None
    updates, _ = jax.jit(tx.update)(grads, tx.init(params), params)
    muon = optax.contrib.muon(0.02, weight_decay=0.1)
    want, _ = jax.jit(muon.update)({"w": grads["w"]}, muon.init({"w": params["w"]}), {"w": params["w"]})
    np.testing.assert_allclose(updates["w"], want["w"], rtol=1e-5, atol=1e-7)
    for name in ("wte", "bias", "conv", "lm_head"):
        expected = -0.001 * (np.sign(grads[name]) + 0.1 * params[name])  # Adam's first step is the sign
        np.testing.assert_allclose(updates[name], expected, rtol=1e-5, atol=1e-8)
    assert "muon(momentum=0.95" in config.optimizer_text


def test_muon_and_its_adamw_keep_their_ratio_under_a_schedule() -> None:
    data = {
        "optimizer": {"type": "Muon", "params": {"muon_lr": 0.02, "adam_lr": 0.001}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 2}},
    }
    tx = Config.load(data).make_optimizer()
    assert tx is not None
    params, grads = {"bias": jnp.ones(3)}, {"bias": jnp.ones(3)}
    state = tx.init(params)
    for _ in range(4):
        updates, state = tx.update(grads, state, params)
    np.testing.assert_allclose(updates["bias"], -0.001, rtol=1e-4)


def test_abstract_init() -> None:
    for kind in OPTIMIZERS:
        tx = config_of(kind).make_optimizer()
        assert tx is not None
        shapes = jax.eval_shape(
            tx.init, jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), PARAMS)
        )
        assert jax.tree.map(lambda x: x.shape, shapes) == jax.tree.map(jnp.shape, tx.init(PARAMS))


EFFECTS = [
    key
    for key in keys.all_keys()
    if key.path[:2] == ("optimizer", "params") and key.kind and key.row.status == "honoured"
]


@pytest.mark.parametrize("key", EFFECTS, ids=str)
def test_every_honoured_param_changes_the_trajectory(key: keys.Key) -> None:
    base = {"lr": 0.1, "weight_decay": 0.1, "betas": [0.9, 0.99], "eps": 1e-3, "momentum": 0.9}
    fields = key.model.model_fields
    params = {name: value for name, value in base.items() if name in fields and name != key.name}
    values = {
        "decay_mask": ("all", "no_bias_or_norm"),
        "betas": ([0.9, 0.99], [0.5, 0.6]),
        "max_coeff": (0.02, 10.0),
        "min_coeff": (0.01, 9.0),
        "momentum": (0.0, 0.5),
    }.get(key.name, (False, True) if key.model.model_fields[key.name].annotation is bool else (0.01, 0.02))
    if key.kind == "AdamW" and key.name == "adam_w_mode":
        return  # false is refused for AdamW: test_rules.py
    runs = [run(config_of(key.kind, **params, **{key.name: value}).make_optimizer()) for value in values]
    assert any(not np.allclose(runs[0][name], runs[1][name], rtol=1e-6, atol=0) for name in PARAMS)
