"""From the section "optimizer" to an optax chain, which can say in words what it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from zeroj.config.decay import decay_mask, is_muon_matrix
from zeroj.config.load import Loaded
from zeroj.config.optimizer_rows import (
    AdagradParams,
    AdamParams,
    CommonParams,
    LambParams,
    LionParams,
    MuonParams,
    SGDParams,
)
from zeroj.config.schedules import build_momentum_schedule, describe_schedule, make_schedule
from zeroj.config.transforms import clip_trust_ratio, in_float32, scale_by_plain_adam


class Link(NamedTuple):
    """One transformation of a chain, and its text."""

    tx: optax.GradientTransformation
    text: str


class _Rate(NamedTuple):
    """A learning rate or a schedule, and its text."""

    value: optax.ScalarOrSchedule
    text: str

    def times(self, factor: float) -> _Rate:
        """The rate, `factor` times as large."""
        value, text = self.value, self.text
        if factor == 1.0:
            return self
        if callable(value):
            return _Rate(lambda count: factor * value(count), f"{factor:g} * {text}")
        return _Rate(factor * value, f"{factor * value:g}")


def make_optimizer(
    loaded: Loaded, state_dtype: str, learning_rate: optax.ScalarOrSchedule | None = None
) -> optax.GradientTransformation | None:
    """The optimizer of a file; see `Config.make_optimizer`."""
    if loaded.optimizer is None:
        return None
    links = _links(loaded, _rate(loaded, learning_rate))
    return in_float32(
        optax.chain(*(link.tx for link in links)), jnp.bfloat16 if state_dtype == "bf16" else None
    )


def describe(loaded: Loaded, state_dtype: str) -> str:
    """The chain that `make_optimizer` builds, in words."""
    if loaded.optimizer is None:
        return "none in the config: pass tx"
    assert loaded.file.optimizer is not None
    chain = " -> ".join(link.text for link in _links(loaded, _rate(loaded, None)))
    return f"{loaded.file.optimizer.type}: {chain}; moments in {state_dtype}"


def _rate(loaded: Loaded, own: optax.ScalarOrSchedule | None) -> _Rate:
    assert loaded.optimizer is not None
    if own is not None:
        return _Rate(own, "your own schedule" if callable(own) else f"{own}")
    schedule = make_schedule(loaded)
    if schedule is None:
        return _Rate(loaded.optimizer.base_lr, f"{loaded.optimizer.base_lr:g}")
    assert loaded.file.scheduler is not None and loaded.scheduler is not None
    return _Rate(schedule, describe_schedule(loaded.file.scheduler.type, loaded.scheduler))


def _links(loaded: Loaded, rate: _Rate) -> list[Link]:
    momentum = build_momentum_schedule(loaded.scheduler)
    match loaded.optimizer:
        case AdamParams() as p:
            adam = _adam(p, momentum)
            return [adam, *_decay(p), _lr(rate)] if p.adam_w_mode else [*_decay(p), adam, _lr(rate)]
        case AdagradParams() as p:
            # optax adds eps under the root, torch outside: the square makes them agree
            tx = optax.scale_by_rss(p.initial_accumulator_value, p.eps**2)
            return [*_decay(p), Link(tx, f"scale_by_rss(eps={p.eps:g})"), _lr(rate)]
        case LambParams() as p:
            ratio = Link(
                clip_trust_ratio(p.min_coeff, p.max_coeff), f"trust ratio {p.min_coeff:g}..{p.max_coeff:g}"
            )
            return [_adam(p, momentum), *_decay(p), ratio, _lr(rate)]
        case LionParams() as p:
            lion = _with_betas(optax.scale_by_lion, p.betas, momentum)
            return [Link(lion.tx, f"scale_by_lion({lion.text})"), *_decay(p), _lr(rate)]
        case MuonParams() as p:
            return [_muon(p, rate)]
        case SGDParams() as p:
            trace = Link(optax.trace(p.momentum, p.nesterov), f"trace({p.momentum:g}, nesterov={p.nesterov})")
            return [*_decay(p), *([trace] if p.momentum else []), _lr(rate)]
    raise AssertionError(f"no chain for {type(loaded.optimizer).__name__}")


def _lr(rate: _Rate) -> Link:
    return Link(optax.scale_by_learning_rate(rate.value), f"scale by -lr, lr = {rate.text}")


def _decay(params: CommonParams) -> list[Link]:
    if not params.weight_decay:
        return []
    spared = params.decay_mask == "no_bias_or_norm"
    tx = optax.add_decayed_weights(params.weight_decay, decay_mask if spared else None)
    return [
        Link(
            tx,
            f"add_decayed_weights({params.weight_decay:g}{', not for biases and norms' if spared else ''})",
        )
    ]


def _adam(params: AdamParams | LambParams, momentum: optax.Schedule | None) -> Link:
    inside = isinstance(params, LambParams) and params.eps_inside_sqrt
    eps = {"eps": 0.0, "eps_root": params.eps} if inside else {"eps": params.eps}
    factory = optax.scale_by_adam if params.bias_correction else scale_by_plain_adam
    link = _with_betas(factory, params.betas, momentum, **eps)
    return Link(
        link.tx, f"{factory.__name__}({link.text}, {', '.join(f'{k}={v:g}' for k, v in eps.items())})"
    )


def _with_betas(
    factory: Callable[..., optax.GradientTransformation],
    betas: tuple[float, float],
    momentum: optax.Schedule | None,
    **fixed: Any,
) -> Link:
    if momentum is None:
        return Link(factory(b1=betas[0], b2=betas[1], **fixed), f"b1={betas[0]:g}, b2={betas[1]:g}")
    # fp32, since optax would otherwise take the params' dtype, in which 0.99 and 1 may be the same
    cycled = optax.inject_hyperparams(factory, hyperparam_dtype=jnp.float32)
    return Link(cycled(b1=momentum, b2=0.99, **fixed), "b1=cycled, b2=0.99")


def _muon(params: MuonParams, rate: _Rate) -> Link:
    adam_rate = (
        rate.times(params.base_adam_lr / params.base_lr) if params.base_lr else _Rate(params.base_adam_lr, "")
    )
    spared = decay_mask if params.decay_mask == "no_bias_or_norm" else None
    muon = optax.contrib.muon(
        rate.value, beta=params.momentum, weight_decay=params.weight_decay, weight_decay_mask=spared
    )
    rest = [
        _with_betas(optax.scale_by_adam, params.betas, None, eps=params.eps),
        *_decay(params),
        _lr(adam_rate),
    ]

    def labels(tree: Any) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: "muon" if is_muon_matrix(path, leaf) else "adam", tree
        )

    text = (
        f"matrices but embeddings and heads: muon(momentum={params.momentum:g}, "
        f"weight_decay={params.weight_decay:g}, lr = {rate.text}); other leaves: "
        + " -> ".join(link.text for link in rest)
    )
    return Link(
        optax.partition({"muon": muon, "adam": optax.chain(*(link.tx for link in rest))}, labels), text
    )
