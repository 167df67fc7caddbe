"""The step of a plan with state in files: gradients as one program, then the update part by part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from zeroj.optimizer.spill import SpilledUpdate
from zeroj.optimizer.update import Arrays
from zeroj.plan.plan import Plan
from zeroj.plan.tree import ZeroOptState
from zeroj.spill.reader import ParamReader, ticket_structs
from zeroj.spill.tier import is_spilled
from zeroj.step.state import TrainState


class WithoutFiles:
    """A jitted function of (state, batch) whose program takes nothing that lies in files.

    It is given no optimizer state. Params in files are read while it runs; the call then waits for its end.

    Args:
        jitted: the function, of a state with tickets in place of such params.
        plan: the plan.
        reader: reads params from files; None where there are none.
    """

    def __init__(self, jitted: Any, plan: Plan, reader: ParamReader | None) -> None:
        self.jitted, self.plan, self.reader = jitted, plan, reader

    def __call__(self, state: TrainState, batch: Any) -> Any:
        """Runs the program.

        Raises:
            SpillError: params could not be read, or are not what was written.
        """
        if self.reader is None:
            return self.jitted(_without_state(state), batch)
        flat = self.plan.treedef.flatten_up_to(state.params)
        tickets = self.reader.begin({i: x for i, x in enumerate(flat) if is_spilled(x)})
        try:
            out = jax.block_until_ready(self.jitted(self._with(state, tickets), batch))
        except BaseException:
            self.reader.abandon()
            raise
        self.reader.end()
        return out

    @property
    def trace(self) -> Callable[..., Any]:
        """Of the program, on (state, batch), which may be abstract."""
        return lambda state, batch: self.jitted.trace(self._with(state, ticket_structs(self.plan)), batch)

    @property
    def lower(self) -> Callable[..., Any]:
        """Of the program, on (state, batch), which may be abstract."""
        return lambda state, batch: self.jitted.lower(self._with(state, ticket_structs(self.plan)), batch)

    def _with(self, state: TrainState, tickets: dict[int, Any]) -> TrainState:
        flat = self.plan.treedef.flatten_up_to(state.params)
        params = self.plan.treedef.unflatten([tickets.get(i, x) for i, x in enumerate(flat)])
        return _without_state(state)._replace(params=params)


class SpilledStep:
    """``(state, batch) -> (state, metrics)``, as :func:`zeroj.make_train_step` describes it.

    It is no jitted function, since the update reads and writes files between its programs; so it cannot be
    called under ``jit``. A step that is skipped changes no file. One that fails in the middle of its update leaves
    a state that cannot be used again; its checkpoint before it can.

    Attributes:
        update: the update, with ``buffer_bytes``, the bound on the host memory that it takes.
        gradients: the program of everything before the update.
    """

    def __init__(self, gradients: WithoutFiles, update: SpilledUpdate) -> None:
        self.gradients, self.update = gradients, update

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        """One step."""
        plan = self.update.plan
        live = [i for i, leaf in enumerate(plan.leaves) if leaf.trainable]
        flat = plan.treedef.flatten_up_to(state.params)
        params = [flat[i] for i in live]
        masters = params
        if plan.has_master:
            every = plan.treedef.flatten_up_to(state.opt_state.master)
            masters = [every[i] for i in live]
        inner = plan.state_treedef.flatten_up_to(state.opt_state.inner)
        running = self.update.begin(Arrays(params, masters, inner))
        try:
            grads, counters, metrics, left = self.gradients(state, batch)
            if not bool(metrics["applied"]):
                running.cancel()
                return state._replace(**counters), metrics
        except BaseException:
            running.cancel()
            raise
        new = running.run(grads, metrics["loss"], left)
        for i, value in zip(live, new.params, strict=True):
            flat[i] = value
        master: Any = ()
        if plan.has_master:
            for i, value in zip(live, new.masters, strict=True):
                every[i] = value
            master = plan.treedef.unflatten(every)
        opt_state = ZeroOptState(master, plan.state_treedef.unflatten(new.inner))
        return state._replace(params=plan.treedef.unflatten(flat), opt_state=opt_state, **counters), metrics

    @property
    def trace(self) -> Callable[..., Any]:
        """Of the gradients' program, on (state, batch)."""
        return self.gradients.trace

    @property
    def lower(self) -> Callable[..., Any]:
        """Of the gradients' program, on (state, batch)."""
        return self.gradients.lower


def _without_state(state: TrainState) -> TrainState:
    return state._replace(opt_state=ZeroOptState((), ()))
