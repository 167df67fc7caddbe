"""The step of a plan with optimizer state in files: gradients as one program, then the update part by part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zeroj.optimizer.spill import SpilledUpdate
from zeroj.optimizer.update import Arrays
from zeroj.plan.tree import ZeroOptState
from zeroj.step.state import TrainState


class SpilledStep:
    """``(state, batch) -> (state, metrics)``, as :func:`zeroj.make_train_step` describes it.

    It is no jitted function, since the update reads and writes files between its programs; so it cannot be
    called under ``jit``. A step that is skipped touches no file. One that fails in the middle of its update leaves
    a state that cannot be used again; its checkpoint before it can.

    Attributes:
        update: the update, with ``buffer_bytes``, the bound on the host memory that it takes.
        gradients: the jitted program of everything before the update.
    """

    def __init__(self, gradients: Any, update: SpilledUpdate) -> None:
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
            grads, counters, metrics = self.gradients(_without_state(state), batch)
            if not bool(metrics["applied"]):
                running.cancel()
                return state._replace(**counters), metrics
        except BaseException:
            running.cancel()
            raise
        new = running.run(grads, metrics["loss"])
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
        return lambda state, batch: self.gradients.trace(_without_state(state), batch)

    @property
    def lower(self) -> Callable[..., Any]:
        """Of the gradients' program, on (state, batch)."""
        return lambda state, batch: self.gradients.lower(_without_state(state), batch)


def _without_state(state: TrainState) -> TrainState:
    return state._replace(opt_state=ZeroOptState((), ()))


def without_files(step: Any) -> Any:
    """A jitted function of (state, batch) that is given no optimizer state, for plans that have some in files."""
    return lambda state, batch: step(_without_state(state), batch)
