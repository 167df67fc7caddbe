"""Walks a traced program with sharded parameters: a table from the name of a primitive to a rule.

The program is that of the loss *and its gradient*, so forward and backward uses of a parameter are seen
alike, and nothing has to be differentiated here. A parameter enters as a lazy shard. An equation on lazy
values alone stays lazy; one that also takes activations has its parameters gathered for it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax

from zeroj import _compat
from zeroj.collectives.quantized import Feedback
from zeroj.gather import kept, lazy, loops
from zeroj.gather.counters import Counted
from zeroj.gather.reductions import Reduction, ReductionPlan, Reductions, is_zero, place_reductions
from zeroj.gather.regions import NotAlike, Operands, Regions
from zeroj.gather.renewals import Coming, Renewals, until_used
from zeroj.gather.sinks import Sinks
from zeroj.gather.stacks import only_sliced
from zeroj.gather.tokens import Gather, Gathers, Tokens
from zeroj.gather.uniform import Uniform
from zeroj.gather.uses import in_order_of_use, last_uses


class Interpreter:
    """Evaluates programs on a mix of lazy and ordinary values, inside ``shard_map``.

    Args:
        gather: makes a whole parameter from a stored shard.
        bucket: elements gathered together and ahead of their use (see :class:`Gathers`).
        reuse: how many gathered elements later a whole parameter may be used again at top level.
        max_live: elements that may be gathered at a time for a region that ``jax.checkpoint`` recomputes.
    """

    def __init__(self, gather: Gather, bucket: int, reuse: int, max_live: int) -> None:
        self.gather = gather
        self.bucket = bucket
        self.reuse = reuse
        self.max_live = max_live
        self.gathers = Gathers(gather, bucket, reuse)
        self.regions = Regions()
        self.errors: dict[str, Feedback] = {}
        self.sinks: Sinks = {}
        self.renewals = Renewals()
        self.coming = Coming()
        self.reading = False  # whether a first gradient is there, and sinks read what they need
        self.counted = Counted()

    def within(
        self, errors: dict[str, Feedback], sinks: Sinks, near: kept.Kept, counted: Counted
    ) -> Interpreter:
        """The interpreter of one iteration of a loop, with what is kept of gathers before it."""
        inner = Interpreter(self.gather, self.bucket, self.reuse, self.max_live)
        inner.regions, inner.errors, inner.sinks = self.regions, errors, sinks
        inner.counted, inner.gathers.kept = counted, near
        inner.gathers.free_start = True
        return inner

    def run(
        self,
        program: _compat.Program,
        args: Sequence[Any],
        wanted: Reductions,
        reduced: Collection[Any] = (),
        uniform: Uniform | None = None,
    ) -> list[Any]:
        """Evaluates a program.

        Args:
            program: the program.
            args: a value per input, lazy or not.
            wanted: per output the reduction over devices that it needs, or None.
            reduced: inputs that come in reduced.
            uniform: the program's uniform values; left out, no input is uniform.

        Returns:
            A value per output, lazy where the output is made of parameters alone.
        """
        jaxpr = program.jaxpr
        reductions = place_reductions(jaxpr, wanted, reduced, uniform)
        env: dict[Any, Any] = dict(zip(jaxpr.constvars, program.consts))
        env.update(zip(jaxpr.invars, args, strict=True))

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, _compat.Literal) else env[atom]

        last, renewed = last_uses(jaxpr), len(self.renewals.now)
        for index, eqn in enumerate(jaxpr.eqns):
            outs = self._equation(eqn, self._renewed(eqn, [read(v) for v in eqn.invars]), reductions)
            if len(self.renewals.now) > renewed:
                renewed = len(self.renewals.now)
                env = {var: self.renewals.current(value) for var, value in env.items()}
                outs = [self.renewals.current(out) for out in outs]
            for var, out in zip(eqn.outvars, outs, strict=True):
                reduction = reductions.at.get(var)
                if reduction is not None and is_zero(eqn):
                    env[var] = reduction.zero(var.aval.dtype)
                else:
                    env[var] = self._reduced(out, reduction)
            for var in last.get(index, ()):
                env.pop(var, None)
        outs = [read(v) for v in jaxpr.outvars]
        outs = [self._reduced(out, r) for out, r in zip(outs, reductions.at_exit, strict=True)]
        done = {id(var) for var in reductions.taken_inside(jaxpr)}  # a gradient that is a literal has no hash
        return [
            out if w is None or id(v) in done else self._kept(out, w)
            for v, out, w in zip(jaxpr.outvars, outs, wanted, strict=True)
        ]

    def _renewed(self, eqn: _compat.Eqn, operands: list[Any]) -> list[Any]:
        """The operands, of params that are up to date, but for those that the equation's own program renews."""
        if not self.renewals.waiting or until_used(eqn):
            return operands
        later = loops.run_over(eqn, operands) if eqn.primitive.name == "scan" else set()
        self.renewals.renew([value for i, value in enumerate(operands) if i not in later])
        return [self.renewals.current(value) for value in operands]

    def _kept(self, value: Any, reduction: Reduction) -> Any:
        """A reduced gradient where it is kept: taken by its sink, or in its memory."""
        return self.sinks[reduction.into].plus(value) if reduction.into else reduction.away(value)

    def _reduced(self, value: Any, reduction: Reduction | None) -> Any:
        """A gradient summed over devices; any other value as it is."""
        if reduction is None:
            return value
        (grad,) = self.force([value])
        if self.sinks and not self.reading:
            self.sinks = {path: sink.after(grad) for path, sink in self.sinks.items()}
            self.reading = True
        sink = self.sinks.get(reduction.part_of)
        if sink is not None:
            self.sinks[reduction.part_of] = sink.due(self.gathers.with_gradients)
        return self.gathers.reduce(grad, partial(self._reduce, reduction), reduction.small(grad.size))

    def _reduce(self, reduction: Reduction, value: jax.Array) -> jax.Array:
        """The sum over devices; what quantising loses of it goes into the leaf's errors, where it has any."""
        slot = reduction.feedback
        if slot is None:
            return reduction(value)
        before = self.errors[slot.path]
        here, value = before.fetched(value)
        reduced, errors = reduction.with_feedback(value, slot, here)
        after = before.after(errors)
        self.errors[slot.path] = replace(after, errors=self.gathers.in_step(after.errors))
        return reduced

    def force(self, values: Sequence[Any]) -> list[Any]:
        """Gathers and evaluates the lazy ones among ``values``; passes the others."""
        self.gathers.issue([shard for value in values for shard in lazy.shards_of(value)])
        return [lazy.evaluate(value, self.gathers.whole) for value in values]

    def _equation(self, eqn: _compat.Eqn, operands: list[Any], reductions: ReductionPlan) -> list[Any]:
        """Evaluates one equation by the rule for its primitive."""
        inside = reductions.inside.get(id(eqn))
        has_lazy = any(lazy.is_lazy(value) for value in operands)
        if not has_lazy and inside is None:
            return _compat.bind(eqn, self._in_step(eqn, operands))
        rule = RULES.get(eqn.primitive.name)
        if rule is not None:
            with _compat.source_of(eqn):
                return rule(self, eqn, operands, inside or [None] * len(eqn.outvars), reductions.uniform)
        called = _compat.called_program(eqn)
        if called is not None:
            with _compat.source_of(eqn):
                inner = reductions.uniform.of_call(eqn, called.jaxpr)
                return self.run(called, operands, inside or [None] * len(eqn.outvars), uniform=inner)
        if _params_alone(eqn, operands):
            return list(lazy.apply(eqn, operands))
        if eqn.primitive.name == "dynamic_slice" and all(v in reductions.uniform for v in eqn.invars[1:]):
            smaller = lazy.sliced(eqn, operands)
            if smaller is not None:
                return [self._in_turn(eqn, smaller) if isinstance(smaller, lazy.Shard) else smaller]
        return self.consume(eqn, operands)

    def _in_turn(self, eqn: _compat.Eqn, shard: lazy.Shard) -> lazy.Shard:
        """The shard; marked, if it is a layer of a stack all of whose layers this loop takes, in their order."""
        layer = shard.layer
        if layer is None or not self.counted.takes_all(eqn.invars[1], layer.stack.shape[0]):
            return shard
        return replace(shard, layer=replace(layer, in_turn=True))

    def _in_step(self, eqn: _compat.Eqn, operands: list[Any]) -> list[Any]:
        """The operands of a costly equation, held until the gradients before it are made; see ``Gathers``."""
        if eqn.primitive.name not in COSTLY or not self.gathers.gradients_are_due():
            return operands
        at_hand = [i for i, v in enumerate(operands) if isinstance(v, jax.Array)]
        held = dict(zip(at_hand, self.gathers.after_gradients([operands[i] for i in at_hand]), strict=True))
        return [held.get(i, v) for i, v in enumerate(operands)]

    def consume(self, eqn: _compat.Eqn, operands: list[Any]) -> list[Any]:
        """Gathers what the equation needs, evaluates it, and lets go."""
        lazies = [value for value in operands if lazy.is_lazy(value)]
        with _compat.source_of(eqn):
            shards = [shard for value in lazies for shard in lazy.shards_of(value)]
            self.gathers.issue(shards)
            at_hand = [i for i, v in enumerate(operands) if isinstance(v, jax.Array)]
            values = self.coming.before_use([operands[i] for i in at_hand], shards)
            values = self.gathers.before_use(values, shards)
            held = dict(zip(at_hand, values, strict=True))
            whole = [lazy.evaluate(held.get(i, v), self.gathers.whole) for i, v in enumerate(operands)]
        return _compat.bind(eqn, whole)


