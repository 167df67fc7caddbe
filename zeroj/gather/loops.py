"""The walk's rule for ``scan``: stacks of shards go in, each iteration gathers its own slice."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from zeroj import _compat
from zeroj.collectives.memory import put_layer
from zeroj.collectives.quantized import Feedback
from zeroj.gather import kept, lazy
from zeroj.gather.counters import counting
from zeroj.gather.reductions import Reductions
from zeroj.gather.renewals import Coming
from zeroj.gather.stacks import Restacked, made_by, only_sliced, restack, stacks_of, warn_whole
from zeroj.gather.uniform import Uniform
from zeroj.gather.uses import in_order_of_use

if TYPE_CHECKING:
    from zeroj.gather.interpret import Interpreter


def scan(
    self: Interpreter, eqn: _compat.Eqn, operands: list[Any], wanted: Reductions, uniform: Uniform
) -> list[Any]:
    """Layers in a loop.

    Parameters that every iteration uses whole (the loop's constants) are gathered once, before it; a stack of
    which every iteration takes a slice by its index is gathered slice by slice.
    """
    loop = _Loop(self, eqn, wanted, uniform)
    init, xs = loop.enter(operands)
    layout = loop.layout
    (carry, errors, sums, renewed), (ys, pieces, nears, tokens) = jax.lax.scan(
        loop.body, init, xs, length=layout.length, reverse=layout.reverse, unroll=layout.unroll
    )
    self.gathers.gate = self.gathers.gate + jnp.sum(tokens)
    for key, carried in renewed.items():
        self.renewals.finish(key, loop.renewing[key].whole(carried))
    near = kept.with_values(loop.near_kept, nears, stacks_of(loop.rebuilt, pieces, layout.length))
    self.gathers.kept |= kept.renewed(near, self.renewals.now)
    self.errors |= {path: loop.fed[path].after(errors[path]) for path in loop.fed}
    rest, made = iter(ys), iter(pieces)
    outs = [*carry, *(next(rest) if s is None else s.build(made, layout.length) for s in loop.rebuilt)]
    taken = {at: self.sinks[path].whole(sums[path], outs[at]) for at, path in loop.taken.items()}
    return [taken.get(at, out) for at, out in enumerate(outs)]


def run_over(eqn: _compat.Eqn, operands: list[Any]) -> set[int]:
    """The numbers of a loop's operands that each iteration gathers its own slice of."""
    layout = _compat.scan_layout(eqn)
    first = layout.num_consts + layout.num_carry
    return {i for i, x in enumerate(operands) if i >= first and lazy.is_lazy(x) and lazy.sliceable(x)}


@dataclass
class _Loop:
    """One loop while it is walked.

    Attributes:
        walker: the interpreter that came to it.
        eqn: its equation.
        wanted: per output the reduction over devices that it needs, or None.
        uniform: the uniform values around it.
        fed: path -> errors of quantised reductions inside it.
        taken: number of an output -> path of the leaf whose sink takes it.
        renewing: id of the array of a stack -> what renews it, layer by layer.
        near_kept: after the walk of its body, what an iteration keeps of its gathers.
        rebuilt: after the walk of its body, for each y the stacks that it is made of, or None.
    """

    walker: Interpreter
    eqn: _compat.Eqn
    wanted: Reductions
    uniform: Uniform
    near_kept: kept.Kept = field(default_factory=dict)
    rebuilt: list[Restacked | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.layout = _compat.scan_layout(self.eqn)
        self.same = self.uniform.of_scan(self.eqn)
        self.counted = counting(self.layout, self.eqn, self.uniform.jaxpr)
        errors = self.walker.errors
        paths = (r.feedback.path for r in self.wanted if r and r.feedback)
        self.fed: dict[str, Feedback] = {path: errors[path] for path in paths}
        self.taken: dict[int, str] = {at: r.into for at, r in enumerate(self.wanted) if r and r.into}

    def enter(self, operands: list[Any]) -> tuple[Any, Any]:
        """Gathers what every iteration uses; what the loop carries at first, and what it runs over."""
        walker, nc, nk = self.walker, self.layout.num_consts, self.layout.num_carry
        xs, over = operands[nc + nk :], run_over(self.eqn, operands)
        self.lazy_xs = [x if nc + nk + i in over else None for i, x in enumerate(xs)]
        whole = [x for x, stays in zip(xs, self.lazy_xs, strict=True) if lazy.is_lazy(x) and stays is None]
        warn_whole(whole, self.eqn)
        self.lazy_consts = {i: x for i, x in enumerate(operands[:nc]) if only_sliced(self.same, i, x)}
        waiting = [None if i in self.lazy_consts else x for i, x in enumerate(operands[: nc + nk])]
        ready = walker.force(
            waiting + [x if s is None else None for x, s in zip(xs, self.lazy_xs, strict=True)]
        )
        self.consts = [self.lazy_consts.get(i, x) for i, x in enumerate(ready[:nc])]
        shards = [s for x in self.lazy_xs if x is not None for s in lazy.shards_of(x)]
        self.stacks = {id(s.array): s for s in shards}
        self.known = kept.stacks_in(walker.gathers.kept, self.stacks)
        self.outer = {key: near for key, near in walker.gathers.kept.items() if key.depth > 0}
        errors = {path: tuple(f.errors) for path, f in self.fed.items()}
        sinks = {path: walker.sinks[path] for path in self.taken.values()}
        self.held = {id(sink.shard): path for path, sink in sinks.items() if sink.shard is not None}
        way = (self.layout.length - 1, -1) if self.layout.reverse else (0, 1)
        sums = {path: sink.start(*way) for path, sink in sinks.items()}
        to_renew = walker.renewals.waiting
        self.renewing = {key: to_renew[key][2] for key in self.stacks if key in to_renew}
        renewed = {key: renewal.start(*way) for key, renewal in self.renewing.items()}
        index = jnp.arange(self.layout.length) if errors or sums or renewed else None
        own = self.held.keys() | self.renewing.keys()
        stacked = [s.array for key, s in self.stacks.items() if key not in own]
        nears = [near.value for near in self.known.values()]
        init = list(ready[nc : nc + nk]), errors, sums, renewed
        return init, (ready[nc + nk :], stacked, nears, index)

    def body(self, carried: tuple[list[Any], Any, Any, Any], sliced: tuple[Any, ...]) -> tuple[Any, Any]:
        """One iteration: (carry, errors, sums, what is renewed), slices -> the same, (ys, pieces of stacks, what is
        kept, token)."""
        (carry, errors, sums, renewed), (plain_xs, shard_slices, near_slices, index) = carried, sliced
        nc, nk, program = self.layout.num_consts, self.layout.num_carry, self.layout.body
        sinks = {path: self.walker.sinks[path].layer(sums[path], index) for path in self.taken.values()}
        rest = iter(shard_slices)
        given = {key: sinks[path].shard for key, path in self.held.items()}
        new = {key: renewal.layer(renewed[key], index) for key, renewal in self.renewing.items()}
        given |= {key: param for key, (param, _) in new.items()}
        slices: dict[int, Any] = {key: given[key] if key in given else next(rest) for key in self.stacks}
        lazies = zip(self.lazy_xs, plain_xs, strict=True)
        args = [p if x is None else lazy.slice_of(x, slices) for x, p in lazies]
        before = self.outer | kept.sliced(self.known, near_slices, slices)
        inner = self.walker.within(
            {path: self.fed[path].layer(errors[path], index) for path in self.fed},
            dict(sinks),
            dict(before),
            self.counted,
        )
        if new:
            order = in_order_of_use(program.jaxpr, [*self.consts, *carry, *args])
            working = {key: (param, self.renewing[key], on) for key, (param, on) in new.items()}
            inner.coming = Coming(working, [shard.array for shard in order])
        added = [v for v, r in zip(program.jaxpr.invars[nc : nc + nk], self.wanted, strict=False) if r]
        outs = inner.run(program, [*self.consts, *carry, *args], self.wanted, added, self.same)
        sums = {path: inner.sinks[path].put(outs[at]) for at, path in self.taken.items()}
        renewed = inner.coming.put()
        kept_out = {at: sinks[path].given(outs[at]) for at, path in self.taken.items()}
        outs = [kept_out.get(at, out) for at, out in enumerate(outs)]
        origin = {id(piece): self.stacks[key] for key, piece in slices.items()}
        outside = {id(shard.array) for x in self.lazy_consts.values() for shard in lazy.shards_of(x)}
        self.rebuilt = [restack(out, origin, outside) for out in outs[nk:]]
        real = [out for out, stack in zip(outs[nk:], self.rebuilt, strict=True) if stack is None]
        forced = inner.force(outs[:nk] + real)
        made = made_by(self.rebuilt)
        self.near_kept = kept.stacked(inner.gathers.kept, before, origin, made)
        left = {path: inner.errors[path].left() for path in self.fed}
        errors = {
            path: tuple(put_layer(*pair, index) for pair in zip(errors[path], left[path], strict=True))
            for path in self.fed
        }
        nears = [near.value for near in self.near_kept.values()]
        pieces = [s.array for s in made]
        return (forced[:nk], errors, sums, renewed), (forced[nk:], pieces, nears, inner.gathers.token())
