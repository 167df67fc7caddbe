"""What a Trainer takes for a model, as pure functions of params: nnx modules, linen modules, or a loss."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx

from zeroj.errors import PlanError
from zeroj.gather.loss import takes_rng

#: (params, batch, rng, train) -> the model's output.
Forward = Callable[[Any, Any, Any, bool], Any]


@dataclasses.dataclass(frozen=True)
class Model:
    """A model as the Trainer sees it.

    Args:
        forward: ``(params, batch, rng, train)`` -> output; None where only a loss is known.
        loss_fn: ``(params, batch, rng)`` -> loss, where the user gave a loss in place of a model.
        params: the user's params, or a function of nothing that makes them.
        source: the user's object, for its config, names and loss type.
        columns: names of the inputs that it takes; None for any.
    """

    forward: Forward | None
    loss_fn: Callable[[Any, Any, Any], Any] | None
    params: Any
    source: Any
    columns: frozenset[str] | None

    @property
    def hidden_size(self) -> int | None:
        """The width, by Hugging Face's names in the model's config, for "auto" bucket sizes."""
        return hidden_size(getattr(self.source, "config", None))

    @property
    def loss_kind(self) -> str | None:
        """Which default loss the model says it wants."""
        return getattr(self.source, "loss_type", None)

    @property
    def names(self) -> Callable[[str], str] | None:
        """path -> name of the tensor in a file, where the model has ``tensor_name``."""
        return getattr(self.source, "tensor_name", None)


def as_model(model: Any, params: Any = None) -> Model:
    """Brings what the user gave to one form.

    Args:
        model: an ``nnx.Module`` (real, or abstract by ``nnx.eval_shape`` with ``params``), a function of nothing
            that makes one, a linen module with ``params``, or a loss ``(params, batch[, rng])`` with ``params``.
        params: the params, where the model does not hold them.

    Raises:
        PlanError: it is none of these, or has state beside params that a step would have to change.
    """
    if isinstance(model, nnx.Module):
        return _of_nnx(model, params)
    if isinstance(model, linen.Module):
        return _of_linen(model, params)
    if callable(model) and params is None and _takes_nothing(model):
        abstract = nnx.eval_shape(model)
        if isinstance(abstract, nnx.Module):
            return _of_nnx(abstract, lambda: nnx.state(model(), nnx.Param))
    if callable(model) and params is not None:
        return _of_loss(model, params)
    raise PlanError(
        "Trainer(model=...) takes an nnx.Module, a function of nothing that makes one, a linen module with "
        f"params=, or a loss (params, batch) with params=; it got a {type(model).__name__}"
        + (" without params=." if params is None else ".")
    )


def _of_nnx(model: nnx.Module, params: Any) -> Model:
    parts: Any = nnx.split(model, nnx.Param, ...)
    own, rest = parts[1:]
    _check_rest(rest)
    definitions = {}
    for train in (True, False):
        model.train() if train else model.eval()
        definitions[train] = nnx.split(model, nnx.Param, ...)[0]
    model.train()
    names, wants = _signature(type(model).__call__)

    def forward(params: Any, batch: Any, rng: Any, train: bool) -> Any:
        whole = nnx.merge(definitions[train], params, _seeded(rest, rng))
        return whole(**_inputs(batch, names), **_mode(wants, train))

    return Model(forward, None, own if params is None else params, model, names)


def _check_rest(rest: Any) -> None:
    wrong = sorted(
        f"{'/'.join(map(str, path))} ({type(value).__name__})"
        for path, value in nnx.to_flat_state(rest)
        if not isinstance(value, nnx.RngState)
    )
    if wrong:
        raise PlanError(
            "The model has state that a step would have to change, which the Trainer does not do: "
            + ", ".join(wrong)
            + ". Use a norm without running statistics, or pass a loss in place of the model."
        )


def _seeded(rest: Any, rng: Any) -> Any:
    """The model's random streams, each at its start, with a key of its own folded from this step's."""
    pairs = []
    for index, (path, variable) in enumerate(nnx.to_flat_state(rest)):
        if isinstance(variable, nnx.RngKey):
            pairs.append((path, variable.replace(jax.random.fold_in(rng, index))))
        else:
            pairs.append((path, variable.replace(jnp.uint32(0))))
    return nnx.from_flat_state(pairs)


def _of_linen(module: linen.Module, params: Any) -> Model:
    if params is None:
        raise PlanError("A linen module holds no params: Trainer(model=module, params=module.init(...)).")
    collections = set(params) if isinstance(params, Mapping) else set()
    boxed = "params" in collections
    if boxed and collections != {"params"}:
        raise PlanError(
            f"The variables have the collections {sorted(collections - {'params'})}, which a step would have to "
            "change; the Trainer trains 'params' alone. Pass a loss in place of the model."
        )
    names, wants = _signature(type(module).__call__)

    def forward(params: Any, batch: Any, rng: Any, train: bool) -> Any:
        rngs = {"dropout": rng} if train and rng is not None else None
        variables = params if boxed else {"params": params}
        keywords: dict[str, Any] = _inputs(batch, names) | _mode(wants, train)
        return module.apply(variables, rngs=rngs, **keywords)

    return Model(forward, None, params, module, names)


def _of_loss(loss_fn: Callable[..., Any], params: Any) -> Model:
    random = takes_rng(loss_fn)

    def loss(params: Any, batch: Any, rng: Any) -> Any:
        return loss_fn(params, batch, rng) if random else loss_fn(params, batch)

    return Model(None, loss, params, loss_fn, None)


def _signature(call: Callable[..., Any]) -> tuple[frozenset[str] | None, frozenset[str]]:
    """(names of inputs, which of train / deterministic it takes); no names where it takes any keyword."""
    parameters = list(inspect.signature(call).parameters.values())[1:]
    modes = frozenset(p.name for p in parameters) & {"train", "deterministic"}
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return None, modes
    return frozenset(p.name for p in parameters) - modes, modes


def _mode(wants: frozenset[str], train: bool) -> dict[str, bool]:
    values = {"train": train, "deterministic": not train}
    return {name: values[name] for name in wants}


def _inputs(batch: Any, names: frozenset[str] | None) -> dict[str, Any]:
    return {name: value for name, value in batch.items() if names is None or name in names}


def _takes_nothing(model: Callable[..., Any]) -> bool:
    try:
        inspect.signature(model).bind()
    except (TypeError, ValueError):
        return False
    return True


def hidden_size(config: Any) -> int | None:
    """The width that a model's config gives: hidden_size, the largest of hidden_sizes, or its text_config's."""
    for part in (config, getattr(config, "text_config", None)):
        for name in ("hidden_size", "hidden_sizes", "n_embd", "d_model", "width"):
            found = getattr(part, name, None)
            if isinstance(found, int):
                return found
            if isinstance(found, list | tuple) and found:
                return int(max(found))
    return None