#: Equations that are worth waiting for, and with which a reduction can hide.
COSTLY = frozenset({"dot_general", "conv_general_dilated", "ragged_dot_general", "scan"})

Rule = Callable[[Interpreter, _compat.Eqn, list[Any], Reductions, Uniform], list[Any]]


def _remat(
    self: Interpreter, eqn: _compat.Eqn, operands: list[Any], wanted: Reductions, uniform: Uniform
) -> list[Any]:
    """A region that the backward pass recomputes; walked once for all layers that are alike."""
    called = _compat.called_program(eqn)
    assert called is not None
    inner = uniform.of_call(eqn, called.jaxpr)
    shards = [s for value in operands for s in lazy.shards_of(value)]
    if self.gathers.has(shards) or self.coming.working:  # what is at hand comes into the region
        return _recomputed(self, eqn, operands, wanted, inner)
    try:
        taken = Operands(operands)
        key = self.regions.key(eqn, taken, wanted, inner.inputs(), self.gathers.progress())

        def walk(arrays: list[jax.Array], tokens: Tokens) -> tuple[list[Any], Gathers]:
            within = Interpreter(self.gather, self.bucket, self.reuse, self.max_live)
            within.regions, within.gathers = self.regions, self.gathers.part(tokens)
            return _recomputed(within, eqn, taken.rebuilt(arrays), wanted, inner), within.gathers

        outs, tokens, progress = self.regions.call(key, walk, taken.arrays, self.gathers.tokens())
    except NotAlike:
        return _recomputed(self, eqn, operands, wanted, inner)
    self.gathers.after(tokens, progress)
    return outs


