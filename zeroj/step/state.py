"""The state of a training run, born where the plan says."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from zeroj.collectives import frozen, plain
from zeroj.config.precision import LossScale
from zeroj.errors import PlanError
from zeroj.gather import model_state as model_states
from zeroj.gather.inputs import check_params
from zeroj.optimizer.birth import born_in_files
from zeroj.optimizer.zero import first_state, masters_of, params_from_masters, wrap_optimizer
from zeroj.plan import tree
from zeroj.plan.feedback import errors_struct, first_errors
from zeroj.plan.host_memory import check_host_memory
from zeroj.plan.mesh import traced_on
from zeroj.plan.plan import ParamLeaf, Plan
from zeroj.plan.rules import Placement
from zeroj.plan.tree import ZeroOptState
from zeroj.spill.tier import is_spilled
from zeroj.step.precision import ScaleState, default_scaling, init_scale


class TrainState(NamedTuple):
    """Everything that a step changes.

    Attributes:
        params: the stored params, as ``plan.params`` says.
        opt_state: the wrapped optimizer's state.
        step: int32 scalar, successful updates so far.
        skipped: int32 scalar, updates skipped so far.
        scale: the loss scaler's state.
        rng: the key from which every step's key is folded.
        model_state: what the model carries beside its params, whole on every device; ``()`` for most models.
        errors: what quantising lost of the gradients so far (LoCo): path -> a buffer for each hop, of which
            each device has its own along dim 0; see :mod:`zeroj.plan.feedback`. ``()`` without it.
        feeds: bool scalar beside ``errors``: where it is False (an update was skipped, or ``reset_T`` is over),
            they stand for zeros. ``()`` without them.
        pending: an update that the next step makes (see :class:`zeroj.step.rotated.RotatedStep`); ``()`` without one.
    """

    params: Any
    opt_state: ZeroOptState
    step: jax.Array
    skipped: jax.Array
    scale: ScaleState
    rng: jax.Array
    model_state: Any = ()
    errors: Any = ()
    feeds: Any = ()
    pending: Any = ()


def check_settled(state: Any) -> None:
    """Raises PlanError where a state has an update pending, so that its params and optimizer state are one behind."""
    if isinstance(state, TrainState) and state.pending:
        raise PlanError(
            f"The state has the update of {', '.join(sorted(state.pending.grads))} pending, as a step with rotate=True "
            "leaves it: state = step.settle(state) makes it. Steps take the state as it is."
        )


def shard_params(plan: Plan, params: Any) -> Any:
    """Brings params in the user's shapes into the plan's layout, leaf by leaf, without a whole device copy.

    Args:
        plan: the plan.
        params: the user's tree of numpy or jax arrays, or params that already are in the plan's layout.

    Returns:
        Stored params: padded, cast and sharded.

    Raises:
        PlanError: the tree or shapes are not those of the plan.
    """
    values = _user_values(plan, params)

    def one(leaf: ParamLeaf, value: Any) -> jax.Array:
        if leaf.packed and value.dtype == np.int8:
            return value
        placed = _place(plan, leaf, value, plan.param_placement(leaf), plan.param_dtype(leaf))
        return frozen.packed(plan, leaf, placed) if leaf.packed else placed

    return plan.treedef.unflatten([one(*pair) for pair in zip(plan.leaves, values, strict=True)])


def init_state(
    params_or_init_fn: Any,
    tx: optax.GradientTransformation,
    plan: Plan,
    *,
    rng: jax.Array | int = 0,
    loss_scale: LossScale | None = None,
    model_state: Any = (),
) -> TrainState:
    """The first state of a run, every array born in its place.

    Args:
        params_or_init_fn: the user's params, or a function of nothing that makes them: it is compiled with the
            plan's shardings, so nothing is ever whole on one device.
        tx: the optax optimizer, bare or wrapped.
        plan: the plan.
        rng: a key or a seed for the steps' randomness.
        loss_scale: the loss scaler's settings; left out, dynamic for fp16 and none otherwise.
        model_state: what the model carries beside its params (running statistics, counters, random keys), or
            a function of nothing that makes it; see :func:`zeroj.make_train_step`.

    Returns:
        The state.

    Raises:
        PlanError: the params do not fit the plan; lists every leaf that differs.

    Example:
        >>> state = zj.init_state(lambda: model.init(key, x), tx, plan)
    """
    wrapped = wrap_optimizer(tx, plan)
    check_host_memory(plan)
    struct = abstract_state(tx, plan, loss_scale=loss_scale)
    shardings = jax.tree.map(lambda s: s.sharding, struct)
    values: Any = birth(plan, params_or_init_fn)() if callable(params_or_init_fn) else None
    given = None if callable(params_or_init_fn) else _user_values(plan, params_or_init_fn)

    def master_of(i: int) -> jax.Array:
        leaf = plan.leaves[i]
        if given is None:
            value, values[i] = values[i], None
            return value
        return _place(plan, leaf, given[i], plan.master_placement(leaf), plan.master_dtype(leaf))

    if plan.spills:
        params, opt_state = born_in_files(wrapped.user_tx, plan, master_of)
    else:
        masters = [master_of(i) for i in range(len(plan.leaves))]
        params, opt_state = _born(wrapped, plan, masters, shardings)
    scaler = init_scale(loss_scale or default_scaling(plan.precision.name))
    errors = first_errors(plan) or ()
    counters = (np.int32(0), np.int32(0), scaler, np.bool_(True) if errors else ())
    step, skipped, scale, feeds, key = _small(plan, counters, rng)
    carried = model_states.everywhere(plan, model_state)
    return TrainState(params, opt_state, step, skipped, scale, key, carried, errors, feeds)


def abstract_state(
    tx: optax.GradientTransformation,
    plan: Plan,
    *,
    loss_scale: LossScale | None = None,
    model_state: Any = (),
) -> TrainState:
    """The state as ShapeDtypeStructs with shardings: what ``step.lower`` takes, with nothing allocated."""
    wrap_optimizer(tx, plan)  # raises where tx is not the plan's
    scale = init_scale(loss_scale or default_scaling(plan.precision.name))
    key = jax.eval_shape(lambda: jax.random.key(0))

    def whole(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(np.shape(x), x.dtype, sharding=plan.replicated)

    counter = whole(np.int32(0))
    small: list[Any] = [counter, counter, jax.tree.map(whole, scale), whole(key)]
    carried = jax.eval_shape(model_state) if callable(model_state) else model_state
    small.append(jax.tree.map(whole, carried))
    errors = errors_struct(plan) or ()
    small += [errors, whole(np.bool_(True)) if errors else ()]
    return TrainState(plan.params_struct(), plan.opt_state_struct(), *small)


def full_params(state: TrainState | Any, plan: Plan) -> Any:
    """The user's own tree: user shapes and dtypes, whole, as numpy arrays on the host.

    Where there is an fp32 master, its values are returned. Every process must call it; each gets the whole.

    Args:
        state: a :class:`TrainState`, or stored params.
        plan: the plan.
    """
    check_settled(state)
    params = state.params if isinstance(state, TrainState) else state
    values = check_params(plan, params)
    values = [frozen.unpacked(plan, leaf, value) for leaf, value in zip(plan.leaves, values, strict=True)]
    placements = [plan.param_placement(leaf) for leaf in plan.leaves]
    if isinstance(state, TrainState) and plan.has_master:
        masters = plan.treedef.flatten_up_to(state.opt_state.master)
        for i, leaf in enumerate(plan.leaves):
            if leaf.trainable:
                values[i], placements[i] = masters[i], plan.master_placement(leaf)
    whole = [
        fetch(plan, value)[tuple(slice(0, n) for n in placement.shape)].astype(leaf.dtype)
        for value, placement, leaf in zip(values, placements, plan.leaves, strict=True)
    ]
    return plan.treedef.unflatten(whole)


def fetch(plan: Plan, value: Any) -> np.ndarray:
    """One array, whole, on this host, whichever processes hold its shards."""
    if is_spilled(value):
        value = value.to_devices()
    if not value.is_fully_addressable and not value.is_fully_replicated:
        value = jax.jit(lambda x: x, out_shardings=plan.replicated)(value)
    return np.asarray(value.addressable_data(0) if value.is_fully_replicated else value)


def birth(plan: Plan, init_fn: Callable[[], Any]) -> Any:
    """The user's init as a jitted function of nothing, compiled with the plan's shardings.

    Returns:
        A function that gives one master per leaf; ``.lower().compile()`` shows what it needs without running it.
    """
    _user_values(plan, jax.eval_shape(init_fn))
    shardings = [plan.sharding(plan.master_placement(leaf)) for leaf in plan.leaves]
    return jax.jit(traced_on(plan.mesh, lambda: masters_of(plan, init_fn())), out_shardings=shardings)


def _born(wrapped: Any, plan: Plan, masters: list[jax.Array], shardings: Any) -> tuple[Any, ZeroOptState]:
    """Params and optimizer state from masters, which are used up: nothing is held twice, even while it is made.

    Whichever of the two keeps the masters' values is made last and takes over their memory.
    """
    to_params = traced_on(plan.mesh, partial(params_from_masters, plan))
    if not plan.has_master:
        opt_state = _first_opt_state(wrapped, plan, masters, shardings.opt_state, set())
        held = plan.treedef.flatten_up_to(shardings.params)
        kept = {i for i, x in enumerate(masters) if x.sharding == held[i]}
        return _using_up(to_params, masters, kept, shardings.params), opt_state
    params = jax.jit(to_params, out_shardings=shardings.params)(masters)
    kept = {i for i, leaf in enumerate(plan.leaves) if leaf.trainable}
    return params, _first_opt_state(wrapped, plan, masters, shardings.opt_state, kept)


def _first_opt_state(
    wrapped: Any, plan: Plan, masters: list[jax.Array], shardings: Any, kept: set[int]
) -> ZeroOptState:
    """The optimizer's state; an init that needs real values runs outside ``jit``, on global arrays."""
    make = traced_on(plan.mesh, partial(first_state, wrapped.user_tx, plan))
    if not plan.concrete_init:
        return _using_up(make, masters, kept, shardings)
    return jax.tree.map(jax.device_put, make(masters), shardings)


