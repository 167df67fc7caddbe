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

#: (params, carried, batch, rng, train) -> (the model's output, carried).
Forward = Callable[[Any, Any, Any, Any, bool], tuple[Any, Any]]
#: What a module may be told of whether it trains, and its value while it does.
MODES = {"train": True, "training": True, "deterministic": False, "use_running_average": False}


@dataclasses.dataclass(frozen=True)
class Model:
    """A model as the Trainer sees it.

    Args:
        forward: ``(params, carried, batch, rng, train)`` -> (output, carried); None where only a loss is known.
        loss_fn: ``(params, batch, rng)`` -> loss, where the user gave a loss in place of a model.
        params: the user's params, or a function of nothing that makes them.
        source: the user's object, for its config, names and loss type.
        columns: names of the inputs that it takes; None for any.
        carried: what a step changes beside params, such as running statistics, or a function of nothing that
            makes it; ``()`` for most models.
    """

    forward: Forward | None
    loss_fn: Callable[[Any, Any, Any], Any] | None
    params: Any
    source: Any
    columns: frozenset[str] | None
    carried: Any = ()

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
        params: the params, where the model does not hold them; of a linen module all its variables.

    Raises:
        PlanError: it is none of these, or has state beside params of which only shapes are known.
    """
    if isinstance(model, nnx.Module):
        return _of_nnx(model, params)
    if isinstance(model, linen.Module):
        return _of_linen(model, params)
    if callable(model) and params is None and _takes_nothing(model):
        abstract = nnx.eval_shape(model)
        if isinstance(abstract, nnx.Module):
            return _of_nnx(abstract, lambda: nnx.state(model(), nnx.Param), lambda: _parts(model())[3])
    if callable(model) and params is not None:
        return _of_loss(model, params)
    raise PlanError(
        "Trainer(model=...) takes an nnx.Module, a function of nothing that makes one, a linen module with "
        f"params=, or a loss (params, batch) with params=; it got a {type(model).__name__}"
        + (" without params=." if params is None else ".")
    )


def _of_nnx(model: nnx.Module, params: Any, carried: Any = None) -> Model:
    _, own, streams, first = _parts(model)
    definitions = {}
    for train in (True, False):
        model.train() if train else model.eval()
        definitions[train] = _parts(model)[0]
    model.train()
    names, wants = _signature(type(model).__call__)

    def forward(params: Any, carried: Any, batch: Any, rng: Any, train: bool) -> tuple[Any, Any]:
        rest = [carried] if jax.tree.leaves(carried) else []
        whole = nnx.merge(definitions[train], params, _seeded(streams, rng), *rest)
        output = whole(**_inputs(batch, names), **_mode(wants, train))
        return output, _parts(whole)[3] if train and rest else carried

    if not jax.tree.leaves(first):
        carried = ()
    elif carried is None:
        carried = _real(first)
    return Model(forward, None, own if params is None else params, model, names, carried)


def _parts(model: nnx.Module) -> tuple[Any, Any, Any, Any]:
    """(definition, params, random streams, what else a step changes); what is sown is no part of it."""
    found: Any = nnx.split(model, nnx.Param, nnx.RngState, nnx.Intermediate, ...)
    definition, params, streams, _, rest = found
    return definition, params, streams, rest


def _real(carried: Any) -> Any:
    wrong = sorted(
        f"{'/'.join(map(str, path))} ({type(value).__name__})"
        for path, value in nnx.to_flat_state(carried)
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(value))
    )
    if wrong:
        raise PlanError(
            "Of what the model carries beside its params only shapes are known: "
            + ", ".join(wrong)
            + ". Pass a function of nothing that makes the model, or a model that holds values."
        )
    return carried


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
    shapes = jax.eval_shape(params) if callable(params) else params
    collections = set(shapes) if isinstance(shapes, Mapping) else set()
    boxed = "params" in collections
    others = sorted(collections - {"params"}) if boxed else []
    names, wants = _signature(type(module).__call__)

    def forward(params: Any, carried: Any, batch: Any, rng: Any, train: bool) -> tuple[Any, Any]:
        rngs = {"dropout": rng} if train and rng is not None else None
        variables = dict(params) if boxed else {"params": params}
        keywords: dict[str, Any] = _inputs(batch, names) | _mode(wants, train)
        if not (others and train):
            return module.apply(variables | dict(carried), rngs=rngs, **keywords), carried
        output, new = module.apply(variables | dict(carried), rngs=rngs, mutable=others, **keywords)
        return output, {name: new[name] for name in others}

    if not others:
        return Model(forward, None, params, module, names)
    return Model(forward, None, _chosen(params, ["params"]), module, names, _chosen(params, others))


def _chosen(variables: Any, collections: list[str]) -> Any:
    """Some collections of a linen module's variables, or of what a function of nothing makes."""
    if callable(variables):
        return lambda: _chosen(variables(), collections)
    return {name: variables[name] for name in collections}


def _of_loss(loss_fn: Callable[..., Any], params: Any) -> Model:
    random = takes_rng(loss_fn)

    def loss(params: Any, batch: Any, rng: Any) -> Any:
        return loss_fn(params, batch, rng) if random else loss_fn(params, batch)

    return Model(None, loss, params, loss_fn, None)


def _signature(call: Callable[..., Any]) -> tuple[frozenset[str] | None, frozenset[str]]:
    """(names of inputs, which of MODES it takes); no names where it takes any keyword."""
    parameters = list(inspect.signature(call).parameters.values())[1:]
    modes = frozenset(p.name for p in parameters) & MODES.keys()
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return None, modes
    return frozenset(p.name for p in parameters) - modes, modes


def _mode(wants: frozenset[str], train: bool) -> dict[str, bool]:
    return {name: MODES[name] == train for name in wants}


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