def _recomputed(
    self: Interpreter, eqn: _compat.Eqn, operands: list[Any], wanted: Reductions, uniform: Uniform
) -> list[Any]:
    """Walks such a region.

    Its activations go behind a barrier, as JAX itself does, or XLA would keep the forward's results instead.
    Within the region a gathered parameter serves the recomputation and the backward alike. A stack of which it takes
    layers by index is gathered layer by layer, where they are used.
    """
    called = _compat.called_program(eqn)
    assert called is not None
    operands = list(operands)
    whole = [None if only_sliced(uniform, i, x) else x for i, x in enumerate(operands)]
    self.gathers.enter_region(in_order_of_use(called.jaxpr, whole), self.max_live)
    if eqn.params.get("differentiated"):
        at_hand = [i for i, v in enumerate(operands) if isinstance(v, jax.Array)]
        held = self.gathers.hold([operands[i] for i in at_hand])
        for i, value in zip(at_hand, held, strict=True):
            operands[i] = value
    outs = self.run(called, operands, wanted, uniform=uniform)
    self.gathers.leave_region()
    onward = [
        i for i, (v, w) in enumerate(zip(outs, wanted, strict=True)) if w is None and isinstance(v, jax.Array)
    ]
    for i, value in zip(onward, self.gathers.after_gradients([outs[i] for i in onward]), strict=True):
        outs[i] = value
    return outs


def _whole_first(
    self: Interpreter, eqn: _compat.Eqn, operands: list[Any], wanted: Reductions, uniform: Uniform
) -> list[Any]:
    """Branches and loops whose course may differ between devices: no collective may stand inside them."""
    assert not any(wanted)
    return self.consume(eqn, operands)


#: Primitive -> rule. What is not here is a call (walked into), lazy arithmetic, or a consumer.
RULES: dict[str, Rule] = {
    "scan": loops.scan,
    "remat2": _remat,
    "checkpoint": _remat,
    "cond": _whole_first,
    "while": _whole_first,
}


def _params_alone(eqn: _compat.Eqn, operands: list[Any]) -> bool:
    """Whether the result depends on parameters and literals alone, so that it can wait for its use."""
    literal = [isinstance(v, _compat.Literal) for v in eqn.invars]
    return not eqn.effects and all(lazy.is_lazy(v) or lit for v, lit in zip(operands, literal, strict=True))
