"""What happens to each parameter in a step: where it is gathered, in which dtype, how often, what stays whole.

Read off the traced step: an all-gather (or, over the global batch, a constraint to whole) whose operand comes
from a parameter is a gather of it, and carries the source line of the use that asked for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np

from zeroj import _compat
from zeroj.errors import PlanError
from zeroj.plan import tree
from zeroj.plan.plan import ParamLeaf, Plan

#: Gathers of a parameter in a step by the formula: one for the forward pass, one for the backward pass.
FORMULA = 2


class Origin(NamedTuple):
    """Which parameter a value of the program comes from, and over which axes it is gathered by now.

    Attributes:
        path: the parameter's.
        gathered: whether any of its dims is gathered.
        axes: the axes that it was gathered over, in order.
        place: the number of the place where that was begun.
    """

    path: str
    gathered: bool
    axes: tuple[str, ...] = ()
    place: int = 0


#: Equations that hand a node's part of a parameter on to where it is gathered within the node.
HANDING_ON = frozenset({"dynamic_slice", "slice", "squeeze", "device_put", "reshape"})


@dataclass(frozen=True)
class Gathering:
    """One place where a parameter is gathered.

    Attributes:
        line: the user's ``file:line (function)``.
        dtype: on the wire.
        elements: of what is whole afterwards.
        times: how often it runs in a step: the trip counts of the loops around it.
        feeds: the loop that it is gathered for, before the loop begins; empty where it is used at once.
        axes: the mesh axes that it is gathered over here, in order. Under hpZ not those across nodes, where the
            node's part is there from an earlier place.
    """

    line: str
    dtype: np.dtype
    elements: int
    times: int
    feeds: str = ""
    axes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Explanation:
    """What a step does with each parameter; ``print`` it.

    Attributes:
        plan: the plan.
        gathers: path -> the places where it is gathered.
        micro_batches: micro-batches of a step.
    """

    plan: Plan
    gathers: dict[str, list[Gathering]]
    micro_batches: int

    def times(self, path: str) -> float:
        """How often a parameter is gathered in a step: elements gathered, by its size."""
        leaf = next(x for x in self.plan.leaves if x.path == path)
        return sum(g.elements * g.times for g in self.gathers.get(path, ())) / max(math.prod(leaf.shape), 1)

    def across(self, path: str) -> float:
        """How often in a step that goes over the outermost ZeRO axis that splits it, the network: 1 under hpZ."""
        leaf = next(x for x in self.plan.leaves if x.path == path)
        outer = next((a for a in self.plan.zero_axes if a in leaf.placement.axes), None)
        found = [g for g in self.gathers.get(path, ()) if outer in g.axes]
        return sum(g.elements * g.times for g in found) / max(math.prod(leaf.shape), 1)

    @property
    def expected(self) -> int:
        """How often the formula has it gathered."""
        return self.micro_batches * (FORMULA if self.plan.zero.reshard_after_forward else 1)

    @property
    def excessive(self) -> tuple[str, ...]:
        """Paths of parameters that are gathered more often than the formula says."""
        return tuple(x.path for x in self.plan.leaves if self.times(x.path) > self.expected * 1.02)

    def __str__(self) -> str:
        lines = [
            f"{len(self.plan.leaves)} params; by the formula each sharded one is gathered {self.expected} x"
        ]
        for leaf in self.plan.leaves:
            lines += self._of_leaf(leaf)
        return "\n".join(lines)

    def _of_leaf(self, leaf: ParamLeaf) -> list[str]:
        found, placement = self.gathers.get(leaf.path, []), self.plan.param_placement(leaf)
        head = f"{leaf.path} {leaf.dtype}{list(leaf.shape)}: "
        if not placement.sharded:
            why = placement.note or f"stage {self.plan.zero.stage} does not shard params"
            return [head + f"whole on every device ({why})"]
        if not found:
            return [head + "never gathered: nothing uses it"]
        often = f"gathered {self.times(leaf.path):.3g} x"
        lines = [head + often + (" (MORE THAN THE FORMULA)" if leaf.path in self.excessive else "")]
        for g in found:
            share = g.elements / max(math.prod(leaf.shape), 1)
            part = "" if share > 0.99 else f" {share:.3g} of it"
            over = f" over {', then '.join(g.axes)}" if placement.wire.first else ""
            lines.append(f"    {g.times} x{part} as {g.dtype}{over}, at {g.line}")
            if g.feeds:
                lines.append(f"        stays whole through {g.feeds}, which uses it in every iteration")
        if not self.plan.zero.reshard_after_forward:
            lines.append("        stays whole until the end of the step (reshard_after_forward is false)")
        return lines


def explain(
    step: Callable[..., Any], plan: Plan, params_or_state: Any, *args: Any, micro_batches: int = 1
) -> Explanation:
    """Tells for each parameter where a step gathers it, in which dtype and how often, and what stays whole.

    Args:
        step: a step of :func:`zeroj.make_train_step` or :func:`zeroj.make_eval_step`, or a function made with
            :func:`zeroj.value_and_grad`. It is only traced.
        plan: its plan.
        params_or_state: its first argument: a :class:`zeroj.TrainState` or stored params, or the
            ShapeDtypeStructs of them (:func:`zeroj.abstract_state`).
        *args: its further arguments, such as the batch, or ShapeDtypeStructs of them.
        micro_batches: the step's ``accumulation_steps``.

    Returns:
        An explanation: ``print`` it, or read ``times(path)`` and ``excessive``.

    Raises:
        PlanError: the first argument does not hold the plan's params.

    Example:
        >>> print(zj.explain(step, plan, zj.abstract_state(tx, plan), batch))
    """
    params = getattr(params_or_state, "params", params_or_state)
    found, _ = tree.flatten(params)
    if [*found] != [leaf.path for leaf in plan.leaves]:
        raise PlanError(
            "The first argument after the plan must be the step's TrainState, or the plan's params."
        )
    traced = jax.jit(step).trace(params_or_state, *args)
    program = _compat.program(traced.jaxpr)
    owner = {id(entry.value): path for path, entry in found.items()}
    leaves = jax.tree.leaves((params_or_state, *args))
    origins = [Origin(owner[id(x)], False) if id(x) in owner else None for x in leaves]
    whole = {leaf.path for leaf in plan.leaves if not plan.param_placement(leaf).sharded}
    walk = _Walk(set(plan.zero_axes))
    walk.run(program.jaxpr, [None if o and o.path in whole else o for o in origins], 1)
    return Explanation(plan, walk.gathers, micro_batches)


@dataclass
class _Walk:
    """Follows parameters through a program, and notes where they are gathered."""

    axes: set[str]
    gathers: dict[str, list[Gathering]] = field(default_factory=dict)
    begun: dict[int, Origin] = field(default_factory=dict)

    def run(self, jaxpr: _compat.Jaxpr, origins: Sequence[Origin | None], times: int) -> list[Origin | None]:
        """Origins of the outputs from those of the inputs."""
        known: dict[Any, Origin] = {
            var: origin for var, origin in zip(jaxpr.invars, origins, strict=True) if origin is not None
        }
        loops = {v: eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan" for v in _vars(eqn.invars)}

        def read(atom: Any) -> Origin | None:
            return None if isinstance(atom, _compat.Literal) else known.get(atom)

        for eqn in jaxpr.eqns:
            outs = self._equation(eqn, [read(v) for v in eqn.invars], times, loops)
            known.update((v, o) for v, o in zip(eqn.outvars, outs, strict=True) if o is not None)
        return [read(v) for v in jaxpr.outvars]

    def _equation(
        self, eqn: _compat.Eqn, operands: list[Origin | None], times: int, loops: dict[Any, _compat.Eqn]
    ) -> list[Origin | None]:
        nothing: list[Origin | None] = [None] * len(eqn.outvars)
        name, called = eqn.primitive.name, _compat.called_program(eqn)
        if not any(operands):
            return nothing
        if name == "optimization_barrier":
            return operands
        if name == "shard_map":
            return self.run(_compat.program(eqn.params["jaxpr"]).jaxpr, operands, times)
        if name == "scan":
            layout = _compat.scan_layout(eqn)
            return self.run(layout.body.jaxpr, operands, times * layout.length)
        if called is not None:
            return self.run(called.jaxpr, operands, times)
        if name == "all_gather" or (name == "sharding_constraint" and not self._splits(eqn)):
            return [self._gathered(eqn, operands[0], times, loops)]
        if name in HANDING_ON and operands[0] is not None and operands[0].gathered:
            return operands[:1]
        paths = {origin.path for origin in operands if origin is not None and not origin.gathered}
        if len(paths) != 1 or name in ("dot_general", "conv_general_dilated", "while", "cond"):
            return nothing
        return [Origin(paths.pop(), False)] * len(eqn.outvars)

    def _gathered(
        self, eqn: _compat.Eqn, origin: Origin | None, times: int, loops: dict[Any, _compat.Eqn]
    ) -> Origin | None:
        if origin is None:
            return None
        out = eqn.outvars[0]
        places = self.gathers.setdefault(origin.path, [])
        loop = loops.get(out)
        feeds = f"the loop at {_compat.source_line(loop)}" if loop is not None else ""
        over = eqn.params.get("axis_name", ())
        axes = (over,) if isinstance(over, str) else tuple(over)
        number = len(places)
        if origin.gathered and id(origin) not in self.begun:
            # The second half of a gather; what the first half gave may serve others later.
            self.begun[id(origin)] = origin
            axes, number = (*origin.axes, *axes), origin.place
            places.pop(number)
        line, size = _compat.source_line(eqn), math.prod(out.aval.shape)
        places.insert(number, Gathering(line, out.aval.dtype, size, times, feeds, axes))
        return Origin(origin.path, True, axes, number)

    def _splits(self, eqn: _compat.Eqn) -> bool:
        """Whether a constraint leaves the value split over a ZeRO axis."""
        spec = getattr(eqn.params["sharding"], "spec", ())
        named = {a for entry in spec for a in ((entry,) if isinstance(entry, str) else entry or ())}
        return bool(named & self.axes)


def _vars(atoms: Sequence[Any]) -> list[Any]:
    return [v for v in atoms if not isinstance(v, _compat.Literal)]