def _using_up(
    make: Callable[[list[jax.Array]], Any], masters: list[jax.Array], kept: set[int], shardings: Any
) -> Any:
    """What ``make`` makes of the masters; the output that a master of ``kept`` becomes takes over its memory."""

    def run(kept: dict[int, jax.Array], others: dict[int, jax.Array]) -> Any:
        return make([(kept | others)[i] for i in range(len(masters))])

    given = {i: x for i, x in enumerate(masters) if i in kept}
    others = {i: x for i, x in enumerate(masters) if i not in kept}
    return jax.jit(run, out_shardings=shardings, donate_argnums=(0,))(given, others)


def _small(plan: Plan, counters: tuple[Any, ...], rng: jax.Array | int) -> tuple[Any, ...]:
    """Counters and the key on every device. By ``jit``: ``device_put`` cannot reach other processes' devices."""
    key = jax.random.key(rng) if isinstance(rng, int) else rng
    kind, data = jax.random.key_impl(key), np.asarray(jax.random.key_data(key))
    make = traced_on(plan.mesh, lambda values, data: (*values, jax.random.wrap_key_data(data, impl=kind)))
    return jax.jit(make, out_shardings=plan.replicated)(counters, data)


def _user_values(plan: Plan, params: Any) -> list[Any]:
    """The leaves in the plan's order; raises with every leaf that does not fit."""
    found, _ = tree.flatten(params)
    planned = {leaf.path: leaf for leaf in plan.leaves}
    faults = [f"missing: {p}" for p in planned.keys() - found.keys()]
    faults += [f"not in the plan: {p}" for p in found.keys() - planned.keys()]
    faults += [
        f"{p}: shape {found[p].shape}, planned {leaf.shape}"
        for p, leaf in planned.items()
        if p in found
        and found[p].shape not in (leaf.shape, leaf.placement.padded, plan.stored_placement(leaf).padded)
    ]
    if faults:
        raise PlanError(
            "The params do not fit the plan:\n  - " + "\n  - ".join(sorted(faults)) + "\n"
            "Make the plan from these params."
        )
    return [found[leaf.path].value for leaf in plan.leaves]


