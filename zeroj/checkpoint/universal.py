"""Training states from DeepSpeed's universal checkpoints, so that a run goes on in zeroj with its moments.

Layout, as DeepSpeed's ds_to_universal.py writes it: ``zero/<name of the param>/fp32.pt``, ``exp_avg.pt``,
``exp_avg_sq.pt``, each a dict with the whole tensor under "param", and ``step.pt``, a number.
"""

from __future__ import annotations

import pathlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from zeroj.checkpoint import arrays
from zeroj.checkpoint.arrays import Target
from zeroj.checkpoint.assemble import assemble, first_fields, first_opt_state, stored_params
from zeroj.checkpoint.layout import optimizer_targets, param_targets
from zeroj.checkpoint.torch_file import read_torch_file
from zeroj.config.precision import LossScale
from zeroj.errors import CheckpointError
from zeroj.optimizer.birth import born_in_files
from zeroj.optimizer.zero import wrap_optimizer
from zeroj.plan.plan import Plan, StateLeaf
from zeroj.plan.tree import ZeroOptState
from zeroj.spill.state import spill_to_files
from zeroj.step.state import TrainState

#: Field of an optax state -> file of DeepSpeed. Adam's and Lion's moments, and SGD's momentum.
MOMENTS = {"mu": "exp_avg", "nu": "exp_avg_sq", "trace": "momentum_buffer"}

Change = Callable[[str, np.ndarray], np.ndarray]


def load_universal(
    folder: str | pathlib.Path,
    tx: Any,
    plan: Plan,
    *,
    names: Callable[[str], str] | Mapping[str, str] | None = None,
    change: Change | None = None,
    moments: Mapping[str, str] = MOMENTS,
    loss_scale: LossScale | None = None,
    rng: jax.Array | int = 0,
) -> TrainState:
    """Reads a universal checkpoint into the layout of a plan, slice by slice.

    Args:
        folder: the checkpoint: the folder with ``zero`` in it, or the one with the file ``latest_universal``.
        tx: the optimizer: the optax counterpart of DeepSpeed's.
        plan: the plan.
        names: path of a param -> its name in PyTorch; left out, "/" becomes ".".
        change: ``change(path, value)`` brings a tensor to the param's shape, such as the transpose of a Linear's
            weight; used for the moments too. It may return a view, and then only slices are read.
        moments: field of the optax state -> name of DeepSpeed's file.
        loss_scale: the loss scaler's settings; its state starts anew.
        rng: the key or seed of the run.

    Returns:
        The state: params, masters, moments, and all counts at DeepSpeed's step.

    Raises:
        CheckpointError: files are missing, damaged or of other shapes; lists all of them.

    Example:
        >>> flip = lambda path, value: value.T if path.endswith("kernel") else value
        >>> state = zj.load_universal("ckpt/global_step1000_universal", tx, plan, names=to_torch, change=flip)
    """
    source = _Source(_zero_folder(pathlib.Path(folder)), names, change)
    spilled = spill_to_files(plan) if plan.spills else None
    targets, inner_targets = param_targets(plan, spilled), optimizer_targets(plan, spilled)
    masters = [source.read(leaf.path, "fp32", t) for leaf, t in zip(plan.leaves, targets, strict=True)]
    inner = [
        source.read(leaf.of, moments[_field(leaf)], t) if leaf.of and _field(leaf) in moments else None
        for leaf, t in zip(plan.state_leaves, inner_targets, strict=True)
    ]
    step = source.step([leaf.path for leaf in plan.leaves if leaf.trainable])
    source.check()
    placed = [arrays.place(value, t) for value, t in zip(masters, targets, strict=True) if value is not None]
    fields = first_fields(plan, loss_scale, rng) | {"step": np.int32(step)}
    if spilled is None:
        params, first = stored_params(plan, placed), first_opt_state(tx, plan, placed)
    else:
        user_tx = wrap_optimizer(tx, plan).user_tx
        params, first = born_in_files(user_tx, plan, placed.__getitem__, spilled)
    opt_state = first._replace(inner=_filled(plan, first, inner, inner_targets, step))
    return assemble(plan, params, opt_state, fields)


class _Source:
    """The tensors of one checkpoint; gathers all that is wrong with them."""

    def __init__(self, folder: pathlib.Path, names: Any, change: Change | None) -> None:
        self._folder, self._faults = folder, list[str]()
        self._names: Callable[[str], str] = (
            names.__getitem__ if isinstance(names, Mapping) else names or _dotted
        )
        self._change: Change = change or (lambda path, value: value)

    def read(self, path: str, kind: str, target: Target) -> np.ndarray | None:
        file = self._file(path, kind)
        try:
            content = read_torch_file(file)
            value = content["param"] if isinstance(content, dict) else content
            value = self._change(path, value)
        except (CheckpointError, KeyError) as error:
            self._faults.append(f"{path}: {error}")
            return None
        if value.shape != target.shape:
            self._faults.append(f"{path}: {file} has shape {value.shape}, planned {target.shape}")
            return None
        return value

    def step(self, paths: list[str]) -> int:
        files = [file for path in paths if (file := self._file(path, "step")).exists()]
        steps = {int(np.asarray(read_torch_file(file)).item()) for file in files}
        if len(steps) != 1:
            found = f"the different steps {sorted(steps)}" if steps else "no step.pt"
            self._faults.append(f"{self._folder} has {found}; the optimizer's count must be one number")
            return 0
        return steps.pop()

    def check(self) -> None:
        if self._faults:
            known = sorted(str(p.parent.relative_to(self._folder)) for p in self._folder.rglob("fp32.pt"))
            raise CheckpointError(
                "The universal checkpoint does not fit the plan:\n  - " + "\n  - ".join(self._faults) + "\n"
                f"It has: {', '.join(known)}. Say with names= which is which, with change= what to transpose."
            )

    def _file(self, path: str, kind: str) -> pathlib.Path:
        return self._folder / self._names(path) / f"{kind}.pt"


def _filled(
    plan: Plan, first: ZeroOptState, moments: list[np.ndarray | None], targets: list[Target], step: int
) -> Any:
    """The optimizer's first state with moments and counts put in."""
    inner, anew = [], []
    fresh = plan.state_treedef.flatten_up_to(first.inner)
    for leaf, target, value, born in zip(plan.state_leaves, targets, moments, fresh, strict=True):
        if value is not None:
            inner.append(arrays.place(value, target))
        elif leaf.path.split("/")[-1] == "count" and np.issubdtype(leaf.dtype, np.integer):
            inner.append(arrays.place(np.asarray(step, leaf.dtype), target))
        else:
            inner.append(born)
            anew += [leaf.path] if leaf.of else []
    if anew:
        warnings.warn(f"The checkpoint has nothing for these leaves, they start anew: {anew}", stacklevel=4)
    return plan.state_treedef.unflatten(inner)


def _field(leaf: StateLeaf) -> str:
    """The field of the optax state that a leaf is in: "mu" of "0/mu/blocks/kernel"."""
    return leaf.path.removesuffix(leaf.of).rstrip("/").split("/")[-1]


def _dotted(path: str) -> str:
    return path.replace("/", ".")


def _zero_folder(folder: pathlib.Path) -> pathlib.Path:
    pointer = folder / "latest_universal"
    if not (folder / "zero").is_dir() and pointer.is_file():
        folder = folder / pointer.read_text().strip()
    if not (folder / "zero").is_dir():
        raise CheckpointError(
            f"{folder} is no universal checkpoint: it has no folder zero. Make one of an ordinary checkpoint with "
            "DeepSpeed's ds_to_universal.py."
        )
    return folder / "zero"