def _place(plan: Plan, leaf: ParamLeaf, value: Any, placement: Placement, dtype: np.dtype) -> jax.Array:
    """One leaf in its place; of a host array each device is sent its own slice alone."""
    sharding = plan.sharding(placement)
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return jax.jit(lambda x: _fit(x, leaf, placement).astype(dtype), out_shardings=sharding)(value)
    whole = value if hasattr(value, "__getitem__") and not isinstance(value, jax.Array) else np.asarray(value)
    if whole.shape != leaf.shape:
        whole = np.asarray(whole)[tuple(slice(0, n) for n in leaf.shape)]
    placed = place_array(whole, placement, dtype, sharding)
    let_go(value)
    return placed


def place_array(whole: Any, placement: Placement, dtype: np.dtype, sharding: Any) -> jax.Array:
    """An array in the user's shape in its place: padded, cast, and each device sent its own slice alone.

    It may be anything that is sliced, such as a memory map: only slices are read. On a CPU the result may
    share its memory; XLA copies such an array where a program would take it over.
    """

    def piece(index: Any) -> np.ndarray:
        part = np.asarray(whole[index], dtype=dtype)
        want = [len(range(*i.indices(n))) for i, n in zip(index, placement.padded, strict=True)]
        missing = [(0, w - n) for n, w in zip(part.shape, want, strict=True)]
        return np.pad(part, missing) if any(after for _, after in missing) else part

    return jax.make_array_from_callback(placement.padded, sharding, piece)


def let_go(value: Any) -> None:
    """Gives back the memory that a file's pages take once they are read; they are read again if need be."""
    for part in getattr(value, "sources", ()) or [getattr(value, "source", None)]:
        if part is not None:
            let_go(part)
    if getattr(value, "mode", None) != "r" or not hasattr(mmap, "MADV_DONTNEED"):
        return  # not a read-only memory map; pages that were written to must stay
    base = value
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, mmap.mmap):
        base.madvise(mmap.MADV_DONTNEED)


def _fit(value: jax.Array, leaf: ParamLeaf, placement: Placement) -> jax.Array:
    return plain.pad(plain.unpad(value, leaf.placement), placement)
